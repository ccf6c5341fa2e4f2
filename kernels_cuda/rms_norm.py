"""RMSNorm over the last axis."""

import jax
import jax.numpy as jnp

from kernels_cuda.checks import call, expect, expect_packs, like

MAX_WIDTH = 8192
# Blocks of the backward pass, each with a partial sum of dscale: four a multiprocessor of an H200.
NUM_PARTIALS = 528


def rms_norm(x: jax.Array, scale_D: jax.Array, *, eps: float) -> jax.Array:
  """`x / sqrt(mean(x^2) + eps) * scale`, computed in float32. Floor: 4 bytes an element.

  Args:
    x: bfloat16 [..., width]; width a multiple of 8, at most 8192.
    scale_D: any float dtype, [width].
    eps: added to the mean square.

  Returns:
    Array like `x`.

  Raises:
    ValueError: another dtype or shape.
  """
  x_ND, scale_D = _rows(x), scale_D.astype(jnp.float32)
  _check(x_ND, scale_D)
  y_ND = call("ats_rms_norm_forward", like(x_ND), x_ND, scale_D, eps=float(eps))
  return y_ND.reshape(x.shape)


def rms_norm_backward(
  x: jax.Array, scale_D: jax.Array, dy: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
  """Gradients of `rms_norm` in one pass, without saved statistics; the same bits in every run.

  Floor: 6 bytes an element.

  Args:
    x: what was normalised.
    scale_D: as in the forward pass.
    dy: gradient of the result, like `x`.
    eps: as in the forward pass.

  Returns:
    Gradient of `x`, like it; of the scale, float32 [1, width].

  Raises:
    ValueError: another dtype or shape.
  """
  x_ND, scale_D, dy_ND = _rows(x), scale_D.astype(jnp.float32), _rows(dy)
  _check(x_ND, scale_D, dy_ND)
  rows, width = x_ND.shape
  partials = jax.ShapeDtypeStruct((max(1, min(rows, NUM_PARTIALS)), width), jnp.float32)
  out = (like(x_ND), like(scale_D), partials)
  dx_ND, dscale_D, _ = call("ats_rms_norm_backward", out, x_ND, scale_D, dy_ND, eps=float(eps))
  return dx_ND.reshape(x.shape), dscale_D[None]


def _rows(x):
  return x.reshape(-1, x.shape[-1])


def _check(x_ND, scale_D, dy_ND=None):
  shape = expect("rms_norm", "x", x_ND, (None, None), jnp.bfloat16)
  expect("rms_norm", "scale", scale_D, shape[1:], jnp.float32)
  if dy_ND is not None:
    expect("rms_norm", "dy", dy_ND, shape, jnp.bfloat16)
  expect_packs("rms_norm", shape[1], MAX_WIDTH)
