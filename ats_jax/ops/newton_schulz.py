"""The orthogonal factor of a matrix by a polynomial iteration.

Letters: B batch, M rows, N columns.
"""

import jax
import jax.numpy as jnp

# Odd polynomials a x + b x^3 + c x^5 of singular values, of which each is the best for the interval
# that those before it lead to, from [1e-3, 1] on (Amsel et al. 2025, arXiv:2505.16932). All but the
# last are for values 1 % larger, so that rounding does not lead out of an interval.
_BEST = (
  (8.28721201814563, -23.595886519098837, 17.300387312530933),
  (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
  (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
  (3.3184196573706015, -2.488488024314874, 0.51004894012372),
  (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
  (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
  (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
MARGIN = 1.01
POLYNOMIALS = tuple((a / MARGIN, b / MARGIN**3, c / MARGIN**5) for a, b, c in _BEST)
# Times rows over columns from which on products of the smaller side's square are cheaper.
GRAM_ASPECT = 2.0
# After so many iterations on the square, it is computed anew from the matrix: rounding grows in it.
GRAM_ITERATIONS = 2
# Elements of the matrices that are worked on at a time; several temporaries are as large.
BLOCK = 2**28


def of_unit_norm(x: jax.Array, num_stacked: int, *, eps: float, dtype: jnp.dtype) -> jax.Array:
  """Tensors of a stack divided by their norms, as `orthogonalise` takes them.

  Args:
    x: [*stack, *tensor], sharded in any way.
    num_stacked: how many dimensions count tensors.
    eps: added to the norm, which is taken in float32. A tensor of zeros stays one.
    dtype: of the result.
  """
  x = x.astype(jnp.float32)
  squares = jnp.sum(jnp.square(x), axis=tuple(range(num_stacked, x.ndim)), keepdims=True)
  return (x / (MARGIN * jnp.sqrt(squares) + eps)).astype(dtype)


def orthogonalise(x_BMN: jax.Array, *, steps: int) -> jax.Array:
  """`U V^T` of `x = U S V^T`, roughly: singular values within 0.85 to 1.12 after 5 steps.

  Values below 1e-3 end up smaller.

  Args:
    x_BMN: matrices of norm 1, local to a device. float16 has more bits than bfloat16, and all
      values in between are small.
    steps: iterations; 6 lead to 0.994 to 1.001 in exact arithmetic.

  Returns:
    Array like `x_BMN`.
  """
  batch, rows, columns = x_BMN.shape
  if rows > columns:
    return orthogonalise(x_BMN.mT, steps=steps).mT
  polynomials = [POLYNOMIALS[min(i, len(POLYNOMIALS) - 1)] for i in range(steps)]
  iterate = _by_squares if columns > GRAM_ASPECT * rows else _by_products
  at_a_time = max(1, BLOCK // (rows * columns))
  if batch <= at_a_time:
    return iterate(x_BMN, polynomials)
  one = lambda x_MN: iterate(x_MN[None], polynomials)[0]
  return jax.lax.map(one, x_BMN, batch_size=at_a_time)


def _by_products(x_BMN: jax.Array, polynomials: list[tuple[float, float, float]]) -> jax.Array:
  for a, b, c in polynomials:
    square_BMM = _times(x_BMN, x_BMN.mT)
    factor_BMM = b * square_BMM + c * _times(square_BMM, square_BMM)
    x_BMN = a * x_BMN + _times(factor_BMM, x_BMN)
  return x_BMN


def _by_squares(x_BMN: jax.Array, polynomials: list[tuple[float, float, float]]) -> jax.Array:
  """The same with the iteration on `x x^T`, which is smaller than x.

  Each polynomial multiplies x by a symmetric matrix that commutes with the square.
  """
  one_MM = jnp.eye(x_BMN.shape[1], dtype=x_BMN.dtype)
  for first in range(0, len(polynomials), GRAM_ITERATIONS):
    square_BMM = _times(x_BMN, x_BMN.mT)
    factors = []
    for a, b, c in polynomials[first : first + GRAM_ITERATIONS]:
      if factors:
        square_BMM = _times(_times(factors[-1], square_BMM), factors[-1])
      factors.append(a * one_MM + b * square_BMM + c * _times(square_BMM, square_BMM))
    product_BMM = factors[0]
    for factor_BMM in factors[1:]:
      product_BMM = _times(factor_BMM, product_BMM)
    x_BMN = _times(product_BMM, x_BMN)
  return x_BMN


def _times(x: jax.Array, y: jax.Array) -> jax.Array:
  """The product of matrices. Sums are in float32 on a GPU, whatever the format of the result.

  To ask for a float32 result and round it is 10 % slower there (H100, jax 0.11.2).
  """
  return jnp.einsum("bij,bjk->bik", x, y)
