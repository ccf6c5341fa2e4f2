"""A writer that may fail: in a thread of its own, and given up rather than the run."""

import queue
import threading
from collections.abc import Callable
from typing import Any, override

from absl import logging

from ats_jax.metrics.writer import MetricWriter, MultiWriter

MAX_WAITING = 10_000  # calls that a slow service may be behind
CLOSE_SECS = 60.0  # that the end of a run waits for one


class Guarded(MultiWriter):
  """Passes everything to a writer in a thread of its own; nobody waits for it, but at the end.

  Once it fails, or is `MAX_WAITING` calls behind, it is given up: an error is logged, once, and
  what comes after is dropped. An error that is none of the writer's `errors` is taken for a mistake
  in it: then its traceback is printed as well.
  """

  def __init__(self, name: str, writer: MetricWriter, *, close_secs: float = CLOSE_SECS):
    """Begin.

    Args:
      name: name of the writer in `log.writers`.
      writer: opened.
      close_secs: to wait at the end.
    """
    super().__init__([writer])
    self._name, self._errors, self._close_secs = name, writer.errors, close_secs
    self._given_up = False
    self._calls: queue.Queue[Callable[[], Any] | None] = queue.Queue(MAX_WAITING)
    self._thread = threading.Thread(target=self._work, name=f"writer {name}", daemon=True)
    self._thread.start()

  @override
  def _each(self, method: str, *args: Any, **kwargs: Any) -> None:
    self._put(lambda: super(Guarded, self)._each(method, *args, **kwargs))

  def _put(self, call: Callable[[], Any] | None) -> None:
    if self._given_up:
      return
    try:
      self._calls.put_nowait(call)
    except queue.Full:
      self._give_up(f"it is {MAX_WAITING} calls behind")

  def _work(self) -> None:
    ended = False
    try:
      for call in iter(self._calls.get, None):
        if not self._given_up:
          call()
      ended = True
    except self._errors as error:
      ended = True
      self._give_up(f"{type(error).__name__}: {error}")
    finally:
      if not ended:
        self._give_up("a mistake in it, whose traceback is printed")

  def _give_up(self, why: str) -> None:
    if not self._given_up:
      self._given_up = True
      logging.error(
        "log.writers: %r FAILED and is given up, so it lacks what comes from here on. The run and "
        "its other writers go on. (%s)", self._name, why,
      )  # fmt: skip

  @override
  def close(self) -> None:
    self._put(super().close)
    self._put(None)
    self._thread.join(self._close_secs)
    if self._thread.is_alive():
      self._give_up(f"it did not end within {self._close_secs:g} s")
