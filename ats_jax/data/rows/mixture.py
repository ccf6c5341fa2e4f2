"""Rows of several sources: by a schedule in training, all of them once in an evaluation."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ats_jax.data.batch import SOURCE
from ats_jax.data.corpus import cache
from ats_jax.data.rows.contract import Progress, Rows, TrainRows, info_of
from ats_jax.data.rows.schedule import MixturePhase, Schedule
from ats_jax.data.tokens.tokenizer import Tokenizer


class Joined(Rows):
  """All rows of several sources once, so that any run of them is a fair sample.

  Attributes:
    info: facts about the rows; `parts` are the sources by name.
  """

  def __init__(self, sources: Mapping[str, TrainRows], tokenizer: Tokenizer):
    parts = list(sources.values())
    sizes = np.array([part.info.num_rows for part in parts])
    num_rows = int(sizes.sum())
    self.info = info_of(sources, tokenizer, seq_len=parts[0].info.seq_len, num_rows=num_rows)
    source = np.repeat(np.arange(len(parts)), sizes)
    index = np.arange(num_rows) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    order = np.argsort((index + 0.5) / sizes[source], kind="stable")
    # Behind the last row: one of padding.
    self._source = np.append(source[order], 0)
    self._index = np.append(index[order], sizes[0])

  def read_once(self, rows: np.ndarray | range) -> dict[str, np.ndarray]:
    """Return rows of the split by number, as arrays [*rows.shape, seq_len]."""
    at = np.minimum(np.asarray(rows), self.info.num_rows)
    parts = list(self.info.parts.values())
    return _gathered([part.read_once for part in parts], self._source[at], self._index[at])


class Mixture(Joined, TrainRows):
  """Training rows of several sources, by a schedule.

  Which source row r is of, and which of its rows, follows from the phases and r alone (`Schedule`).
  The rows of a source come as those of a run on it alone would: each once an epoch, each epoch in
  an order of its own. So row r is a pure function of the fingerprints, the seed, the phases and r.
  """

  def __init__(self, sources: Mapping[str, TrainRows], schedule: Schedule, tokenizer: Tokenizer):
    super().__init__(sources, tokenizer)
    self.schedule = schedule
    names = [[name, part.info.fingerprint] for name, part in sources.items()]
    in_words = "; ".join(f"{name}: {part.info.in_words()}" for name, part in sources.items())
    self.info = dataclasses.replace(
      self.info,
      fingerprint=cache.digest("mixture", names),
      scheduled_rows=schedule.end,
      summary="" if self.info.is_complete else in_words,
    )

  def read(self, rows: np.ndarray | range) -> dict[str, np.ndarray]:
    """Return rows by number; the array `source` holds the index of each row's source."""
    source, row = self.schedule.find(np.asarray(rows))
    batch = _gathered([part.read for part in self.info.parts.values()], source, row)
    like = batch["tokens"]
    return {**batch, SOURCE: np.broadcast_to(source[..., None], like.shape).astype(np.int32)}

  def progress(self, row: int, since: int | None = None) -> Progress:
    """Return the progress at `row`. Phases and further epochs of sources are news."""
    counts = self._counts(row)
    before = dict.fromkeys(counts) if since is None else self._counts(since)
    parts = {
      name: part.progress(counts[name], before[name]) for name, part in self.info.parts.items()
    }
    news = [
      f"phase {number + 1} of {len(self.schedule.phases)} of data.phases begins: "
      f"{self.shares(number)}"
      for number, start in enumerate(map(int, self.schedule.starts))
      if number and since is not None and since <= start < row
    ]
    news += [f"source {name}: {text}" for name, part in parts.items() for text in part.news]
    return Progress(
      epochs=row / self.info.num_rows if self.info.is_complete else None,
      passes={name: part.epochs for name, part in parts.items()},
      rows=counts,
      news=news,
    )

  def position(self, row: int) -> dict[str, Any]:
    """Return what a checkpoint keeps at `row`, with the phases that have begun."""
    counts = self._counts(row)
    parts = {name: part.position(counts[name]) for name, part in self.info.parts.items()}
    return {**super().position(row), "phases": self._begun(row), "parts": parts}

  def row_of(self, position: Mapping[str, Any]) -> int:
    """Return the first row that a run at `position` has not read.

    Raises:
      ValueError: also if the phases before the position are others now.
    """
    row = super().row_of(position)
    was, now = position.get("phases", []), self._begun(row)
    if was != now:
      raise ValueError(
        f"data.phases: the first {row:,} rows were drawn from these sources: {_in_words(was)}; now "
        f"they would be: {_in_words(now)}. What was trained on must stay: write the phases up to "
        "here as they were, give the last of them a length that ends here or later, and append "
        "the new phase behind it. Or use another --workdir."
      )
    for name, part in position.get("parts", {}).items():
      self.info.parts[name].row_of(part)
    return row

  def prepare(self, row: int, going: Callable[[], bool]) -> Iterator[None]:
    """Prepare rows from `row` on, a piece of each source in turn."""
    counts = self._counts(row)
    pieces = [part.prepare(counts[name], going) for name, part in self.info.parts.items()]
    for _ in itertools.zip_longest(*pieces):
      yield

  def shares(self, number: int) -> str:
    """A phase in words: the share of each source."""
    parts = self._parts(self.schedule.phases[number])
    total = sum(parts.values())
    return ", ".join(f"{name} {part / total:.1%}" for name, part in parts.items())

  def _counts(self, row: int) -> dict[str, int]:
    """How many rows of each source come before row `row`."""
    return dict(zip(self.info.parts, map(int, self.schedule.counts(row)), strict=True))

  def _begun(self, row: int) -> list[Any]:
    """Of each phase that begins before `row`: where it does, and the parts of its sources."""
    phases = zip(map(int, self.schedule.starts), self.schedule.phases, strict=True)
    return [[start, self._parts(stage)] for start, stage in phases if start < row]

  def _parts(self, stage: MixturePhase) -> dict[str, int]:
    return {name: n for name, n in zip(self.info.parts, stage.parts, strict=True) if n}


def _gathered(
  reads: Sequence[Callable[[np.ndarray], dict[str, np.ndarray]]],
  source: np.ndarray,
  row: np.ndarray,
) -> dict[str, np.ndarray]:
  """Rows of several sources in one batch.

  Args:
    reads: for each source, a function of row numbers that returns their arrays.
    source: the number of each row's source.
    row: number of each row in its source; of the same shape.

  Returns:
    Arrays [*source.shape, seq_len].
  """
  batch: dict[str, np.ndarray] = {}
  for number in np.unique(source):
    here = source == number
    rows = reads[number](row[here])
    for name, values in rows.items():
      if name not in batch:
        batch[name] = np.empty((*source.shape, values.shape[-1]), values.dtype)
      batch[name][here] = values
    assert batch.keys() == rows.keys(), "sources have the same arrays"
  return batch


def _in_words(begun: Sequence[Any]) -> str:
  one = lambda start, parts: f"from row {start:,} {','.join(f'{n}={p}' for n, p in parts.items())}"
  return "; ".join(one(*phase) for phase in begun) or "none"
