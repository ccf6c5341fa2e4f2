"""Few rows times a matrix that is stored by its outputs, as in generation.

Letters: M rows, D inputs, F outputs.
"""

import jax
import jax.numpy as jnp


def row_matmul(x_MD: jax.Array, w_FD: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
  """`x @ w.T`, added in float32.

  Args:
    x_MD: rows.
    w_FD: the matrix, one row an output, same dtype.
    dtype: of the result; None = that of `x_MD`.
  """
  dtype = dtype or x_MD.dtype
  if x_MD.shape[0] == 1:  # a sum that XLA joins with what is around it
    wide = jnp.promote_types(x_MD.dtype, jnp.float32)
    y_F = jnp.sum(x_MD.astype(wide) * w_FD.astype(wide), axis=1)
    return y_F[None].astype(dtype)
  dims = (((1,), (1,)), ((), ()))
  # In the type of the result: as float32 it would be written, read and rounded by another kernel.
  return jax.lax.dot_general(x_MD, w_FD, dims, preferred_element_type=dtype)
