"""Snapshots on a machine's own disk, of one process; tests/multidevice has those of two."""

import logging
import resource
import signal

import jax
import numpy as np
import pytest
from checkpoint_helpers import assert_same, flip_bit, make_state
from jax.sharding import PartitionSpec as P

from ats_jax.checkpoint import CheckpointError, CheckpointManager, abstract_like
from ats_jax.checkpoint.local import LocalSnapshots, Offer, choose_snapshot, folder_of
from ats_jax.config.identity import RunIdentity
from ats_jax.config.schema import CheckpointConfig
from ats_jax.store.paths import Path

RUN = RunIdentity("0123456789abcdef", "settings")


@pytest.fixture
def cfg(tmp_path):
  return CheckpointConfig(local_every=1, local_dir=str(tmp_path / "local"))


def manager(tmp_path, cfg, mesh="mesh"):
  return CheckpointManager(Path(tmp_path / "run" / "checkpoints"), cfg, RUN, mesh=mesh)


def own(cfg):
  return Path(cfg.local_dir) / RUN.run / "process_0"


def kept(cfg):
  return sorted(p.name for p in own(cfg).iterdir())


def abandon(tmp_path, cfg, *steps, checkpoint=0):
  """Save snapshots, and end as a killed process does: nothing is tidied up."""
  saving = manager(tmp_path, cfg)
  if checkpoint:
    saving.save(checkpoint, make_state(checkpoint), {"rows": checkpoint}, wait=True)
  for step in steps:
    saving.save_locally(step, make_state(step), {"rows": step})
  saving._local.wait()


def test_the_later_of_snapshot_and_checkpoint_is_used(tmp_path, cfg):
  abandon(tmp_path, cfg, 5, checkpoint=3)
  with manager(tmp_path, cfg) as found:
    step, state, extra = found.restore_latest(make_state(0))
    assert (step, extra) == (5, {"rows": 5})
    assert_same(state, make_state(5))
    found.save(7, make_state(7), {"rows": 7})
    found.finish()
  assert not own(cfg).exists(), "a checkpoint has replaced them"
  abandon(tmp_path, cfg, 6)
  with manager(tmp_path, cfg) as found:
    assert found.restore_latest(make_state(0))[0] == 7


def test_two_are_kept_and_none_of_a_time_that_was_taken_back(tmp_path, cfg):
  abandon(tmp_path, cfg, 1, 2, 3)
  assert kept(cfg) == ["2", "3"]
  abandon(tmp_path, cfg, 2)  # after a rollback to step 1
  assert kept(cfg) == ["2"]


@pytest.mark.parametrize("file", ["data.bin", "index.json"])
def test_a_damaged_one_is_not_used(file, tmp_path, cfg, caplog):
  abandon(tmp_path, cfg, 1, 2)
  flip_bit(own(cfg) / "2" / file, 50)
  with manager(tmp_path, cfg) as found:
    step, state, _ = found.restore_latest(make_state(0))
  assert step == 1 and "2 is damaged: " in caplog.text
  assert_same(state, make_state(1))


def test_those_of_another_mesh_or_run_are_not_used(tmp_path, cfg, caplog):
  abandon(tmp_path, cfg, 2, checkpoint=1)
  with manager(tmp_path, cfg, mesh="another") as found:
    assert found.newest()[0] == 1
  assert "is of another mesh or of other settings; not used" in caplog.text
  other = RunIdentity("fedcba9876543210", "settings")
  snapshots = LocalSnapshots(cfg, other, "mesh")
  assert snapshots.newest(0) is None
  snapshots.close()


def test_one_that_does_not_fit_is_explained(tmp_path, cfg):
  abandon(tmp_path, cfg, 2)
  with manager(tmp_path, cfg) as found:
    found.newest()
    with pytest.raises(CheckpointError, match=r"does not fit: .*Delete .* on each machine"):
      found.read(2, {"step": jax.numpy.int32(0)})


def test_what_was_unfinished_is_no_snapshot(tmp_path, cfg):
  abandon(tmp_path, cfg, 1)
  (own(cfg) / "1").rename(own(cfg) / "unfinished.2")
  with manager(tmp_path, cfg) as found:
    assert found.newest() is None


def test_a_full_disk_is_a_warning(tmp_path, cfg, caplog):
  saving = manager(tmp_path, cfg)
  saving.save_locally(1, make_state(1), {})
  saving._local.wait()
  before, ignored = (
    resource.getrlimit(resource.RLIMIT_FSIZE),
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
  )
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    with caplog.at_level(logging.WARNING, "absl"):
      saving.save_locally(2, make_state(2), {})
      saving._local.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)
  assert "snapshot 2 was not kept" in caplog.text and "File too large" in caplog.text
  assert kept(cfg) == ["1"]


def test_shards_come_back_where_they_were(tmp_path, cfg):
  mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
  with jax.set_mesh(mesh):
    key = jax.random.key(7)
    state = {
      "cut": jax.random.normal(key, (16, 24), out_sharding=P("fsdp", "data")),
      "copied": jax.random.normal(key, (8, 3), np.dtype("bfloat16"), out_sharding=P("fsdp")),
      "keys": jax.sharding.reshard(jax.random.split(key, 8), P("fsdp")),
      "step": jax.numpy.int32(3),
    }
    saving = manager(tmp_path, cfg)
    saving.save_locally(1, state, {})
    saving._local.wait()
    size = (own(cfg) / "1" / "data.bin").stat().length
    assert size == sum(jax.random.key_data(x).nbytes if n == "keys" else x.nbytes
                       for n, x in state.items())  # each piece once  # fmt: skip
    with manager(tmp_path, cfg) as found:
      _, restored, _ = found.restore_latest(abstract_like(state, mesh))
  assert_same(restored, state)
  for name in ("cut", "copied", "keys"):
    assert restored[name].sharding.is_equivalent_to(state[name].sharding, state[name].ndim), name


def test_saved_values_survive_donation_of_the_state(tmp_path, cfg):
  state = {"w": jax.numpy.arange(1000.0)}
  saving = manager(tmp_path, cfg)
  saving.save_locally(1, state, {})
  jax.jit(lambda s: {"w": s["w"] * 0 - 1}, donate_argnums=0)(state)
  saving._local.wait()
  with manager(tmp_path, cfg) as found:
    _, restored, _ = found.restore_latest({"w": jax.numpy.zeros(1000)})
  np.testing.assert_array_equal(restored["w"], np.arange(1000.0))


REPLICAS, SHARDS = ["a", "a"], ["a", "b"]


@pytest.mark.parametrize(
  ("offers", "found"),
  [
    ([[], []], None),
    # Both have it: each its own.
    ([[Offer(5, 0, REPLICAS)], [Offer(5, 1, REPLICAS)]], (5, [(0, 0), (1, 1)])),
    # One has lost its own.
    ([[Offer(5, 0, REPLICAS)], []], (5, [(0, 0), (0, 0)])),
    ([[], [Offer(5, 1, REPLICAS)]], (5, [(1, 1), (1, 1)])),
    # Nobody else holds what it has lost.
    ([[Offer(5, 0, SHARDS)], []], None),
    # The newest is not whole, the one before is.
    ([[Offer(4, 0, SHARDS), Offer(5, 0, SHARDS)], [Offer(4, 1, SHARDS)]], (4, [(0, 0), (1, 1)])),
    # The processes have changed machines.
    ([[Offer(5, 1, SHARDS)], [Offer(5, 0, SHARDS)]], (5, [(1, 0), (0, 1)])),
    # Of another number of processes.
    ([[Offer(5, 0, ["a"])], [Offer(5, 0, ["a"])]], None),
    ([[Offer(5, 0, SHARDS)], [Offer(5, 1, REPLICAS)]], None),
  ],
)
def test_where_each_process_finds_its_part(offers, found):
  assert choose_snapshot(offers) == found


def test_the_folder_of_a_machine(monkeypatch):
  monkeypatch.setenv("SCRATCH", "/scratch/7")
  assert str(folder_of("$SCRATCH/ats")) == "/scratch/7/ats"
  with pytest.raises(ValueError, match=r"local_dir=\$ATS_NONE/x: a variable in it is not set"):
    folder_of("$ATS_NONE/x")
