"""Blocks of the last dimension of an array that may be sharded along it.

Blocks are cut from the start of the whole dimension; the last one may be shorter. So they do not
depend on the sharding. Where a block is whole on a device, nothing is exchanged. Else devices
exchange the largest numbers of their pieces of blocks, and all have those of all blocks of a row.
"""

import math

import jax
import jax.numpy as jnp

from ats_jax.sharding.apply import map_shards


def zeros(like: jax.Array, block: int) -> jax.Array:
  """Zeros, one for each block of `like`: float32 [..., blocks], sharded as `largest` is."""
  number = -(-like.shape[-1] // block)
  cut = _cut(like)
  if not cut:
    return jnp.zeros((*like.shape[:-1], number), jnp.float32)
  _, is_whole = _piece(like, block)
  cut = cut if is_whole else jax.P(*cut[:-1], None)
  return jnp.zeros((*like.shape[:-1], number), jnp.float32, out_sharding=cut)


def largest(x: jax.Array, block: int) -> jax.Array:
  """The largest number of each block of `x`, which is not negative: [..., blocks]."""
  piece, is_whole = _piece(x, block)
  most = lambda x: (jnp.max(x.reshape(*x.shape[:-1], -1, piece), axis=-1),)
  (of_pieces,) = map_shards(most, x, out_like=(0,))
  if is_whole:
    return of_pieces
  of_pieces, each = _reshard_last(of_pieces, None), block // piece
  padding = [(0, 0)] * (x.ndim - 1) + [(0, -of_pieces.shape[-1] % each)]
  of_pieces = jnp.pad(of_pieces, padding)
  return jnp.max(of_pieces.reshape(*of_pieces.shape[:-1], -1, each), axis=-1)


def spread(of_blocks: jax.Array, like: jax.Array, block: int) -> jax.Array:
  """What each block has, for all of its elements: an array of the shape and sharding of `like`."""
  piece, is_whole = _piece(like, block)
  if not is_whole:
    pieces = like.shape[-1] // piece
    of_blocks = _repeat(of_blocks, block // piece)[..., :pieces]
    if cut := _cut(like):
      of_blocks = _reshard_last(of_blocks, cut[-1])
  (spread,) = map_shards(lambda s: (_repeat(s, piece),), of_blocks, out_like=(0,))
  return spread


def _piece(x: jax.Array, block: int) -> tuple[int, bool]:
  """The largest length that divides blocks and shards; whether it is that of all blocks."""
  mesh, cut = jax.sharding.get_abstract_mesh().shape, _cut(x)
  last = cut[-1] if cut else None
  names = () if last is None else (last,) if isinstance(last, str) else last
  local = x.shape[-1] // math.prod(mesh[name] for name in names)
  piece = math.gcd(local, min(block, x.shape[-1]))
  return piece, piece == min(block, x.shape[-1])


def _cut(x: jax.Array) -> jax.P:
  """The partition spec of an array; an empty one without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return jax.typeof(x).sharding.spec if len(mesh.manual_axes) < len(mesh.axis_names) else jax.P()


def _reshard_last(x: jax.Array, last: str | tuple[str, ...] | None) -> jax.Array:
  cut = _cut(x)
  return jax.reshard(x, jax.P(*cut[:-1], last)) if cut and cut[-1] != last else x


def _repeat(x: jax.Array, times: int) -> jax.Array:
  """Each entry of the last dimension several times."""
  return jnp.broadcast_to(x[..., None], (*x.shape, times)).reshape(*x.shape[:-1], -1)
