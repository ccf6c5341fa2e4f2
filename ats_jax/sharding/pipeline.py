"""A pipeline: each stage holds consecutive layers, and micro-batches go from stage to stage.

GPipe's schedule (Huang et al. 2019, arXiv:1811.06965) as one program for all devices: in tick t
stage s works on micro-batch t - s, then every stage hands on what it made, by a collective-permute.
Of the m + p - 1 ticks that m micro-batches take through p stages each stage idles in p - 1: there
it computes what nobody uses.

With r rounds a stage holds r groups of layers that are not neighbours, and micro-batches go round
the stages r times, p of them at a time, in the order of Narayanan et al. 2021 (arXiv:2104.04473,
section 2.2): the last stage's result is with the first one just when it is due. A tick is an r-th
as long then, and a stage still idles in p - 1 of the r m + p - 1.

Before and behind the layers the stages share the micro-batches, so that none looks up or scores
what another one does.

Letters: M micro-batches, R rows of all of them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.sharding.apply import all_to_all, mesh_axes, num_shards, row_axis
from ats_jax.sharding.rules import current_rules


def num_stages() -> int:
  """The number of pipeline stages of the current mesh; 1 = there is no pipeline."""
  return num_shards("layers")


def num_ticks(micro: int, stages: int, rounds: int = 1) -> int:
  """The number of ticks of one pass, in each of which a stage runs one group of its layers.

  Micro-batches go round in groups of as many as there are stages. A smaller last group takes as
  long for each round.
  """
  groups, last = divmod(micro - 1, stages)
  return (groups * rounds + rounds - 1) * stages + last + stages


def bubble(micro: int, stages: int, rounds: int = 1) -> float:
  """The share of a pipeline's ticks in which a stage idles (arXiv:1811.06965, section 2.3)."""
  ticks = num_ticks(micro, stages, rounds)
  return (ticks - micro * rounds) / ticks


def single_stage_mesh() -> jax.sharding.AbstractMesh:
  """The current mesh with its stages moved to the first batch axis.

  Layers are traced on it without a pipeline; a device has the same rows if there are as many times
  more of them as there were stages.
  """
  mesh, sizes = jax.sharding.get_abstract_mesh(), dict(jax.sharding.get_abstract_mesh().shape)
  (staged,), (first, *_) = mesh_axes("layers"), mesh_axes("batch")
  sizes[first] *= sizes[staged]
  sizes[staged] = 1
  return jax.sharding.AbstractMesh(
    tuple(sizes.values()), mesh.axis_names, axis_types=mesh.axis_types
  )


def describe_pipeline(layers: int, micro: int, stages: int, rounds: int = 1) -> str:
  """Describe a pipeline in one line, for the log and the planner."""
  ticks, of_tick = num_ticks(micro, stages, rounds), layers // (stages * rounds)
  groups, turns = (f"{rounds} x ", f" {rounds} rounds of") if rounds > 1 else ("", "")
  return (
    f"{stages} stages of {groups}{of_tick} layers;{turns} {micro} micro-batches take {ticks} "
    f"ticks, of which a stage idles {ticks - micro * rounds} ({bubble(micro, stages, rounds):.1%})"
  )


def most_micro_batches(rows: int) -> int:
  """The number of micro-batches for rows outside of training: one per stage, if they divide."""
  return math.gcd(rows // num_shards("batch"), num_stages())


def join_micro_batches(x_MB: jax.Array) -> jax.Array:
  """Join micro-batches [micro, batch, ...] into rows [micro * batch, ...] shared by the stages.

  The order of rows moves nothing between devices; `split_micro_batches` undoes it.
  """
  x_MB = _shard_leading(x_MB, "micro", "batch")
  return _regroup(x_MB, num_stages(), "micro", ("rows",))


def split_micro_batches(x_R: jax.Array, micro: int) -> jax.Array:
  """Split rows [rows, ...] as joined by `join_micro_batches` into [micro, rows / micro, ...]."""
  rows, *shape = x_R.shape
  axis = row_axis(rows)
  x_R = _shard_leading(x_R, axis)
  parts, outer = (num_stages(), "micro") if axis == "rows" else (1, None)
  assert micro % parts == 0, f"{micro} micro-batches do not divide over {parts} stages"
  rest = _spec(x_R)[1:]
  x = _reshape(x_R, (parts, rows // micro, micro // parts, *shape), (outer, "batch", None), rest)
  return _reshape(jnp.swapaxes(x, 1, 2), (micro, rows // micro, *shape), (outer, "batch"), rest)


class _Slot(NamedTuple):
  """The work of a stage in one tick.

  Attributes:
    micro: index of the micro-batch.
    round: index of the round.
    is_real: False in the ticks in which the stage idles; their results are discarded.
  """

  micro: jax.Array
  round: jax.Array
  is_real: jax.Array


def _slot(number: jax.Array, micro: int, stages: int, rounds: int) -> _Slot:
  """The slot of tick `number`, counted from the tick in which the first micro-batch arrives."""
  group, within = jnp.divmod(jnp.maximum(number, 0), stages * rounds)
  of_round, place = jnp.divmod(within, stages)
  index = group * stages + place
  return _Slot(jnp.minimum(index, micro - 1), of_round, (number >= 0) & (index < micro))


def pipeline(
  stage: Callable[..., tuple[Any, Any]],
  rounds: Sequence[Any],
  x: Any,
  side_inputs: Any,
  key: jax.Array | None,
  *,
  micro: int,
  policy: Callable[..., Any] | None = None,
) -> tuple[Any, list[Any]]:
  """Run micro-batches through the stages.

  What reverse mode keeps is the input of each stage in each tick, and what a policy says: a stage
  computes its layers again in the backward pass. Gradients of weights are added up over the ticks
  in float32 or wider.

  Args:
    stage: `(layers, x, side_inputs, key) -> (x, statistics)` for some layers and one micro-batch.
    rounds: the layers of each round, alike trees whose every leaf has a leading [layers]; the
      stages divide them.
    x: a tree of arrays [rows, ...] that go through the layers.
    side_inputs: a tree of arrays [rows, ...] that every layer reads.
    key: folded with the index of each micro-batch; None = no key.
    micro: the number of micro-batches (`split_micro_batches`).
    policy: a policy of `jax.checkpoint`; None = keep only the inputs of stages.

  Returns:
    `x` after the last layers, in the order of the rows, and the statistics of each round, a tree
    of arrays with a leading [layers], summed over micro-batches.
  """
  (axis,), stages, times = mesh_axes("layers"), num_stages(), len(rounds)
  shared = row_axis(jax.tree.leaves(x)[0].shape[0]) == "rows"

  def local(rounds, x_M, side_inputs_M, key):
    here = jax.lax.axis_index(axis)
    if shared:  # a stage's own
      x_M, side_inputs_M = jax.tree.map(lambda a: a[0], (x_M, side_inputs_M))
    narrow = jax.tree.map(jax.lax.stop_gradient, rounds)
    wide = jax.tree.map(_to_float32, rounds)
    # Each hands on to the next one, and what has rounds to go comes back to the first.
    onwards = [(s, (s + 1) % stages) for s in range(stages if times > 1 else stages - 1)]

    # A loop needs no barriers against CSE.
    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def work(rounds, x, side_inputs, key, slot):
      layers = jax.tree.map(lambda *of_rounds: _select(slot.round, of_rounds), *rounds)
      return stage(
        layers, x, side_inputs, None if key is None else jax.random.fold_in(key, slot.micro)
      )

    def tick(carry, number):
      (arrived, made_M), slot = carry, _slot(number - here, micro, stages, times)
      entering, side_inputs = jax.tree.map(
        lambda a: _micro_batch(a, slot.micro), (x_M, side_inputs_M)
      )
      enters = (here == 0) & (slot.round == 0)
      x = jax.tree.map(lambda new, old: jnp.where(enters, new, old), entering, arrived)
      x, stats = work(jax.tree.map(_accumulate_wide, narrow, wide), x, side_inputs, key, slot)
      # The last that is written for a micro-batch stays: that of the last round.
      put = lambda all_M, a: jax.lax.dynamic_update_index_in_dim(all_M, a, slot.micro, 0)
      made_M = jax.tree.map(put, made_M, x)
      return (jax.tree.map(lambda a: jax.lax.ppermute(a, axis, onwards), x), made_M), stats

    # Before a micro-batch arrives, a stage works on a real one: no zeros whose norm is nothing.
    start = jax.tree.map(lambda a: _micro_batch(a, 0), x_M), jax.tree.map(jnp.zeros_like, x_M)
    numbers = jnp.arange(num_ticks(micro, stages, times))
    (_, made), stats = jax.lax.scan(tick, start, numbers)  # made: right on the last stage
    slots = _slot(numbers - here, micro, stages, times)
    if shared:
      made = jax.tree.map(lambda a: a[None], made)
    else:
      of_last = lambda a: jnp.where(here == stages - 1, a, jnp.zeros_like(a))
      made = jax.tree.map(lambda a: jax.lax.psum(of_last(a), axis), made)
    of_round = lambda n: slots.is_real & (slots.round == n)
    return made, [
      jax.tree.map(functools.partial(_masked_sum, of_round(n)), stats) for n in range(times)
    ]

  ends = jax.P(axis) if shared else jax.P()
  run = jax.shard_map(
    local,
    in_specs=(jax.P(axis), ends, ends, jax.P()),
    out_specs=(ends, jax.P(axis)),
    axis_names={axis},
    check_vma=False,  # as of islands, see `apply.island`
  )
  rounds = jax.tree.map(lambda a: _shard_leading(a, "layers"), list(rounds))
  x_M, side_inputs_M = jax.tree.map(lambda a: split_micro_batches(a, micro), (x, side_inputs))
  if shared:
    x_M, side_inputs_M = jax.tree.map(_to_all, (x_M, side_inputs_M))
  out_M, stats = run(rounds, x_M, side_inputs_M, key)
  if shared:
    out_M = jax.tree.map(_from_last, out_M)
  outer, rows = ("micro", "rows") if shared else (None, "batch")
  parts = stages if shared else 1
  of_all = lambda s: jax.reshard(s, jax.P(None, *_spec(s)[1:]))
  out = jax.tree.map(lambda a: _regroup(a, parts, outer, (rows,)), out_M)
  return out, jax.tree.map(of_all, stats)


def layer_at(layers: Any, index: jax.Array) -> Any:
  """Broadcast one layer of a stack from the stage that holds it to all stages.

  Args:
    layers: a tree whose every leaf has a leading [layers].
    index: int32 scalar.
  """
  (axis,), stages = mesh_axes("layers"), num_stages()

  def pick(stack: jax.Array) -> jax.Array:
    if _spec(stack)[0] is None:
      return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
    number = len(stack) // stages

    def local(stack, index):
      own = jax.lax.dynamic_index_in_dim(stack, index % number, keepdims=False)
      has_it = jax.lax.axis_index(axis) == index // number
      return jax.lax.psum(jnp.where(has_it, own, jnp.zeros_like(own)), axis)

    cut = (jax.P(axis), jax.P())
    return jax.shard_map(
      local, in_specs=cut, out_specs=jax.P(), axis_names={axis}, check_vma=False
    )(stack, index)

  return jax.tree.map(pick, layers)


# Islands over all axes: over the stages alone XLA would gather along the other axes too.
def _to_all(x_MB: jax.Array) -> jax.Array:
  """All-gather micro-batches over the stages: [stage, micro, batch, ...], all for each stage."""
  spec = _spec(x_MB)
  all_of = lambda x: jax.lax.all_gather(x, spec[0], tiled=True)[None]
  out = jax.P(spec[0], None, *spec[1:])
  return jax.shard_map(all_of, in_specs=spec, out_specs=out, check_vma=False)(x_MB)


def _from_last(x_SMB: jax.Array) -> jax.Array:
  """Distribute the last stage's results [micro, batch, ...] over the stages."""
  spec, share = _spec(x_SMB), x_SMB.shape[1] // num_stages()
  of_last = lambda x: all_to_all(x[0], "layers")[-share:]
  out = jax.P(spec[0], *spec[2:])
  return jax.shard_map(of_last, in_specs=spec, out_specs=out, check_vma=False)(x_SMB)


def _select(index: jax.Array, choices: Sequence[jax.Array]) -> jax.Array:
  """`choices[index]` without stacking, which would copy all choices and their gradients."""
  return choices[0] if len(choices) == 1 else jax.lax.select_n(index, *choices)


def _masked_sum(is_counted: jax.Array, values: jax.Array) -> jax.Array:
  """Sum values [ticks, ...] over the ticks where `is_counted`."""
  counts = jnp.expand_dims(is_counted, tuple(range(1, values.ndim)))
  return jnp.sum(jnp.where(counts, values, jnp.zeros_like(values)), axis=0)


def _micro_batch(x_MB: jax.Array, index: jax.Array | int) -> jax.Array:
  x = jax.lax.dynamic_index_in_dim(x_MB, index, keepdims=False)
  return _shard_leading(x, "batch")  # one row has lost its axis


def _is_narrow(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32


def _to_float32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32) if _is_narrow(x) else x


def _accumulate_wide(narrow: jax.Array, wide: jax.Array) -> jax.Array:
  """Return `narrow` with its gradient going to `wide`, in whose dtype a loop accumulates it."""
  return _narrowed(narrow, wide) if narrow.dtype != wide.dtype else wide


@jax.custom_jvp
def _narrowed(narrow: jax.Array, wide: jax.Array) -> jax.Array:
  return narrow


@_narrowed.defjvp
def _narrowed_jvp(primals, tangents):
  (narrow, _), (_, wide_dot) = primals, tangents
  return narrow, wide_dot.astype(narrow.dtype)


def _regroup(x_MB, parts, outer, rows):
  """[micro, batch, ...] -> [micro * batch, ...]: by part, row, and micro-batch of the part."""
  micro, batch, *shape = x_MB.shape
  rest = _spec(x_MB)[2:]
  x = _reshape(x_MB, (parts, micro // parts, batch, *shape), (outer, None, "batch"), rest)
  return _reshape(jnp.swapaxes(x, 1, 2), (micro * batch, *shape), rows, rest)


def _spec(x: jax.Array) -> jax.P:
  return jax.typeof(x).sharding.spec


def _shard_leading(x: jax.Array, *axes: str | None) -> jax.Array:
  """Shard the first dimensions by logical axes; the others stay as they are."""
  rules = current_rules()
  return jax.reshard(x, jax.P(*(rules[a] for a in axes), *_spec(x)[len(axes) :]))


def _reshape(x, shape, axes, rest):
  rules = current_rules()
  return jax.lax.reshape(x, shape, out_sharding=jax.P(*(rules[a] for a in axes), *rest))
