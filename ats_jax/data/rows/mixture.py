"""Rows of several sources: taking turns in training, all of them once in an evaluation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ats_jax.data.batch import SOURCE
from ats_jax.data.corpus import cache
from ats_jax.data.rows.dataset import Dataset, check_same, in_words, read_rows
from ats_jax.data.rows.schedule import Stage, Turns
from ats_jax.data.rows.stream import AHEAD, Stream
from ats_jax.data.tokens.tokenizer import Tokenizer

type Part = Dataset | Stream


class Joined:
  """All rows of several sources once, so that any run of them is a fair sample; see `Rows`.

  Attributes:
    sources: by name.
  """

  def __init__(self, sources: Mapping[str, Part], tokenizer: Tokenizer):
    self.sources, self.tokenizer = dict(sources), tokenizer
    parts = list(self.sources.values())
    self.seq_len = parts[0].seq_len
    self.num_rows = sum(part.num_rows for part in parts)
    self.num_tokens = sum(part.num_tokens for part in parts)
    self.num_documents = sum(part.num_documents for part in parts)
    known = all(part.bytes_per_token for part in parts if part.num_tokens)
    num_bytes = sum(part.bytes_per_token * part.num_tokens for part in parts)
    self.bytes_per_token = num_bytes / max(self.num_tokens, 1) if known else 0.0
    sizes = np.array([part.num_rows for part in parts])
    source = np.repeat(np.arange(len(parts)), sizes)
    index = np.arange(self.num_rows) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    order = np.argsort((index + 0.5) / sizes[source], kind="stable")
    # Behind the last row: one of padding.
    self._source = np.append(source[order], 0)
    self._index = np.append(index[order], sizes[0])

  def rows(self, indices: np.ndarray | range) -> dict[str, np.ndarray]:
    """See `Rows`."""
    at = np.minimum(np.asarray(indices), self.num_rows)
    parts = list(self.sources.values())
    pairs = zip(self._source[at].flat, self._index[at].flat, strict=True)
    return read_rows([(parts[source].counted(), int(row)) for source, row in pairs], at.shape)


class Mixture(Joined):
  """Training rows of several sources, which take turns; see `TrainRows`.

  Which source row r is of, and which of its rows, follows from the phases and r alone (`Turns`).
  The rows of a source come as those of a run on it alone would: each once an epoch, each epoch in
  an order of its own. So row r is a pure function of the fingerprints, the seed, the phases and r.
  """

  def __init__(self, sources: Mapping[str, Part], turns: Turns, tokenizer: Tokenizer):
    super().__init__(sources, tokenizer)
    self.turns = turns
    parts = enumerate(self.sources.values())
    self._streams = {number: part for number, part in parts if isinstance(part, Stream)}
    self.are_ready = not self._streams
    self.fingerprint = cache.digest(
      "mixture", [[name, part.fingerprint] for name, part in self.sources.items()]
    )

  @property
  def ids_used(self) -> int:
    """See `TrainRows`."""
    return max(part.ids_used for part in self.sources.values())

  def with_sources(self, sources: Mapping[str, Dataset], tokenizer: Any) -> "Mixture":
    """The same turns of other sources (for the audit)."""
    return Mixture(sources, self.turns, tokenizer)

  def row_length(self, row: int) -> int:
    """See `TrainRows`."""
    del row
    return self.seq_len

  def global_rows(self, indices: np.ndarray | range) -> dict[str, np.ndarray]:
    """See `TrainRows`; with the number of each row's source beside the other arrays."""
    place = self.turns.find(np.asarray(indices))
    parts = list(self.sources.values())
    pairs = ((parts[s], int(row)) for s, row in zip(*(x.flat for x in place), strict=True))
    batch = read_rows([part.place(row) for part, row in pairs], place.source.shape)
    like = batch["tokens"]
    return {**batch, SOURCE: np.broadcast_to(place.source[..., None], like.shape).astype(np.int32)}

  def position(self, row: int) -> dict[str, Any]:
    """See `TrainRows`. What has been read before names the phases that have begun."""
    found = {"row": row, "data": self.fingerprint, "phases": self._begun(row)}
    if self.are_ready:
      return found
    counts, names = self.turns.counts(row), list(self.sources)
    parts = {names[n]: part.position(int(counts[n])) for n, part in self._streams.items()}
    return {**found, "parts": parts}

  def _begun(self, row: int) -> list[Any]:
    """Of each phase that begins before `row`: where it does, and the parts of its sources."""
    phases = zip(map(int, self.turns.starts), self.turns.stages, strict=True)
    return [[start, self._parts(stage)] for start, stage in phases if start < row]

  def _parts(self, stage: Stage) -> dict[str, int]:
    return {name: n for name, n in zip(self.sources, stage.parts, strict=True) if n}

  def row_of(self, position: Mapping[str, Any]) -> int:
    """See `TrainRows`.

    Raises:
      ValueError: also if the phases before the position are others now.
    """
    row = position["row"]
    check_same(self.fingerprint, position)
    was, now = position.get("phases", []), self._begun(row)
    if was != now:
      raise ValueError(
        f"data.mixture: the first {row:,} rows were drawn from these sources: {_say(was)}; now "
        f"they would be: {_say(now)}. What was trained on must stay: write the phases up to here "
        "as they were, give the last of them a length that ends here or later, and append the new "
        "phase behind it. Or use another --workdir."
      )
    for name, part in position.get("parts", {}).items():
      self.sources[name].row_of(part)
    return row

  def news(self, first: int, end: int) -> Sequence[str]:
    """Which phases and which further epochs of sources begin in these rows."""
    found = []
    phases = len(self.turns.stages)
    for number, start in enumerate(map(int, self.turns.starts)):
      if number and first <= start < end:
        what = f"phase {number + 1} of {phases} of data.mixture begins"
        found.append(f"{what}: {self.shares(number)}")
    before, after = self.turns.counts(first), self.turns.counts(end)
    for (name, part), a, b in zip(self.sources.items(), before, after, strict=True):
      found += [f"source {name}: {words}" for words in part.news(int(a), int(b))]
    return found

  def shares(self, number: int) -> str:
    """A phase in words: the share of each source."""
    parts = self._parts(self.turns.stages[number])
    total = sum(parts.values())
    return ", ".join(f"{name} {part / total:.1%}" for name, part in parts.items())

  def in_words(self) -> str:
    """See `TrainRows`."""
    if self.are_ready:
      return in_words(self)
    return "; ".join(f"{name}: {part.in_words()}" for name, part in self.sources.items())

  def epochs(self, row: int) -> float | None:
    """See `TrainRows`."""
    return row / self.num_rows if self.are_ready else None

  def passes(self, row: int) -> dict[str, float | None]:
    """See `TrainRows`."""
    counts = self.turns.counts(row)
    pairs = zip(self.sources.items(), counts, strict=True)
    return {name: part.epochs(int(count)) for (name, part), count in pairs}

  def ahead(self, row: int, going: Callable[[], bool]) -> None:
    """See `TrainRows`: one window of each stream, then another one."""
    counts = self.turns.counts(row)
    for windows in range(AHEAD + 1):
      for number, part in self._streams.items():
        part.make_ready(int(counts[number]), windows, going)


def _say(begun: Sequence[Any]) -> str:
  one = lambda start, parts: f"from row {start:,} {','.join(f'{n}={p}' for n, p in parts.items())}"
  return "; ".join(one(*phase) for phase in begun) or "none"
