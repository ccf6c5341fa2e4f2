"""Layers one after the other, from weights that are stacked: `lax.scan` without a loop.

With `lax.scan(unroll=num_layers)` XLA copies each layer's weights out of the stack for the backward
pass, since what `jax.checkpoint` reads again stands behind a barrier, and it gathers the gradients
of all layers again inside everything that reads them (docs/performance.md has both times).
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ats_jax.sharding.apply import unwritten


def unstack(tree: Any) -> list[Any]:
  """Trees of the layers, from a tree whose every leaf has a leading [layers].

  Their gradients are written into a stack layer by layer, each by whatever computes it.
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
  stack = unwritten((len(grads), *aval.shape), aval.dtype, jax.P(None, *aval.sharding.spec))
  # Places that XLA knows it makes asynchronous copies to (docs/log.md).
  places = jax.lax.optimization_barrier(tuple(map(jnp.int32, range(len(grads)))))
  for place, grad in zip(places, grads, strict=True):
    stack = jax.lax.dynamic_update_index_in_dim(stack, grad, place, axis=0)
  # Or else whatever reads the stack looks for the place of each of its elements.
  return (jax.lax.optimization_barrier(stack),)


_slices.defvjp(_slices_fwd, _slices_bwd)


def run_layers(body: Callable, carry: Any, xs: Iterable[Any]) -> tuple[Any, Any]:
  """`jax.lax.scan(body, carry, xs)` of `xs` already taken apart; outputs are stacked."""
  outputs = []
  for x in xs:
    carry, output = body(carry, x)
    outputs.append(output)
  return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)
