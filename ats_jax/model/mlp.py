"""SwiGLU feed-forward. Letters: B batch, T seq, D d_model, F d_ff."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ats_jax.config.schema import ModelConfig
from ats_jax.model.init import Numerics, normal, residual_std
from ats_jax.ops.linear import linear
from ats_jax.ops.swiglu import swiglu


class MLP(nnx.Module):
  """`down(silu(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202, eq. 6)."""

  def __init__(self, cfg: ModelConfig, num: Numerics, rngs: nnx.Rngs, d_ff: int):
    self.dtype, self.slots = num.compute_dtype, num.slots
    shape = (cfg.d_model, d_ff)
    self.gate = normal(rngs.params(), shape, ("embed", "ff"), cfg.init_std, num.param_dtype)
    self.up = normal(rngs.params(), shape, ("embed", "ff"), cfg.init_std, num.param_dtype)
    self.down = normal(
      rngs.params(), shape[::-1], ("ff", "embed"), residual_std(cfg), num.param_dtype
    )

  def __call__(self, x_BTD: jax.Array, *, fp8: bool = False) -> jax.Array:
    """Map [batch, seq, d_model] to the same shape; `fp8` multiplies in 8 bits."""

    def project(x: jax.Array, weight: nnx.Param, inputs: str, outputs: str) -> jax.Array:
      weight_IO = weight[...].astype(self.dtype)
      axes = dict(inputs=(inputs,), outputs=(outputs,))
      return linear(x, weight_IO, **axes, fp8=fp8, slots=self.slots)

    gate_BTF = checkpoint_name(project(x_BTD, self.gate, "act_embed", "ff"), "mlp_gate")
    up_BTF = checkpoint_name(project(x_BTD, self.up, "act_embed", "ff"), "mlp_up")
    return project(swiglu(gate_BTF, up_BTF, self.slots), self.down, "ff", "act_embed")
