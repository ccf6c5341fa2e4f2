"""All filters over some documents: what a process does for a batch of them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ats_jax.config.schema.filters import ChangesText, Filter, Near
from ats_jax.data.filters import duplicates
from ats_jax.data.filters.rules import RULES, Rule, make_rule

COMPARISONS = ("exact", "near")  # these look at all documents, at the end


class DocumentHead(NamedTuple):
  """The part of a document that filters judge.

  Attributes:
    text: its first characters; all of it, unless it is longer than `sieve.LONGEST`.
    rest: a hash of the text that follows; b"" = nothing follows.
  """

  text: str
  rest: bytes


class Verdicts(NamedTuple):
  """The verdicts of all filters on n documents.

  Attributes:
    reasons: the different reasons, in words; the first is "".
    stage: [n] int16, index of the filter that drops each document; the number of filters = none
      of those that look at one document.
    reason: [n] int32, index of `reasons`.
    changed: [n] bool, whether a filter changed the text.
    exact: [n, 2] uint64, or [0, 2] without this filter.
    near: [n, NUM_HASHES] uint32, or [0, NUM_HASHES].
  """

  reasons: np.ndarray
  stage: np.ndarray
  reason: np.ndarray
  changed: np.ndarray
  exact: np.ndarray
  near: np.ndarray


class Judge:
  """The filters of `data.filters`, made once."""

  def __init__(self, filters: Iterable[Filter]):
    self._stages = tuple(filters)
    self._rules = {s.name: make_rule(s) for s in self._stages if s.name in RULES}
    for stage in self._stages:
      if stage.name == "near":
        duplicates.check_packages()

  def __reduce__(self):
    return Judge, (self._stages,)  # another process makes its own

  def __call__(self, documents: Sequence[DocumentHead]) -> Verdicts:
    """Judge each by itself, and say what it is to be compared by."""
    reasons = {"": 0}
    stages, whys, changed = [], [], []
    hashes = bytearray()
    texts: list[str] = []
    for document in documents:
      text, dropped_at, why = document.text, len(self._stages), ""
      for number, stage in enumerate(self._stages):
        if stage.name == "exact":
          hashes += bytes(16) if why else duplicates.exact_hash(text, document.rest)
        elif stage.name == "near":
          texts.append("" if why else text)
        elif not why:
          text, why = self._rules[stage.name](text)
          why = f"{stage.name}: {why}" if why else ""
          dropped_at = number if why else dropped_at
      stages.append(dropped_at)
      whys.append(reasons.setdefault(why, len(reasons)))
      changed.append(not why and text != document.text)
    return Verdicts(
      np.array(list(reasons)), np.array(stages, np.int16), np.array(whys, np.int32),
      np.array(changed, bool), np.frombuffer(bytes(hashes), np.uint64).reshape(-1, 2),
      duplicates.signatures(texts) if texts else np.empty((0, duplicates.NUM_HASHES), np.uint32),
    )  # fmt: skip

  def changes(self) -> list[Rule]:
    """The filters that may make another text of a document, in order."""
    return [self._rules[s.name] for s in self._stages if isinstance(s, ChangesText)]


def drop_duplicates(
  filters: Iterable[Filter],
  stage: np.ndarray,
  keys: np.ndarray,
  exact: np.ndarray,
  near: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
  """Compare the documents that the filters before have kept.

  Args:
    filters: those of `data.filters`.
    stage: [n], of all documents, as `Verdicts.stage`.
    keys: [n] uint64, of their names.
    exact: as `Verdicts.exact`.
    near: as `Verdicts.near`.

  Returns:
    [n] the filter that drops each, and [n] int64 which document is kept in its place, or -1.
  """
  stage, instead = stage.copy(), np.full(len(stage), -1)
  for number, compared in enumerate(filters):
    if compared.name not in COMPARISONS:
      continue
    alive = np.flatnonzero(stage > number)
    if compared.name == "exact":
      survivors = duplicates.group_equal(exact[alive], keys[alive])
    else:
      assert isinstance(compared, Near)
      survivors = duplicates.group_similar(near, alive, keys[alive], compared.threshold)
    twice = survivors != np.arange(len(alive))
    stage[alive[twice]] = number
    instead[alive[twice]] = alive[survivors[twice]]
  return stage, instead
