"""One matmul for each group of consecutive rows: the experts of a mixture.

Letters: M rows, E groups, D input width, F output width, J tiles, R rows of a tile.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from ats_jax.ops import registry
from ats_jax.ops.registry import XLA, Kernels
from kernels_triton.plan import FEW_ROWS

MAX_TILE_ROWS = 512  # of the XLA implementation


def grouped_matmul(
  x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, kernels: Kernels = XLA
) -> jax.Array:
  """`y[m] = x[m] @ w[g(m)]`, accumulated in float32.

  For local arrays: call it inside an island.

  Args:
    x_MD: rows [rows, d_in], sorted by group.
    w_EDF: one matrix a group [groups, d_in, d_out], same dtype.
    sizes_E: int32 [groups]; their sum may be less than M.
    kernels: the chosen implementations.

  Returns:
    [rows, d_out] in the dtype of `x_MD`; zero in rows past the last group.
  """
  return grouped_matmuls(x_MD, (w_EDF,), sizes_E, kernels)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmuls(
  x_MD: jax.Array, weights: tuple[jax.Array, ...], sizes_E: jax.Array, kernels: Kernels = XLA
) -> tuple[jax.Array, ...]:
  """`grouped_matmul` of the same rows with several weights of one shape, such as gate and up.

  Then the gradient of the rows is a sum of products, which "mosaic" makes in one pass.

  Returns:
    [rows, d_out] for each of the weights.
  """
  return tuple(_matmul(x_MD, w_EDF, sizes_E, kernels) for w_EDF in weights)


def _forward(x_MD, weights, sizes_E, kernels):
  return grouped_matmuls(x_MD, weights, sizes_E, kernels), (x_MD, weights, sizes_E)


def _backward(kernels, residuals, gradients):
  x_MD, weights, sizes_E = residuals
  dx_MD = _input_gradient(gradients, weights, sizes_E, kernels)
  dw = (_weight_gradient(x_MD, dy_MF, sizes_E, kernels) for dy_MF in gradients)
  return dx_MD, tuple(d.astype(w.dtype) for d, w in zip(dw, weights, strict=True)), None


grouped_matmuls.defvjp(_forward, _backward)


@jax.custom_vjp
def add_by_group(y_MF: jax.Array, bias_EF: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """`y[m] + bias[g(m)]`; rows past the last group stay.

  The gradient of the biases is a matmul: scattered adds are slow, and their order is not fixed.

  Args:
    y_MF: rows [rows, width], sorted by group.
    bias_EF: [groups, width], same dtype.
    sizes_E: int32 [groups]; their sum may be less than M.
  """
  group_M = _group_of(jnp.cumsum(sizes_E), jnp.arange(y_MF.shape[0]))
  return y_MF + bias_EF.at[group_M].get(mode="fill", fill_value=0)


def _add_forward(y_MF, bias_EF, sizes_E):
  return add_by_group(y_MF, bias_EF, sizes_E), sizes_E


def _add_backward(sizes_E, dy_MF):
  group_M = _group_of(jnp.cumsum(sizes_E), jnp.arange(dy_MF.shape[0]))
  is_in_ME = group_M[:, None] == jnp.arange(sizes_E.shape[0])
  dbias_EF = jnp.einsum(
    "ME,MF->EF",
    is_in_ME.astype(dy_MF.dtype),
    dy_MF,
    preferred_element_type=_wide(dy_MF.dtype),
    precision=jax.lax.Precision.HIGHEST,
  )
  return dy_MF, dbias_EF.astype(dy_MF.dtype), None


add_by_group.defvjp(_add_forward, _add_backward)


def _matmul(x_MD, w_EDF, sizes_E, kernels):
  slot = "few_rows" if x_MD.shape[0] <= FEW_ROWS else "forward"
  kernel = _kernel(slot, x_MD, w_EDF.shape, kernels)
  if kernel is not None:
    return kernel(x_MD, w_EDF, sizes_E)
  return _by_tiles("JRD,JDF->JRF", x_MD, w_EDF, sizes_E)


def _input_gradient(gradients, weights, sizes_E, kernels):
  kernel = _kernel("input_gradient", gradients[0], weights[0].shape, kernels)
  if kernel is not None:
    return kernel(gradients, weights, sizes_E)
  pairs = zip(gradients, weights, strict=True)
  parts = [_by_tiles("JRF,JDF->JRD", dy_MF, w_EDF, sizes_E) for dy_MF, w_EDF in pairs]
  return functools.reduce(operator.add, parts)


def _by_tiles(formula, x_MD, w_EDF, sizes_E):
  tiles = _Tiles(x_MD.shape[0], sizes_E)
  wide = _wide(x_MD.dtype)
  y = jnp.einsum(formula, tiles.split(x_MD), w_EDF[tiles.group_J], preferred_element_type=wide)
  return tiles.join(y.astype(x_MD.dtype))


def _weight_gradient(x_MD, dy_MF, sizes_E, kernels):
  shape = (sizes_E.shape[0], x_MD.shape[1], dy_MF.shape[1])
  kernel = _kernel("weight_gradient", x_MD, shape, kernels)
  if kernel is not None:
    return kernel(x_MD, dy_MF, sizes_E)
  tiles = _Tiles(x_MD.shape[0], sizes_E)
  dw_JDF = jnp.einsum(
    "JRD,JRF->JDF",
    tiles.split(x_MD),
    tiles.split(dy_MF),
    preferred_element_type=_wide(x_MD.dtype),
  )
  # The groups are sorted, but where they are many, XLA of jax 0.11.2 aborts if it is told so.
  return jax.ops.segment_sum(dw_JDF, tiles.group_J, sizes_E.shape[0])


def _kernel(slot, x_MD, shape_EDF, kernels):
  groups, d_in, d_out = shape_EDF
  dims = dict(rows=x_MD.shape[0], groups=groups, d_in=d_in, d_out=d_out)
  return registry.kernel("grouped_matmul", slot, kernels, **dims)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
  return jnp.promote_types(dtype, jnp.float32)


def _group_of(ends: jax.Array, at: jax.Array) -> jax.Array:
  """The index of the interval that each position lies in, given their ends; past the last, E."""
  return jnp.searchsorted(ends, at, side="right", method="compare_all")


class _Tiles:
  """Rows cut into tiles of R that lie in one group each; the last one of a group is filled up.

  Their number is static: J = ceil(M / R) + E, of which a few are empty.
  """

  def __init__(self, num_rows: int, sizes_E: jax.Array):
    num_groups = sizes_E.shape[0]
    # About eight tiles a group, so that filling up costs a sixteenth.
    target = max(1, num_rows // (8 * num_groups))
    self.rows = min(MAX_TILE_ROWS, max(8, 1 << (target - 1).bit_length()))
    ends_E = jnp.cumsum(sizes_E)
    tile_ends_E = jnp.cumsum(-(-sizes_E // self.rows))
    tile_J = jnp.arange(-(-num_rows // self.rows) + num_groups)
    self.group_J = jnp.minimum(_group_of(tile_ends_E, tile_J), num_groups - 1)
    starts_E, tile_starts_E = ends_E - sizes_E, tile_ends_E - (-(-sizes_E // self.rows))
    first_J = starts_E[self.group_J] + (tile_J - tile_starts_E[self.group_J]) * self.rows
    source_JR = first_J[:, None] + jnp.arange(self.rows)
    inside_JR = (source_JR < ends_E[self.group_J][:, None]) & (tile_J < tile_ends_E[-1])[:, None]
    self.source_JR = jnp.where(inside_JR, source_JR, num_rows)
    row_M = jnp.arange(num_rows)
    group_M = jnp.minimum(_group_of(ends_E, row_M), num_groups - 1)
    slot_M = tile_starts_E[group_M] * self.rows + row_M - starts_E[group_M]
    self.slot_M = jnp.where(row_M < ends_E[-1], slot_M, self.source_JR.size)

  def split(self, x_MD: jax.Array) -> jax.Array:
    """[M, D] -> [J, R, D], zero where a tile is filled up."""
    return x_MD.at[self.source_JR].get(mode="fill", fill_value=0)

  def join(self, y_JRF: jax.Array) -> jax.Array:
    """[J, R, F] -> [M, F], zero in rows past the last group."""
    y_SF = y_JRF.reshape(-1, y_JRF.shape[-1])
    return y_SF.at[self.slot_M].get(mode="fill", fill_value=0)
