"""The section `data.reading`: when text is tokenised."""

import dataclasses
from typing import Any, ClassVar

from ats_jax.config.schema.filters import spelled
from ats_jax.config.schema.mixture import phases_of
from ats_jax.config.schema.setting import Kinds, setting

READINGS = Kinds(
  "data.reading",
  "when text is tokenised: whole, before the first step; or while it is read, a window at a time "
  "(streaming), so that a training on much of it starts at once and needs little disk, without "
  "filters, and nothing is held out",
)


@dataclasses.dataclass(frozen=True)
class Reading:
  """What every way of reading has: its name."""

  name: str = READINGS.tag("whole")

  is_streamed: ClassVar[bool] = False  # else all text is tokenised before the first step


@READINGS.register
@dataclasses.dataclass(frozen=True)
class Whole(Reading):
  """All text is tokenised before the first step."""


@READINGS.register
@dataclasses.dataclass(frozen=True)
class Streaming(Reading):
  """Text is tokenised a window at a time, while the run trains."""

  name: str = READINGS.tag("streaming")
  window_mb: float = setting(
    64.0,
    "text of a window, whose rows are shuffled together; four of them are on disk",
    unit="millions of characters",
    low=0.001,
  )

  is_streamed: ClassVar[bool] = True

  def check(self, cfg: Any) -> None:
    """Refuse what needs the whole text before the first step."""
    data = cfg.data
    message = "data.reading=streaming, but {} needs the whole text before the first step. {}"
    if not data.format.of_source("").STREAMED:
      what = f"data.format={data.format.name}"
      advice = "Conversations are not streamed: set data.reading=whole."
      raise ValueError(message.format(what, advice))
    if data.filters:
      what = f"data.filters={spelled(data.filters)}"
      advice = "Filter it with `ats-jax data prepare`, or leave it out."
      raise ValueError(message.format(what, advice))
    if data.validation_fraction and not data.validation_paths:
      what = f"data.validation_fraction={data.validation_fraction:g}"
      advice = (
        "Name text to validate on in data.validation_paths, or set data.validation_fraction=0."
      )
      raise ValueError(message.format(what, advice))
    if cfg.counts_epochs and cfg.length != "flops":
      what = f"num_epochs={cfg.num_epochs:g}" if cfg.num_epochs else f"length={cfg.length}"
      raise ValueError(message.format(what, "Say how long the run is with num_steps."))
    if cfg.eval.bigram_baseline:
      what = "eval.bigram_baseline=true"
      raise ValueError(message.format(what, "Set eval.bigram_baseline=false."))
    phases = phases_of(data)
    if data.sources and not phases:
      advice = "Give the weights in data.mixture, e.g. data.mixture=web=0.7,code=0.3."
      raise ValueError(message.format("a mixture by size", advice))
    if any(phase.epochs for phase in phases):
      advice = "Give the lengths of phases in steps or tokens."
      raise ValueError(message.format("a phase in epochs", advice))
