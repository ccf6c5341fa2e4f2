"""Random access -> iteration, by a thread or by processes that outlive Ctrl-C, not their parent."""

import contextlib
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from multiprocessing import resource_tracker
from typing import Self

import grain
import numpy as np
from absl import flags

from ats_jax.data.batch import Batch


class Source:
  """`length` batches, of which `read(k)` makes number k. Must pickle if processes read it."""

  def __init__(self, read: Callable[[int], Batch], length: int):
    self._read, self._length = read, length

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, index: int) -> Batch:
    return self._read(index)


class Batches:
  """An iterator over a source, in order; owns threads or processes: close it, or use a `with`."""

  def __init__(self, source: Source, *, num_workers: int, prefetch: int):
    """Starts to read at once.

    Args:
      source: what to iterate over.
      num_workers: processes that read; 0 = a thread of this one.
      prefetch: batches made ahead, by each process or by the thread.
    """
    # An element is a whole batch, made from its number alone: no worker has a rest to lose when
    # shares end unevenly, and there is no state to save.
    threads = 0 if num_workers else 1
    data = grain.MapDataset.source(source).to_iter_dataset(
      grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads * prefetch)
    )
    if num_workers:
      if not flags.FLAGS.is_parsed():  # Grain reads flags; a notebook or a test has parsed none
        flags.FLAGS.mark_as_parsed()
      options = grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=prefetch)
      data = data.mp_prefetch(options, worker_init_fn=_start_worker)
    batches = iter(data)
    self._shared_memory = num_workers > 0
    # Ctrl-C and a preemption signal reach the whole process group. The main process finishes its
    # step, so its loaders must live on: they inherit the mask of the thread that starts them.
    executor = futures.ThreadPoolExecutor(1, "first-batch")
    with _signals_blocked():
      self._first: futures.Future | None = executor.submit(next, batches, None)
    self._open = [batches]  # the only reference, which closing drops: Grain fails if it outlives us
    self._finalizer = weakref.finalize(self, _close, self._open, executor)

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
    return {name: np.array(x) for name, x in batch.items()}

  def close(self) -> None:
    """Stops the threads or processes and waits for them; harmless if repeated."""
    self._finalizer()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def _close(batches: list[grain.DatasetIterator], executor: futures.Executor) -> None:
  executor.shutdown(wait=True)
  batches.pop().close()


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
  parent = multiprocessing.parent_process()
  assert parent is not None

  def leave() -> None:
    parent.join()  # a parent that is killed cannot say goodbye
    os._exit(1)

  threading.Thread(target=leave, name="parent-watch", daemon=True).start()
