"""Rows -> batches: an endless stream for training, one pass for evaluation.

A thread makes them, or processes that outlive Ctrl-C, but not their parent.
"""

import contextlib
import functools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from multiprocessing import resource_tracker
from typing import Any, Self

import grain
import numpy as np
from absl import flags, logging

from ats_jax.data.batch import Batch
from ats_jax.data.corpus.child import end_with_parent
from ats_jax.data.rows.contract import Rows, TrainRows

_ENDLESS = 2**48  # batches: more than any run takes


class Batches:
  """An iterator over batches, in order; owns threads or processes: close it, or use a `with`."""

  def __init__(
    self,
    data: grain.MapDataset,
    *,
    num_workers: int,
    prefetch: int,
    place: Callable[[Batch], Any] | None = None,
  ):
    """Starts to read at once.

    Args:
      data: the batches by number. It must pickle if processes read it.
      num_workers: processes that read; 0 = a thread of this one.
      prefetch: batches made ahead, by each process or by the thread.
      place: what to make of a batch in this process: of the thread's ahead of time, of a worker's
        when it is asked for.
    """
    self._place = place if num_workers else None
    readers: set[threading.Thread] = set()
    if not num_workers:
      data = grain.MapDataset.source(_NotesThreads(data.map(place) if place else data, readers))
    # An element is a whole batch, made from its number alone. So no worker holds a remainder that
    # could be lost when shares end unevenly, and there is no state to save.
    threads = 0 if num_workers else 1
    read_options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads * prefetch)
    in_order = data.to_iter_dataset(read_options)
    if num_workers:
      if not flags.FLAGS.is_parsed():  # Grain reads flags; a notebook or a test has parsed none
        flags.FLAGS.mark_as_parsed()
      options = grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=prefetch)
      in_order = in_order.mp_prefetch(options, worker_init_fn=_start_worker)
    batches = iter(in_order)
    self._shared_memory = num_workers > 0
    # Ctrl-C and a preemption signal reach the whole process group. The main process finishes its
    # step, so its loaders must live on: they inherit the mask of the thread that starts them.
    executor = futures.ThreadPoolExecutor(1, "first-batch")
    with _signals_blocked():
      self._first: futures.Future | None = executor.submit(next, batches, None)
    self._open = [batches]  # the only reference, which closing drops: Grain fails if it outlives us
    self._finalizer = weakref.finalize(self, _close, self._open, executor, readers)

  def __iter__(self) -> "Batches":
    return self

  def __next__(self) -> Batch:
    if not self._open:
      raise ValueError("This iterator is closed; make a new one.")
    if self._first:
      batch = self._first.result()
      self._first = None
      if batch is None:
        raise StopIteration
    else:
      batch = next(self._open[0])
    if not self._shared_memory:
      return batch
    # Grain frees a worker's shared memory once its array is gone; a zero-copy reader may remain.
    batch = {name: np.array(x) for name, x in batch.items()}
    return self._place(batch) if self._place else batch

  def close(self) -> None:
    """Stops the threads or processes and waits for them; harmless if repeated."""
    self._finalizer()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


class _NotesThreads:
  """The batches by number, and the threads that have read some."""

  def __init__(self, data: grain.MapDataset, readers: set[threading.Thread]):
    self._data, self._readers = data, readers

  def __len__(self) -> int:
    return len(self._data)

  def __getitem__(self, index: int) -> Any:
    self._readers.add(threading.current_thread())
    return self._data[index]


def _close(
  batches: list[grain.DatasetIterator], executor: futures.Executor, readers: set[threading.Thread]
) -> None:
  executor.shutdown(wait=True)
  batches.pop().close()
  for reader in readers:  # Grain tells its thread to end, and does not wait for it
    if reader is not threading.current_thread():  # which may be the one that collects us
      reader.join()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
  resource_tracker.ensure_running()  # started later, it would unblock them again
  before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(index: int, count: int) -> None:
  del index, count
  end_with_parent()


class TrainBatches(Batches):
  """An endless iterator over this host's share of the training batches, which knows where it is.

  Slot j of micro-step a of batch k holds global row `row + (k * accum + a) * micro + j` of those
  from `row` on, where the position is, so another host count or micro-batch gives the same rows in
  another arrangement. Epochs follow each other inside a batch; nothing is dropped. Batches are of
  arrays [accum_steps, len(local_rows), seq_len]; of a step with shorter rows, of as many more of
  them in the place of each (`TrainRows.length`).
  """

  def __init__(
    self,
    dataset: TrainRows,
    *,
    position: Mapping[str, Any] | None = None,
    accum_steps: int,
    batch_size: int,
    local_rows: np.ndarray,
    num_workers: int,
    prefetch: int,
    tells: bool = False,
    place: Callable[[Batch], Any] | None = None,
  ):
    """Starts to read at once, as `Batches`.

    Args:
      dataset: the training split.
      position: the position to go on at, from `TrainBatches.position`; None = the first row.
      accum_steps: micro-batches per update.
      batch_size: rows per update over all hosts; a multiple of `accum_steps`.
      local_rows: sorted indices in [0, batch_size // accum_steps) that this host loads.
      num_workers: loader processes; 0 = a thread.
      prefetch: batches made ahead, by each process or by the thread.
      tells: log what begins in the batches that are handed out (`Progress.news`), and make rows
        ahead of them (`TrainRows.prepare`).
      place: maps a batch to what the iterator returns, as of `Batches`.

    Raises:
      ValueError: if the arguments contradict each other, the split is empty, or the position is one
        in other data.
    """
    first_row = 0 if position is None else dataset.row_of(position)
    if not dataset.info.num_rows:
      raise ValueError("The dataset has no row to train on.")
    if batch_size % accum_steps:
      raise ValueError(f"batch_size={batch_size} is not a multiple of accum_steps={accum_steps}.")
    micro = batch_size // accum_steps
    slots = np.arange(accum_steps)[:, None] * micro + _checked(local_rows, micro)
    self._first_row, self._batch_size, self._dataset = first_row, batch_size, dataset
    self._count = 0
    self._prefetcher = _RowPrefetcher(dataset, first_row) if tells else None
    read = functools.partial(_train_batch, dataset, first_row, batch_size, slots)
    data = grain.MapDataset.range(_ENDLESS).map(read)
    super().__init__(data, num_workers=num_workers, prefetch=prefetch, place=place)

  def __next__(self) -> Batch:
    batch = super().__next__()
    begin = self._row()
    self._count += 1
    if self._prefetcher:
      for news in self._dataset.progress(self._row(), since=begin).news:
        logging.info("%s", news)
      self._prefetcher.move_to(self._row())
    return batch

  def close(self) -> None:
    """End the threads and processes that read ahead."""
    if self._prefetcher:
      self._prefetcher.close()
    super().close()

  def position(self) -> dict[str, Any]:
    """After the batches handed out so far, prefetched ones left out; JSON, alike on all hosts."""
    return self._dataset.position(self._row())

  @property
  def row_length(self) -> int:
    """Positions in the rows of the batch that is handed out next."""
    return self._dataset.length(self._row())

  def _row(self) -> int:
    return self._first_row + self._count * self._batch_size


class _RowPrefetcher:
  """A thread that makes rows before they are read. Without it they would be made as they are."""

  def __init__(self, dataset: TrainRows, row: int):
    self._dataset, self._row, self._going = dataset, row, True
    self._moved = threading.Event()
    self._thread = threading.Thread(target=self._run, name="data-ahead", daemon=True)
    self._thread.start()

  def move_to(self, row: int) -> None:
    """Rows before this one have been handed out."""
    self._row = row
    self._moved.set()

  def close(self) -> None:
    """Stop, and wait for it."""
    self._going = False
    self._moved.set()
    self._thread.join()

  def _run(self) -> None:
    try:
      while self._going:
        self._moved.clear()
        for _ in self._dataset.prepare(self._row, lambda: self._going):
          pass
        self._moved.wait()
    except InterruptedError:
      pass
    except (OSError, ValueError) as e:  # whoever reads these rows meets it again
      logging.warning("No more text is prepared ahead: %s", e)


def _train_batch(
  dataset: TrainRows, first_row: int, batch_size: int, slots: np.ndarray, k: int
) -> Batch:
  return dataset.read(first_row + k * batch_size + slots)


def eval_batches(
  dataset: Rows, *, batch_size: int, local_rows: np.ndarray, num_batches: int
) -> Batches:
  """This host's share of one pass over the rows in order; the last batch is filled with padding.

  Args:
    dataset: any split, also an empty one.
    batch_size: rows of a batch over all hosts.
    local_rows: sorted indices in [0, batch_size) that this host loads.
    num_batches: stop after so many; 0 = all.

  Returns:
    `Batches` of arrays [len(local_rows), seq_len].
  """
  local = _checked(local_rows, batch_size)
  length = -(-dataset.info.num_rows // batch_size)
  length = min(length, num_batches) if num_batches else length
  data = grain.MapDataset.range(length).map(lambda k: dataset.read_once(k * batch_size + local))
  return Batches(data, num_workers=0, prefetch=2)


def _checked(local_rows: np.ndarray, micro: int) -> np.ndarray:
  local = np.asarray(local_rows)
  if local.ndim != 1 or local.dtype.kind not in "iu" or not len(local):
    raise ValueError(f"local_rows={local!r}: expected a 1-D array of at least one row index.")
  if local[0] < 0 or local[-1] >= micro or (np.diff(local) <= 0).any():
    raise ValueError(f"local_rows={local!r}: expected increasing indices in [0, {micro}).")
  return local
