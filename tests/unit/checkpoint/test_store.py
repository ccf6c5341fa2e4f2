"""Checkpoints on an object store: as on a disk, whenever the process dies."""

import numpy as np
import pytest
from bucket import become, objects
from checkpoint_helpers import assert_same, make_state

from ats_jax.checkpoint import (
  CheckpointError,
  CheckpointManager,
  committed_steps,
  integrity,
  load_extra,
  restore_tree,
)
from ats_jax.checkpoint.reader import damaged_folders
from ats_jax.config.schema import CheckpointConfig
from ats_jax.store import paths
from ats_jax.store.paths import Path

STORE = Path("gs://bucket/run/checkpoints")


@pytest.fixture(autouse=True)
def store(bucket, tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  yield bucket
  left = [p for p in (tmp_path / "ats_jax").rglob("*") if p.is_file()]
  assert not left, "nothing stays on the local disk"


def save(step, keep=5, metric=None, **rest):
  with CheckpointManager(STORE, CheckpointConfig(keep=keep, **rest)) as manager:
    manager.save(step, make_state(step), {"rows": step}, metric)


def test_round_trip_is_bit_equal():
  with CheckpointManager(STORE, CheckpointConfig()) as manager:
    assert manager.restore_latest(make_state(0)) is None
    manager.save(5, make_state(5), {"rows": 1})
    step, restored, extra = manager.restore_latest(make_state(0))
  assert (step, extra) == (5, {"rows": 1})
  assert_same(restored, make_state(5))
  assert load_extra(STORE) == {"rows": 1}
  _, model, _ = restore_tree(STORE, make_state(0)["model"], subtree="model")
  assert_same(model, make_state(5)["model"])


def test_keeps_newest_and_best():
  kept = []
  for step, metric in {1: 5.0, 2: 3.0, 3: 4.0, 4: None, 5: float("nan")}.items():
    save(step, keep=2, metric=metric, keep_best=True)
    kept.append(committed_steps(STORE))
  assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]
  of_steps = {name.split("/")[4] for name in objects()}
  assert of_steps == {"2", "4", "5"}  # nothing is left of the others
  assert restore_tree(STORE, make_state(0), "best")[0] == 2


def test_every_moment_of_a_save_leaves_an_intact_newest_checkpoint(store):
  """Killed before any change to the store: a save, with the deletion of the one before."""

  def save(step):
    with CheckpointManager(STORE, CheckpointConfig(keep=1)) as manager:
      manager.save(step, {"x": np.arange(step)}, {})

  save(1)
  moments = []
  store.before = staticmethod(lambda operation, name: moments.append(objects()))
  save(2)
  store.before = staticmethod(lambda operation, name: None)
  seen = []
  for moment in [*moments, objects()]:
    become(moment)
    steps = committed_steps(STORE)
    if steps not in seen:
      seen.append(steps)
    assert all(integrity.find_damage(STORE / str(s)) == [] for s in steps)
    with CheckpointManager(STORE, CheckpointConfig()) as manager:
      step, state, _ = manager.restore_latest({"x": np.zeros(steps[-1], int)})
    assert step == steps[-1]
    np.testing.assert_array_equal(state["x"], np.arange(step))
    assert sorted({int(name.split("/")[4]) for name in objects()}) == steps  # the rest is removed
  assert seen == [[1], [1, 2], [2]] and len(moments) > 10


def test_what_a_killed_upload_left_is_removed_with_a_line(caplog):
  save(1)
  save(2)
  (STORE / "2" / "manifest.json").unlink()
  caplog.set_level("WARNING", "absl")
  assert committed_steps(STORE) == [1]
  assert any("/2/" in name for name in objects()), "a reader removes nothing"
  with CheckpointManager(STORE, CheckpointConfig()) as manager:
    assert manager.steps() == [1]
  assert "removing unfinished checkpoints of a stopped process: ['2']" in caplog.text
  assert not any("/2/" in name for name in objects())


def test_an_upload_that_fails_is_said_and_the_next_one_goes_well(store):
  save(1)

  def fail(operation, name):
    if name.endswith("manifest.json"):
      raise ConnectionError("no route to the store")

  with CheckpointManager(STORE, CheckpointConfig()) as manager:
    store.before = staticmethod(fail)
    manager.save(2, make_state(2), {})
    with pytest.raises(CheckpointError, match=r"2 was not saved .*no route.*intact: \[1\]"):
      manager.wait()
    store.before = staticmethod(lambda operation, name: None)
    manager.save(2, make_state(2), {}, wait=True)
    assert manager.steps() == [1, 2]
    assert_same(manager.restore_latest(make_state(0))[1], make_state(2))


def largest(step):
  names = [n for n in objects() if f"/checkpoints/{step}/" in n]
  return max(names, key=lambda n: len(objects()[n]))


@pytest.mark.parametrize("harm", ["flipped", "shorter", "missing"])
def test_a_damaged_one_is_passed_over_and_set_aside(harm, caplog):
  for step in (1, 2):
    save(step)
  name, content = largest(2), objects()
  data = content.pop(name)
  if harm != "missing":
    content[name] = data[:-1] if harm == "shorter" else bytes([data[0] ^ 1]) + data[1:]
  become(content)
  files = sorted(n for n in content if "/checkpoints/2/" in n)

  assert restore_tree(STORE, make_state(0))[0] == 1
  assert committed_steps(STORE) == [1, 2]  # a reader changes nothing

  caplog.set_level("WARNING", "absl")
  with CheckpointManager(STORE, CheckpointConfig()) as manager:
    step, state, _ = manager.restore_latest(make_state(0))
    assert step == 1 and manager.steps() == [1]
  assert_same(state, make_state(1))
  aside = sorted(n for n in objects() if "/2.damaged/" in n)
  assert [n.replace("2.damaged", "2") for n in aside] == files
  assert [p.name for p in damaged_folders(STORE)] == ["2.damaged"]
  assert f"the damaged one is now {STORE}/2.damaged." in caplog.text
  save(2)
  assert committed_steps(STORE) == [1, 2]


def test_a_process_that_died_while_it_wrote_locally_leaves_nothing(caplog):
  """The local copy that was to be put is found and removed by the next start."""
  left = paths.staging(STORE) / "4.1" / "state"
  paths.make_folder(left)
  (left / "half").write_text("x")
  caplog.set_level("WARNING", "absl")
  with CheckpointManager(STORE, CheckpointConfig()):
    assert not left.exists()
  assert "removing unfinished checkpoints of a stopped process: ['4.1']" in caplog.text


def test_an_empty_store_holds_nothing():
  assert committed_steps(STORE) == []
  with pytest.raises(CheckpointError, match="no checkpoint in gs://bucket/run/checkpoints"):
    restore_tree(STORE, {"x": np.zeros(3)})
