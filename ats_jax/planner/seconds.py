"""Estimates the time of a step from the rates of devices and links."""

import collections
import math
from typing import Any

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.model.count import Counts
from ats_jax.model.decoder import Decoder
from ats_jax.model.fp8 import fp8_layers
from ats_jax.model.layer_kinds import layer_kinds
from ats_jax.model.layers import activation_axes
from ats_jax.model.layout import mod_tokens
from ats_jax.model.numerics import is_unrolled
from ats_jax.model.param import Frozen, Param, Role, is_quantised, params_of, weights_of
from ats_jax.ops.expert_exchange import host_capacity
from ats_jax.planner.hardware import Hardware
from ats_jax.sharding.apply import mesh_axes, num_hosts, num_shards
from ats_jax.sharding.compressed import sent_bytes
from ats_jax.sharding.pipeline import num_stages, num_ticks
from ats_jax.sharding.replicas import num_replicas
from ats_jax.sharding.rules import StatePart
from ats_jax.step.parts.replicas import compresses, is_compressed

# Fitted to steps of 1.5B, 8.03B and models with experts on one to four H100s and H200s
# (docs/lab/performance.md#the-planner-beside-what-was-measured).
MATMUL_EFFICIENCY = 0.96  # a step's matmuls, as a share of the rate of a large matmul alone
# Attention's share of the rate of a step's matmuls, by the length of rows.
MAX_ATTENTION_SHARE = 0.82  # the limit that it rises to
ATTENTION_HALF_LENGTH = 2730  # the length with half of it
MIN_LENGTH = 2048  # shorter rows were not measured and count as this long
ATTENTION_FALL_LENGTH = 500_000  # falls to half again at this length, by rows of 131,072
NARROW_HEAD_SHARE = 0.73  # factor of that share for heads narrower than 128
# Reads and writes by elementwise ops of a layer and its gradient.
STREAM_PASSES = 26  # of d_model numbers of a token
FF_PASSES = 20  # of d_ff numbers of a token
CHOICE_PASSES = 12  # of d_model numbers for each choice, on the way to an expert and back
# Of rows of d_model numbers, by what surrounds an exchange of tokens in both passes of a layer.
GATHERED_PASSES = 14  # of those of all tokens, from which a device takes its experts' own
PLACED_PASSES = 40  # of those that are put into blocks, one for each device
BYTES_PER_LOGIT = 14
GRADIENT_PASSES = 6  # written, put into place, and read for norms and the update
# The share of what weights and gradients exchange by which a step is shorter than if nothing were
# hidden, with `mesh.copy_engines`. Without, it is 0: NCCL's kernels take SMs, and as they run other
# kernels lose about as much time as the links need (docs/lab/performance.md#what-fsdp-waits-for).
HIDDEN_COPIES = 0.25
# Policies of `step.remat`.
RECOMPUTING_POLICIES = ("full", "attention")  # keep no matmul of a layer
INPUT_KEEPING_POLICIES = ("names", "qkv")  # keep the inputs of attention
# In 8 bits, on an H100.
FP8_TIME = 0.5  # of the time of a matmul in bfloat16
CAST_PASSES = 10  # of the numbers of a token, by casts
# Bytes that a stage moves in each tick for each of its weights: gradients are put into place and
# added up, and a loop over layers copies slices too. By steps in one round and in two.
BYTES_PER_TICK = 14
BYTES_PER_TICK_IN_LOOP = 38


def step_seconds(
  cfg: Config, model: Decoder, state_bytes: int, counts: Counts, hardware: Hardware
) -> dict[str, Any]:
  """Estimate the seconds of each part of a step on one device.

  Weights that are sharded along `rules.ZERO_AXES` are gathered in the compute dtype or in 8
  bits, for the forward and the backward pass of each micro-batch (once with
  `mesh.keep_gathered`), and their gradients scattered; with `mesh.zero` below 3 new
  weights are gathered once an update. Other gradients are summed over the axes of the batch and of
  a row; compressed ones over replicas once an update, in 8 bits there and back
  (`sharding.compressed`). Devices along these axes swap parts of the rows of a lookup table, and of
  their gradients.
  `context` swaps positions for heads before attention and back, in both passes. `tensor` sums
  activations twice a layer in the forward and twice in the backward pass (Shoeybi et al. 2019,
  arXiv:1909.08053, section 3). `expert` sends rows to experts and back in both passes, by
  `moe.exchange=hierarchical` first between hosts, at the rate of the links that were measured.
  Attention is slower than other matmuls, and elementwise ops take the time of the memory that they
  go through, by numbers fitted on one GPU. `step.remat=full` computes the layers' forward pass
  twice, with what it exchanges, `attention` all of it but attention, and `qkv` the feed-forward
  part; what other policies compute twice is left out. A stage of a pipeline computes its layers
  once more by `step.remat_stages`, in each tick, also where it idles (`sharding.pipeline`); what is
  before and behind them is shared. It moves gradients in each tick, and in a loop weights. Matmuls
  in 8 bits take half the time, as on a GPU that has them.

  Args:
    cfg: the resolved config.
    model: its (abstract) decoder, sharded by the current (abstract) mesh.
    state_bytes: bytes of the state on a device; fewer give a lower bound of the time.
    counts: parameters and FLOPs of the model.
    hardware: the rates of devices and links.

  Returns:
    `parts`, seconds by name, None where nothing was measured; `least`, if all communication of
    weights and gradients were hidden (that of activations is not: the next op waits for it),
    `most`, if none were, and `likely`: `most`, or less with `mesh.copy_engines`.

  Raises:
    ValueError: if the rate of a matmul in the compute dtype was not measured.
  """
  dtype = cfg.precision.compute_dtype
  if dtype not in hardware.matmul_flops:
    known = ", ".join(hardware.matmul_flops)
    raise ValueError(
      f"precision.compute_dtype={dtype}: matmuls were measured in {known} only. Measure anew: "
      "`ats-jax check_env --measure`."
    )
  tokens = cfg.data.batch_size * cfg.data.seq_len / jax.sharding.get_abstract_mesh().size
  in_layers = (
    tokens * _layer_passes(cfg) / cfg.step.accum_steps
  )  # as many as in all turns of a device
  of_head = 6.0 * cfg.model.vocab_size * cfg.model.d_model
  table = 0 if cfg.model.tie_embeddings else counts.parts["embedding"].total
  attention = counts.flops_causal - 6.0 * (counts.active - table) + 2.0 * counts.frozen
  rate, memory = MATMUL_EFFICIENCY * hardware.matmul_flops[dtype], hardware.memory_bytes_per_sec
  in_8_bits = _fp8_share(cfg, model, counts.active - table - of_head / 6.0)
  layers = (counts.flops_causal - of_head - attention) * in_layers / rate
  layers *= 1.0 - (1.0 - FP8_TIME) * in_8_bits
  attention *= in_layers / (rate * _attention_share(cfg))
  ways = math.prod(num_shards(axis) for axis in ("rows", "seq"))
  of_device = cfg.data.batch_size * cfg.data.seq_len / ways
  passes = _passes(cfg) * of_device * num_stages() * _layer_passes(cfg) / cfg.step.accum_steps
  logits = of_device * cfg.model.vocab_size / num_shards("vocab") * BYTES_PER_LOGIT
  parts = {
    "matmuls": layers + of_head * tokens / rate,
    "attention": attention,
    "elementwise": (passes + logits) / memory,
    "recomputed": _recomputed(cfg, counts, attention, layers + passes / memory),
    "moved by a stage": _stage_bytes(cfg, model, passes) / memory,
    "update": (2 * state_bytes + GRADIENT_PASSES * _gradient_bytes(model)) / memory,
    **_weights_and_gradients(cfg, model, hardware),
    **_activations(cfg, hardware),
  }
  total = lambda names: sum(parts[name] or 0.0 for name in names)
  waiting = (
    "activations summed", "heads swapped", "tokens exchanged", "handed on", "rows looked up",
  )  # fmt: skip
  own = (
    "matmuls", "attention", "elementwise", "recomputed", "moved by a stage", "update", *waiting
  )  # fmt: skip
  computing, talking = total(own), total(name for name in parts if name not in own)
  least, most = total(waiting) + max(computing - total(waiting), talking), computing + talking
  return {
    "device_kind": hardware.device_kind,
    "measured_devices": 0 if hardware.is_typical else hardware.devices,
    "parts": parts,
    "least": least,
    "likely": most - (HIDDEN_COPIES if cfg.mesh.copy_engines else 0.0) * (most - least),
    "most": most,
  }


def _recomputed(cfg: Config, counts: Counts, attention: float, rest: float) -> float:
  """Seconds of recomputation; a forward pass is a third of both passes of a layer."""
  active = {name: part.active for name, part in counts.parts.items()}
  feed = active["dense feed-forward"] + active["experts"]
  share = dict.fromkeys(RECOMPUTING_POLICIES, 1.0) | {"qkv": feed / (feed + active["attention"])}
  policies = _policies(cfg)
  of_attention = sum(policy == "full" for policy in policies)
  return (attention * of_attention + rest * sum(share.get(policy, 0.0) for policy in policies)) / 3


def _policies(cfg: Config) -> tuple[str, ...]:
  """The remat policies of a layer and, in a pipeline, of a stage."""
  return (cfg.step.remat, cfg.step.remat_stages) if _is_staged() else (cfg.step.remat,)


def _fp8_share(cfg: Config, model: Decoder, active: float) -> float:
  """The share of the layers' matmuls in 8 bits; `active` is the number of their active weights."""
  in_8_bits = fp8_layers(cfg)
  if not any(in_8_bits):
    return 0.0
  matrices = [p for p in weights_of(model) if p.role is Role.MATRIX and p.ndim > len(p.axes)]
  return sum(in_8_bits) / len(in_8_bits) * min(1.0, sum(p.num_values for p in matrices) / active)


def _stage_bytes(cfg: Config, model: Decoder, passes: float) -> float:
  """Bytes that the loops of a pipeline move beside what its layers compute; 0 without one.

  What a stage keeps of its layers is put on a stack and taken from it: as much as elementwise ops
  go through, by a step of 1.5B.
  """
  if not _is_staged():
    return 0.0
  mesh = jax.sharding.get_abstract_mesh().shape
  ways = lambda param: math.prod(mesh[axis] for axis in _axes(param, "gradients"))
  size = sum(p.size / ways(p) for p in params_of(model) if p.ndim > len(p.axes))
  kept = passes if cfg.step.remat_stages in ("names", "dots") else 0.0
  each = BYTES_PER_TICK if is_unrolled(cfg, "gpu") else BYTES_PER_TICK_IN_LOOP
  return _layer_passes(cfg) * cfg.mesh.stage_rounds * size * each + kept


def _attention_share(cfg: Config) -> float:
  """The rate of attention as a share of that of other matmuls."""
  narrow = 1.0 if cfg.model.head_dim >= 128 else NARROW_HEAD_SHARE
  length = max(MIN_LENGTH, cfg.data.seq_len)
  return (
    MAX_ATTENTION_SHARE
    * narrow
    / (1 + ATTENTION_HALF_LENGTH / length + length / ATTENTION_FALL_LENGTH)
  )


def _passes(cfg: Config) -> float:
  """Bytes of a token on a device that elementwise ops of the layers of a stage read or write."""
  model, moe = cfg.model, cfg.moe
  routed = mod_tokens(cfg.mod.capacity, cfg.data.seq_len) / cfg.data.seq_len
  numbers = 0.0
  for kind, is_8_bit in zip(layer_kinds(cfg), fp8_layers(cfg), strict=True):
    choices = moe.top_k if kind.moe else 0
    width = (choices + moe.num_shared) * moe.d_ff if kind.moe else model.d_ff
    passes = STREAM_PASSES * model.d_model + FF_PASSES * width / num_shards("ff")
    passes += CHOICE_PASSES * choices * model.d_model
    if is_8_bit and not kind.moe:
      passes += CAST_PASSES * (model.d_model + width / num_shards("ff"))
    numbers += passes * (routed if kind.mod else 1.0)
  return numbers * jnp.dtype(cfg.precision.compute_dtype).itemsize / num_stages()


def _gradient_bytes(model: Decoder) -> float:
  mesh = jax.sharding.get_abstract_mesh().shape
  ways = lambda param: math.prod(mesh[axis] for axis in _axes(param, "gradients"))
  return sum(param.size * param.dtype.itemsize / ways(param) for param in params_of(model))


def _is_staged() -> bool:
  return num_stages() > 1


def _layer_passes(cfg: Config) -> float:
  """How often a device runs its layers in a step."""
  rounds = cfg.mesh.stage_rounds
  return num_ticks(cfg.step.accum_steps, num_stages(), rounds) / rounds


def _weights_and_gradients(
  cfg: Config, model: Decoder, hardware: Hardware
) -> dict[str, float | None]:
  """Seconds of the communication of weights and gradients, by name."""
  mesh, staged = jax.sharding.get_abstract_mesh().shape, _is_staged()
  ways = lambda axes: math.prod(mesh[axis] for axis in axes)
  compute = jnp.dtype(cfg.precision.compute_dtype).itemsize
  in_8_bits = fp8_layers(cfg)
  token_axes = {*mesh_axes("rows"), *mesh_axes("seq")}
  sent = collections.Counter[tuple[str, int, float]]()  # bytes by name, devices, times in a step
  for param in weights_of(model):
    of_layers = param.ndim > len(param.axes)
    # A pipeline's layers work in each tick, and what is before and behind them once.
    passes = _layer_passes(cfg) if of_layers or not staged else 1
    weights, grads, moments = (_axes(param, part) for part in ("weights", "gradients", "moments"))
    itemsize = param.dtype.itemsize
    used = _mesh_axes_of(_stacked(param, activation_axes(param.axes)))  # as it is multiplied with
    whole = param.size // ways(used)
    # Of a table that is no head too, devices swap the rows that they look up: see `_activations`.
    is_table = param.role is Role.EMBEDDING and not cfg.model.tie_embeddings
    stays = is_table and ways(weights - used) > 1
    if weights > used and not stays:
      kept = cfg.mesh.keep_gathered and of_layers
      bytes_each = itemsize if is_quantised(param) else compute
      if of_layers and param.role is Role.MATRIX and not is_quantised(param):
        bytes_each -= (compute - 1) * sum(in_8_bits) / len(in_8_bits)
      times = (2 - kept + (staged and of_layers)) * passes
      sent["weights gathered", ways(weights - used), times] += whole * bytes_each
    if isinstance(param, Frozen):
      continue
    if moments > weights:
      sent["new weights gathered", ways(moments - weights), 1] += whole * itemsize
    if grads > used and not stays:
      sent["gradients scattered", ways(grads - used), passes] += whole * itemsize
    summed_over = token_axes - grads
    if compresses(cfg) and is_compressed(param):
      summed_over -= {*mesh_axes("replica")}
      sent["gradients compressed", num_replicas(), 1] += sent_bytes(param.size // ways(grads))
    others = ways(summed_over)
    sent["gradients summed", others, passes] += param.size // ways(grads) * itemsize
  collectives = {
    "weights gathered": "all_gather",
    "new weights gathered": "all_gather",
    "gradients scattered": "reduce_scatter",
    "gradients summed": "all_reduce",
    "gradients compressed": "all_to_all",
  }
  seconds: dict[str, list[float | None]] = {name: [] for name in collectives}
  for (name, devices, times), size in sent.items():
    seconds[name].append(_multiply(times, hardware.seconds(collectives[name], size, devices)))
    if name == "gradients compressed":  # and the sums back
      seconds[name].append(hardware.seconds("all_gather", size, devices))
  return {name: _sum(found) for name, found in seconds.items()}


def _activations(cfg: Config, hardware: Hardware) -> dict[str, float | None]:
  """Seconds of the communication of activations, by name."""
  micro, stages, turns = cfg.step.accum_steps, num_stages(), _layer_passes(cfg)
  runs = turns * cfg.model.num_layers / stages  # of a layer, on a device in a step
  tokens = cfg.data.batch_size // micro // num_shards("batch") * cfg.data.seq_len
  tokens //= num_shards("seq")
  stream = tokens * cfg.model.d_model  # numbers of a micro-batch on a device
  itemsize = jnp.dtype(cfg.precision.compute_dtype).itemsize
  tensor, staged = num_shards("ff"), _is_staged()
  again = cfg.step.remat in RECOMPUTING_POLICIES
  # Of a layer that `remat` recomputes the first sum alone: nothing needs the second. A stage that
  # is recomputed needs both. At the head in float32.
  in_layer = hardware.seconds("all_reduce", stream * itemsize, tensor)
  at_head = hardware.seconds("all_reduce", stream * 4, num_shards("vocab"))
  sums = [
    _multiply(runs * (4 + again + 2 * staged), in_layer),
    _multiply(micro / stages, at_head),
  ]
  sparse = sum(kind.moe for kind in layer_kinds(cfg))
  exchanged = _exchanged(cfg, tokens, hardware) if sparse else 0.0
  *inputs, output = [
    hardware.seconds("all_to_all", tokens * width * itemsize, num_shards("seq"))
    for width in swapped_widths(cfg)
  ]
  # No policy keeps an output that was swapped back.
  passes = 2 + sum(policy != "none" for policy in _policies(cfg))
  taken = 2 + sum(policy not in ("none", *INPUT_KEEPING_POLICIES) for policy in _policies(cfg))
  swaps = [_multiply(runs * passes, output), _multiply(runs * taken, _sum(inputs))]
  # One device hands an array to the next: half of what both would have after a gather.
  handed = hardware.seconds("all_gather", 2 * stream * itemsize, min(2, stages))
  # Each stage gets all micro-batches, and the last one shares its results; and back.
  ends = [
    hardware.seconds(collective, micro * stream * itemsize, stages)
    for collective in ("all_gather", "reduce_scatter", "all_to_all", "all_to_all")
  ]
  looked_up = hardware.seconds("all_to_all", stream * itemsize, num_shards("embed"))
  return {
    "activations summed": _sum(sums),
    "heads swapped": _sum(swaps),
    "tokens exchanged": _multiply(turns * sparse / stages, exchanged),
    "handed on": _sum([_multiply(2 * turns * cfg.mesh.stage_rounds, handed), *ends]),
    "rows looked up": _multiply(2 * micro / stages, looked_up),
  }


def _exchanged(cfg: Config, tokens: int, hardware: Hardware) -> float | None:
  """Seconds of a layer's exchange of `tokens` tokens of a device with experts, in both passes.

  Rows go there and back, and in the backward pass their gradients. That pass sends rows anew unless
  all is kept, and results too where they come back by choice, whose weights have gradients.
  """
  moe, ways, hosts = cfg.moe, num_shards("experts"), num_hosts()
  if ways == 1:
    return 0.0
  again, twice = cfg.step.remat != "none", 2 * _is_staged()
  a_token = cfg.model.d_model * jnp.dtype(cfg.precision.compute_dtype).itemsize
  in_memory = lambda passes, size: passes * size / hardware.memory_bytes_per_sec
  if moe.dispatch == "capacity":
    size = moe.capacity_factor * tokens * moe.top_k * a_token
    one_way = hardware.seconds("all_to_all", round(size), ways)
    return _sum([_multiply(4 + 2 * again + twice, one_way), in_memory(PLACED_PASSES, size)])
  of_host, sent, between = tokens, 0.0, 0.0
  if hosts > 1:  # to hosts and their devices in one pass
    limits = moe.exchange.factor, moe.num_groups, moe.top_groups
    of_host = hosts * host_capacity(tokens, moe.top_k, hosts, *limits)
    sent = of_host * a_token
    between = hardware.seconds("all_to_all", sent, hosts)
  size = of_host * ways // hosts * a_token
  there, back = (
    hardware.seconds(collective, size, ways // hosts)
    for collective in ("all_gather", "reduce_scatter")
  )
  return _sum(
    [
      _multiply(4 + again + twice, between),
      _multiply(2 + again + twice / 2, there),
      _multiply(2 + twice / 2, back),
      in_memory(PLACED_PASSES, sent) + in_memory(GATHERED_PASSES, size * (ways > hosts)),
    ]
  )


def swapped_widths(cfg: Config) -> tuple[int, ...]:
  """Numbers that a device sends along a row for a token: queries, keys, values and results.

  Keys and values are sent as often as devices need them (`ops.attention.ulysses`).
  """
  model, ways = cfg.model, num_shards("seq")
  heads, kv_heads = (n // num_shards("heads") for n in (model.num_heads, model.num_kv_heads))
  sent, value = math.lcm(kv_heads, ways), model.v_head_dim or model.head_dim
  return heads * model.head_dim, sent * model.head_dim, sent * value, heads * value


def _axes(param: Param | Frozen, part: StatePart) -> set[str]:
  """Mesh axes that shard a parameter, or a part of the state like it."""
  return _mesh_axes_of(_stacked(param, param.axes), part)


def _stacked(param: Param | Frozen, axes: tuple[str, ...]) -> tuple[str, ...]:
  """Logical axes of the layers of a stack, from those of one."""
  return ("layers",) * (param.ndim - len(param.axes)) + axes


def _mesh_axes_of(axes: tuple[str, ...], part: StatePart = "weights") -> set[str]:
  return {name for axis in axes for name in mesh_axes(axis, part)}


def _multiply(number: float, seconds: float | None) -> float | None:
  return None if seconds is None else number * seconds


def _sum(seconds: list[float | None]) -> float | None:
  known = [s for s in seconds if s is not None]
  return sum(known) if len(known) == len(seconds) else None


def render_seconds(seconds: dict[str, Any], tokens: int) -> list[str]:
  """Render the result of `step_seconds` as lines; `tokens` is the number of tokens of a step."""
  show = lambda s: "not measured" if s is None else f"{s * 1e3:,.2f} ms"
  devices, kind = seconds["measured_devices"], seconds["device_kind"]
  rates = f"rates measured on {devices} x {kind}" if devices else f"typical rates of {kind}"
  lines = [f"a step, from {rates}"]
  lines += [f"  {name:<24}{show(part):>16}" for name, part in seconds["parts"].items()]
  lines.append(f"  {'weights hidden':<24}{show(seconds['least']):>16}")
  lines.append(f"  {'nothing hidden':<24}{show(seconds['most']):>16}")
  rate = f"{tokens / seconds['likely']:,.0f} tokens/s on all devices"
  lines.append(f"  about {rate}")
  return lines
