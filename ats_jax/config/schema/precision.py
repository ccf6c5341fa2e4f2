"""The section `precision`."""

import dataclasses
from typing import Any

from ats_jax.config.schema.setting import of_flags, setting, when

EIGHT_BIT_MULTIPLE = 16  # of the sizes of a matmul in 8 bits: what cuBLASLt takes


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
  """Number formats. Norms, softmax, loss and reductions are float32 whatever is said here."""

  param_dtype: str = setting(
    "float32",
    "stored matrices and head; embedding, routers and vectors are float32",
    choices=("float32", "bfloat16"),
  )
  compute_dtype: str = setting("bfloat16", "operands of matmuls", choices=("float32", "bfloat16"))
  fp8: bool = setting(
    False,
    "projections of attention and dense feed-forwards in 8 bits: e4m3 operands, e5m2 gradients, "
    "one scale a tensor; not in layers that skip tokens (docs/internals/adr/0009-eight-bits.md)",
    resume="free",
  )
  fp8_keep_first: int = setting(
    1, "bottom layers left in compute_dtype", low=0, resume="free", needs=when("precision.fp8")
  )
  fp8_keep_last: int = setting(
    1, "top layers left in compute_dtype", low=0, resume="free", needs=when("precision.fp8")
  )
  fp8_band: float = setting(
    0.0025,
    "share of the validation loss that 8 bits may add at an evaluation (eval.every_steps); past it "
    "they are off for the rest of the run, with a warning",
    low=0.0,
    resume="free",
    needs=[when("precision.fp8"), of_flags(when("eval.every_steps"))],
  )
  deterministic: bool = setting(
    False, "GPU: bit-equal reruns, at a cost in speed (docs/reference/performance.md)"
  )

  def check(self, cfg: Any) -> None:
    """Refuse 8 bits without a layer for them, or of sizes that their matmuls do not take."""
    if not self.fp8:
      return
    m, tensor = cfg.model, cfg.mesh.tensor
    if self.fp8_keep_first + self.fp8_keep_last >= m.num_layers:
      raise ValueError(
        f"precision.fp8_keep_first={self.fp8_keep_first} and fp8_keep_last={self.fp8_keep_last} "
        f"leave none of {m.num_layers} layers for 8 bits. Lower them, or set precision.fp8=false."
      )
    ways = cfg.mesh.context * (tensor if cfg.mesh.shard_residuals else 1)
    widths = {
      "model.d_model": m.d_model,
      "model.num_heads x head_dim": m.num_heads * m.head_width // tensor,
      "model.num_kv_heads x head_dim": m.num_kv_heads * m.head_width // tensor,
      "model.kv_latent_dim": m.kv_latent_dim,
      "model.kv_latent_dim + latent_rope_dim": m.kv_latent_dim + m.latent_rope_dim,
      "model.q_latent_dim": m.q_latent_dim,
      "model.num_heads x v_head_dim": m.num_heads * m.v_head_dim // tensor,
      "model.num_heads x latent_rope_dim": m.num_heads * m.latent_rope_dim // tensor,
      "model.d_ff": m.d_ff // tensor,
      "data.seq_len": cfg.data.seq_len // ways,
    }
    for name, width in widths.items():
      if width % EIGHT_BIT_MULTIPLE:
        raise ValueError(
          f"precision.fp8 needs multiples of {EIGHT_BIT_MULTIPLE}: {name} is {width} on a device. "
          "Change it, or set precision.fp8=false."
        )
