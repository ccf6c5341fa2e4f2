"""What is asked of the engine, and how it ends."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Self

from ats_jax.config.schema import SampleConfig

MAX_SEED = 2**32 - 1  # as that of a run
MOST_LIKELIEST = 20  # tokens whose probabilities may be asked for at each place


class Finished(enum.StrEnum):
  """Why nothing more comes of a request."""

  END = "end"  # the model ended the text, or drew one of `Sampling.stop_ids`
  STOP = "stop"  # one of the texts of `Sampling.stop` came
  LENGTH = "length"  # `Sampling.max_tokens` were drawn
  CANCELLED = "cancelled"
  REFUSED = "refused"  # it can never be done; the event says why


_NUMBERS = {  # name: type, lowest, highest, what it does
  "temperature": (float, 0.0, 100.0, "divides the logits; 0 = the likeliest token"),
  "top_k": (int, 0, 2**31 - 1, "keeps the k likeliest tokens; 0 = all"),
  "top_p": (float, 0.0, 1.0, "keeps the likeliest tokens that sum to p; 1 = all"),
  "min_p": (float, 0.0, 1.0, "keeps tokens at least p times as likely as the likeliest; 0 = all"),
  "repetition_penalty": (float, 0.1, 10.0, "divides logits of tokens that came; 1 = none"),
  "presence_penalty": (float, -2.0, 2.0, "is taken off tokens that were drawn; 0 = none"),
  "frequency_penalty": (float, -2.0, 2.0, "is taken off for each time one was drawn; 0 = none"),
  "seed": (int, 0, MAX_SEED, "of the draws"),
  "max_tokens": (int, 1, 2**31 - 1, "tokens at most"),
  "logprobs": (int, 0, MOST_LIKELIEST, "likeliest tokens to report at each place; 0 = none"),
}


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How one request draws its tokens.

  Attributes:
    max_tokens: ends the text.
    temperature: divides the logits; 0 = the likeliest token, and what narrows a draw is ignored.
    top_k: keeps the k likeliest tokens; 0 = all.
    top_p: then keeps the likeliest that sum to p; 1 = all.
    min_p: then keeps those at least p times as likely as the likeliest; 0 = all.
    repetition_penalty: divides positive logits of tokens of the prompt or the answer, and
      multiplies negative ones; 1 = none.
    presence_penalty: is taken off the logits of tokens that were drawn; 0 = none.
    frequency_penalty: the same for each time that one was drawn.
    stop: texts that end the text and are not part of it.
    stop_ids: tokens that do.
    seed: of the draws: the same seed gives the same text.
    logprobs: how many of the likeliest tokens are reported at each place; 0 = none.
    ignore_end: go on behind the end of the document, to measure speed.
  """

  max_tokens: int = 128
  temperature: float = 0.8
  top_k: int = 0
  top_p: float = 0.95
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  stop: tuple[str, ...] = ()
  stop_ids: tuple[int, ...] = ()
  seed: int = 0
  logprobs: int = 0
  ignore_end: bool = False

  @classmethod
  def of(cls, cfg: SampleConfig, seed: int) -> Self:
    """What the settings `sample.*` say."""
    names = {field.name for field in dataclasses.fields(cls)} & vars(cfg).keys()
    return cls(seed=seed, **{name: getattr(cfg, name) for name in names})

  def __post_init__(self):
    """Refuse values that mean nothing."""
    for name, (kind, low, high, meaning) in _NUMBERS.items():
      value = getattr(self, name)
      if not _is_number(value, kind) or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name}={value!r} is not {what} from {low} to {high} ({meaning}).")
    for text in self.stop:
      if not isinstance(text, str) or not text:
        raise ValueError(f"stop={text!r} is not a text of at least one character.")
      if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"stop={text!r} is not UTF-8, so no text can hold it.")
    for token in self.stop_ids:
      if not _is_number(token, int) or token < 0:
        raise ValueError(f"stop_ids: {token!r} is not the id of a token (0, 1, 2, ...).")


def _is_number(value: Any, kind: type) -> bool:
  kinds = (int, float) if kind is float else (int,)
  return isinstance(value, kinds) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Request:
  """A text to continue. Several answers to a prompt are several requests, which share its pages.

  Attributes:
    prompt: ids, bos first.
    sampling: how it goes on.
  """

  prompt: Sequence[int]
  sampling: Sampling
