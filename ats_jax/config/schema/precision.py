"""The section `precision`."""

import dataclasses

from ats_jax.config.schema.setting import setting, when


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
  """Number formats. Norms, softmax, loss and reductions are float32 whatever is said here."""

  param_dtype: str = setting("float32", "stored weights", choices=("float32", "bfloat16"))
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
    needs=when("precision.fp8"),
  )
  deterministic: bool = setting(
    False, "GPU: bit-equal reruns, at a cost in speed (docs/reference/performance.md)"
  )
