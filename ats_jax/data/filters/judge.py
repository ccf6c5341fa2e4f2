"""All filters over some documents: what a process does for a batch of them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ats_jax.config.schema.filters import ChangesText, Filter, Near
from ats_jax.data.filters import duplicates
from ats_jax.data.filters.rules import RULES, Rule, make_rule

COMPARISONS = ("exact", "near")  # these look at all documents, at the end


class Head(NamedTuple):
  """A document to be judged.

  Attributes:
    text: its beginning; all of it, unless it is very long.
    rest: a hash of what follows, or nothing.
  """

  text: str
  rest: bytes


class Judged(NamedTuple):
  """What is said of n documents.

  Attributes:
    reasons: in words, each once; the first is "".
    stage: [n] int16, which filter drops each; the number of filters = none of those that look at
      one document.
    reason: [n] int32, why, as an index of `reasons`.
    changed: [n] bool, whether a filter made another text of it.
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

  def __call__(self, documents: Sequence[Head]) -> Judged:
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
    return Judged(
      np.array(list(reasons)), np.array(stages, np.int16), np.array(whys, np.int32),
      np.array(changed, bool), np.frombuffer(bytes(hashes), np.uint64).reshape(-1, 2),
      duplicates.signatures(texts) if texts else np.empty((0, duplicates.NUM_HASHES), np.uint32),
    )  # fmt: skip

  def changes(self) -> list[Rule]:
    """The filters that may make another text of a document, in order."""
    return [self._rules[s.name] for s in self._stages if isinstance(s, ChangesText)]


def resolve(
  filters: Iterable[Filter],
  stage: np.ndarray,
  keys: np.ndarray,
  exact: np.ndarray,
  near: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
  """Compare the documents that the filters before have kept.

  Args:
    filters: those of `data.filters`.
    stage: [n], of all documents, as `Judged.stage`.
    keys: [n] uint64, of their names.
    exact: as `Judged.exact`.
    near: as `Judged.near`.

  Returns:
    [n] the filter that drops each, and [n] int64 which document is kept in its place, or -1.
  """
  stage, instead = stage.copy(), np.full(len(stage), -1)
  for number, compared in enumerate(filters):
    if compared.name not in COMPARISONS:
      continue
    alive = np.flatnonzero(stage > number)
    if compared.name == "exact":
      kept = duplicates.same(exact[alive], keys[alive])
    else:
      assert isinstance(compared, Near)
      kept = duplicates.similar(near, alive, keys[alive], compared.threshold)
    twice = kept != np.arange(len(alive))
    stage[alive[twice]] = number
    instead[alive[twice]] = alive[kept[twice]]
  return stage, instead
