"""The section `sample`."""

import dataclasses
from typing import Any

from ats_jax.config.schema.setting import of_flags, setting, when

_DRAWN = of_flags(when("sample.temperature"))


@dataclasses.dataclass(frozen=True)
class SampleConfig:
  """Generation: the sample at the end of training, and `ats_jax generate`."""

  prompt: str = setting("", "text to continue", resume="free")
  max_tokens: int = setting(
    128,
    "tokens to generate at most; 0 = no sample",
    unit="tokens",
    low=0,
    high=2**20,
    resume="free",
  )
  temperature: float = setting(
    0.8, "divides the logits; 0 = greedy", low=0.0, high=100.0, resume="free"
  )
  top_k: int = setting(
    0, "keep the k likeliest tokens; 0 = all", low=0, resume="free", needs=_DRAWN
  )
  top_p: float = setting(
    0.95,
    "keep the likeliest tokens that sum to p; 1 = all",
    low=0.0,
    high=1.0,
    resume="free",
    needs=_DRAWN,
  )
  min_p: float = setting(
    0.0,
    "keep tokens at least p times as likely as the likeliest; 0 = all",
    low=0.0,
    high=1.0,
    resume="free",
    needs=_DRAWN,
  )
  repetition_penalty: float = setting(
    1.0,
    "divides positive logits of tokens of prompt and answer, multiplies negative ones; 1 = none",
    low=0.1,
    high=10.0,
    resume="free",
  )
  presence_penalty: float = setting(
    0.0, "taken off the logits of tokens of the answer", low=-2.0, high=2.0, resume="free"
  )
  frequency_penalty: float = setting(
    0.0, "the same, each time that a token came", low=-2.0, high=2.0, resume="free"
  )
  stop: tuple[str, ...] = setting((), "texts that end generation", resume="free")

  def check(self, cfg: Any) -> None:
    """Refuse texts that no tokenizer can encode; a training would find out at its end."""
    del cfg
    for name, text in (("prompt", self.prompt), *(("stop", text) for text in self.stop)):
      try:
        text.encode()
      except UnicodeEncodeError as e:
        raise ValueError(f"sample.{name} is not UTF-8 at character {e.start}.") from e
