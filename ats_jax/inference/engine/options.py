"""How the engine works, as far as users choose it; how a text is drawn is of each request."""

import dataclasses
from collections.abc import Sequence
from typing import Self

PAGES = {"int8": "int8", "fp8": "float8_e4m3fn"}  # formats in 8 bits, and their dtypes
MOST_GUESSED = 16


@dataclasses.dataclass(frozen=True)
class Options:
  """Choices that change speed and memory.

  Attributes:
    pages: a format of `PAGES`, in which keys and values are stored with a scale for each token and
      head; "" = in the compute dtype.
    speculate: tokens at most that are guessed from what followed the same few before, and verified
      in one step; 0 = none. Texts stay as they are, but for rounding.
    draft: the workdir of a run whose model guesses instead, its latest checkpoint; "" = none.
    tensor: devices that share each layer's heads and widths, and the vocabulary.
    expert: devices, or groups of `tensor` of them, that share the experts.
  """

  pages: str = ""
  speculate: int = 0
  draft: str = ""
  tensor: int = 1
  expert: int = 1

  def __post_init__(self):
    """Refuse what there is not."""
    if self.pages not in ("", *PAGES):
      known = ", ".join(map(repr, PAGES))
      raise ValueError(f"pages={self.pages!r}: expected {known}, or '' for the compute dtype.")
    if not _is_whole(number := self.speculate) or not 0 <= number <= MOST_GUESSED:
      raise ValueError(
        f"speculate={number!r} is not a whole number from 0 to {MOST_GUESSED} (tokens to guess; "
        "0 = none)."
      )
    if self.draft and not self.speculate:
      raise ValueError(f"draft={self.draft}: how many tokens it guesses is missing: speculate=4.")
    if self.draft and self.devices > 1:
      raise ValueError(f"draft={self.draft}: it guesses on one device, without tensor and expert.")
    for name in ("tensor", "expert"):
      if not _is_whole(number := getattr(self, name)) or number < 1:
        raise ValueError(f"{name}={number!r} is not a whole number of devices, from 1.")

  @property
  def devices(self) -> int:
    """On how many it runs."""
    return self.tensor * self.expert

  @classmethod
  def parse(cls, items: Sequence[str]) -> Self:
    """What `NAME=VALUE` each say."""
    given, names = {}, [field.name for field in dataclasses.fields(cls)]
    for item in items:
      name, _, value = item.partition("=")
      if name not in names:
        raise ValueError(f"{item!r}: expected NAME=VALUE with one of {', '.join(names)}.")
      given[name] = int(value) if name not in ("pages", "draft") and value.isdecimal() else value
    return cls(**given)


def _is_whole(number: object) -> bool:
  return isinstance(number, int) and not isinstance(number, bool)


DEFAULT = Options()
