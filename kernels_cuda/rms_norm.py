"""RMSNorm, alone or after a residual sum.

Letters: N rows, D their width.
"""

import functools

import jax
import jax.numpy as jnp

from kernels_cuda.checks import call, expect, expect_packs, like

MAX_WIDTH = 8192
# Blocks of the backward pass, each with a partial sum of dscale: four a multiprocessor of an H200.
NUM_PARTIALS = 528


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x_ND: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
  """`x / sqrt(mean(x^2) + eps) * scale` over rows, computed in float32.

  The backward pass keeps no statistics. Floor: 4 bytes an element forward, 6 backward.

  Args:
    x_ND: bfloat16 [rows, width]; width a multiple of 8, at most 8192.
    scale_D: float32 [width].
    eps: added to the mean square.

  Returns:
    Array like `x_ND`.

  Raises:
    ValueError: another dtype or shape.
  """
  _check(x_ND, scale_D)
  return call("ats_rms_norm_forward", like(x_ND), x_ND, scale_D, eps=float(eps))


def _forward(x_ND, scale_D, eps):
  return rms_norm(x_ND, scale_D, eps), (x_ND, scale_D)


def _backward(eps, residuals, dy_ND):
  return rms_norm_backward(*residuals, dy_ND, eps=eps)


rms_norm.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def add_rms_norm(
  x_ND: jax.Array, residual_ND: jax.Array, scale_D: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
  """`sum = x + residual` and `rms_norm(sum)` in one pass.

  Floor: 8 bytes an element forward, 8 backward.

  Args:
    x_ND: bfloat16 [rows, width]; width a multiple of 8, at most 8192.
    residual_ND: like `x_ND`.
    scale_D: float32 [width].
    eps: added to the mean square.

  Returns:
    The sum, rounded to bfloat16, and its norm; both like `x_ND`.

  Raises:
    ValueError: another dtype or shape.
  """
  _check(x_ND, scale_D, residual=residual_ND)
  out = (like(x_ND), like(x_ND))
  return call("ats_add_rms_norm_forward", out, x_ND, residual_ND, scale_D, eps=float(eps))


def _add_forward(x_ND, residual_ND, scale_D, eps):
  sum_ND, y_ND = add_rms_norm(x_ND, residual_ND, scale_D, eps)
  return (sum_ND, y_ND), (sum_ND, scale_D)


def _add_backward(eps, residuals, cotangents):
  dsum_ND, dy_ND = cotangents
  dx_ND, dscale_D = rms_norm_backward(*residuals, dy_ND, dsum_ND, eps=eps)
  return dx_ND, dx_ND, dscale_D


add_rms_norm.defvjp(_add_forward, _add_backward)


def rms_norm_backward(
  x_ND: jax.Array,
  scale_D: jax.Array,
  dy_ND: jax.Array,
  dsum_ND: jax.Array | None = None,
  *,
  eps: float,
  num_partials: int = NUM_PARTIALS,
) -> tuple[jax.Array, jax.Array]:
  """Gradients of `rms_norm` in one pass; the same bits in every run with the same `num_partials`.

  Args:
    x_ND: what was normalised.
    scale_D: float32.
    dy_ND: gradient of the norm.
    dsum_ND: gradient that reaches `x_ND` on another way, added to the result.
    eps: as in the forward pass.
    num_partials: rows of the buffer of partial sums of dscale, one a block.

  Returns:
    Gradient of `x_ND`, like it; of the scale, float32 [width].
  """
  _check(x_ND, scale_D, dy=dy_ND, **({} if dsum_ND is None else {"dsum": dsum_ND}))
  rows, width = x_ND.shape
  partials = jax.ShapeDtypeStruct((max(1, min(rows, num_partials)), width), jnp.float32)
  name = "ats_rms_norm_backward" if dsum_ND is None else "ats_add_rms_norm_backward"
  args = (x_ND, scale_D, dy_ND) if dsum_ND is None else (x_ND, scale_D, dy_ND, dsum_ND)
  out = (like(x_ND), like(scale_D), partials)
  dx_ND, dscale_D, _ = call(name, out, *args, eps=float(eps))
  return dx_ND, dscale_D


def forward(x: jax.Array, scale_D: jax.Array, *, eps: float) -> jax.Array:
  """`rms_norm` of `x` [..., width] with a scale of any float dtype."""
  return rms_norm(_rows(x), scale_D.astype(jnp.float32), eps).reshape(x.shape)


def backward(
  x: jax.Array, scale_D: jax.Array, dy: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
  """Gradients of `forward`: of `x`, like it; of the scale, float32 [1, width]."""
  scale_D = scale_D.astype(jnp.float32)
  dx_ND, dscale_D = rms_norm_backward(_rows(x), scale_D, _rows(dy), eps=eps)
  return dx_ND.reshape(x.shape), dscale_D[None]


def _rows(x):
  return x.reshape(-1, x.shape[-1])


def _check(x_ND, scale_D, **others):
  shape = expect("rms_norm", "x", x_ND, (None, None), jnp.bfloat16)
  expect("rms_norm", "scale", scale_D, shape[1:], jnp.float32)
  for name, other in others.items():
    expect("rms_norm", name, other, shape, jnp.bfloat16)
  expect_packs("rms_norm", shape[1], MAX_WIDTH)
