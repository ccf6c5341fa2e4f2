"""SwiGLU feed-forward. Letters: B batch, T seq, D d_model, F d_ff."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ats_jax.config.schema import ModelConfig
from ats_jax.model.init import Numerics, normal, residual_std
from ats_jax.ops.swiglu import swiglu
from ats_jax.sharding.apply import einsum


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

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Map [batch, seq, d_model] to the same shape."""
    axes = ("batch", "seq", "ff")
    gate_BTF = einsum("BTD,DF->BTF", x_BTD, self.gate[...].astype(self.dtype), axes=axes)
    up_BTF = einsum("BTD,DF->BTF", x_BTD, self.up[...].astype(self.dtype), axes=axes)
    gate_BTF = checkpoint_name(gate_BTF, "mlp_gate")
    up_BTF = checkpoint_name(up_BTF, "mlp_up")
    return einsum(
      "BTF,FD->BTD",
      swiglu(gate_BTF, up_BTF, self.slots),
      self.down[...].astype(self.dtype),
      axes=("batch", "seq", "act_embed"),
    )
