"""The section `precision`."""

import dataclasses
import math
from typing import Any

from ats_jax.config.schema.setting import Kinds, of_flags, section, setting, when

EIGHT_BIT_MULTIPLE = 16  # of the sizes of a matmul in 8 bits: what cuBLASLt takes
LOSS_SCALES = Kinds(
  "precision.loss_scale",
  "what the loss is multiplied with, so that gradients in float16 do not vanish; auto = dynamic "
  "with compute_dtype=float16, none with the other formats",
)
_MAY_BE_FLOAT16 = when("precision.compute_dtype", "float16", "auto")


@dataclasses.dataclass(frozen=True)
class LossScaling:
  """What every scale of the loss has: its name."""

  name: str = LOSS_SCALES.tag("auto")

  @property
  def first(self) -> float:
    """The scale of the first update."""
    return 1.0

  def in_words(self) -> str:
    """What becomes of it, for the log."""
    return f"{self.name}: {self.first:.9g}"


@LOSS_SCALES.register
@dataclasses.dataclass(frozen=True)
class AutoScaling(LossScaling):
  """As the format of the matmuls needs it."""


@LOSS_SCALES.register
@dataclasses.dataclass(frozen=True)
class Static(LossScaling):
  """One scale; an update whose gradients overflow is left out."""

  name: str = LOSS_SCALES.tag("static")
  scale: float = setting(
    1024.0, "a power of two", low=2.0**-24, high=2.0**24, needs=_MAY_BE_FLOAT16
  )

  @property
  def first(self) -> float:
    """The scale of the first update."""
    return self.scale

  def check(self, cfg: Any) -> None:
    """Refuse a scale that rounds."""
    del cfg
    _power_of_two("precision.loss_scale.scale", self.scale)


@LOSS_SCALES.register
@dataclasses.dataclass(frozen=True)
class Dynamic(LossScaling):
  """Halved when gradients overflow, which leaves the update out; doubled after many that do not."""

  name: str = LOSS_SCALES.tag("dynamic")
  initial: float = setting(
    65536.0,
    "scale of the first update, a power of two",
    low=2.0**-24,
    high=2.0**24,
    needs=_MAY_BE_FLOAT16,
  )
  growth_interval: int = setting(
    2000,
    "updates in a row without an overflow after which it is doubled",
    unit="updates",
    low=1,
    needs=_MAY_BE_FLOAT16,
  )
  least: float = setting(
    1.0,
    "it is not halved below this power of two",
    low=2.0**-24,
    high=2.0**24,
    needs=_MAY_BE_FLOAT16,
  )

  @property
  def first(self) -> float:
    """The scale of the first update."""
    return self.initial

  def in_words(self) -> str:
    """What becomes of it, for the log."""
    return (
      f"{super().in_words()} at first, halved when gradients overflow, doubled after "
      f"{self.growth_interval:,} updates that do not"
    )

  def check(self, cfg: Any) -> None:
    """Refuse scales that round, or that begin below the least."""
    del cfg
    _power_of_two("precision.loss_scale.initial", self.initial)
    _power_of_two("precision.loss_scale.least", self.least)
    if self.initial < self.least:
      raise ValueError(
        f"precision.loss_scale.initial={self.initial:g} is below least={self.least:g}. Raise it, "
        "or lower least."
      )


def _power_of_two(name: str, value: float) -> None:
  if math.frexp(value)[0] != 0.5:
    near = 2.0 ** round(math.log2(value))
    raise ValueError(f"{name}={value:g} rounds gradients. Use a power of two, such as {near:g}.")


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
  """Number formats. Norms, softmax, loss and reductions are float32 whatever is said here."""

  param_dtype: str = setting(
    "float32",
    "stored matrices and head, and the embedding where adapters train beside it; routers, vectors "
    "and another embedding are float32. There is no float16: "
    "updates of a weight near 1 below 0.0005 would be rounded away, and small ones to 0",
    choices=("float32", "bfloat16"),
  )
  compute_dtype: str = setting(
    "bfloat16",
    "operands of matmuls; auto = bfloat16 where the device multiplies in it, and float16 on NVIDIA "
    "GPUs that do not (before sm_80)",
    choices=("float32", "bfloat16", "float16", "auto"),
  )
  loss_scale: LossScaling = section(LOSS_SCALES, "auto")
  tf32: bool = setting(
    True,
    "GPU: float32 matmuls in TF32, which has 10 bits of mantissa; false = in float32, slower",
    resume="free",
    needs=when("precision.compute_dtype", "float32"),
  )
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

  @property
  def scaling(self) -> LossScaling | None:
    """How the loss is scaled; None = it is not."""
    if self.compute_dtype != "float16":
      return None
    return Dynamic() if isinstance(self.loss_scale, AutoScaling) else self.loss_scale

  def check(self, cfg: Any) -> None:
    """Refuse float16 for what it is too small for, and 8 bits that matmuls do not take."""
    may_be_16 = self.compute_dtype in ("float16", "auto")
    if may_be_16 and self.param_dtype != "float32":
      raise ValueError(
        f"precision.param_dtype={self.param_dtype} with precision.compute_dtype="
        f"{self.compute_dtype}: weights whose matmuls may be in float16 are stored in float32. Set "
        "precision.param_dtype=float32."
      )
    if not may_be_16 and not isinstance(self.loss_scale, AutoScaling):
      raise ValueError(
        f"precision.loss_scale={self.loss_scale.name} is for gradients in float16, and "
        f"precision.compute_dtype is {self.compute_dtype}. Leave it out."
      )
    if not self.fp8:
      return
    if may_be_16:
      raise ValueError(
        f"precision.fp8 with precision.compute_dtype={self.compute_dtype}: products in 8 bits "
        "overflow float16, and devices that have them have bfloat16. Set that, or precision.fp8="
        "false."
      )
    m, tensor = cfg.model, cfg.mesh.tensor
    if self.fp8_keep_first + self.fp8_keep_last >= m.num_layers:
      raise ValueError(
        f"precision.fp8_keep_first={self.fp8_keep_first} and fp8_keep_last={self.fp8_keep_last} "
        f"leave none of {m.num_layers} layers for 8 bits. Lower them, or set precision.fp8=false."
      )
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
      "data.seq_len": cfg.data.seq_len // cfg.mesh.context,
    }
    for name, width in widths.items():
      if width % EIGHT_BIT_MULTIPLE:
        raise ValueError(
          f"precision.fp8 needs multiples of {EIGHT_BIT_MULTIPLE}: {name} is {width} on a device. "
          "Change it, or set precision.fp8=false."
        )
