"""Proof that an epoch holds each token of each document as a target once and only once.

Of rows in parts (sources of a mixture, documents of one length): that the first epoch of each part
does, wherever its rows come.

The loader is run twice side by side: as in training, and over the same rows with each text token
replaced by its own number. The numbers say which token of which document a place holds without
asking the packing code; the real batch must hold that token's id in the same place.
"""

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ats_jax.data.batch import Batch
from ats_jax.data.rows.contract import TrainRows, leaf_rows, with_documents
from ats_jax.data.rows.loader import TrainBatches
from ats_jax.data.rows.packed import Packed

BATCH_SIZE = 28  # rows per update, where their order does not depend on it
_BOS, _EOS, _PAD = -1, -2, -3  # of the numbered corpus
_LIMIT = 2**31 - 1
_LONGEST = 2**40  # rows of a run: a part that has not been read by then never is


class ReadingPhase(NamedTuple):
  """A part of an epoch that some hosts read together, from where the phase before it ended.

  Attributes:
    hosts: number of hosts.
    accum_steps: micro-batches of a step.
    until: the share of the epoch, from 0 to 1, at which the phase ends.
  """

  hosts: int
  accum_steps: int
  until: float


SCENARIOS: dict[str, tuple[ReadingPhase, ...]] = {
  "1 host": (ReadingPhase(1, 1, 1.0),),
  "2 hosts": (ReadingPhase(2, 1, 1.0),),
  "4 hosts": (ReadingPhase(4, 1, 1.0),),
  "7 hosts": (ReadingPhase(7, 1, 1.0),),
  "4 hosts, then 7 with half the micro-batch": (ReadingPhase(4, 1, 0.5), ReadingPhase(7, 2, 1.0)),
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


def audit(
  dataset: TrainRows,
  *,
  scenarios: dict[str, Sequence[ReadingPhase]] | None = None,
  batches: Callable[..., TrainBatches] = TrainBatches,
) -> Iterator[Result]:
  """Reads one epoch per scenario and compares it with the documents.

  Args:
    dataset: rows of packed documents, at least one. Of those in parts so many are read that each
      part has been read once, but for those that never are. Where the order of rows depends on the
      size of a batch they are read in batches of that size, by no more hosts than a micro-batch has
      rows.
    scenarios: name -> phases; None = SCENARIOS.
    batches: the loader, `TrainBatches` or one that is called like it.

  Raises:
    ValueError: for rows without packed documents, or more targets than fit in 31 bits.
  """
  if dataset.info.num_tokens > _LIMIT:
    raise ValueError(
      f"The audit numbers targets in 31 bits, and the split has {dataset.info.num_tokens}. "
      "Audit a part of the files: --config.data.paths=..."
    )
  for name, phases in (SCENARIOS if scenarios is None else scenarios).items():
    yield _Audit(dataset, batches).run(name, phases)


def batch_size(dataset: TrainRows) -> int:
  """Rows of a batch of the audit."""
  return dataset.info.batch_size or BATCH_SIZE


def _rows_until_read(dataset: TrainRows) -> list[int]:
  """For each of the `leaves`, how many rows there are until it has been read; 0 = it never is."""
  if not dataset.info.parts:
    return [dataset.info.num_rows]
  rows_of_parts = []
  for name, part in dataset.info.parts.items():
    count = lambda row, name=name: dataset.progress(row).rows[name]
    for rows in _rows_until_read(part):
      comes = 0 < rows <= count(_LONGEST)
      rows_of_parts.append(bisect.bisect_left(range(_LONGEST), rows, key=count) if comes else 0)
  return rows_of_parts


class _NumberedCorpus:
  """Looks like a Corpus; token i of document d is `base[d] + i`, and its eos the number after."""

  def __init__(self, packed: Packed, first: int):
    self.length = packed.corpus.length
    sizes = self.length[packed.documents] + 1
    self.starts = first + np.cumsum(sizes) - sizes
    self.base = np.full(len(self.length), _LIMIT, np.int64)
    self.base[packed.documents] = self.starts

    self.codes = packed.corpus.codes

  def tokens(self, document: int, begin: int, end: int) -> np.ndarray:
    return self.base[document] + np.arange(begin, min(end, int(self.length[document])))


class _NumberedTokenizer:
  bos_id, eos_id, pad_id = _BOS, _EOS, _PAD


class _Audit:
  """The state of one scenario: how often each target was seen, and the first fault."""

  def __init__(self, dataset: TrainRows, batches: Callable[..., TrainBatches]):
    info = dataset.info
    self._dataset, self._batches, self._batch_size = dataset, batches, batch_size(dataset)
    self._num_tokens = info.num_tokens
    self._is_first, self._is_eos = np.zeros((2, info.num_tokens), bool)
    self._ids = np.full(info.num_tokens, info.tokenizer.eos_id, np.int32)
    self._bos = np.zeros(info.num_tokens, np.int32)  # of the source that a token is of
    self._weights = np.zeros(info.num_tokens, np.float32)
    self._due = np.ones(info.num_tokens, bool)  # whether it must come
    self._parts: list[tuple[Packed, np.ndarray]] = []  # and where the documents of each start
    numbered, first, ends = [], 0, []
    rows_until_read = _rows_until_read(dataset)
    for (name, leaf), rows in zip(leaf_rows(dataset), rows_until_read, strict=True):
      packed, end = leaf.info.packed, first + leaf.info.num_tokens
      if packed is None:
        raise ValueError(
          f"The audit compares rows with documents, and {name or 'these'} have none."
        )
      numbered.append(_NumberedCorpus(packed, first))
      self._parts.append((packed, numbered[-1].starts))
      self._expect(packed, numbered[-1].starts, first, end)
      self._due[first:end] = rows > 0
      ends.append(end)
      first = end
    self._has_context = any(packed.overlap for packed, _ in self._parts)
    self._num_rows = max(rows_until_read)
    self._ends = np.array(ends)
    self._unread = np.array([packed.num_rows for packed, _ in self._parts])  # of first epochs
    corpora, tokenizer = iter(numbered), _NumberedTokenizer()
    self._shadow = with_documents(
      dataset, lambda packed: packed.with_corpus(next(corpora), tokenizer)
    )
    self._seen = np.zeros(info.num_tokens, np.uint16)
    self._difference = ""

  def _expect(self, packed: Packed, starts: np.ndarray, first: int, end: int) -> None:
    """Note the ids and weights of documents, whose tokens have the numbers [first, end)."""
    ends = np.append(starts[1:], end) - 1
    self._bos[first:end] = packed.tokenizer.bos_id
    self._is_first[starts] = True
    self._is_eos[ends] = True
    if packed.weights is None:
      self._weights[first:end] = 1.0
    for document, start, last in zip(packed.documents, starts, ends, strict=True):
      self._ids[start:last] = packed.corpus.tokens(int(document), 0, last - start)
      if packed.weights is not None:
        codes = packed.corpus.codes(int(document), 0, last - start)
        self._weights[start:last] = packed.weights[codes]
        if packed.second_code:
          self._is_first[start + int(np.argmax(codes >= packed.second_code))] = True

  def run(self, name: str, phases: Sequence[ReadingPhase]) -> Result:
    total = -(-self._num_rows // self._batch_size)
    done = rows = 0
    position = None
    for phase in phases:
      until = total if phase.until == 1.0 else int(total * phase.until)
      seen, position = self._read(phase, position, until - done)
      rows += seen
      done = until
    wrong = np.flatnonzero((self._seen > 1) | (self._due & (self._seen == 0)))
    if len(wrong) and not self._difference:
      self._difference = f"{self._place(wrong[0])} came {self._seen[wrong[0]]} times"
    lost, seen = int((self._due & (self._seen == 0)).sum()), int(self._seen.sum(dtype=np.int64))
    repeated = int(np.maximum(self._seen.astype(np.int64) - 1, 0).sum())
    return Result(name, total, rows, seen, lost, repeated, self._difference)

  def _read(self, phase: ReadingPhase, position: Any, count: int) -> tuple[int, Any]:
    """Reads `count` batches on all hosts, the first of which is at `position`.

    Returns:
      How many of their rows are of a first epoch, and the position behind them.
    """
    micro = self._batch_size // phase.accum_steps
    rows = 0
    with contextlib.ExitStack() as stack:
      hosts = [
        [
          stack.enter_context(
            self._batches(
              dataset, position=position, accum_steps=phase.accum_steps,
              batch_size=self._batch_size, local_rows=local, num_workers=0, prefetch=2,
            )
          )
          for dataset in (self._dataset, self._shadow)
        ]
        for local in np.array_split(np.arange(micro), min(phase.hosts, micro))
      ]  # fmt: skip
      for _ in range(count):
        real, shadow = (_joined([next(b) for b in side]) for side in zip(*hosts, strict=True))
        first_epoch = self._in_first_epoch(shadow)
        self._check(*({name: x[first_epoch] for name, x in b.items()} for b in (real, shadow)))
        rows += int(first_epoch.sum())
      ends = [real.position() for real, _ in hosts]
    if any(end != ends[0] for end in ends):
      self._difference = self._difference or f"hosts are at different positions: {ends}"
    return rows, ends[0]

  def _in_first_epoch(self, shadow: Batch) -> np.ndarray:
    """Whether each of these rows, the next ones of the run, is of the first epoch of its part."""
    number = np.where(shadow["segment_ids"] > 0, _numbers(shadow), -1).max(axis=-1)
    part = np.searchsorted(self._ends, number, "right")
    first_epoch = np.ones(len(part), bool)  # also a row that belongs to no part, which is a fault
    for index, unread in enumerate(self._unread):
      of_part = np.flatnonzero(part == index)
      first_epoch[of_part[unread:]] = False
      self._unread[index] -= min(unread, len(of_part))
    return first_epoch

  def _check(self, real: Batch, shadow: Batch) -> None:
    counts = shadow["segment_ids"] > 0
    if self._has_context:  # which counts elsewhere, as a target
      counts &= shadow["loss_mask"] > 0
    tokens, targets = shadow["tokens"][counts].astype(np.int64), shadow["targets"][counts]
    number = _numbers(shadow)[counts]
    inside = (number >= 0) & (number < self._num_tokens)
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
    inputs = np.where(tokens == _BOS, self._bos[number], self._ids[tokens])
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


def _numbers(shadow: Batch) -> np.ndarray:
  """The number of each target of the numbered documents; an eos has the one after its input."""
  return np.where(
    shadow["targets"] == _EOS, shadow["tokens"].astype(np.int64) + 1, shadow["targets"]
  )


def _joined(shares: Sequence[Batch]) -> dict[str, np.ndarray]:
  """The shares of all hosts of a batch, as its rows in order: [rows, seq_len]."""
  batch = {name: np.concatenate([share[name] for share in shares], axis=1) for name in shares[0]}
  return {name: x.reshape(-1, x.shape[-1]) for name, x in batch.items()}
