"""Memory of one device: exact bytes of the state, and an estimate of temporary arrays."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from ats_jax.config.schema import Config
from ats_jax.config.schema.setting import Table
from ats_jax.data.batch import Batch
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import rules_at
from ats_jax.model.layers import ExpertLinear, Linear, Weight, activation_axes
from ats_jax.model.numerics import is_unrolled
from ats_jax.model.param import (
  Frozen,
  Param,
  Role,
  gradient_shards,
  is_quantised,
  is_variable,
  merge,
  params_of,
  trainable,
  weights_of,
)
from ats_jax.ops.attention import chunked
from ats_jax.ops.registry import asked_for
from ats_jax.planner.abstract import abstract_state, batch_on_mesh, device_bytes
from ats_jax.sharding.apply import has_several_devices, num_shards
from ats_jax.sharding.pipeline import num_stages, num_ticks, single_stage_mesh
from ats_jax.sharding.rules import whole_rows
from ats_jax.step.objective import Pretraining, batch_totals
from ats_jax.step.optimizers.base import per_parameter
from ats_jax.step.state import TrainState


def state_memory(cfg: Config, state: TrainState) -> dict[str, int]:
  """The exact bytes of the state and gradients on one device, by part.

  With gradient accumulation there is a float32 sum beside the gradients of a micro-batch; in a
  pipeline of those of its layers, as what is before and behind them works once.

  Args:
    cfg: the resolved config.
    state: its (abstract) state on the current (abstract) mesh.
  """
  params = trainable(state.model)
  of_optimizer = dict.fromkeys((name for name, _ in per_parameter(state.opt_state)), 0)
  for name, tree in per_parameter(state.opt_state):
    of_optimizer[name] += device_bytes(tree)
  parts = {"weights": device_bytes(state.model), **of_optimizer, "ema": device_bytes(state.ema)}
  parts["unsent gradients"] = device_bytes(state.unsent)
  as_float32 = lambda tree: jax.tree.map(lambda p: p.astype(jnp.float32), tree)
  grads = jax.eval_shape(gradient_shards, params)
  summed: Any = grads.segments if num_stages() > 1 else grads
  sums = jax.eval_shape(as_float32, summed) if cfg.step.accum_steps > 1 else None
  return {
    **parts,
    "counters": device_bytes(state) - sum(parts.values()),
    "gradients": device_bytes(grads),
    "gradient sums": device_bytes(sums),
  }


class Peak(NamedTuple):
  """The moment of a step that needs most memory.

  Attributes:
    moment: a description of the moment.
    parts: bytes on one device in addition to the exact ones, by part. The exact bytes hold
      all gradients; those that do not exist yet are a negative part.
  """

  moment: str
  parts: dict[str, int]


def peak(cfg: Config, state: TrainState, kept: Callable[[Config, int], int] | None = None) -> Peak:
  """Estimate the memory of a step in addition to the state, at its largest moment.

  In a loop the stacks of activations and of gradients are whole all the time, so all parts add up.
  So they about do under accumulation, by two measured models; what takes the room is not known. In
  other unrolled layers activations go as gradients come. The largest of three moments counts, as
  seen in programs that were compiled for GPUs (docs/lab/performance.md):

    the loss: all activations wait, and layers have no gradients yet;
    the first layer of the backward pass: all activations wait, and a block is computed;
    the last one: all gradients are there, and a block is computed.

  activations: what reverse mode keeps of a micro-batch between its forward and backward pass, as
    traced under `step.remat`; XLA may keep less (fusion) or more (copies). Where attention may be
    cuDNN's, arrays of the size seq x seq are left out, and so is the head's gradient, which the
    loss makes.
  recomputed block: with remat, what a super-block keeps without it, once.
  block's gradients: of unrolled layers. Of all that a super-block keeps, as the gradients of its
    weights are made last; each has the size of what it is the gradient of. Without gradients of
    matrices only those of the input and the outputs of the largest matmul are there at a time.
  recomputed stage: of a pipeline, whose stages keep their inputs and what `step.remat_stages`
    says: what the layers of one stage keep of a micro-batch under `step.remat`.
  handed on: of a pipeline, what comes out of it, and its gradient.
  compute weights: those of the head and of a super-block in the compute dtype, gathered, if
    they are stored otherwise; of an unrolled stack those of all layers, see `_compute_weights`.
    What is decoded for a matmul is there in a layer only.
  head's gradient: the loss adds it up in float32, gathered. Without what is among the
    gradients.
  logits chunk: logits of step.loss_chunk_tokens in float32, their gradient in the compute dtype.
    A pipeline computes them before its backward loop: in a loop, what is more than what is
    recomputed there.
  scores chunk: what attention in chunks (`ops.attention.chunked`) keeps of one for its backward
    pass, as traced. It runs if settings name it or nothing takes the compute dtype but XLA. It is
    never there together with the logits: in a loop, the larger of the two.
  stacks of gradients: of unrolled layers, beside each layer's own; see `_stacks`.
  gradients to come: those that are not there yet.

  Args:
    cfg: the resolved config.
    state: its (abstract) state on the current (abstract) mesh.
    kept: returns `activations` for a config and rows; None = trace them.
  """
  sizes = _sizes(cfg, state, kept)
  apart = is_unrolled(cfg, "gpu") and (cfg.step.accum_steps == 1 or num_stages() > 1)
  moments = _moments(cfg, state, sizes) if apart else [_simultaneous(sizes)]
  return max(moments, key=lambda moment: sum(moment.parts.values()))


class _Sizes(NamedTuple):
  """Bytes of what comes and goes in a step; the parts of `peak`, and more.

  Attributes:
    of_head: bytes of the head's gradient that are among the gradients.
    of_layer: bytes of the activations of one super-block; 0 in a pipeline.
    made_by_loss: the head's gradient and that of its input.
    weights: in the compute dtype, see `_compute_weights`.
    weights_at_end: those of them that are there in the last layer of the backward pass.
    decoded: codes in the compute dtype, of the matrices that one input is multiplied with.
  """

  activations: int
  of_layer: int
  recomputed_block: int
  block_gradients: int
  recomputed_stage: int
  handed_on: int
  weights: int
  weights_at_end: int
  decoded: int
  head_gradient: int
  of_head: int
  made_by_loss: int
  logits: int
  scores: int


def _sizes(cfg: Config, state: TrainState, kept: Callable[[Config, int], int] | None) -> _Sizes:
  blocks, stages = sum(segment.repeats for segment in state.model.layout), num_stages()
  compute = jnp.dtype(cfg.precision.compute_dtype).itemsize
  rows = cfg.data.batch_size // cfg.step.accum_steps // num_shards("batch")
  stream = rows * cfg.data.seq_len // num_shards("seq") * cfg.model.d_model * compute
  micro, rounds, of_stage = cfg.step.accum_steps, cfg.mesh.stage_rounds, 0
  behind = rows * micro // stages if stages > 1 else rows  # rows in the loss
  # Traced as a loop: what XLA makes of weights for unrolled layers is a part of its own.
  step_with = functools.partial(dataclasses.replace, cfg.step, scan_unroll=1)
  under = lambda remat: dataclasses.replace(cfg, step=step_with(remat=remat))
  again = cfg.step.remat != "none"
  with jax.sharding.use_abstract_mesh(single_stage_mesh()):
    traced = kept or (lambda cfg, rows: activations(cfg, abstract_state(cfg), rows))
    waiting = traced(under(cfg.step.remat), rows)
    of_block = (traced(under("none"), rows) if again else waiting) // blocks
    if stages > 1:
      ticks, parts = num_ticks(micro, stages, rounds), stages * rounds
      kept_too = traced(under(cfg.step.remat_stages), rows) - traced(under("full"), rows)
      of_stage = waiting // parts  # with a copy of what was kept
      # Of the layers the input of each tick, what a policy keeps, and what is behind them.
      waiting = ticks * kept_too / parts
      waiting += traced(under("full"), behind) + (ticks - blocks * behind / rows) * stream
  table = (state.model.head or state.model.embed).weight
  of_head, is_frozen = _gradient_bytes(trainable(table)), isinstance(table, Frozen)
  whole_head = 0 if is_frozen else table.size // num_shards("vocab") * 4
  # The trace has a float32 gradient of the head; of a frozen one nobody computes it.
  traced = device_bytes(table) if is_frozen else of_head
  waiting = round(waiting - traced // table.dtype.itemsize * 4)
  scored = num_shards("seq")  # parts of a row
  of_chunk = cfg.step.loss_chunk_tokens // (num_shards("rows") * scored)
  chunk = min(behind * cfg.data.seq_len // scored, max(1, of_chunk))
  weights, weights_at_end = _compute_weights(cfg, state.model)
  groups = [group for block in state.model.segments for group in _matmuls(block)]
  tokens = rows * cfg.data.seq_len // scored
  return _Sizes(
    activations=waiting,
    of_layer=0 if stages > 1 else waiting // blocks,
    recomputed_block=again * of_block,
    block_gradients=_passing(groups, tokens * compute) or of_block,
    recomputed_stage=of_stage,
    handed_on=2 * micro * stream if stages > 1 else 0,
    weights=weights,
    weights_at_end=weights_at_end,
    decoded=compute * max(map(_num_decoded, groups), default=0),
    head_gradient=max(0, whole_head - of_head),
    of_head=of_head,
    made_by_loss=whole_head + behind * stream // rows,
    logits=chunk * cfg.model.vocab_size // num_shards("vocab") * (4 + compute),
    scores=_scores(cfg, rows),
  )


def _simultaneous(sizes: _Sizes) -> Peak:
  recomputed = sizes.recomputed_stage + sizes.recomputed_block * (num_stages() > 1)
  logits = max(0, sizes.logits - recomputed)
  return Peak(
    "all at once, as in a loop",
    {
      "activations": sizes.activations,
      "recomputed stage": sizes.recomputed_stage,
      "recomputed block": sizes.recomputed_block,
      "handed on": sizes.handed_on,
      "compute weights": sizes.weights + sizes.decoded,
      "head's gradient": sizes.head_gradient,
      "logits chunk": logits if logits >= sizes.scores else 0,
      "scores chunk": sizes.scores if logits < sizes.scores else 0,
    },
  )


def _moments(cfg: Config, state: TrainState, sizes: _Sizes) -> list[Peak]:
  """The moments of a step with unrolled layers (`peak`)."""
  early, late = _stacks(cfg, state.model, sizes.made_by_loss)
  # What waits for the layer at hand is part of the block that is computed again.
  own = sizes.of_layer if cfg.step.remat != "none" else 0
  block = {
    "recomputed block": sizes.recomputed_block,
    "block's gradients": sizes.block_gradients,
    "scores chunk": sizes.scores,
  }
  always = {"handed on": sizes.handed_on, "head's gradient": sizes.head_gradient}
  before_gradients = {
    **always,
    "compute weights": sizes.weights,
    "stacks of gradients": early,
    "gradients to come": sizes.of_head - _gradient_bytes(trainable(state.model)),
  }
  return [
    Peak(
      "the loss",
      {"activations": sizes.activations, "logits chunk": sizes.logits, **before_gradients},
    ),
    Peak(
      "the first layer of the backward pass",
      {
        "activations": sizes.activations - own,
        "recomputed stage": sizes.recomputed_stage,
        **block,
        **before_gradients,
        "compute weights": sizes.weights + sizes.decoded,
      },
    ),
    Peak(
      "the last layer of the backward pass",
      {
        "activations": sizes.of_layer - own,
        **block,
        **always,
        "compute weights": sizes.weights_at_end + sizes.decoded,
        "stacks of gradients": late,
      },
    ),
  ]


def _gradient_bytes(weight: Any) -> int:
  return device_bytes(jax.eval_shape(gradient_shards, weight))


def activations(cfg: Config, state: TrainState, rows: int) -> int:
  """Bytes that wait for the backward pass of so many rows a device, see `peak`."""
  rows, seq = rows * num_shards("batch"), cfg.data.seq_len
  kept = _residuals(cfg, state, rows, seq)
  is_whole = asked_for(cfg).get("attention.forward", ("", ""))[1] == "xla"
  if is_whole or cfg.step.remat != "none" or seq % (2 * num_shards("seq")):
    return kept
  # The same tokens in rows half as long need half as much of what grows with seq x seq.
  return kept - 2 * (kept - _residuals(cfg, state, 2 * rows, seq // 2))


def _residuals(cfg: Config, state: TrainState, rows: int, seq: int) -> int:
  rules = rules_at(cfg, 0, training=True)  # capacity only falls

  def pullback(params: Any, model: Decoder, batch: Batch, key: jax.Array) -> Any:
    def objective(params: Any) -> jax.Array:
      return Pretraining(cfg)(
        merge(params, model), batch, batch_totals(batch, rules), rules, key
      ).loss

    return jax.vjp(objective, params)[1]  # a pytree of all that it keeps

  args = trainable(state.model), state.model, batch_on_mesh(rows, seq), state.key
  return _kept_by(pullback, *args)


def _kept_by(pullback: Callable, *args: Any) -> int:
  """Bytes of what a function of `args` returns that was not given to it."""
  jaxpr = jax.make_jaxpr(pullback)(*args).jaxpr
  given = {*jaxpr.invars, *jaxpr.constvars}  # weights and batch are there anyway
  kept = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)} - given
  return sum(device_bytes(v.aval) for v in kept)


def with_kernels(cfg: Config, **implementations: str) -> Config:
  """`cfg` with `ops.kernels` that name the implementations of some ops."""
  kernels = Table(cfg.ops.kernels, **implementations)
  return dataclasses.replace(cfg, ops=dataclasses.replace(cfg.ops, kernels=kernels))


def _scores(cfg: Config, rows: int) -> int:
  """Bytes kept of the last chunk of queries of so many rows a device; 0 = not in chunks."""
  by_default = cfg.precision.compute_dtype == "float32" and not chunked.reserve(cfg)
  unnamed = "", "chunked" if by_default else ""
  if asked_for(cfg).get("attention.forward", unnamed)[1] != "chunked":
    return 0
  seq, soft_cap = cfg.data.seq_len, cfg.model.attn_soft_cap or None
  heads = cfg.model.num_heads // (num_shards("heads") * num_shards("seq"))
  queries = min(chunked.CHUNK, seq)
  dtype = jnp.dtype(cfg.precision.compute_dtype)
  of = lambda tokens: jax.ShapeDtypeStruct((rows, tokens, heads, cfg.model.head_width), dtype)
  seen = jax.ShapeDtypeStruct((rows, queries, seq), jnp.bool_)

  def pullback(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> Any:
    return jax.vjp(lambda q, k, v: chunked.attend_to_seen(q, k, v, seen, soft_cap), q, k, v)[1]

  return _kept_by(pullback, of(queries), of(seq), of(seq), seen)


def _stacks(cfg: Config, model: Decoder, of_loss: int) -> tuple[int, int]:
  """Bytes of the stacks of layers' gradients, at the loss and in the last layer.

  Layers make their gradients as arrays of their own. They are written into the stack last, from
  the first layer on, so for a while both are there; in a pipeline they are added to the sums. The
  array of a stack waits for nothing. On one device XLA runs what takes least memory first: it makes
  a stack before the loss if that is smaller than what the loss makes, and so the embedding's
  gradient. On several devices it makes the stacks when they are written. In 8 bits no stack was
  seen early: XLA puts off the matmuls of all gradients to the end, and copies few at a time.

  Args:
    cfg: the resolved run.
    model: its (abstract) decoder on the current (abstract) mesh.
    of_loss: bytes that the loss makes.
  """
  layers = [_gradient_bytes(p) for p in params_of(model.segments)]
  if has_several_devices():
    return 0, 0 if num_stages() > 1 else sum(layers)
  if cfg.precision.fp8:
    return 0, 0
  small = lambda sizes: sum(size for size in sizes if size <= of_loss)
  embed = [_gradient_bytes(p) for p in params_of(model.embed)] if model.head else []
  return small(layers + embed), small(layers)


def _compute_weights(cfg: Config, model: Decoder) -> tuple[int, int]:
  """Bytes of weights in the compute dtype, gathered, that are not stored like that.

  Of the head and the largest super-block, or of all layers if they are kept; and in the last layer
  of the backward pass those of a super-block. XLA makes those of an unrolled stack once, for both
  passes, unless remat has it gather them twice. With `mesh.keep_gathered` it does not, and keeps a
  copy of the others too. Experts that are gathered for both without remat are among the
  activations. Codes are decoded anew for each pass, a matmul at a time (`_num_decoded`). Triton's
  grouped matmul reads whole arrays, so XLA copies the experts of all layers out of their stack.
  """
  dtype = jnp.dtype(cfg.precision.compute_dtype)
  keeps = cfg.mesh.keep_gathered and cfg.step.remat != "none"

  def of_param(param: Param | Frozen, *, always: bool = False) -> int:
    ways = _shards(param.axes) // _shards(activation_axes(param.axes))
    if ways == 1 and param.dtype == dtype and not always:
      return 0
    shape = param.sharding.shard_shape(param.shape)
    return math.prod(shape[param.ndim - len(param.axes) :]) * dtype.itemsize * ways

  table = (model.head or model.embed).weight
  whole = table.size // num_shards("vocab")
  is_stored = table.dtype == dtype and math.prod(table.sharding.shard_shape(table.shape)) == whole
  head = 0 if is_stored else whole * dtype.itemsize
  plain = lambda block: [p for p in weights_of(block) if not is_quantised(p)]
  largest = max(sum(map(of_param, plain(block))) for block in model.segments)
  again = num_shards("embed") > 1 and cfg.step.remat != "none" and not cfg.mesh.keep_gathered
  if not is_unrolled(cfg, "gpu") or again:
    return head + largest, largest
  by_triton = asked_for(cfg).get("grouped_matmul.forward", ("", ""))[1] == "triton"
  counts = lambda p: cfg.step.remat != "none" or p.role is not Role.EXPERT
  copied = lambda p: keeps or (by_triton and p.role is Role.EXPERT)
  layers = sum(
    segment.repeats * sum(of_param(p, always=copied(p)) for p in plain(block) if counts(p))
    for segment, block in zip(model.layout, model.segments, strict=True)
  )
  return head + max(largest, layers // num_stages()), largest


def _matmuls(block: Any) -> list[list[Linear | ExpertLinear]]:
  """The layers that multiply at once: of a module those that read the same, or all experts'."""
  found: dict[Any, list[Linear | ExpertLinear]] = {}
  leaves = jax.tree_util.tree_leaves_with_path(block, is_leaf=lambda x: isinstance(x, Weight))
  for path, layer in leaves:
    if isinstance(layer, Linear | ExpertLinear):
      inputs = layer.inputs if isinstance(layer, Linear) else ()
      found.setdefault((path[:-1], inputs), []).append(layer)
  return list(found.values())


def _num_decoded(layers: Sequence[Linear | ExpertLinear]) -> int:
  """The number of entries of a device that are decoded from codes for one matmul."""
  weights = [layer.weight for layer in layers if not is_variable(layer.weight)]
  return sum(_local_size(w, 0, len(w.axes)) for w in weights)


def _passing(groups: Sequence[Sequence[Linear | ExpertLinear]], bytes_of_column: int) -> int:
  """Bytes of the gradients around the largest matmul; 0 = matrices train, or there are experts."""

  def width(layers: Sequence[Linear | ExpertLinear]) -> int:
    outputs = sum(_local_size(x.weight, x.weight.num_inputs, len(x.weight.axes)) for x in layers)
    return outputs + _local_size(layers[0].weight, 0, layers[0].weight.num_inputs)

  layers = [layer for group in groups for layer in group]
  waits = lambda layer: isinstance(layer, ExpertLinear) or isinstance(layer.weight, Param)
  return 0 if any(map(waits, layers)) else bytes_of_column * max(map(width, groups), default=0)


def _local_size(weight: Any, first: int, end: int) -> int:
  """The size on a device of some dimensions of one layer's weight, as a matmul has it."""
  sizes = weight.shape[weight.ndim - len(weight.axes) :]
  return math.prod(sizes[first:end]) // _shards(activation_axes(weight.axes[first:end]))


def _shards(axes: Sequence[str]) -> int:
  return math.prod(map(num_shards, axes))


def kv_cache_bytes(cfg: Config, model: Decoder) -> int:
  """Bytes of the keys and values of a row of `data.seq_len` tokens, over all devices.

  A layer that whole blocks skip keeps its places only.

  Args:
    cfg: the resolved run.
    model: its (abstract) decoder on the current (abstract) mesh.
  """
  rules = rules_at(cfg, cfg.num_steps, training=False)
  rows, dtype = num_shards("batch"), jnp.dtype(cfg.precision.compute_dtype)
  with whole_rows():
    cache = jax.eval_shape(lambda: model.empty_cache(rows, cfg.data.seq_len, rules, dtype))
  keys_and_values = [layer.kv for segment in cache for layer in segment]
  return sum(math.prod(a.shape) * dtype.itemsize for a in jax.tree.leaves(keys_and_values)) // rows
