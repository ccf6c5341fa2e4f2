"""Run stacked layers unrolled, or in several scans.

`lax.scan(unroll=num_layers)` has two costs on a GPU. XLA copies each layer's weights out of the
stack for the backward pass, because `jax.checkpoint` puts them behind a barrier. And XLA gathers
the gradients of all layers inside every op that reads them (docs/lab/records has both times).
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from ats_jax.model.param import Frozen, is_variable
from ats_jax.sharding.apply import num_shards, redirect_gradient, uninitialised


def unstack(tree: Any) -> list[Any]:
  """Split a tree of stacked layers, whose every leaf has a leading [layers], into one tree a layer.

  In the backward pass each layer's gradient is written directly into its place in the stack.
  """
  leaves, structure = jax.tree.flatten(tree)
  return [structure.unflatten(layer) for layer in zip(*map(_slices, leaves), strict=True)]


@jax.custom_vjp
def _slices(stack: jax.Array) -> tuple[jax.Array, ...]:
  return tuple(stack[index] for index in range(len(stack)))


def _slices_fwd(stack: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
  return _slices(stack), None


def _slices_bwd(_, grads: tuple[jax.Array, ...]) -> tuple[jax.Array]:
  aval = jax.typeof(grads[0])
  stack = uninitialised((len(grads), *aval.shape), aval.dtype, jax.P(None, *aval.sharding.spec))
  # The barrier hides constant indices: XLA turns writes to those into asynchronous copies
  # (docs/lab/log.md).
  places = jax.lax.optimization_barrier(tuple(map(jnp.int32, range(len(grads)))))
  for place, grad in zip(places, map(_row_major, grads), strict=True):
    stack = jax.lax.dynamic_update_index_in_dim(stack, grad, place, axis=0)
  # Without this barrier XLA fuses the index lookup into every reader of the stack.
  return (jax.lax.optimization_barrier(stack),)


_slices.defvjp(_slices_fwd, _slices_bwd)


def reread_layer(layer: Any, stack: Any, index: jax.Array) -> Any:
  """Read a layer from the stack where it is used, with gradients that go to `layer`.

  For layers that the backward pass recomputes: it then keeps the stack, which is resident anyway,
  and no copy of the layer.

  Args:
    layer: a result of `unstack`, which gets the gradient. Its values are not read.
    stack: the argument of `unstack`.
    index: int32 index of the layer in the stack.
  """

  def read(own: jax.Array, stack: jax.Array) -> jax.Array:
    value = jax.lax.dynamic_index_in_dim(jax.lax.stop_gradient(stack), index, keepdims=False)
    is_trained = jnp.issubdtype(own.dtype, jnp.inexact)
    return redirect_gradient(jax.typeof(own).sharding.spec, own, value) if is_trained else value

  return jax.tree.map(read, layer, stack)


def run_layers(
  bodies: Sequence[Callable], carry: Any, xs: Iterable[Any], *, in_order: bool = False
) -> tuple[Any, Any]:
  """Run layers one after the other, like an unrolled `jax.lax.scan`; outputs are stacked.

  Args:
    bodies: the function of each layer, `(carry, x) -> (carry, output)`.
    carry: the first carry.
    xs: the input of each layer.
    in_order: in the backward pass, a layer waits for the gradients of the last but one before it.
      Where they are scattered over devices, XLA may put off the matmuls of all layers that make
      them, and then waits for one scatter after the other.
  """
  outputs, xs = [], list(xs)
  for index, body in enumerate(bodies):
    if in_order and index + 1 < len(xs):
      carry, xs[index + 1] = _tied(carry, xs[index + 1])
    carry, output = body(carry, xs[index])
    outputs.append(output)
  return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def _tied(carry: Any, x: Any) -> tuple[Any, Any]:
  """`_tie_gradients` of all but frozen weights: it would ask for their gradients."""
  is_frozen = lambda v: isinstance(v, Frozen)
  trained = jax.tree.map(lambda v: None if is_frozen(v) else v, x, is_leaf=is_variable)
  carry, trained = _tie_gradients(carry, trained)
  pick = lambda v, t: v if is_frozen(v) else t
  return carry, jax.tree.map(pick, x, trained, is_leaf=is_variable)


@jax.custom_vjp
def _tie_gradients(carry: Any, x: Any) -> tuple[Any, Any]:
  """Return both; what reads the gradient of one waits until the gradient of the other exists."""
  return carry, x


_tie_gradients.defvjp(
  lambda carry, x: ((carry, x), None), lambda _, grads: jax.lax.optimization_barrier(grads)
)


def _row_major(grad: jax.Array) -> jax.Array:
  """Lay out a layer's gradient in the order of its axes, if it is scattered over devices.

  XLA scatters along the last axis by putting that axis first, and would lay out the whole stack
  that way: the optimizer then writes its float32 directions to memory, to transpose them.
  """
  if num_shards("embed") == 1:
    return grad
  return with_layout_constraint(grad, Layout(tuple(range(grad.ndim))))


@jax.custom_vjp
def _with_row_major_gradient(x: jax.Array) -> jax.Array:
  return x


_with_row_major_gradient.defvjp(lambda x: (x, None), lambda _, grad: (_row_major(grad),))


def _with_row_major_gradients(body: Callable) -> Callable:
  """The function of a layer, with `_row_major` gradients of the layer's arrays."""
  if num_shards("embed") == 1:
    return body
  is_trained = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
  mark = lambda x: _with_row_major_gradient(x) if is_trained(x) else x
  return lambda carry, x: body(carry, jax.tree.map(mark, x))


def scan_runs(bodies: Sequence[Callable], carry: Any, xs: Any, unroll: int) -> tuple[Any, Any]:
  """Run one `jax.lax.scan` after the other, each over consecutive layers with the same body.

  Args:
    bodies: the function of each layer; consecutive equal functions share a scan.
    carry: the first carry.
    xs: trees with a leading [layers]. With several scans, each copies its slices.
    unroll: layers per iteration.

  Returns:
    The last carry, and the outputs of all layers, stacked.
  """
  runs = [(body, len(list(same))) for body, same in itertools.groupby(bodies)]
  runs = [(_with_row_major_gradients(body), size) for body, size in runs]
  if len(runs) == 1:
    return jax.lax.scan(runs[0][0], carry, xs, unroll=unroll)
  leaves, structure = jax.tree.flatten(xs)
  sizes = tuple(size for _, size in runs)
  parts, outputs = zip(*(_split_runs(leaf, sizes) for leaf in leaves), strict=True), []
  for (body, _), part in zip(runs, parts, strict=True):
    carry, output = jax.lax.scan(body, carry, structure.unflatten(part), unroll=unroll)
    outputs.append(output)
  return carry, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _split_runs(stack: jax.Array, sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
  ends = tuple(itertools.accumulate(sizes))
  return tuple(stack[end - size : end] for size, end in zip(sizes, ends, strict=True))


def _split_runs_fwd(stack: jax.Array, sizes: tuple[int, ...]) -> tuple[tuple[jax.Array, ...], None]:
  return _split_runs(stack, sizes), None


def _split_runs_bwd(sizes: tuple[int, ...], _, grads: tuple[jax.Array, ...]) -> tuple[jax.Array]:
  # JAX's own derivative would pad the gradient of each slice to a whole stack and add them up.
  return (jnp.concatenate(grads),)


_split_runs.defvjp(_split_runs_fwd, _split_runs_bwd)
