"""A process that works for another one ends with it."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
  """Watch the process that started this one, from now on; when it is gone, end this one too."""
  parent = multiprocessing.parent_process()
  assert parent is not None

  def leave() -> None:
    parent.join()  # a parent that is killed cannot say goodbye
    os._exit(1)

  threading.Thread(target=leave, name="parent-watch", daemon=True).start()
