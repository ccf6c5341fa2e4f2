"""Processes that work for another one: they end with it, and what they make comes back in order."""

import collections
import multiprocessing
import os
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent import futures
from typing import Any


def end_with_parent() -> None:
  """Watch the process that started this one, from now on; when it is gone, end this one too."""
  parent = multiprocessing.parent_process()
  assert parent is not None

  def leave() -> None:
    parent.join()  # a parent that is killed cannot say goodbye
    os._exit(1)

  threading.Thread(target=leave, name="parent-watch", daemon=True).start()


def map_in_children[T, B, S, R](
  batches: Iterator[B],
  tool: T,
  workers: int,
  sent: Callable[[B], S],
  work: Callable[[T, S], R],
  what: str,
) -> Generator[tuple[B, R]]:
  """Batches with what was made of them, in order; at most two for each process are in memory.

  Close it: that ends the processes.

  Args:
    batches: batches of work.
    tool: an object that the work needs; each process gets it once.
    workers: processes; 0 = this one.
    sent: maps a batch to the part of it that a process needs.
    work: makes of that what comes back; a function of a module.
    what: the processes do, for the error.

  Raises:
    ValueError: if a process died.
  """
  if not workers:
    for batch in batches:
      yield batch, work(tool, sent(batch))
    return
  context = multiprocessing.get_context("spawn")
  pool = futures.ProcessPoolExecutor(workers, context, initializer=_start, initargs=(tool,))
  waiting: collections.deque[tuple[B, futures.Future]] = collections.deque()
  try:
    for batch in batches:
      waiting.append((batch, pool.submit(_work, work, sent(batch))))
      if len(waiting) > 2 * workers:
        done, future = waiting.popleft()
        yield done, future.result()
    while waiting:
      done, future = waiting.popleft()
      yield done, future.result()
  except futures.process.BrokenProcessPool as e:
    raise ValueError(
      f"One of the {workers} processes that {what} was ended, by lack of memory perhaps. What is "
      "done is kept: run the same command again, with fewer --workers."
    ) from e
  finally:
    pool.shutdown(cancel_futures=True)


_tool: Any = None  # of a process that works


def _start(tool: Any) -> None:
  global _tool
  _tool = tool
  os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
  end_with_parent()


def _work[S, R](work: Callable[[Any, S], R], sent: S) -> R:
  assert _tool is not None
  return work(_tool, sent)
