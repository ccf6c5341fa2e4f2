"""The section `model.rope_scaling`: rotary frequencies for contexts longer than at first."""

import dataclasses
from typing import Any

from ats_jax.config.schema.setting import Kinds, setting

ROPE_SCALINGS = Kinds(
  "model.rope_scaling",
  "how rotary frequencies are lowered for contexts longer than those of the first training: all "
  "(linear), or the slow ones, as in Llama 3 or as in YaRN",
)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """What every scaling has: its name."""

  name: str = ROPE_SCALINGS.tag("none")


@ROPE_SCALINGS.register
@dataclasses.dataclass(frozen=True)
class Unscaled(RopeScaling):
  """Frequencies as they are."""


@ROPE_SCALINGS.register
@dataclasses.dataclass(frozen=True)
class LinearScaling(RopeScaling):
  """All frequencies are divided by the factor."""

  name: str = ROPE_SCALINGS.tag("linear")
  factor: float = setting(1.0, "what the frequencies are divided by", low=1.0)


@ROPE_SCALINGS.register
@dataclasses.dataclass(frozen=True)
class Llama3Scaling(LinearScaling):
  """Slow frequencies are divided by the factor, fast ones are left (arXiv:2407.21783)."""

  name: str = ROPE_SCALINGS.tag("llama3")
  original_len: int = setting(
    0, "context of the first training, which says what is slow", unit="tokens", low=0
  )
  slow_turns: float = setting(
    1.0, "a pair that turns less often in original_len is slowed by all of the factor", low=0.0
  )
  fast_turns: float = setting(
    32.0, "one that turns more often is left as it is; 4 in Llama 3, 32 in YaRN", low=0.0
  )

  def check(self, cfg: Any) -> None:
    """Refuse a ramp that does not rise, or begins nowhere."""
    del cfg
    if not self.original_len:
      raise ValueError(
        f"model.rope_scaling={self.name} needs model.rope_scaling.original_len: the context of the "
        "first training, in tokens."
      )
    if self.slow_turns >= self.fast_turns:
      raise ValueError(
        f"model.rope_scaling.slow_turns={self.slow_turns} is not below "
        f"model.rope_scaling.fast_turns={self.fast_turns}. Lower the first."
      )


@ROPE_SCALINGS.register
@dataclasses.dataclass(frozen=True)
class Yarn(Llama3Scaling):
  """YaRN (Peng et al. 2023, arXiv:2309.00071)."""

  name: str = ROPE_SCALINGS.tag("yarn")
  whole_pairs: bool = setting(True, "round the two ends of the ramp outwards to pairs")
  concentration: float = setting(
    0.0, "multiplies rotated queries and keys; 0 = 0.1 ln(factor) + 1", low=0.0
  )

  def check(self, cfg: Any) -> None:
    """Refuse, besides, a logarithm of 0."""
    super().check(cfg)
    if not self.slow_turns:
      raise ValueError(
        "model.rope_scaling.slow_turns=0: YaRN takes its logarithm. Use 1, as published."
      )
