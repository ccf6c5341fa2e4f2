"""Files and folders, local and on a store: the same operations, the same guarantees."""

import contextlib
import errno
import itertools
import os
import stat
import sys

import pytest
from bucket import become, objects
from fsspec.registry import _registry

from ats_jax.store import paths
from ats_jax.store.paths import Log, Path


@pytest.fixture(params=["local", "store"])
def root(request, tmp_path):
  if request.param == "local":
    return Path(tmp_path)
  request.getfixturevalue("bucket")
  return Path("gs://bucket/run")


def test_a_path_is_local_or_on_a_store(bucket):
  for text in ("runs/debug", "/a/b", "gs://bucket/run", "../x"):
    path = paths.parse(text)
    assert isinstance(path, Path) and str(path / "c") == f"{text}/c"


def test_a_path_that_cannot_be_is_refused():
  for text, says in (
    ("foo://bucket/run", "expected a local path or one of gs://, s3://, az://, not foo://"),
    ("http://host/run", "not http://"),
    ("gs://", "names no bucket. Example: gs://bucket/runs/debug"),
    ("gs:///", "names no bucket"),
  ):
    with pytest.raises(ValueError, match=says) as error:
      paths.parse(text)
    assert str(error.value).startswith(text) and "\n" not in str(error.value)


@pytest.mark.parametrize(("scheme", "driver"), paths.DRIVERS.items())
def test_a_missing_driver_names_the_extra(scheme, driver, monkeypatch):
  monkeypatch.setitem(sys.modules, driver, None)
  monkeypatch.delitem(_registry, scheme, raising=False)
  with pytest.raises(ValueError) as error:
    paths.parse(f"{scheme}://bucket/run")
  assert str(error.value) == (
    f"{scheme}://bucket/run needs {driver}, which is not installed: pip install 'ats_jax[{scheme}]'"
  )


def test_a_file_is_replaced_in_one_step(root):
  paths.make_folder(root / "a")
  path = root / "a" / "x"
  for content in ("first", "", b"\x00\xff"):
    paths.write(path, content)
    assert paths.read(path) == (content if isinstance(content, bytes) else content.encode())
  assert paths.files(root) == ["a/x"]
  with pytest.raises(FileNotFoundError):
    paths.read(root / "nothing")


def test_links_devices_and_pipes_are_not_followed(tmp_path):
  """Those that somebody else left in a folder could overwrite files, or have no end."""
  (other := tmp_path / "other").write_text("mine")
  path = Path(tmp_path / "config.json")
  for link, write in (
    ("config.json.tmp", lambda: paths.write(path, "x")),
    ("log.txt", lambda: Log(Path(tmp_path / "log.txt"), b"mine")),
  ):
    (tmp_path / link).symlink_to(other)
    with pytest.raises(OSError, match="symbolic link"):
      write()
  assert other.read_text() == "mine"
  os.mkfifo(tmp_path / "pipe")
  for name in (tmp_path / "pipe", "/dev/zero"):
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
      paths.read(Path(name))
  assert paths.parse_json(b'\xef\xbb\xbf{"a": 1}') == paths.parse_json('\ufeff{"a": 1}') == {"a": 1}
  with pytest.raises(ValueError, match="nested too deeply"):
    paths.parse_json("[" * 100_000)


@pytest.mark.parametrize(
  ("code", "of_folders", "fails"),
  [
    (errno.EINVAL, True, False),  # CIFS and FUSE flush files only
    (errno.ENOTSUP, True, False),
    (errno.EIO, True, True),
    (errno.EINVAL, False, True),
  ],
)
def test_a_file_system_may_not_know_how_to_flush_a_folder(
  tmp_path, monkeypatch, code, of_folders, fails
):
  flush = os.fsync

  def fsync(number):
    if stat.S_ISDIR(os.fstat(number).st_mode) == of_folders:
      raise OSError(code, os.strerror(code))
    flush(number)

  monkeypatch.setattr(os, "fsync", fsync)
  with pytest.raises(OSError) if fails else contextlib.nullcontext():
    paths.write(tmp_path / "a.json", "new")
  assert of_folders == (tmp_path / "a.json").exists()


def test_a_log_grows_and_begins_anew(root):
  path = root / "log"
  for begin, lines in ((b"", [b"1\n", b"2\n"]), (b"1\n", [b"3\n"])):
    log = Log(path, begin)
    for line in lines:
      log.write(line)
    log.flush()
    assert paths.read(path) == begin + b"".join(lines)
    log.rewrite(b"head\n")
    log.write(b"tail\n")
    log.close()
    assert paths.read(path) == b"head\ntail\n"


def test_a_log_on_a_store_is_put_seldom_but_by_itself(bucket, monkeypatch):
  """A put sends the whole: the longer it takes, the longer until the next."""
  now, puts = [0.0], []
  monkeypatch.setattr(paths.time, "monotonic", lambda: now[0])

  def slow(operation, name):
    puts.append(now[0])
    now[0] += 1.0

  bucket.before = staticmethod(slow)
  log = Log(Path("gs://bucket/log"))
  while now[0] < 4000.0:
    log.write(b"row\n")
    now[0] += 0.5
  gaps = [b - a for a, b in itertools.pairwise(puts)]
  assert len(puts) >= 15 and min(gaps) >= 1.0 * paths.PUT_SHARE
  log.close()
  assert paths.read(Path("gs://bucket/log")).endswith(b"row\n")


ROWS = [b"%d " % n + b"x" * (n % 5) + b"\n" for n in range(30)]


def test_a_log_on_a_store_grows_by_parts(bucket, monkeypatch):
  """Only the last part is put again; whole rows stay in one, and a run that is cut goes on."""
  monkeypatch.setattr(paths, "PART_BYTES", 20)
  path, puts = Path("gs://bucket/run/log.jsonl"), []
  bucket.before = staticmethod(lambda operation, name: puts.append((operation, name)))
  log = Log(path)
  for row in ROWS:
    log.write(row)
    log.flush()
  log.close()
  assert paths.read_log(path) == b"".join(ROWS)
  names = sorted(objects())
  assert names[:2] == ["/bucket/run/log.jsonl", "/bucket/run/log.jsonl.0001"] and len(names) > 5
  assert all(data.endswith(b"\n") and len(data) < 20 + 10 for data in objects().values() if data)
  first = [name for operation, name in puts if name.endswith("log.jsonl")]
  last = max(i for i, (_, name) in enumerate(puts) if name.endswith("log.jsonl"))
  assert len(first) == last + 1, "a part that is full is never put again"

  before = objects()
  for kept in (30, 12, 11, 3, 0):  # rows up to the checkpoint that a run goes on from
    become(before)
    moments = []
    bucket.before = staticmethod(lambda operation, name, m=moments: m.append(objects()))
    log = Log(path, b"".join(ROWS[:kept]))
    log.write(b"new\n")
    log.close()
    bucket.before = staticmethod(lambda operation, name: None)
    assert paths.read_log(path) == b"".join([*ROWS[:kept], b"new\n"])
    for moment in moments:  # killed: all that is to be kept is there, and what follows is in order
      become(moment)
      found = paths.read_log(path)
      assert found.startswith(b"".join(ROWS[:kept])) and b"".join(ROWS).startswith(
        found.removesuffix(b"new\n")
      )


def test_what_is_changed_at_its_beginning_stays_whole(bucket, monkeypatch):
  monkeypatch.setattr(paths, "PART_BYTES", 20)
  path = Path("gs://bucket/run/table.csv")
  log = Log(path, one_object=True)
  for row in ROWS:
    log.write(row)
  log.close()
  assert list(objects()) == ["/bucket/run/table.csv"]
  assert paths.read_log(path) == paths.read(path) == b"".join(ROWS)
  with pytest.raises(FileNotFoundError):
    paths.read_log(path.with_name("none"))


def folder_of(staged, number):
  paths.make_folder(staged / "deep")
  for name in ("a", "deep/b", "last"):
    (staged / name).write_text(f"{name} {number}")


def test_a_folder_is_committed_fetched_moved_and_deleted(root, tmp_path):
  for number in (1, 2):
    folder_of(paths.staging(root) / str(number), number)
    paths.commit_folder(paths.staging(root) / str(number), root / str(number), "last")
  names = lambda: sorted(set(paths.committed(root, "last")) - {"unfinished"})
  assert names() == ["1", "2"]
  assert paths.files(root / "1") == ["a", "deep/b", "last"]
  with paths.fetched(root / "2") as local:
    assert (local / "deep" / "b").read_text() == "deep/b 2"
    assert not paths.is_remote(local)
  paths.move_folder(root / "2", root / "2.damaged", "last")
  assert names() == ["1", "2.damaged"]
  assert paths.read(root / "2.damaged" / "a") == b"a 2"
  paths.delete_folder(root / "1", "last", paths.staging(root) / "gone")
  assert names() == ["2.damaged"]


def test_every_moment_of_a_change_to_a_store_leaves_whole_folders(bucket, tmp_path):
  """Committed, moved, deleted: whenever the process dies, what is committed is complete."""
  root, moments = Path("gs://bucket/run"), []
  bucket.before = staticmethod(lambda operation, name: moments.append(objects()))
  folder_of(Path(tmp_path) / "1", 1)
  paths.commit_folder(Path(tmp_path) / "1", root / "1", "last")
  paths.move_folder(root / "1", root / "2", "last")
  paths.delete_folder(root / "2", "last", root / "unused")
  seen = []
  assert len(moments) == 3 + 3 + 3 + 3
  for moment in [*moments, objects()]:
    become(moment)
    now = paths.committed(root, "last")
    if not seen or now != seen[-1]:
      seen.append(now)
    for name in now:
      assert paths.files(root / name) == ["a", "deep/b", "last"]
    assert set(paths.unfinished_in(root, "last")).isdisjoint(now)
  assert seen[0] == [] and ["1"] in seen and ["2"] in seen and seen[-1] == []


def test_what_is_filled_locally_ends_in_its_folder(root):
  with paths.filled(root / "trace") as local:
    paths.make_folder(local / "deep")
    (local / "deep" / "x").write_text("x")
  assert paths.files(root / "trace") == ["deep/x"]
