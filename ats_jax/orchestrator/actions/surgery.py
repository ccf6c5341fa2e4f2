"""Experts split, merged, pruned and recycled while training goes on: state -> state.

No shape changes, so the train step is not compiled again: a layer has `moe.num_experts +
moe.spare_experts` slots, of which some are idle. Each function edits weights, router, averaged
weights and what the optimizer keeps of each parameter, in one compiled program. Like the train step
it donates the state. It checks nothing: the actions do (`experts.py`).

Letters: S expert slots, D d_model.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import entr

from ats_jax.model.moe import MoE
from ats_jax.model.param import Param, params_of
from ats_jax.model.random import Purpose, fold
from ats_jax.model.router import CLOSED
from ats_jax.sharding.apply import reshard
from ats_jax.step.optimizers.base import Codec, per_parameter
from ats_jax.step.state import TrainState

_OF_EXPERTS = {"stored_experts", "experts", "router"}  # dimensions that count experts
EXCLUSIVE = -CLOSED  # the penalty at which a token can go to one half of a pair only


# The edits. They change arguments of a compiled program in place: nobody else holds them.
# block: which stacked layer, static. repeat: which of the stack. Slots are traced; -1 is none.


def _edit(*static: str):
  return functools.partial(jax.jit, static_argnames=("block", *static), donate_argnames="state")


@_edit("codecs")
def split(state, block, repeat, layer, expert, slot, codecs):
  """Split an expert in two that share its tokens; the model computes the same function.

  `slot` gets a copy of the weights, and a random plane through the origin says which of the two a
  token can go to ("exclusive twin"). They drift apart because they see different tokens.
  """
  direction = _direction(state, block, repeat, layer, expert)
  for moe in _models(state, block):
    first, second, router = _mask_of(moe, expert), _mask_of(moe, slot), moe.router
    for variable, axis in (*_rows(moe), (router.bias_E, 0)):
      _put(variable, repeat, second, _mix(variable, repeat, 1.0 * first, axis), axis)
    both = first | second
    _put(router.load_E, repeat, both, _mix(router.load_E, repeat, 0.5 * first))
    _put(router.active_S, repeat, second, 1.0)
    _put(router.side_S, repeat, first, 1.0)
    _put(router.side_S, repeat, second, -1.0)
    _put(router.penalty_S, repeat, both, EXCLUSIVE)
    _put(router.direction_SD, repeat, both, direction)
  moe = _moe(state.model, block)
  first, both = _mask_of(moe, expert), _mask_of(moe, expert, slot)
  for variable, axis in _kept_rows(state, block, codecs):  # each half sees half of the tokens
    _put(variable, repeat, both, _mix(variable, repeat, 0.5 * first, axis), axis)
  return state


def _direction(state, block, repeat, layer, expert) -> jax.Array:
  """A random unit vector [d_model], nearly orthogonal to the router's columns.

  What the tokens of an expert have in common lies along the columns: a vector with a part of it
  would often send nearly all of them to one side (docs/guides/orchestrator.md).
  """
  columns_DE = reshard(_moe(state.model, block).router.weight[...][repeat], None, None)
  u = jax.random.normal(_key(state, layer, expert), columns_DE.shape[:1], columns_DE.dtype)
  gram_EE = columns_DE.T @ columns_DE
  # The ridge is for columns that are equal, as those of a fresh pair.
  ridge = 1e-3 * jnp.mean(jnp.diagonal(gram_EE)) * jnp.eye(gram_EE.shape[0])
  u -= columns_DE @ jnp.linalg.solve(gram_EE + ridge, u @ columns_DE)
  return u / jnp.linalg.norm(u)


@_edit()
def release(state, block, repeat, expert, twin, penalty):
  """Let the two halves of a split expert compete for all their tokens.

  Lower the penalty from about 10, where a token's score at the other half is exp(-10) of that at
  its own, to 0 over some hundreds of steps. At 0 they are two ordinary experts.
  """
  for moe in _models(state, block):
    both = _mask_of(moe, expert, twin)
    _put(moe.router.penalty_S, repeat, both, penalty)
    _make_whole(moe, repeat, both & (penalty == 0.0))
  return state


@_edit()
def prune(state, block, repeat, expert, twin):
  """Close an expert; its weights stay. Its tokens go to their next best experts.

  Those of a half go to the other half, which is whole again: that undoes a split.
  """
  for moe in _models(state, block):
    _close(moe, repeat, expert, twin)
  return state


@functools.partial(jax.jit, donate_argnames="state")
def temper(state, by):
  """Multiply the temperature of all routers: columns and offsets are divided by `by`.

  The function is then that of a model with `moe.temperature` times `by`, for whoever uses the
  weights. Gradients of columns keep their scale: nothing is done to moments.
  """
  for model in (state.model, state.ema):
    for blocks in () if model is None else model.segments:
      for layer in blocks.layers:
        if isinstance(layer.mlp, MoE):
          router = layer.mlp.router
          for variable in (router.weight, router.offset):
            if variable is not None:
              variable[...] /= by
  return state


@_edit("moe", "codecs")
def merge(state, block, repeat, keep, drop, moe, codecs):
  """Make one expert of two: `keep` becomes their mean, weighted by load; `drop` closes.

  Exact for a pair that was just split. Else the function changes: hidden units of two experts match
  only if the experts are similar, and no column gives the sum of two experts' probabilities. The
  mean of the columns is nearest to it (least squares over isotropic inputs) but for a constant, at
  most log 2 in the logit, which goes into the offset with `moe.router_bias`.
  """
  router = _moe(state.model, block).router
  load_E, is_pair = router.load_E[...][repeat], router.side_S[...][repeat, keep] != 0
  loads = [jnp.maximum(load_E[e], 1e-9) for e in (keep, drop)]  # they may both be 0
  shares = [load / (loads[0] + loads[1]) for load in loads]
  # log(exp a + exp b) = p a + (1 - p) b + entropy(p) at best. A token sees one half of a pair.
  gain = jnp.where(is_pair, 0.0, moe.temperature * (entr(shares[0]) + entr(shares[1])))
  for layer in _models(state, block):
    kept_mask, dropped = _mask_of(layer, keep), _mask_of(layer, drop)
    share = shares[0] * kept_mask + shares[1] * dropped
    for variable, axis in (*_rows(layer), (layer.router.bias_E, 0)):
      _put(variable, repeat, kept_mask, _mix(variable, repeat, share, axis), axis)
    if (offset := layer.router.offset) is not None and moe.score == "softmax":
      _put(offset, repeat, kept_mask, _mix(offset, repeat, 1.0 * kept_mask) + gain)
    _close(layer, repeat, drop, keep)
  layer = _moe(state.model, block)
  kept_mask, both = _mask_of(layer, keep), _mask_of(layer, keep, drop)
  for variable, axis in _kept_rows(state, block, codecs):  # a gradient is a sum over tokens
    _put(variable, repeat, kept_mask, _mix(variable, repeat, 1.0 * both, axis), axis)
  return state


# What they are made of.


def _moe(tree: Any, block: tuple[int, int]) -> MoE:
  """The stacked layer in a model, or in a tree like it."""
  segment, member = block
  return tree.segments[segment].layers[member].mlp


def _models(state: TrainState, block: tuple[int, int]) -> list[MoE]:
  return [_moe(m, block) for m in (state.model, state.ema) if m is not None]


def _rows(moe: MoE) -> list[tuple[Param, int]]:
  """The parameters that have a row for each expert, and which dimension of a layer counts them."""
  rows = []
  for param in params_of(moe):
    rows += [(param, d) for d, name in enumerate(param.axes) if name in _OF_EXPERTS]
  return rows


class _Coded(NamedTuple):
  """An array of the optimizer's that is kept as codes, in place of a variable."""

  codec: Codec
  codes: nnx.Variable
  scale: nnx.Variable


def _kept_rows(
  state: TrainState, block: tuple[int, int], codecs: tuple[Codec, ...]
) -> list[tuple[Param | _Coded, int]]:
  """The same of what the optimizer keeps.

  An array that some optimizer keeps in another shape has rows of experts where it is like the
  parameter up to that dimension; one that sums over experts has none.
  """
  trees = [(name, _rows(_moe(tree, block))) for name, tree in per_parameter(state.opt_state)]
  codec_of = {codec.field: codec for codec in codecs}
  is_scale = {codec.scales for codec in codecs}
  rows, of_model = [], _rows(_moe(state.model, block))
  for name, arrays in trees:
    codec = codec_of.get(name)
    scales = next((s for n, s in trees if codec and n == codec.scales), arrays)
    for (array, axis), (scale, _), (param, _) in zip(arrays, scales, of_model, strict=True):
      leading = slice(axis + 2)  # the stack's dimension too
      if name in is_scale or not jax.tree.leaves(array):
        continue
      if array.shape[leading] == param.shape[leading]:
        if codec is not None and jax.tree.leaves(scale):
          array = _Coded(codec, array, scale)
        rows.append((array, axis))
  return rows


def _mask_of(moe: MoE, *experts: Any) -> jax.Array:
  """Mask [slots]; -1 is none of them."""
  return jnp.any(jnp.arange(moe.router.num_slots) == jnp.array(experts)[:, None], axis=0)


def _along(of_slots_S: jax.Array, x: jax.Array, axis: int) -> jax.Array:
  """Make it broadcast along a dimension of `x`; 0 for null experts, which come last."""
  vector = jnp.pad(of_slots_S, (0, x.shape[axis] - of_slots_S.size))
  return jnp.expand_dims(vector, [d for d in range(x.ndim) if d != axis])


def _mix(
  variable: nnx.Variable | _Coded, repeat: Any, share_S: jax.Array, axis: int = 0
) -> jax.Array:
  """Sum of `share * x` over the slots of a layer; slots of share 0 are not looked at.

  A masked sum, not an index: it works for any sharding, and moves no more than the result.
  """
  x = _layer(variable, repeat)
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  share = _along(share_S, x, axis)
  return jnp.sum(jnp.where(share != 0, share * x, 0.0), axis=axis)


def _layer(variable: nnx.Variable | _Coded, repeat: Any) -> jax.Array:
  """The array of a layer."""
  if isinstance(variable, _Coded):
    return variable.codec.decode(*(part[...][repeat] for part in variable[1:]))
  return variable[...][repeat]


def _put(
  variable: nnx.Variable | _Coded, repeat: Any, is_slot_S: Any, row: Any, axis: int = 0
) -> None:
  """Write `row` into slots of a layer; codes of other slots stay as they are."""
  if isinstance(variable, _Coded):
    shape = variable.codes.shape[1:]
    row = jnp.broadcast_to(row, shape[:axis] + shape[axis + 1 :])
    for part, new in zip(variable[1:], variable.codec.encode(row), strict=True):
      _put(part, repeat, is_slot_S, new, axis)
    return
  stack = variable[...]
  x, row = stack[repeat], jnp.asarray(row, stack.dtype)
  row = jnp.expand_dims(row, axis) if row.ndim else row
  variable[...] = stack.at[repeat].set(jnp.where(_along(is_slot_S, x, axis), row, x))


def _close(moe: MoE, repeat: Any, expert: Any, heir: Any) -> None:
  """Close an expert; another one (-1 = none) gets its load, and all tokens if it was its twin."""
  router, closed, both = moe.router, _mask_of(moe, expert), _mask_of(moe, expert, heir)
  _put(router.active_S, repeat, closed, 0.0)
  _put(router.load_E, repeat, both & ~closed, _mix(router.load_E, repeat, 1.0 * both))
  _put(router.load_E, repeat, closed, 0.0)
  _make_whole(moe, repeat, both)


def _make_whole(moe: MoE, repeat: Any, is_slot_S: Any) -> None:
  for buffer in (moe.router.side_S, moe.router.penalty_S, moe.router.direction_SD):
    _put(buffer, repeat, is_slot_S, 0.0)


def _key(state: TrainState, layer: Any, slot: Any) -> jax.Array:
  return fold(state.key, Purpose.SURGERY, state.step, layer, slot)
