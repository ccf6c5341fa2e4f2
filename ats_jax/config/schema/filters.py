"""The elements of `data.filters`: which documents are kept, and what is repaired in them.

The options of `gopher`, `repetition` and `c4` have the names that datatrove gives them.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ats_jax.config.schema.setting import Kinds, setting

FILTERS = Kinds("data.filters", "which filter it is")


@dataclasses.dataclass(frozen=True)
class Filter:
  """What every filter has: its name."""

  name: str = FILTERS.tag("")

  def __str__(self) -> str:
    """Its name and the options that are not at their defaults, sorted: "near:threshold=0.7"."""
    options = sorted(
      f"{field.name}={_in_words(getattr(self, field.name))}"
      for field in dataclasses.fields(self)
      if field.name != "name" and getattr(self, field.name) != field.default
    )
    return ":".join([self.name, *options])


class ChangesText(Filter):
  """A filter that may make another text of a document."""


@FILTERS.register
@dataclasses.dataclass(frozen=True)
class Repair(ChangesText):
  """Repairs text that was read in a wrong encoding, and takes out control characters."""

  name: str = FILTERS.tag("repair")


@FILTERS.register
@dataclasses.dataclass(frozen=True)
class Exact(Filter):
  """Drops copies; case, spaces and the composition of letters do not count."""

  name: str = FILTERS.tag("exact")


@FILTERS.register
@dataclasses.dataclass(frozen=True)
class Near(Filter):
  """Drops near copies, by an estimate of MinHash."""

  name: str = FILTERS.tag("near")
  threshold: float = setting(
    0.8,
    "share of sequences of five words that two documents have in common, from which one is dropped",
    low=0.3,
    high=1.0,
  )


@FILTERS.register
@dataclasses.dataclass(frozen=True)
class Language(Filter):
  """Drops documents in other languages, or in none for sure."""

  name: str = FILTERS.tag("language")
  keep: tuple[str, ...] = setting((), "the languages to keep, as ISO 639 codes: en, de")
  min_score: float = setting(
    0.65, "score of the detected language from which it counts as sure", low=0.0, high=1.0
  )

  def check(self, cfg: Any) -> None:
    """Refuse to keep no language."""
    del cfg
    if not self.keep:
      raise ValueError(
        "data.filters: language does not say which languages to keep. Give them in a config file: "
        'Language(keep=("en", "de")), of ats_jax.config.schema.filters.'
      )


@FILTERS.register
@dataclasses.dataclass(frozen=True)
class Gopher(Filter):
  """Rules of Gopher on the quality of English prose (Rae et al. 2021, arXiv:2112.11446)."""

  name: str = FILTERS.tag("gopher")
  min_doc_words: int = setting(50, "fewest words; 0 = any number", low=0)
  max_doc_words: int = setting(100_000, "most words; 0 = any number", low=0)
  min_avg_word_length: int = setting(3, "least mean length of a word; 0 = any", low=0)
  max_avg_word_length: int = setting(10, "largest mean length of a word; 0 = any", low=0)
  max_symbol_word_ratio: float = setting(
    0.1, "most hash tags, and most ellipses, for each word; 0 = any number", low=0.0
  )
  max_bullet_lines_ratio: float = setting(
    0.9, "largest share of lines that begin with a bullet; 0 = any", low=0.0
  )
  max_ellipsis_lines_ratio: float = setting(
    0.3, "largest share of lines that end in an ellipsis; 0 = any", low=0.0
  )
  max_non_alpha_words_ratio: float = setting(
    0.8, "least share of words with a letter; 0 = any", low=0.0
  )
  min_stop_words: int = setting(2, "fewest English stop words; 0 = none are needed", low=0)


@FILTERS.register
@dataclasses.dataclass(frozen=True)
class Repetition(Filter):
  """Gopher's limits of repeated lines, paragraphs and sequences of words."""

  name: str = FILTERS.tag("repetition")
  dup_line_frac: float = setting(0.3, "largest share of repeated lines; 0 = any", low=0.0)
  dup_para_frac: float = setting(0.3, "largest share of repeated paragraphs; 0 = any", low=0.0)
  dup_line_char_frac: float = setting(
    0.2, "largest share of characters in repeated lines; 0 = any", low=0.0
  )
  dup_para_char_frac: float = setting(
    0.2, "largest share of characters in repeated paragraphs; 0 = any", low=0.0
  )


@FILTERS.register
@dataclasses.dataclass(frozen=True)
class C4(ChangesText):
  """Rules of C4, which drop lines and documents (Raffel et al. 2020, arXiv:1910.10683)."""

  name: str = FILTERS.tag("c4")
  filter_no_terminal_punct: bool = setting(True, "drop lines without an end mark")
  min_num_sentences: int = setting(5, "fewest sentences that are left; -1 = any number", low=-1)
  min_words_per_line: int = setting(3, "fewest words of a line; -1 = any number", low=-1)
  max_word_length: int = setting(
    1000, "drop lines with a word of more characters; -1 = none", low=-1
  )
  filter_lorem_ipsum: bool = setting(True, "drop documents with 'lorem ipsum'")
  filter_curly_bracket: bool = setting(True, "drop documents with a '{'")
  filter_javascript: bool = setting(True, "drop lines that mention JavaScript")
  filter_policy: bool = setting(True, "drop lines of privacy and cookie notices")
  remove_citations: bool = setting(True, "take out citations such as [1]")
  split_paragraph: bool = setting(True, "judge lines; false = sentences")


def spelled(filters: Iterable[Filter]) -> str:
  """Filters and the options that are not at their defaults: "exact,near:threshold=0.7"."""
  return ",".join(map(str, filters))


def _in_words(value: Any) -> str:
  if isinstance(value, tuple):
    return "+".join(map(str, value))
  return str(value).lower() if isinstance(value, bool) else str(value)
