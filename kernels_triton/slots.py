"""The slots of the op `grouped_matmul`.

Letters: M rows, E groups, D input width, F output width.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kernels_triton import plan
from kernels_triton.call import call


def forward(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """`y[m] = x[m] @ w[g(m)]`, added in float32; 0 past the last group."""
  return _matmul([(x_MD, w_EDF)], sizes_E, transposed=False)


def input_gradient(
  gradients: Sequence[jax.Array], weights: Sequence[jax.Array], sizes_E: jax.Array
) -> jax.Array:
  """The sum over pairs of `dy[m] @ w[g(m)]^T`; two of them in one kernel."""
  pairs = list(zip(gradients, weights, strict=True))
  parts = [_matmul(pairs[i : i + 2], sizes_E, transposed=True) for i in range(0, len(pairs), 2)]
  return sum(parts[1:], start=parts[0])


def weight_gradient(x_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """`dw[e] = x[rows of e]^T @ dy[rows of e]`, added in float32; 0 for an empty group."""
  shape = (sizes_E.shape[0], x_MD.shape[1], dy_MF.shape[1])
  inputs = {"x": x_MD, "dy": dy_MF, "starts": _starts(sizes_E, x_MD.shape[0])}
  made = {"dw": jax.ShapeDtypeStruct(shape, x_MD.dtype)}
  return call(plan.grouped_weight_gradient(*shape), inputs, made)[0]


def _matmul(pairs, sizes_E, *, transposed: bool) -> jax.Array:
  (x, w), (x_more, w_more) = pairs[0], pairs[-1]
  launch = plan.grouped_matmul(x.shape[0], w.shape, transposed=transposed, pairs=len(pairs))
  starts = _starts(sizes_E, x.shape[0])
  inputs = {"x": x, "w": w, "x_more": x_more, "w_more": w_more, "starts": starts}
  made = {"y": jax.ShapeDtypeStruct((x.shape[0], launch.constants["d_out"]), x.dtype)}
  return call(launch, inputs, made)[0]


def _starts(sizes_E, rows: int) -> jax.Array:
  """First row of each group, the row behind the last one, and the number of rows."""
  ends_E = jnp.cumsum(sizes_E)
  return jnp.concatenate([jnp.zeros(1), ends_E, jnp.full(1, rows)]).astype(jnp.int32)
