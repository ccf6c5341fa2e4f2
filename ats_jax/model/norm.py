"""RMSNorm."""

import jax
from flax import nnx

from ats_jax.model.numerics import Numerics
from ats_jax.model.param import Role, ones
from ats_jax.ops.rms_norm import rms_norm


class RMSNorm(nnx.Module):
  """`x / rms(x) * scale` over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4)."""

  def __init__(self, dim: int, eps: float, num: Numerics):
    self.eps, self.kernels = eps, num.kernels
    self.scale = ones((dim,), ("norm",), num.param_dtype, Role.NORM)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalise `x [..., dim]`; statistics in float32, result in the dtype of `x`."""
    return rms_norm(x, self.scale[...], eps=self.eps, kernels=self.kernels)
