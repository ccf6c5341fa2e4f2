"""SwiGLU feed-forward. Letters: B batch, T seq, D d_model, F d_ff."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ats_jax.config.schema import ModelConfig
from ats_jax.model.linear import Linear, project
from ats_jax.model.numerics import Numerics
from ats_jax.model.param import residual_std
from ats_jax.ops.swiglu import swiglu


class MLP(nnx.Module):
  """`down(silu(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202, eq. 6)."""

  def __init__(self, cfg: ModelConfig, num: Numerics, rngs: nnx.Rngs, d_ff: int):
    self.kernels = num.kernels
    stream, wide = {"embed": cfg.d_model}, {"ff": d_ff}
    self.gate = Linear(stream, wide, std=cfg.init_std, num=num, rngs=rngs)
    self.up = Linear(stream, wide, std=cfg.init_std, num=num, rngs=rngs)
    self.down = Linear(wide, stream, std=residual_std(cfg), num=num, rngs=rngs)

  def __call__(self, x_BTD: jax.Array, *, fp8: bool = False) -> jax.Array:
    """Map [batch, seq, d_model] to the same shape; `fp8` multiplies in 8 bits."""
    gate_BTF, up_BTF = project(x_BTD, (self.gate, self.up), fp8=fp8)
    gate_BTF, up_BTF = checkpoint_name(gate_BTF, "mlp_gate"), checkpoint_name(up_BTF, "mlp_up")
    return self.down(swiglu(gate_BTF, up_BTF, self.kernels), fp8=fp8)
