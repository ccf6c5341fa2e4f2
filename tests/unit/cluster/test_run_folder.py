"""The folder of runs, on real file systems and on a store in memory."""

import os

import pytest

from ats_jax.cluster.preflight import folder
from ats_jax.cluster.preflight.folder import (
  clock_row,
  clock_skew,
  file_system,
  folder_rows,
  speed_row,
)
from ats_jax.cluster.preflight.results import CheckVerdict
from ats_jax.store.paths import Path


def test_a_folder_is_left_as_it_was(tmp_path, monkeypatch):
  monkeypatch.setattr(folder, "DISK_BYTES", 2**24)
  workdir = tmp_path / "runs" / "new"
  rows = {row.name: row for row in folder_rows(Path(workdir))}
  assert not list(tmp_path.iterdir())
  assert list(rows) == ["workdir", "disk", "whole files", "clock"]
  assert rows["workdir"].found.startswith(f"{workdir}: ")
  assert rows["whole files"].verdict is rows["clock"].verdict is CheckVerdict.OK


def test_a_folder_in_memory(tmp_path, monkeypatch):
  monkeypatch.setattr(folder, "DISK_BYTES", 2**24)
  monkeypatch.setattr(folder, "_mounts", lambda: {"/": "ext4", str(tmp_path): "tmpfs"})
  assert "a restart of the machine loses it" in folder_rows(Path(tmp_path))[0].advice
  monkeypatch.setattr(folder, "_mounts", lambda: {"/": "ext4", str(tmp_path): "nfs4"})
  rows = folder_rows(Path(tmp_path))
  assert rows[0].found.endswith("nfs4, shared")
  assert rows[2].found.endswith("(tried on this machine only)")


def test_a_folder_that_may_not_be_written():
  (row,) = folder_rows(Path("/proc/runs"))  # for root too
  assert row.verdict is CheckVerdict.BAD and "Choose another --workdir" in row.advice


def test_kinds_of_file_systems():
  mounts = {"/": "overlay", "/home": "nfs4", "/home/me/scratch": "lustre"}
  assert file_system("/home/me", mounts) == "nfs4"
  assert file_system("/home/me/scratch/runs", mounts) == "lustre"
  assert file_system("/homes", mounts) == "overlay"
  assert file_system("/x", {}) == "unknown"


def test_a_slow_disk():
  assert speed_row(2e9, 3e9).verdict is CheckVerdict.OK
  row = speed_row(20e6, 3e9)
  assert row.found.startswith("writes 20 MB/s, reads 3,000 MB/s")
  assert "takes 10 minutes" in row.advice and "checkpoint.every_steps" in row.advice


@pytest.mark.parametrize("ahead", [100.0, -100.0])
def test_a_file_system_with_another_clock(ahead, tmp_path, monkeypatch):
  """This machine's clock is moved against that of the disk."""
  assert abs(clock_skew(tmp_path)) < 1
  now = folder.time.time
  monkeypatch.setattr(folder.time, "time", lambda: now() - ahead)
  skew = clock_skew(tmp_path)
  assert skew == pytest.approx(ahead, abs=1)
  row = clock_row(skew)
  assert row.verdict is CheckVerdict.ADVICE and "set the clocks" in row.advice
  assert f"s {'ahead' if ahead > 0 else 'behind'}" in row.found


def test_a_lock_that_does_not_hold(tmp_path, monkeypatch):
  assert folder._locks(tmp_path / "lock")
  monkeypatch.setattr(folder.fcntl, "flock", lambda file, how: None)  # a file system without locks
  assert not folder._locks(tmp_path / "lock")
  row = folder._whole_row(Path(tmp_path), shared=True)
  assert row.verdict is CheckVerdict.BAD and "two runs could share a workdir" in row.advice


def test_a_store(bucket):
  workdir, claims = folder_rows(Path("gs://bucket/runs"))
  assert workdir.verdict is claims.verdict is CheckVerdict.OK
  assert claims.found == "the store refuses a write to what must not be there"
  assert not bucket.store, os.linesep.join(bucket.store)


def test_a_store_that_writes_all_the_same(bucket, monkeypatch):
  put = bucket.pipe_file
  monkeypatch.setattr(
    bucket, "pipe_file", lambda self, path, value, mode="": put(self, path, value)
  )
  _, claims = folder_rows(Path("gs://bucket/runs"))
  assert claims.verdict is CheckVerdict.ADVICE and "ends within 10 s" in claims.advice


def test_a_store_that_refuses(bucket):
  def refuse(operation, name):
    raise PermissionError(13, "Forbidden")

  bucket.before = staticmethod(refuse)
  (row,) = folder_rows(Path("gs://bucket/runs"))
  assert row.verdict is CheckVerdict.BAD and "Forbidden" in row.found
