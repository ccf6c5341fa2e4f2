"""Flags of the verbs that draw text: which run, and how (`sample.*` where nothing is given)."""

from typing import Any

from absl import flags

from ats_jax.config.schema import MAX_SEED
from ats_jax.config.text import parse
from ats_jax.inference.engine.options import PAGES, Options
from ats_jax.verbs import cli


class EngineFlag:
  """`--engine`: how the engine works."""

  def __init__(self, flag_values: flags.FlagValues):
    """Define it."""
    self._flag = flags.DEFINE_list(
      "engine",
      [],
      f"pages={' or '.join(PAGES)}: keys and values in 8 bits, so that nearly twice the texts fit; "
      "speculate=K: guess up to K tokens from what came before; draft=WORKDIR: guess by that run; "
      "tensor=N, expert=N: share each layer, or the experts, among devices. Separated by a comma.",
      flag_values=flag_values,
    )

  @property
  def value(self) -> Options:
    """What it says.

    Raises:
      ValueError: for what there is not.
    """
    try:
      return Options.parse(self._flag.value)
    except ValueError as e:
      raise ValueError(f"--engine: {e}") from e


class DrawingFlags:
  """Flags of the run (`--workdir` to `--seed`), and one for each setting of sampling."""

  def __init__(self, flag_values: flags.FlagValues):
    """Define them."""
    self.workdir = cli.define_workdir_flag(flag_values)
    self.step = cli.define_step_flag(flag_values)
    self.compute_dtype = cli.define_compute_dtype_flag(flag_values)
    self.engine = EngineFlag(flag_values)
    self.seed = flags.DEFINE_integer(
      "seed",
      0,
      "Of the draws: the same seed gives the same text.",
      0,
      MAX_SEED,
      flag_values=flag_values,
    )

    def number(name: str, about: str, low: float, high: float | None = None) -> flags.FlagHolder:
      return flags.DEFINE_float(name, None, about, low, high, flag_values=flag_values)

    def whole(name: str, about: str, low: int) -> flags.FlagHolder:
      return flags.DEFINE_integer(name, None, about, low, flag_values=flag_values)

    self._sampling = (
      whole("max_tokens", "Tokens at most.", 1),
      number("temperature", "0 = the likeliest token.", 0.0),
      whole("top_k", "Keep the k likeliest tokens; 0 = all.", 0),
      number("top_p", "Keep the likeliest that sum to p.", 0.0, 1.0),
      number("min_p", "Keep those at least p times as likely as the likeliest.", 0.0, 1.0),
      number("repetition_penalty", "Above 1 = against what came before.", 0.1, 10.0),
      number("presence_penalty", "Above 0 = against what was drawn.", -2.0, 2.0),
      number("frequency_penalty", "Above 0 = against tokens by how often they came.", -2.0, 2.0),
      flags.DEFINE_string(
        "stop", None, "Comma-separated texts that end the generation.", flag_values=flag_values
      ),
    )

  def given(self) -> dict[str, Any]:
    """The settings that flags name, as `TrainedRun.sampling` takes them."""
    return {
      flag.name: parse(f"sample.{flag.name}", flag.value, {})
      for flag in self._sampling
      if flag.value is not None
    }
