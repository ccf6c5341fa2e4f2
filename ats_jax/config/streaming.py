"""What `data.streaming` cannot be used with."""

from ats_jax.config.schema import Config
from ats_jax.config.schema.filters import spelled
from ats_jax.config.schema.mixture import phases_of


def streaming(cfg: Config) -> None:
  """A rule of `config.validate`.

  Raises:
    ValueError: for settings that need the whole text before the first step.
  """
  data = cfg.data
  if not data.streaming:
    return
  whole = "data.streaming=true, but {} needs the whole text before the first step. {}"
  if not data.format.of_source("").STREAMED:
    what = f"data.format={data.format.name}"
    raise ValueError(
      whole.format(what, "Conversations are not streamed: set data.streaming=false.")
    )
  if data.filters:
    what = f"data.filters={spelled(data.filters)}"
    raise ValueError(whole.format(what, "Filter it with `ats-jax data prepare`, or leave it out."))
  if data.validation_fraction and not data.validation_paths:
    what = f"data.validation_fraction={data.validation_fraction:g}"
    advice = "Name text to validate on in data.validation_paths, or set data.validation_fraction=0."
    raise ValueError(whole.format(what, advice))
  if cfg.counts_epochs:
    what = f"num_epochs={cfg.num_epochs:g}" if cfg.num_epochs else f"length={cfg.length}"
    raise ValueError(whole.format(what, "Say how long the run is with num_steps."))
  if cfg.eval.bigram_baseline:
    what = "eval.bigram_baseline=true"
    raise ValueError(whole.format(what, "Set eval.bigram_baseline=false."))
  phases = phases_of(data)
  if data.sources and not phases:
    advice = "Give the weights in data.mixture, e.g. data.mixture=web=0.7,code=0.3."
    raise ValueError(whole.format("a mixture by size", advice))
  if any(phase.epochs for phase in phases):
    advice = "Give the lengths of phases in steps or tokens."
    raise ValueError(whole.format("a phase in epochs", advice))
