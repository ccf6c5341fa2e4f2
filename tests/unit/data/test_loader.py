import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import grain
import numpy as np
import psutil
import pytest
from loading import assert_same, batches_of

from ats_jax.data.rows.loader import Batches


def numbers(length):
  return grain.MapDataset.range(length).map(lambda k: {"k": np.full(3, k)})


def test_thread_reads_all_in_order_and_ends():
  with Batches(numbers(7), num_workers=0, prefetch=3) as batches:
    assert [int(b["k"][0]) for b in batches] == list(range(7))
    with pytest.raises(StopIteration):
      next(batches)
  with Batches(numbers(0), num_workers=0, prefetch=3) as batches:
    assert list(batches) == []


def test_closed_is_closed_and_an_error_in_the_source_reaches_the_reader():
  batches = Batches(numbers(7), num_workers=0, prefetch=3)
  next(batches)
  batches.close()
  batches.close()
  with pytest.raises(ValueError, match="closed"):
    next(batches)

  def read(k):
    if k == 2:
      raise ValueError("row 2 is bad")
    return {"k": np.array(k)}

  with Batches(grain.MapDataset.range(5).map(read), num_workers=0, prefetch=2) as batches:
    next(batches), next(batches)
    with pytest.raises(ValueError, match="row 2 is bad"):
      next(batches)


def test_closing_waits_for_the_thread_that_reads():
  """What it reads from may be closed next."""
  begun, go_on, readers = threading.Event(), threading.Event(), []

  def read(k):
    if k == 1:
      begun.set()
      go_on.wait()
    readers.append(threading.current_thread())
    return {"k": np.array(k)}

  batches = Batches(grain.MapDataset.range(9).map(read), num_workers=0, prefetch=3)
  next(batches)
  begun.wait()
  threading.Timer(0.2, go_on.set).start()
  batches.close()
  assert len(readers) == 2 and not readers[1].is_alive()


def test_prefetch_is_bounded():
  read = []
  data = grain.MapDataset.range(99).map(lambda k: read.append(k) or {"k": np.array(k)})
  with Batches(data, num_workers=0, prefetch=3) as batches:
    for taken in range(1, 100):
      next(batches)
      assert len(read) <= taken + 3
  assert read == list(range(99))


def test_workers_give_what_a_thread_gives(numbered):
  ds = numbered([3, 30, 1, 7, 19, 12, 2, 2, 40, 5, 6, 11, 9, 14], seq_len=8)
  how = dict(position={"row": 3, "data": ds.info.fingerprint}, accum=2, batch=6, local=[0, 2])
  before = multiprocessing.active_children()  # of other tests
  with batches_of(ds, **how) as thread, batches_of(ds, workers=2, **how) as workers:
    for _ in range(25):
      a, b = next(thread), next(workers)
      assert all(type(x) is np.ndarray for x in b.values())
      assert_same(a, b)
      assert workers.position() == thread.position()  # whatever was read ahead
  assert multiprocessing.active_children() == before


SCRIPT = """
import signal, sys
import grain, numpy as np, psutil
from ats_jax.data.rows.loader import Batches

if __name__ == "__main__":
  caught = []
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *a: caught.append(a[0]))
  source = grain.MapDataset.range(10**9).map(lambda k: {"k": np.full(100_000, k)})
  batches = Batches(source, num_workers=2, prefetch=2)
  children = psutil.Process().children(recursive=True)
  print("started", *(p.pid for p in children), flush=True)
  k = 0
  while len(caught) < 2 or k < 20:
    assert next(batches)["k"][0] == k
    k += 1
    if k in (1, 10):
      print("read", k, flush=True)
  for _ in range(20):
    assert next(batches)["k"][0] == k
    k += 1
  children = psutil.Process().children(recursive=True)
  print("alive", *(p.pid for p in children), flush=True)
  maps = [m.path for p in (*children, psutil.Process()) for m in p.memory_maps()]
  print("shared", *{path for path in maps if path.startswith("/dev/shm/psm")}, flush=True)
  while True:
    next(batches)
"""


@pytest.mark.thorough
def test_signals_to_the_group_and_death_of_the_parent(tmp_path):
  """Ctrl-C and SIGTERM, also while workers start, stop no worker; the parent's death stops all."""
  script = tmp_path / "script.py"
  script.write_text(textwrap.dedent(SCRIPT))
  main = subprocess.Popen(
    [sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True
  )
  try:
    for event in ("started", "read 1", "read 10"):
      assert main.stdout.readline().startswith(event)
      os.killpg(main.pid, signal.SIGINT)
      os.killpg(main.pid, signal.SIGTERM)
    word, *pids = main.stdout.readline().split()
    assert word == "alive" and len(pids) >= 2
    _, *shared = main.stdout.readline().split()
    assert shared
    main.kill()
    children = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    gone, alive = psutil.wait_procs(children, timeout=120)
    assert not alive
    assert not any(Path(path).exists() for path in shared)
  finally:
    for pid in (*map(int, locals().get("pids", [])), main.pid):
      if psutil.pid_exists(pid):
        os.kill(pid, signal.SIGKILL)
    main.wait()
    main.stdout.close()


@pytest.mark.thorough
def test_leaving_without_close_is_quick_and_quiet(tmp_path):
  """And uneven shares lose nothing (grain#1129)."""
  script = tmp_path / "script.py"
  script.write_text(
    "import grain, numpy as np\n"
    "from ats_jax.data.rows.loader import Batches\n"
    "if __name__ == '__main__':\n"
    "  data = grain.MapDataset.range(7).map(lambda k: {'k': np.array(k)})\n"
    "  with Batches(data, num_workers=2, prefetch=2) as batches:\n"
    "    assert [int(b['k']) for b in batches] == list(range(7))\n"
    "  batches = Batches(data, num_workers=2, prefetch=1)\n"
    "  print(next(batches)['k'])\n"  # the second worker has not been asked yet
  )
  done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
  # Python clears up, and says so, after a worker that was ended while it handed a batch over, and
  # when it collects semaphores of a closed loader while others are made.
  tracker = re.compile(r".*UserWarning: resource_?tracker.*\n.*warnings\.warn.*\n", re.IGNORECASE)
  said = tracker.sub("", done.stderr)
  assert (done.returncode, done.stdout, said) == (0, "0\n", "")
