"""Training rows of which each step reads a part of the documents: rows of one length, or level.

A part is rows of its own: the documents up to so many tokens in rows of that length, or
those of one level of difficulty. A step holds as many tokens in each: where rows are a quarter as
long there are four times as many. So a run still counts rows of `data.seq_len`, of which a step has
`data.batch_size`, and its position stays one number.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from absl import logging

from ats_jax.config.schema import DataConfig
from ats_jax.data.corpus import cache
from ats_jax.data.rows.contract import (
  Part,
  Progress,
  RowOrder,
  TrainingDocuments,
  TrainRows,
  info_of,
)
from ats_jax.data.rows.schedule import rank_in_source, shuffled

LEAST_STEPS = 4  # of an epoch, in a part: one with fewer is joined to its neighbour
MUCH_PADDING = 0.1  # share of the places of training rows that is worth a warning


class Step(NamedTuple):
  """Where the rows of a step come from.

  Attributes:
    part: the number of the part.
    number: number of the step among those of its part, over the run.
  """

  part: int
  number: int


class StepOrder:
  """Which part each step of a run reads: a pure function of the sizes, the seed and the step.

  Epoch after epoch each part has the fewest steps that end its own epoch. The last of them goes on
  into the part's next epoch, from where the part goes on in the next one. So after any whole epoch
  each row of a part has been read that often, and at most a step of them once more.
  """

  def __init__(self, rows: Sequence[int], a_step: Sequence[int], seed: int | None):
    """Set the sizes.

    Args:
      rows: number of rows of each part in an epoch.
      a_step: number of rows that a step of each part takes.
      seed: seed of a random order of steps in each epoch; None = the parts follow each other.
    """
    assert min(rows) > 0
    self.seed = seed
    self._rows, self._a_step = np.array(rows, np.int64), np.array(a_step, np.int64)
    self._steps = sum(Fraction(n, k) for n, k in zip(rows, a_step, strict=True))  # of an epoch
    self._table: tuple[int, np.ndarray, np.ndarray] = (-1, self._rows, self._rows)

  def start(self, epoch: int) -> int:
    """The first step of an epoch."""
    return int(self._before(epoch).sum())

  def epoch(self, step: int) -> int:
    """Which epoch a step is of."""
    # An epoch begins at most `parts - 1` steps later than by the sizes alone.
    epoch = max(0, math.floor((step - len(self._rows) + 1) / self._steps))
    while self.start(epoch + 1) <= step:
      epoch += 1
    return epoch

  def epochs(self, step: int) -> float:
    """How often all rows have been read after so many steps."""
    epoch = self.epoch(step)
    start = self.start(epoch)
    return epoch + (step - start) / (self.start(epoch + 1) - start)

  def find(self, step: int) -> Step:
    """Where the rows of a step (from 0) come from."""
    epoch = self.epoch(step)
    at = step - self.start(epoch)
    parts, rank = self._order_of(epoch)
    part = int(parts[at])
    return Step(part, int(self._before(epoch)[part] + rank[at]))

  def counts(self, step: int) -> np.ndarray:
    """[parts] steps of each before a step."""
    epoch = self.epoch(step)
    before = self._before(epoch)
    parts, _ = self._order_of(epoch)
    return before + np.bincount(parts[: step - self.start(epoch)], minlength=len(before))

  def _before(self, epoch: int) -> np.ndarray:
    """[parts] steps of each before an epoch."""
    return -(-epoch * self._rows // self._a_step)

  def _order_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The part of each step of an epoch, and how many steps of the same part come before it."""
    table = self._table  # at once: threads read it
    if table[0] != epoch:
      table = self._table = epoch, *self._make_order(epoch)
    return table[1:]

  def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    counts = self._before(epoch + 1) - self._before(epoch)
    order = np.repeat(np.arange(len(counts)), counts)
    if self.seed is not None:
      order = shuffled(order, f"steps {self.seed} {epoch}")
    return order, rank_in_source(order)


class Buckets(TrainRows):
  """Training rows in parts, one a step.

  Row r of the run is of step r // batch_size. If the rows of that step are shorter it is several of
  them: so many follow each other in a batch in its place.

  Attributes:
    info: facts about the rows; `parts` are the buckets by name, in the order of training.
    order: the order of steps.
  """

  def __init__(
    self, parts: Mapping[str, TrainRows], *, batch_size: int, seq_len: int, seed: int | None
  ):
    """Set the order.

    Args:
      parts: each with at least one row.
      batch_size: rows of `seq_len` of a step.
      seq_len: positions in a row of the run; a multiple of that of each part.
      seed: seed of the order of steps, as for `StepOrder`.
    """
    infos = [part.info for part in parts.values()]
    self._batch_size = batch_size
    self._times = [seq_len // info.seq_len for info in infos]
    self.order = StepOrder(
      [info.num_rows for info in infos], [batch_size * times for times in self._times], seed
    )
    num_rows = self.order.start(1) * batch_size
    info = info_of(parts, infos[0].tokenizer, seq_len=seq_len, num_rows=num_rows)
    places = sum(part.num_rows * part.seq_len for part in infos)
    self.padding = 1 - info.num_tokens / places
    order = "one after the other in each epoch" if seed is None else "mixed at random"
    rows = "; ".join(
      f"{name}: {part.info.num_rows:,} rows of {part.info.seq_len}" for name, part in parts.items()
    )
    fingerprints = [part.fingerprint for part in infos]
    self.info = dataclasses.replace(
      info,
      fingerprint=cache.digest("buckets", fingerprints, batch_size, seed is None),
      batch_size=batch_size,
      # Of the part with the most to say, as all are of one text.
      report=max((p.report for p in infos), key=lambda report: sum(report["skipped"].values())),
      summary=(
        f"{info.num_documents:,} documents, {info.num_tokens:,} targets in "
        f"{self.order.start(1):,} steps an epoch, {order}, {self.padding:.1%} padding: {rows}"
      ),
    )

  def place(self, row: int) -> tuple[int, range]:
    """The number of the part that row `row` of the run is of, and its rows that it is."""
    step, slot = divmod(row, self._batch_size)
    part, number = self.order.find(step)
    times = self._times[part]
    begin = (number * self._batch_size + slot) * times
    return part, range(begin, begin + times)

  def length(self, row: int) -> int:
    """Return the positions in a row of the step that row `row` belongs to."""
    return self._part(self.place(row)[0]).info.seq_len

  def read(self, rows: np.ndarray | range) -> dict[str, np.ndarray]:
    """Return the rows of one step, as arrays [..., rows x times, seq_len / times]."""
    rows = np.asarray(rows)
    places = [self.place(int(row)) for row in rows.flat]
    assert len({part for part, _ in places}) == 1, "the rows are of several steps"
    short = np.array([row for _, rows in places for row in rows], np.int64)
    return self._part(places[0][0]).read(short.reshape(*rows.shape[:-1], -1))

  def read_once(self, rows: np.ndarray | range) -> dict[str, np.ndarray]:
    """Return rows of the first epoch; short ones are laid end to end to `seq_len`."""
    rows = np.asarray(rows)
    joined = [self._joined(int(row)) for row in rows.flat]
    return {
      name: np.stack([row[name] for row in joined]).reshape(*rows.shape, self.info.seq_len)
      for name in joined[0]
    }

  def progress(self, row: int, since: int | None = None) -> Progress:
    """Return the progress at `row`. Further epochs are news, and buckets that come in order."""
    step, slot = divmod(row, self._batch_size)
    counts = self.order.counts(step) * self._batch_size
    counts[self.order.find(step).part] += slot
    counts *= self._times
    return Progress(
      epochs=self.order.epochs(step),
      rows=dict(zip(self.info.parts, map(int, counts), strict=True)),
      news=() if since is None else self._news(since, row),
    )

  def _news(self, first: int, end: int) -> list[str]:
    news = []
    names = list(self.info.parts)
    for step in range(max(1, -(-first // self._batch_size)), -(-end // self._batch_size)):
      epoch = self.order.epoch(step)
      if epoch > self.order.epoch(step - 1):
        news.append(f"all documents have been read; epoch {epoch + 1:,} begins")
      part = self.order.find(step).part
      if self.order.seed is None and part != self.order.find(step - 1).part:
        news.append(f"from step {step + 1:,} on: {names[part]}")
    return news

  def _part(self, number: int) -> TrainRows:
    return list(self.info.parts.values())[number]

  def _joined(self, row: int) -> dict[str, np.ndarray]:
    """One row, [seq_len]; documents of all the short rows that it is are numbered on."""
    number, short = self.place(row)
    part = self._part(number)
    if row >= self.info.num_rows:  # of padding
      batch = part.read_once(np.full(len(short), part.info.num_rows))
    else:
      batch = part.read(np.array(short))
    ids = batch["segment_ids"]
    last = ids.max(axis=1, keepdims=True)
    batch["segment_ids"] = np.where(ids > 0, ids + np.cumsum(last, axis=0) - last, 0)
    return {name: values.reshape(-1) for name, values in batch.items()}


class PartedOrder(RowOrder, Protocol):
  """An order in which each step reads one part of the documents. A subclass has `divide`.

  Attributes:
    in_turn: whether the parts follow each other in each epoch; else their steps come at random.
  """

  in_turn: ClassVar[bool] = True

  def divide(self, cfg: DataConfig, documents: TrainingDocuments) -> Sequence[Part]:
    """Return the parts of at least one document, in the order of training, none of them empty."""
    ...

  def parts(self, cfg: DataConfig, documents: TrainingDocuments) -> Sequence[Part]:
    """Return what `divide` does; a warning says if all documents are one part."""
    parts = self.divide(cfg, documents) if len(documents.indices) else ()
    if len(parts) == 1:
      logging.warning(
        "data.order=%s has no effect: with %d rows of %d tokens a step, the text is too short or "
        "its documents are too much alike to be parted.",
        cfg.order.name, cfg.batch_size, cfg.seq_len,
      )  # fmt: skip
    return parts

  def rows(self, cfg: DataConfig, documents: TrainingDocuments, seed: int) -> TrainRows:
    """Pack each part, and read one in each step."""
    packed = {}
    parts = self.parts(cfg, documents)
    if len(parts) > 1:
      for name, seq_len, members in parts:
        own = dataclasses.replace(cfg, seq_len=seq_len)
        packed[name] = documents.pack(own, seed, members, f"train, {name}")
    packed = {name: part for name, part in packed.items() if part.info.num_rows}
    if not packed:  # also if all documents were left out: then the rows say why
      return documents.pack(cfg, seed, documents.indices, "train")
    rows = Buckets(
      packed,
      batch_size=cfg.batch_size,
      seq_len=cfg.seq_len,
      seed=None if self.in_turn else seed,
    )
    if rows.padding > MUCH_PADDING:
      logging.warning(
        "%.0f%% of the places in training rows are padding: a row holds documents of its part "
        "only. Fewer parts pack better%s%s.",
        100 * rows.padding,
        " (data.order.lengths)" if cfg.order.num_lengths > 1 else "",
        ", and data.packing=concat has no padding" if documents.cuts else "",
      )
    return rows
