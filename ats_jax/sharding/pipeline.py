"""A pipeline: each stage holds consecutive layers, and micro-batches go from stage to stage.

GPipe's schedule (Huang et al. 2019, arXiv:1811.06965) as one program for all devices: in tick t
stage s works on micro-batch t - s, then every stage hands on what it made, by a collective-permute.
Of the m + p - 1 ticks that m micro-batches take through p stages each stage idles in p - 1: there
it computes what nobody uses.

Before and behind the layers the stages share the micro-batches, so that none looks up or scores
what another one does.

Letters: M micro-batches, R rows of all of them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ats_jax.sharding.apply import exchange, mesh_axes, num_shards
from ats_jax.sharding.rules import current_rules


def num_stages() -> int:
  """Into how many stages the current mesh cuts a stack of layers; 1 = there is no pipeline."""
  return num_shards("layers")


def bubble(micro: int, stages: int) -> float:
  """The share of a pipeline's ticks in which a stage idles (arXiv:1811.06965, section 2.3)."""
  return (stages - 1) / (micro + stages - 1)


def one_stage() -> jax.sharding.AbstractMesh:
  """The current mesh with a single stage, on which layers are traced without a pipeline.

  As many times more rows as there were stages leave a device as many of them.
  """
  mesh, sizes = jax.sharding.get_abstract_mesh(), dict(jax.sharding.get_abstract_mesh().shape)
  (staged,), (first, *_) = mesh_axes("layers"), mesh_axes("batch")
  sizes[first] *= sizes[staged]
  sizes[staged] = 1
  return jax.sharding.AbstractMesh(
    tuple(sizes.values()), mesh.axis_names, axis_types=mesh.axis_types
  )


def in_words(layers: int, micro: int, stages: int) -> str:
  """A pipeline, for the log and the planner."""
  return (
    f"{stages} stages of {layers // stages} layers; {micro} micro-batches take "
    f"{micro + stages - 1} ticks, of which a stage idles {stages - 1} ({bubble(micro, stages):.1%})"
  )


def row_axis(rows: int) -> str:
  """The logical axis of rows outside of the layers: the stages share them where they divide."""
  shared = num_stages() > 1 and rows % num_shards("rows") == 0
  return "rows" if shared else "batch"


def most_micro_batches(rows: int) -> int:
  """Into how many micro-batches rows are cut that come uncut: one a stage, if they divide."""
  return math.gcd(rows // num_shards("batch"), num_stages())


def join(x_MB: jax.Array) -> jax.Array:
  """Micro-batches [micro, batch, ...] to rows [micro * batch, ...], which the stages share.

  In an order that moves nothing between devices; `split` undoes it.
  """
  x_MB = _cut(x_MB, "micro", "batch")
  return _regroup(x_MB, num_stages(), "micro", ("rows",))


def split(x_R: jax.Array, micro: int) -> jax.Array:
  """Rows [rows, ...] to `micro` micro-batches [micro, rows / micro, ...]; see `join`."""
  rows, *shape = x_R.shape
  axis = row_axis(rows)
  x_R = _cut(x_R, axis)
  parts, outer = (num_stages(), "micro") if axis == "rows" else (1, None)
  assert micro % parts == 0, f"{micro} micro-batches do not divide over {parts} stages"
  rest = _spec(x_R)[1:]
  x = _reshape(x_R, (parts, rows // micro, micro // parts, *shape), (outer, "batch", None), rest)
  return _reshape(jnp.swapaxes(x, 1, 2), (micro, rows // micro, *shape), (outer, "batch"), rest)


def pipeline(
  stage: Callable[..., tuple[Any, Any]],
  layers: Any,
  x: Any,
  beside: Any,
  key: jax.Array | None,
  *,
  micro: int,
) -> tuple[Any, Any]:
  """Run micro-batches through the stages.

  What reverse mode keeps is the input of each stage in each tick: a stage computes its layers again
  in the backward pass. Gradients of weights are added up over the ticks in float32 or wider.

  Args:
    stage: `(layers, x, beside, key) -> (x, statistics)` of some layers and one micro-batch.
    layers: a tree whose every leaf has a leading [layers]; the stages divide them.
    x: a tree of arrays [rows, ...] that go through the layers.
    beside: a tree of arrays [rows, ...] that every layer is told about them.
    key: is folded with the number of the micro-batch; None = no key.
    micro: into how many micro-batches the rows are cut, as by `split`.

  Returns:
    `x` behind the last stage, in the order of the rows, and the statistics, a tree of arrays with a
    leading [layers], summed over micro-batches.
  """
  (axis,), stages = mesh_axes("layers"), num_stages()
  shared = row_axis(jax.tree.leaves(x)[0].shape[0]) == "rows"

  def local(layers, x_M, beside_M, key):
    here = jax.lax.axis_index(axis)
    if shared:  # a stage's own
      x_M, beside_M = jax.tree.map(lambda a: a[0], (x_M, beside_M))
    narrow = jax.tree.map(jax.lax.stop_gradient, layers)
    wide = jax.tree.map(_widened, layers)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # a loop needs no barriers against CSE
    def work(layers, x, beside, key, index):
      return stage(layers, x, beside, None if key is None else jax.random.fold_in(key, index))

    def tick(arrived, number):
      index = jnp.clip(number - here, 0, micro - 1)
      entering, beside = jax.tree.map(lambda a: _micro_batch(a, index), (x_M, beside_M))
      x = jax.tree.map(lambda new, old: jnp.where(here == 0, new, old), entering, arrived)
      x, stats = work(jax.tree.map(_summed_wide, narrow, wide), x, beside, key, index)
      is_real = (number >= here) & (number < here + micro)
      stats = jax.tree.map(lambda s: jnp.where(is_real, s, jnp.zeros_like(s)), stats)
      onwards = [(s, s + 1) for s in range(stages - 1)]
      return jax.tree.map(lambda a: jax.lax.ppermute(a, axis, onwards), x), (x, stats)

    # Before a micro-batch arrives, a stage works on a real one: no zeros whose norm is nothing.
    start = jax.tree.map(lambda a: _micro_batch(a, 0), x_M)
    _, (made, stats) = jax.lax.scan(tick, start, jnp.arange(micro + stages - 1))
    made = jax.tree.map(lambda a: a[stages - 1 :], made)  # right on the last stage
    if shared:
      made = jax.tree.map(lambda a: a[None], made)
    else:
      of_last = lambda a: jnp.where(here == stages - 1, a, jnp.zeros_like(a))
      made = jax.tree.map(lambda a: jax.lax.psum(of_last(a), axis), made)
    return made, jax.tree.map(lambda s: jnp.sum(s, axis=0), stats)

  ends = jax.P(axis) if shared else jax.P()
  run = jax.shard_map(
    local,
    in_specs=(jax.P(axis), ends, ends, jax.P()),
    out_specs=(ends, jax.P(axis)),
    axis_names={axis},
    check_vma=False,  # as of islands, see `apply.island`
  )
  layers = jax.tree.map(lambda a: _cut(a, "layers"), layers)
  x_M, beside_M = jax.tree.map(lambda a: split(a, micro), (x, beside))
  if shared:
    x_M, beside_M = jax.tree.map(_to_all, (x_M, beside_M))
  out_M, stats = run(layers, x_M, beside_M, key)
  if shared:
    out_M = jax.tree.map(_from_last, out_M)
  outer, rows = ("micro", "rows") if shared else (None, "batch")
  parts = stages if shared else 1
  of_all = lambda s: jax.reshard(s, jax.P(None, *_spec(s)[1:]))
  out = jax.tree.map(lambda a: _regroup(a, parts, outer, (rows,)), out_M)
  return out, jax.tree.map(of_all, stats)


def layer_at(layers: Any, index: jax.Array) -> Any:
  """One layer of a stack on all stages, sent by the stage that holds it.

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
  """Micro-batches that the stages share -> [stage, micro, batch, ...], all of them for each."""
  spec = _spec(x_MB)
  all_of = lambda x: jax.lax.all_gather(x, spec[0], tiled=True)[None]
  out = jax.P(spec[0], None, *spec[1:])
  return jax.shard_map(all_of, in_specs=spec, out_specs=out, check_vma=False)(x_MB)


def _from_last(x_SMB: jax.Array) -> jax.Array:
  """What each stage made -> that of the last one, [micro, batch, ...], which the stages share."""
  spec, share = _spec(x_SMB), x_SMB.shape[1] // num_stages()
  of_last = lambda x: exchange(x[0], "layers")[-share:]
  out = jax.P(spec[0], *spec[2:])
  return jax.shard_map(of_last, in_specs=spec, out_specs=out, check_vma=False)(x_SMB)


def _micro_batch(x_MB: jax.Array, index: jax.Array | int) -> jax.Array:
  x = jax.lax.dynamic_index_in_dim(x_MB, index, keepdims=False)
  return _cut(x, "batch")  # one row has lost its axis


def _is_narrow(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32


def _widened(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32) if _is_narrow(x) else x


def _summed_wide(narrow: jax.Array, wide: jax.Array) -> jax.Array:
  """`narrow`, with its derivative by `wide`: a loop adds the gradients up in that dtype."""
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


def _cut(x: jax.Array, *axes: str | None) -> jax.Array:
  """Shard the first dimensions by logical axes; the others stay as they are."""
  rules = current_rules()
  return jax.reshard(x, jax.P(*(rules[a] for a in axes), *_spec(x)[len(axes) :]))


def _reshape(x, shape, axes, rest):
  rules = current_rules()
  return jax.lax.reshape(x, shape, out_sharding=jax.P(*(rules[a] for a in axes), *rest))
