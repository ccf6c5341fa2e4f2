"""Blocks of rows of any length between the devices along a logical axis."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.sharding.apply import exchange, gather_blocks, mesh_axes, num_shards


class Routes(NamedTuple):
  """What a device sends and receives: int32 [devices * updates], those of one peer together.

  Attributes:
    first: row of the operand at which each update that is sent begins.
    sent: how many rows of it are sent.
    there: row of the peer's result at which it begins.
    received: how many rows of each update come from the peer.
  """

  first: jax.Array
  sent: jax.Array
  there: jax.Array
  received: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def ragged_exchange(
  x_MD: jax.Array, routes: Routes, back: Routes, rows: int, axis: str
) -> jax.Array:
  """Inside an island: send rows to the devices along a logical axis (`jax.lax.ragged_all_to_all`).

  Args:
    x_MD: rows. None is sent twice.
    routes: where they go.
    back: the same exchange the other way round, for the backward pass.
    rows: of the result.
    axis: the logical axis, sharded.

  Returns:
    [rows, D]; zero where no row came.
  """
  del back
  primitive = functools.partial(_primitive, rows=rows, axis=axis)
  # XLA does not have it on a CPU.
  return jax.lax.platform_dependent(
    x_MD, routes, cpu=functools.partial(by_gathering, rows=rows, axis=axis), default=primitive
  )


def _forward(x_MD, routes, back, rows, axis):
  of_rows = x_MD[:, :0]  # tells their number
  return ragged_exchange(x_MD, routes, back, rows, axis), (of_rows, routes, back)


def _backward(rows, axis, residuals, dout):
  del rows
  of_rows, routes, back = residuals
  return ragged_exchange(dout, back, routes, of_rows.shape[0], axis), None, None


ragged_exchange.defvjp(_forward, _backward)


def _primitive(x_MD: jax.Array, routes: Routes, *, rows: int, axis: str) -> jax.Array:
  empty = jnp.zeros((rows, x_MD.shape[1]), x_MD.dtype)
  return jax.lax.ragged_all_to_all(x_MD, empty, *routes, axis_name=mesh_axes(axis))


def by_gathering(x_MD: jax.Array, routes: Routes, *, rows: int, axis: str) -> jax.Array:
  """What `ragged_all_to_all` specifies, by a gather of all rows of all devices.

  Letters: M rows of a device, R rows of the result, U updates.
  """
  first_U, there_U = exchange(routes.first, axis), exchange(routes.there, axis)
  all_MD = gather_blocks(x_MD, axis)
  peer_U = jnp.arange(first_U.size) * num_shards(axis) // first_U.size
  offset_RU = jnp.arange(rows)[:, None] - there_U
  from_RU = (offset_RU >= 0) & (offset_RU < routes.received)
  source_RU = peer_U * x_MD.shape[0] + first_U + offset_RU
  source_R = jnp.sum(jnp.where(from_RU, source_RU, 0), axis=1)
  source_R = jnp.where(jnp.any(from_RU, axis=1), source_R, all_MD.shape[0])
  return all_MD.at[source_R].get(mode="fill", fill_value=0)
