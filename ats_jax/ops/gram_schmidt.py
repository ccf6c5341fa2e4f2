"""An orthonormal basis of the columns of a matrix, in products of matrices.

Letters: M rows, N columns, P columns of a panel.
"""

import jax
import jax.numpy as jnp

PANEL = 64  # columns at a time, whose products are small enough to be factored in a batch
# Added to the products of columns of length 1: above the rounding errors of dependent ones.
SHIFT = 1e-5
# Each divides the smallest singular value of a panel by the root of SHIFT at most, so four of them
# lead from rounding errors (1e-7) to 1.
PASSES = 4


def orthonormal(x_MN: jax.Array) -> jax.Array:
  """Q of the QR decomposition with a positive diagonal of R, in float32.

  Column j of it is in the span of the first j columns. `jnp.linalg.qr` takes one matrix and one
  column after the other on a GPU. This has shifted Cholesky decompositions of panels (Fukaya et al.
  2020, arXiv:1809.11085), each panel orthogonal to those before it.

  Args:
    x_MN: float32, no more columns than rows, and no column of zeros. Where columns are linearly
      dependent up to rounding, the result is orthonormal, and its directions are of rounding.

  Returns:
    Array like `x_MN`.
  """
  _, num_columns = x_MN.shape
  panels = -(-num_columns // PANEL)
  x_MN = jnp.pad(x_MN, ((0, 0), (0, panels * PANEL - num_columns)))

  def add(panel: jax.Array, q_MN: jax.Array) -> jax.Array:
    x_MP = jax.lax.dynamic_slice_in_dim(x_MN, panel * PANEL, PANEL, axis=1)
    for _ in range(PASSES):
      x_MP = _unit(x_MP - times(q_MN, times(q_MN.T, x_MP)))
      products_PP = times(x_MP.T, x_MP) + SHIFT * jnp.eye(PANEL)
      lower_PP = jnp.linalg.cholesky(products_PP, symmetrize_input=False)
      x_MP = jax.lax.linalg.triangular_solve(lower_PP, x_MP, lower=True, transpose_a=True)
    return jax.lax.dynamic_update_slice_in_dim(q_MN, _unit(x_MP), panel * PANEL, axis=1)

  return jax.lax.fori_loop(0, panels, add, jnp.zeros_like(x_MN))[:, :num_columns]


def _unit(x_MP: jax.Array) -> jax.Array:
  """Columns of length 1, or of zeros."""
  largest = jnp.max(jnp.abs(x_MP), axis=0)  # first, so that no square underflows
  x_MP = x_MP / jnp.where(largest > 0.0, largest, 1.0)
  return x_MP / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(x_MP), axis=0)), 1.0)


def times(x: jax.Array, y: jax.Array) -> jax.Array:
  """The product of matrices in float32. Rounded factors would hide small eigenvalues."""
  return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
