"""The section `step.loss`: what is minimised."""

import dataclasses
from typing import Any, ClassVar

from ats_jax.config.schema.setting import Kinds, setting
from ats_jax.extensions import losses

# A loss is `(resolved config) -> ats_jax.step.objective.Objective`.
LOSSES = Kinds("step.loss", "what is minimised", registry=losses)


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """What every loss has: its name.

  Attributes:
    ROWS: "module:function" of what gives the rows of a run the fields that the loss needs beside
      those of the data, as `ats_jax.train.reference.with_reference`; "" = it needs none.
    HELD_OUT: whether held-out rows need them too.
    RATES: whether the model has a head that rates texts, in place of one that predicts tokens.
  """

  ROWS: ClassVar[str] = ""
  HELD_OUT: ClassVar[bool] = True
  RATES: ClassVar[bool] = False

  name: str = LOSSES.tag("cross_entropy")


@LOSSES.of_part("ats_jax.step.by_source:pretraining_objective")
@dataclasses.dataclass(frozen=True)
class CrossEntropy(LossConfig):
  """The next token's negative log-probability."""


@dataclasses.dataclass(frozen=True)
class Preference(LossConfig):
  """Losses of pairs of answers, of which one is preferred.

  Attributes:
    FORMAT: the `data.format` of their rows.
  """

  FORMAT: ClassVar[str] = "preference"

  def check(self, cfg: Any) -> None:
    """Refuse rows without pairs, and settings of the loss of tokens."""
    what = f"step.loss={self.name}"
    if cfg.data.format.name != self.FORMAT:
      raise ValueError(
        f"{what} learns from rows of another kind than data.format={cfg.data.format.name}. Set "
        f"data.format={self.FORMAT}."
      )
    for name in ("z_loss", "label_smoothing"):
      if getattr(cfg.step, name):
        raise ValueError(
          f"step.{name}={getattr(cfg.step, name)} is of the cross-entropy. Set it to 0 with {what}."
        )


@LOSSES.of_part("ats_jax.step.preference:Dpo")
@dataclasses.dataclass(frozen=True)
class DpoConfig(Preference):
  """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), and IPO."""

  ROWS: ClassVar[str] = "ats_jax.train.reference:with_reference"

  name: str = LOSSES.tag("dpo")
  beta: float = setting(
    0.1, "how strongly the model is held to the weights that it began with", low=1e-6
  )
  form: str = setting(
    "sigmoid",
    "'sigmoid' = of DPO; 'sigmoid_norm' = with log-probabilities a token; 'ipo' = a squared "
    "distance from 1 / (2 beta), a token (Azar et al. 2023, arXiv:2310.12036)",
    choices=("sigmoid", "sigmoid_norm", "ipo"),
  )
  label_smoothing: float = setting(
    0.0,
    "share of the pairs that are taken to be the wrong way round",
    low=0.0,
    high=0.5,
  )

  def check(self, cfg: Any) -> None:
    """Refuse smoothing of a loss that has none."""
    super().check(cfg)
    if self.form == "ipo" and self.label_smoothing:
      raise ValueError(
        f"step.loss.label_smoothing={self.label_smoothing} does nothing with step.loss.form=ipo. "
        "Leave it at 0."
      )


@LOSSES.of_part("ats_jax.step.preference:Orpo")
@dataclasses.dataclass(frozen=True)
class OrpoConfig(Preference):
  """Odds-ratio preference optimisation without a reference (Hong et al. 2024, arXiv:2403.07691)."""

  name: str = LOSSES.tag("orpo")
  odds_weight: float = setting(
    0.1, "weight of the odds ratio beside the loss of the preferred answer", low=1e-6
  )


@LOSSES.of_part("ats_jax.step.preference:SimPo")
@dataclasses.dataclass(frozen=True)
class SimPoConfig(Preference):
  """Simple preference optimisation, without a reference (Meng et al. 2024, arXiv:2405.14734)."""

  name: str = LOSSES.tag("simpo")
  beta: float = setting(2.0, "scale of the log-probabilities a token", low=1e-6)
  margin: float = setting(
    1.0, "by how much an answer is to be better (gamma in the paper)", low=0.0
  )


@LOSSES.of_part("ats_jax.step.reward:Reward")
@dataclasses.dataclass(frozen=True)
class RewardConfig(Preference):
  """A model that rates answers, of which pairs are compared (Bradley and Terry 1952)."""

  RATES: ClassVar[bool] = True

  name: str = LOSSES.tag("reward")


@LOSSES.of_part("ats_jax.step.labelled:Kto")
@dataclasses.dataclass(frozen=True)
class KtoConfig(Preference):
  """Kahneman-Tversky optimisation, of answers with labels (Ethayarajh et al., arXiv:2402.01306)."""

  ROWS: ClassVar[str] = "ats_jax.train.labels:with_labels"
  FORMAT: ClassVar[str] = "labelled"

  name: str = LOSSES.tag("kto")
  beta: float = setting(
    0.1, "how strongly the model is held to the weights that it began with", low=1e-6
  )
  desirable: float = setting(1.0, "weight of the desirable answers", low=0.0)
  undesirable: float = setting(1.0, "weight of the others", low=0.0)


@LOSSES.of_part("ats_jax.step.distill:Distill")
@dataclasses.dataclass(frozen=True)
class DistillConfig(LossConfig):
  """Distillation: the likeliest next tokens of a larger model (Hinton et al., arXiv:1503.02531)."""

  ROWS: ClassVar[str] = "ats_jax.train.teacher:with_teacher"
  HELD_OUT: ClassVar[bool] = False

  name: str = LOSSES.tag("distill")
  teacher: str = setting("", "workdir of the larger model's run")
  top_k: int = setting(
    32, "tokens a position that the teacher's probabilities are kept of; all others are one", low=1
  )
  temperature: float = setting(1.0, "what the logits of both are divided by", low=1e-3)
  labels: float = setting(
    0.5, "weight of the loss of the text's own tokens; the rest is the teacher's", low=0.0, high=1.0
  )
  divergence: str = setting(
    "forward",
    "what is minimised: 'forward' KL(teacher || student), 'reverse', or 'jsd', which is the mean "
    "of both from their mixture",
    choices=("forward", "reverse", "jsd"),
  )

  def check(self, cfg: Any) -> None:
    """Refuse a run without a teacher, and rows that are not those of one plan."""
    data = cfg.data
    if not self.teacher:
      raise ValueError(
        "step.loss=distill learns from a larger model. Name its workdir in step.loss.teacher; "
        "`ats-jax bridge import` makes one of a Hugging Face folder."
      )
    for name, value in (("data.sources", data.sources), ("data.order", data.order.name)):
      if value not in ({}, "shuffled"):
        raise ValueError(
          f"step.loss=distill keeps what its teacher says of each row, and {name}={value} makes "
          "others. Use data.paths with data.order=shuffled."
        )
    if data.reading.name != "whole":
      raise ValueError(
        f"step.loss=distill with data.reading={data.reading.name}: the teacher reads all rows "
        "before the first step. Set data.reading=whole."
      )
