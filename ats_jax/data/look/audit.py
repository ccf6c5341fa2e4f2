"""Proof that an epoch holds each token of each document as a target once and only once.

Of a mixture: that the first epoch of each source does, wherever its rows come. Of rows of several
lengths: that the first epoch of each part does.

The loader is run twice side by side: as in training, and over the same rows with each text token
replaced by its own number. The numbers say which token of which document a place holds without
asking the packing code; the real batch must hold that token's id in the same place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ats_jax.data.batch import Batch
from ats_jax.data.rows.buckets import Buckets
from ats_jax.data.rows.dataset import Dataset
from ats_jax.data.rows.loader import TrainBatches
from ats_jax.data.rows.mixture import Mixture

BATCH_SIZE = 28  # rows per update, where their order does not depend on it
_BOS, _EOS, _PAD = -1, -2, -3  # of the numbered corpus
_LIMIT = 2**31 - 1


class Phase(NamedTuple):
  """Some hosts that read together from where the last phase ended to this share of the epoch."""

  hosts: int
  accum_steps: int
  until: float


SCENARIOS: dict[str, tuple[Phase, ...]] = {
  "1 host": (Phase(1, 1, 1.0),),
  "2 hosts": (Phase(2, 1, 1.0),),
  "4 hosts": (Phase(4, 1, 1.0),),
  "7 hosts": (Phase(7, 1, 1.0),),
  "4 hosts, then 7 with half the micro-batch": (Phase(4, 1, 0.5), Phase(7, 2, 1.0)),
}


class Result(NamedTuple):
  """What one scenario emitted in the first epoch; `difference` names the first fault, or is ""."""

  scenario: str
  batches: int
  rows: int
  targets: int
  lost: int
  repeated: int
  difference: str


type Whole = Dataset | Mixture | Buckets


def audit(
  ds: Whole,
  *,
  scenarios: dict[str, Sequence[Phase]] | None = None,
  batches: Callable[..., TrainBatches] = TrainBatches,
) -> Iterator[Result]:
  """Reads one epoch per scenario and compares it with the documents.

  Args:
    ds: a split with at least one row, a mixture or parts of some. Of these so many rows are read
      that each source has been read once, but for those that never are. Parts are read in batches
      of the run's own size, by no more hosts than a micro-batch has rows.
    scenarios: name -> phases; None = SCENARIOS.
    batches: the loader, `TrainBatches` or one that is called like it.

  Raises:
    ValueError: if the split has more targets than fit in 31 bits.
  """
  if ds.num_tokens > _LIMIT:
    raise ValueError(
      f"The audit numbers targets in 31 bits, and the split has {ds.num_tokens}. "
      "Audit a part of the files: --config.data.paths=..."
    )
  for name, phases in (SCENARIOS if scenarios is None else scenarios).items():
    yield _Audit(ds, batches).run(name, phases)


class _NumberedCorpus:
  """Looks like a Corpus; token i of document d is `base[d] + i`, and its eos the number after."""

  def __init__(self, ds: Dataset, first: int):
    self.length = ds.corpus.length
    sizes = self.length[ds.documents] + 1
    self.starts = first + np.cumsum(sizes) - sizes
    self.base = np.full(len(self.length), _LIMIT, np.int64)
    self.base[ds.documents] = self.starts

    self.codes = ds.corpus.codes

  def tokens(self, document: int, begin: int, end: int) -> np.ndarray:
    return self.base[document] + np.arange(begin, min(end, int(self.length[document])))


class _NumberedTokenizer:
  bos_id, eos_id, pad_id = _BOS, _EOS, _PAD


def batch_size(ds: Whole) -> int:
  """Rows of a batch of the audit."""
  return ds.batch_size if isinstance(ds, Buckets) else BATCH_SIZE


def _sources(ds: Whole) -> Mapping[str, Any]:
  if isinstance(ds, Buckets):
    return ds.parts
  return ds.sources if isinstance(ds, Mixture) else {"": ds}


def _with_sources(ds: Whole, shadows: Mapping[str, Dataset]) -> Whole:
  """The same rows of other documents."""
  words = _NumberedTokenizer()
  if isinstance(ds, Buckets):
    return ds.with_parts(shadows, words)
  return ds.with_sources(shadows, words) if isinstance(ds, Mixture) else shadows[""]


def _rows_until_read(ds: Whole, source: int) -> int:
  """How many rows of training there are until a source has been read once; 0 = it never is."""
  if isinstance(ds, Dataset):
    return ds.num_rows
  if isinstance(ds, Buckets):
    return ds.order.until(source) * ds.batch_size
  part = list(ds.sources.values())[source]
  last = ds.turns.until(source, part.num_rows - 1)
  return 0 if last is None else last + 1


def _in_first_epoch(ds: Whole, rows: np.ndarray) -> np.ndarray:
  """Whether each row of a batch of these rows of training is of the first epoch of its source."""
  if isinstance(ds, Dataset):
    return rows < ds.num_rows
  if isinstance(ds, Buckets):
    parts, places = list(ds.parts.values()), [ds.place(int(row)) for row in rows.flat]
    first = [row < parts[number].num_rows for number, short in places for row in short]
    return np.reshape(first, (*rows.shape[:-1], -1))
  place = ds.turns.find(rows)
  return place.row < np.array([part.num_rows for part in ds.sources.values()])[place.source]


class _Audit:
  """The state of one scenario: how often each target was seen, and the first fault."""

  def __init__(self, ds: Whole, batches: Callable[..., TrainBatches]):
    self._ds, self._batches, self._batch_size = ds, batches, batch_size(ds)
    self._is_first, self._is_eos = np.zeros((2, ds.num_tokens), bool)
    self._ids = np.full(ds.num_tokens, ds.tokenizer.eos_id, np.int32)
    self._weights = np.zeros(ds.num_tokens, np.float32)
    self._due = np.ones(ds.num_tokens, bool)  # whether it must come
    self._parts: list[tuple[Dataset, np.ndarray]] = []  # and where the documents of each start
    shadows: dict[str, Dataset] = {}
    first, self._rows = 0, 0
    for number, (name, part) in enumerate(_sources(ds).items()):
      assert isinstance(part, Dataset), "the command refuses streams"
      numbers = _NumberedCorpus(part, first)
      shadows[name] = part.with_corpus(numbers, _NumberedTokenizer())
      self._parts.append((part, numbers.starts))
      self._expect(part, numbers.starts, first)
      end = first + part.num_tokens
      rows = _rows_until_read(ds, number)
      self._due[first:end] = rows > 0
      self._rows, first = max(self._rows, rows), end
    self._shadow = _with_sources(ds, shadows)
    self._seen = np.zeros(ds.num_tokens, np.uint16)
    self._difference = ""

  def _expect(self, part: Dataset, starts: np.ndarray, first: int) -> None:
    """Note the ids and weights of a source, whose tokens are numbered from `first` on."""
    ends = np.append(starts[1:], first + part.num_tokens) - 1
    self._is_first[starts] = True
    self._is_eos[ends] = True
    if part.weights is None:
      self._weights[first : first + part.num_tokens] = 1.0
    for document, start, end in zip(part.documents, starts, ends, strict=True):
      self._ids[start:end] = part.corpus.tokens(int(document), 0, end - start)
      if part.weights is not None:
        self._weights[start:end] = part.weights[part.corpus.codes(int(document), 0, end - start)]

  def run(self, name: str, phases: Sequence[Phase]) -> Result:
    total = -(-self._rows // self._batch_size)
    done = rows = 0
    position = None
    for phase in phases:
      until = total if phase.until == 1.0 else int(total * phase.until)
      micro = self._batch_size // phase.accum_steps
      ends = []
      for local in np.array_split(np.arange(micro), min(phase.hosts, micro)):
        seen, end = self._read_host(local, phase, position, done, until)
        rows += seen
        ends.append(end)
      position = ends[0]
      if any(end != position for end in ends):
        self._difference = self._difference or f"hosts are at different positions: {ends}"
      done = until
    wrong = np.flatnonzero((self._seen > 1) | (self._due & (self._seen == 0)))
    if len(wrong) and not self._difference:
      self._difference = f"{self._place(wrong[0])} came {self._seen[wrong[0]]} times"
    lost, seen = int((self._due & (self._seen == 0)).sum()), int(self._seen.sum(dtype=np.int64))
    repeated = int(np.maximum(self._seen.astype(np.int64) - 1, 0).sum())
    return Result(name, total, rows, seen, lost, repeated, self._difference)

  def _read_host(
    self, local: np.ndarray, phase: Phase, position: Any, start: int, end: int
  ) -> tuple[int, Any]:
    """Reads one host's share of batches [start, end), the first of which is at `position`.

    Returns:
      Its rows of the first epoch, and the position behind them.
    """
    arguments = dict(
      position=position, accum_steps=phase.accum_steps, batch_size=self._batch_size,
      local_rows=local,
      num_workers=0, prefetch=2,
    )  # fmt: skip
    micro = self._batch_size // phase.accum_steps
    slots = np.arange(phase.accum_steps)[:, None] * micro + local
    rows = 0
    with (
      self._batches(self._ds, **arguments) as real,
      self._batches(self._shadow, **arguments) as shadow,
    ):
      for k in range(start, end):
        first_epoch = _in_first_epoch(self._ds, k * self._batch_size + slots)
        pair = ({name: x[first_epoch] for name, x in next(b).items()} for b in (real, shadow))
        self._check(*pair)
        rows += int(first_epoch.sum())
      return rows, real.position()

  def _check(self, real: Batch, shadow: Batch) -> None:
    counts = shadow["segment_ids"] > 0
    tokens, targets = shadow["tokens"][counts].astype(np.int64), shadow["targets"][counts]
    number = np.where(targets == _EOS, tokens + 1, targets)
    inside = (number >= 0) & (number < self._ds.num_tokens)
    self._fault(~inside, number, "a target that belongs to no document")
    number, tokens, targets = number[inside], tokens[inside], targets[inside]
    np.add.at(self._seen, number, 1)

    first = self._is_first[number]
    follows = np.where(tokens == _BOS, first, (number == tokens + 1) & ~first)
    self._fault(~follows, number, "does not follow its input: {} crosses a document boundary")
    self._fault(self._is_eos[number] != (targets == _EOS), number, "{} ends at the wrong place")
    self._fault(real["targets"][counts][inside] != self._ids[number], number, "{} has a wrong id")
    weights = real["loss_mask"][counts][inside]
    self._fault(weights != self._weights[number], number, "{} has a wrong weight")
    bos = self._ds.tokenizer.bos_id  # of all sources
    inputs = np.where(tokens == _BOS, bos, self._ids[tokens])
    self._fault(real["tokens"][counts][inside] != inputs, number, "the input of {} has a wrong id")
    for name in ("loss_mask", "segment_ids", "positions"):
      if not np.array_equal(real[name], shadow[name]):
        self._difference = self._difference or f"{name} differ between two readings of a batch"

  def _fault(self, wrong: np.ndarray, number: np.ndarray, text: str) -> None:
    if wrong.any() and not self._difference:
      self._difference = text.format(self._place(number[wrong][0]) if "{}" in text else "")

  def _place(self, number: int) -> str:
    part, starts = [(p, starts) for p, starts in self._parts if starts[0] <= number][-1]
    at = int(np.searchsorted(starts, number, "right")) - 1
    offset = int(number - starts[at])
    name = part.corpus.name(int(part.documents[at]))
    return f"{'the eos' if self._is_eos[number] else f'token {offset}'} of document {name!r}"
