"""The slots of the op `grouped_matmul` on a TPU, by the kernels "megablox" that JAX comes with.

Letters: M rows, E groups, D input width, F output width.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

ROWS = 512, 256, 128  # of a tile
WIDTH_BYTES = 2048  # of a row of a tile: all tiles of a kernel fit the 16 MiB of VMEM that it has


def forward(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """`y[m] = x[m] @ w[g(m)]`, added in float32; 0 past the last group."""
  return _matmul(x_MD, w_EDF, sizes_E, transposed=False)


def input_gradient(
  gradients: Sequence[jax.Array], weights: Sequence[jax.Array], sizes_E: jax.Array
) -> jax.Array:
  """The sum over pairs of `dy[m] @ w[g(m)]^T`."""
  pairs = zip(gradients, weights, strict=True)
  first, *more = (_matmul(dy_MF, w_EDF, sizes_E, transposed=True) for dy_MF, w_EDF in pairs)
  return sum(more, start=first)


def weight_gradient(x_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """`dw[e] = x[rows of e]^T @ dy[rows of e]`, added in float32; 0 for an empty group."""
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm  # here: for TPUs alone

  tiles = _tiles(x_MD, sizes_E, x_MD.shape[1], dy_MF.shape[1])
  x_MD, dy_MF = (_filled(rows, tiles[0]) for rows in (x_MD, dy_MF))
  return tgmm(x_MD.T, dy_MF, sizes_E, x_MD.dtype, tiles)


def _matmul(x_MD, w_EDF, sizes_E, *, transposed: bool) -> jax.Array:
  from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

  d_in, d_out = w_EDF.shape[:0:-1] if transposed else w_EDF.shape[1:]
  tiles = _tiles(x_MD, sizes_E, d_in, d_out)
  filled = _filled(x_MD, tiles[0])
  y_MF = gmm(filled, w_EDF, sizes_E, x_MD.dtype, tiles, transpose_rhs=transposed)
  # The kernel writes no row past the last group.
  is_in_M1 = jnp.arange(x_MD.shape[0])[:, None] < jnp.sum(sizes_E)
  return jnp.where(is_in_M1, y_MF[: x_MD.shape[0]], 0)


def _tiles(x_MD, sizes_E, d_in: int, d_out: int) -> tuple[int, int, int]:
  """Rows, input width and output width of a tile.

  A tile that two groups share is computed once for each, so tiles have no more rows than a group
  has on average. The kernel reads a matrix anew for each tile of rows: few rows would be slow.
  """
  average = x_MD.shape[0] // sizes_E.shape[0]
  rows = next((few for few in ROWS if few <= average), ROWS[-1])
  widest = WIDTH_BYTES // x_MD.dtype.itemsize
  return rows, _width(d_in, widest), _width(d_out, widest)


def _width(of: int, widest: int) -> int:
  """Of the multiples of 128 from `widest` / 2 on, the one that needs least to fill up `of`."""
  return of if of <= widest else min(range(widest, widest // 2 - 1, -128), key=lambda w: -of % w)


def _filled(x_MD, rows: int) -> jax.Array:
  return jnp.pad(x_MD, [(0, -x_MD.shape[0] % rows), (0, 0)])
