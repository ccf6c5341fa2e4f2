"""One process at a time trains in a workdir, also where the system has no locks."""

import errno
import threading
import time

import pytest
from bucket import objects

from ats_jax.exits import REFUSED
from ats_jax.store import lease, paths
from ats_jax.store.paths import Path

LOCK = Path("gs://bucket/run/.lock")


@pytest.fixture(params=["local", "store"])
def lock(request, tmp_path):
  if request.param == "local":
    return Path(tmp_path / ".lock")
  request.getfixturevalue("bucket")
  return LOCK


@pytest.fixture(autouse=True)
def fast(monkeypatch):
  monkeypatch.setattr(lease, "BEAT_SECS", 0.05)
  monkeypatch.setattr(lease, "DEAD_SECS", 0.5)


@pytest.fixture(autouse=True)
def ended(monkeypatch):
  """Codes with which the process would have ended."""
  codes = []
  monkeypatch.setattr(lease.os, "_exit", codes.append)
  return codes


def wait_for(condition):
  deadline = time.monotonic() + 10
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_a_second_holder_is_refused_until_the_first_ends(lock):
  with pytest.raises(ZeroDivisionError), lease.held(lock):  # also by an error
    for _ in range(2):
      with pytest.raises(BlockingIOError), lease.held(lock):
        raise AssertionError
    raise ZeroDivisionError
  with lease.held(lock):
    pass


def test_whether_a_lock_is_held_is_seen_without_taking_it(lock):
  assert not lease.is_held(lock)
  with lease.held(lock):
    assert lease.is_held(lock)
    with pytest.raises(BlockingIOError), lease.held(lock):
      raise AssertionError
  assert not lease.is_held(lock)
  if lock is LOCK:
    paths.write(LOCK, "dead 0")
    assert not lease.is_held(LOCK) and paths.read(LOCK) == b"dead 0"


def test_the_lock_of_a_dead_process_is_taken_when_it_was_still_for_long(bucket):
  paths.write(LOCK, "host:1:abcd 17")
  start = time.monotonic()
  with lease.held(LOCK):
    assert time.monotonic() - start >= lease.DEAD_SECS
    assert b"abcd" not in paths.read(LOCK)
  assert not objects()


def test_of_two_that_see_the_same_one_dead_the_later_is_refused(bucket, monkeypatch):
  """The other one takes it while this one waits for the last time."""
  paths.write(LOCK, "dead 0")
  sleep = time.sleep

  def other_takes_it(seconds):
    sleep(seconds)
    paths.write(LOCK, "other 0")

  monkeypatch.setattr(lease, "DEAD_SECS", 0.0)
  monkeypatch.setattr(lease.time, "sleep", other_takes_it)
  with pytest.raises(BlockingIOError, match="is held by other 0"), lease.held(LOCK):
    raise AssertionError
  assert paths.read(LOCK) == b"other 0"


def test_the_lock_of_a_process_that_lives_is_never_taken(bucket, monkeypatch):
  """However long it is looked at."""
  monkeypatch.setattr(lease, "DEAD_SECS", 60.0)
  over = threading.Event()

  def beat():
    for n in range(10_000):
      paths.write(LOCK, f"host:1:abcd {n}")
      if over.wait(lease.BEAT_SECS):
        return

  other = threading.Thread(target=beat)
  other.start()
  try:
    for _ in range(3):
      with pytest.raises(BlockingIOError, match="held by host:1:abcd"), lease.held(LOCK):
        raise AssertionError
  finally:
    over.set()
    other.join()


def test_a_lock_that_its_holder_lets_go_meanwhile_is_taken(bucket, monkeypatch):
  monkeypatch.setattr(lease, "DEAD_SECS", float("inf"))  # waiting for its death would never end
  paths.write(LOCK, "host:1:abcd 17")
  threading.Timer(0.1, LOCK.unlink).start()
  with lease.held(LOCK):
    assert b"abcd" not in paths.read(LOCK)


def test_of_two_that_start_at_once_one_goes_on(bucket):
  barrier, inside = threading.Barrier(8), []
  refused = threading.Semaphore(0)

  def start():
    barrier.wait()
    try:
      with lease.held(LOCK):
        inside.append(1)
        for _ in range(7):
          assert refused.acquire(timeout=60)
    except BlockingIOError:
      refused.release()

  threads = [threading.Thread(target=start) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(inside) == 1


def test_a_store_that_has_no_word_for_what_is_there_already(bucket):
  """As s3fs, whose error is that of a wrong argument; what is no such case stays what it is."""

  def fail(operation, name):
    raise OSError(errno.EINVAL, "At least one of the pre-conditions you specified did not hold")

  def take(operation, name):
    bucket.before = staticmethod(lambda operation, name: None)
    paths.write(LOCK, "host:1:abcd 17")
    fail(operation, name)

  for before, kind in ((take, FileExistsError), (fail, OSError)):
    bucket.store.clear()
    bucket.before = staticmethod(before)
    with pytest.raises(OSError) as error:
      paths.create(LOCK, "mine")
    assert type(error.value) is kind


def test_a_holder_whose_lock_was_taken_ends_at_once_and_touches_nothing(bucket, ended):
  with lease.held(LOCK):
    paths.write(LOCK, "host:2:efgh 0")
    wait_for(lambda: ended)
    assert ended[0] == REFUSED
  assert paths.read(LOCK) == b"host:2:efgh 0"


def test_a_network_that_fails_for_a_moment_is_a_warning(bucket, ended, caplog):
  caplog.set_level("WARNING", "absl")
  failures = []

  def fail(operation, name):
    if len(failures) < 3:
      failures.append(name)
      raise ConnectionError("no route")

  with lease.held(LOCK):
    first = paths.read(LOCK)
    bucket.before = staticmethod(fail)
    wait_for(lambda: len(failures) == 3 and paths.read(LOCK) != first)
  assert not ended
  assert "was not renewed: ConnectionError: no route" in caplog.text
