"""SwiGLU feed-forward. Letters: B batch, T seq, D d_model, F d_ff."""

from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ats_jax.config.schema import ModelConfig
from ats_jax.model.init import Numerics, normal, residual_std
from ats_jax.ops.linear import linear, linears
from ats_jax.ops.swiglu import swiglu


class MLP(nnx.Module):
  """`down(silu(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202, eq. 6)."""

  def __init__(self, cfg: ModelConfig, num: Numerics, rngs: nnx.Rngs, d_ff: int):
    self.dtype, self.kernels = num.compute_dtype, num.kernels
    shape = (cfg.d_model, d_ff)
    self.gate = normal(rngs.params(), shape, ("embed", "ff"), cfg.init_std, num.param_dtype)
    self.up = normal(rngs.params(), shape, ("embed", "ff"), cfg.init_std, num.param_dtype)
    self.down = normal(
      rngs.params(), shape[::-1], ("ff", "embed"), residual_std(cfg), num.param_dtype
    )

  def __call__(self, x_BTD: jax.Array, *, fp8: bool = False) -> jax.Array:
    """Map [batch, seq, d_model] to the same shape; `fp8` multiplies in 8 bits."""
    gate_DF, up_DF, down_FD = (w[...].astype(self.dtype) for w in (self.gate, self.up, self.down))
    how: dict[str, Any] = dict(fp8=fp8, kernels=self.kernels)
    axes = (("ff",), ("ff",))
    gate_BTF, up_BTF = linears(x_BTD, (gate_DF, up_DF), inputs=("act_embed",), outputs=axes, **how)
    gate_BTF, up_BTF = checkpoint_name(gate_BTF, "mlp_gate"), checkpoint_name(up_BTF, "mlp_up")
    y_BTF = swiglu(gate_BTF, up_BTF, self.kernels)
    return linear(y_BTF, down_FD, inputs=("ff",), outputs=("act_embed",), **how)
