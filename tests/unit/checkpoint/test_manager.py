import contextlib
import copy
import errno
import functools
import json
import os
import random
import re
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import assert_same, flip_bit, make_state

from ats_jax.checkpoint import (
  CheckpointError,
  CheckpointManager,
  committed_steps,
  integrity,
  keep_for,
  layout,
  load_extra,
  parted,
  reader,
  restore_tree,
  stream,
)
from ats_jax.config.identity import RunIdentity
from ats_jax.config.schema import CheckpointConfig
from ats_jax.store import paths


def files_of(folder):
  return sorted(p for p in folder.rglob("*") if p.is_file())


def data_file(folder):
  return max(files_of(folder), key=lambda p: p.stat().st_size)


def test_round_trip_is_bit_equal(tmp_path):
  state, extra = make_state(5), {"rows": 123, "tokenizer": {"sha": "ab"}, "ü": [1.5, None]}
  with CheckpointManager(tmp_path, CheckpointConfig()) as manager:
    assert manager.restore_latest(state) is None
    manager.save(5, state, extra, metric=2.25)
    assert manager.last_save_stall_secs > 0
    step, restored, back = manager.restore_latest(make_state(0))
  assert (step, back) == (5, extra)
  assert_same(restored, state)
  assert load_extra(tmp_path) == extra
  assert not list((tmp_path / "unfinished").iterdir())
  body = json.loads((tmp_path / "5" / "manifest.json").read_text())["body"]
  assert body["leaves"]["model/embed"] == "float32[32,16]"
  assert body["leaves"]["keys"] == "key<rbg>[3]"


def test_arrays_that_were_read_need_their_files_no_more(tmp_path):
  state = make_state(5)
  with CheckpointManager(tmp_path, CheckpointConfig()) as manager:
    manager.save(5, state, {})
    _, restored, _ = manager.restore_latest(make_state(0))
  for file in files_of(tmp_path / "5"):
    os.truncate(file, 0)  # a page that is still mapped could not be read any more
  assert_same(restored, state)


def test_arrays_are_in_several_files_so_that_threads_hash_them(tmp_path, monkeypatch):
  monkeypatch.setattr(reader, "FILE_BYTES", 2**20)
  state = {f"w{n}": jax.random.normal(jax.random.key(n), (256, 256)) for n in range(16)}  # 4 MB
  with CheckpointManager(tmp_path, CheckpointConfig()) as manager:
    manager.save(1, state, {})
    _, restored, _ = manager.restore_latest(state)
  assert_same(restored, state)
  assert data_file(tmp_path / "1").stat().st_size < 1.5 * 2**20


def test_extra_is_what_it_was_when_saved(tmp_path):
  extra = {"rows": [1]}
  with CheckpointManager(tmp_path, CheckpointConfig()) as manager:
    manager.save(1, {"x": jnp.zeros(3)}, extra)
    extra["rows"].append(2)
    with pytest.raises(ValueError, match=r"`extra` of checkpoint 2 must be JSON values: .*bytes"):
      manager.save(2, {"x": jnp.zeros(3)}, {"bad": b"bytes"})
  assert load_extra(tmp_path, 1) == {"rows": [1]}


def test_saved_values_survive_donation_of_the_state(tmp_path):
  """The step that follows a save overwrites the state's buffers while Orbax still writes."""

  @functools.partial(jax.jit, donate_argnums=0)
  def update(state, change):
    return jax.tree.map(lambda x: x + change, state)

  def fresh():
    layers = np.broadcast_to(np.arange(16.0, dtype=np.float32)[:, None, None], (16, 512, 1024))
    return jax.block_until_ready({"stack": {"w": jnp.array(layers)}})

  pointer = lambda state: state["stack"]["w"].unsafe_buffer_pointer()
  first = fresh()
  before = pointer(first)
  assert pointer(update(first, 1.0)) == before, "donation works here, else this proves nothing"

  with CheckpointManager(tmp_path, CheckpointConfig(), stacks={"stack": range(16)}) as manager:
    for attempt in range(1, 9):  # on a busy machine a save may be over first
      state = fresh()
      manager.save(attempt, state, {})
      state = jax.block_until_ready(update(state, -7.0))
      if attempt not in manager.steps():
        break
    else:
      pytest.fail("no update ran while a save was in flight")
    for _ in range(19):
      state = update(state, -7.0)
    manager.wait()
    _, restored, _ = manager.restore_latest(state)
  assert float(state["stack"]["w"][3, 0, 0]) == 3 - 140
  assert_same(restored, fresh())


def test_saving_a_committed_step_again_changes_nothing(tmp_path):
  with CheckpointManager(tmp_path, CheckpointConfig()) as manager:
    manager.save(1, {"x": jnp.zeros(3)}, {}, wait=True)
    before = (tmp_path / "1" / "manifest.json").read_bytes()
    manager.save(1, {"x": jnp.ones(3)}, {}, wait=True)
  assert (tmp_path / "1" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("asynchronous", [True, False])
def test_keeps_newest_and_best_across_restarts(tmp_path, asynchronous):
  cfg = CheckpointConfig(keep=2, keep_best=True, asynchronous=asynchronous)
  metrics = {1: 5.0, 2: 3.0, 3: 4.0, 4: None, 5: float("nan"), 6: 3.5, 7: 2.5, 8: 9.0}
  kept = []
  for step, metric in metrics.items():
    with CheckpointManager(tmp_path, cfg) as manager:
      manager.save(step, {"x": jnp.full(4, step)}, {"step": step}, metric)
      if not asynchronous:
        assert step in manager.steps()
    kept.append(committed_steps(tmp_path))
  assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6], [6, 7], [7, 8]]
  assert restore_tree(tmp_path, {"x": jnp.zeros(4, int)}, "best")[0] == 7
  assert load_extra(tmp_path, "best") == {"step": 7}


def test_a_checkpoint_that_something_needs_is_kept(checkpoints, caplog):
  caplog.set_level("WARNING", "absl")
  keep_for(checkpoints / "1", "another run")
  keep_for(checkpoints / "7", "a run of one that is gone")
  with CheckpointManager(checkpoints, CheckpointConfig(keep=1)) as manager:
    manager.save(4, make_state(4), {}, wait=True)
    assert manager.steps() == [1, 4]
  (line,) = [r.getMessage() for r in caplog.records]
  assert line.startswith(
    f"{checkpoints}/7 cannot be marked as needed for a run of one that is gone"
  )


def test_of_an_old_checkpoint_that_is_a_link_only_the_link_is_deleted(checkpoints, tmp_path):
  elsewhere = (checkpoints / "1").rename(tmp_path / "elsewhere")
  (checkpoints / "1").symlink_to(elsewhere)
  with CheckpointManager(checkpoints, CheckpointConfig(keep=1)) as manager:
    manager.save(4, make_state(4), {}, wait=True)
    assert manager.steps() == [4]
  assert (elsewhere / "manifest.json").exists()
  assert not list((checkpoints / "unfinished").iterdir())


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(checkpoints, caplog):
  caplog.set_level("WARNING", "absl")
  with CheckpointManager(checkpoints, CheckpointConfig(keep=1)) as manager:
    (checkpoints / "unfinished").mkdir(exist_ok=True)
    (checkpoints / "unfinished" / "2.deleted").write_text("in the way of the rename")
    manager.save(4, make_state(4), {}, wait=True)
    assert manager.steps() == [2, 4]
  (line,) = [r.getMessage() for r in caplog.records]
  assert line.startswith(f"the old checkpoint 2 in {checkpoints} was not deleted: ")


def test_restores_a_part_a_step_or_the_best(checkpoints):
  step, model, extra = restore_tree(checkpoints, make_state(0)["model"], subtree="model")
  assert (step, extra) == (3, {"rows": 300})
  assert_same(model, make_state(3)["model"])
  _, count, _ = restore_tree(checkpoints, jnp.int32(0), 2, subtree="step")
  assert int(count) == 2
  _, state, _ = restore_tree(checkpoints, make_state(0), 1)
  assert_same(state, make_state(1))
  with pytest.raises(CheckpointError, match=r"no checkpoint 9 in .*there are \[1, 2, 3\]"):
    restore_tree(checkpoints, make_state(0), 9)
  with pytest.raises(CheckpointError, match="has a metric"):
    restore_tree(checkpoints, make_state(0), "best")
  with pytest.raises(CheckpointError, match="no checkpoint in"):
    load_extra(checkpoints / "nowhere")


@pytest.mark.parametrize(
  "step, module, name",
  [
    ("latest", integrity, "find_damage"),
    ("latest", layout, "named_arrays"),
    ("latest", parted, "join"),
    ("latest", reader, "load_extra"),
    ("best", parted, "join"),
    (3, integrity, "find_damage"),
    (3, parted, "join"),
  ],
)
def test_a_checkpoint_deleted_while_it_is_read(tmp_path, monkeypatch, caplog, step, module, name):
  with CheckpointManager(tmp_path, CheckpointConfig(keep=1)) as manager:
    manager.save(3, make_state(3), {"rows": 300}, metric=2.0, wait=True)
    original = getattr(module, name)

    def after_training_went_on(*args, **kwargs):
      monkeypatch.setattr(module, name, original)
      manager.save(4, make_state(4), {"rows": 400}, metric=1.0, wait=True)
      return original(*args, **kwargs)

    monkeypatch.setattr(module, name, after_training_went_on)
    said = f"checkpoint 3 in {tmp_path} was deleted while it was read"
    if step == 3:
      with pytest.raises(CheckpointError, match=re.escape(said)):
        restore_tree(tmp_path, make_state(0), step)
      return
    with caplog.at_level("INFO"):
      chosen, state, extra = restore_tree(tmp_path, make_state(0), step)
  assert (chosen, extra) == (4, {"rows": 400})
  assert_same(state, make_state(4))
  assert [r.getMessage() for r in caplog.records if "checkpoint 3" in r.getMessage()] == [
    f"{said}. Reading the {step} one there is now."
  ]


def test_state_that_does_not_fit_is_explained(checkpoints):
  state = make_state(0)
  state["bf16"] = state["bf16"].astype(jnp.float32)
  state["step"] = jnp.zeros((2,), jnp.int32)
  state["new"] = state.pop("key")
  with (
    CheckpointManager(checkpoints, CheckpointConfig()) as manager,
    pytest.raises(CheckpointError, match="4 of 22 arrays differ") as error,
  ):
    manager.restore_latest(state)
  for line in (
    "bf16 is bfloat16[7] in the checkpoint, float32[7] in this program",
    "step is int32[] in the checkpoint, int32[2] in this program",
    "key is key<fry>[] in the checkpoint, not there in this program",
    "new is not there in the checkpoint, key<fry>[] in this program",
  ):
    assert line in str(error.value)
  with pytest.raises(CheckpointError, match=r"ema is not there in the checkpoint"):
    restore_tree(checkpoints, jnp.zeros(3), subtree="ema")


@pytest.fixture
def of_two_runs(tmp_path):
  """A folder with checkpoint 1 of run "one" and checkpoint 2 of run "two"."""
  for step, run in ((1, "one"), (2, "two")):
    with CheckpointManager(tmp_path / run, CheckpointConfig(), RunIdentity(run, "s")) as manager:
      manager.save(step, make_state(step), {"settings": {"num_steps": [1, 2]}})
  (tmp_path / "two" / "2").rename(tmp_path / "one" / "2")
  return tmp_path / "one"


def test_training_takes_no_checkpoint_of_another_run(of_two_runs, checkpoints):
  one = RunIdentity("one", "s")
  for folder, identity, says in (
    (of_two_runs, one, r"one/2 is of another run: two, expected one\. .*Move it out"),
    (of_two_runs, RunIdentity("two", "s"), r"one/1 is of another run: one, expected two\. "),
    (of_two_runs, RunIdentity("one", "t"), r"with other settings: their hash is s, expected t"),
    (checkpoints, one, "is of another run: none, expected one"),
  ):
    with CheckpointManager(folder, CheckpointConfig(keep=1), identity) as manager:
      for use in (manager.newest, lambda manager=manager: manager.restore_latest(make_state(0))):
        with pytest.raises(CheckpointError, match=says):
          use()
  assert committed_steps(of_two_runs) == [1, 2]


def test_a_reader_takes_only_a_checkpoint_of_its_run(of_two_runs):
  one = RunIdentity("one", "s")
  assert restore_tree(of_two_runs, make_state(0), 1, run=one)[0] == 1
  for step in (2, "latest"):
    for use in (
      lambda step=step: restore_tree(of_two_runs, make_state(0), step, run=one),
      lambda step=step: load_extra(of_two_runs, step, one),
    ):
      with pytest.raises(CheckpointError, match="2 is of another run: two, expected one"):
        use()
  assert restore_tree(of_two_runs, make_state(0))[0] == 2  # of any run, if none is asked for


def test_damage_is_damage_also_where_a_run_is_asked_for(tmp_path):
  one = RunIdentity("one", "s")
  with CheckpointManager(tmp_path, CheckpointConfig(), one) as manager:
    for step in (1, 2):
      manager.save(step, make_state(step), {}, wait=True)
    flip_bit(tmp_path / "2" / "manifest.json", 5001)
    assert manager.restore_latest(make_state(0))[0] == 1
  assert (tmp_path / "2.damaged").exists()


def test_the_newest_is_the_newest_intact_one(checkpoints):
  with CheckpointManager(checkpoints, CheckpointConfig()) as manager:
    assert manager.newest() == (3, {"rows": 300})
    (checkpoints / "3" / "extra.json").write_text("{}")
    assert manager.newest() == (2, {"rows": 200})
    assert manager.restore_latest(make_state(0))[0] == 2


def test_flipped_bits_are_all_caught(checkpoints):
  """Each file is hit, small ones too; every flip must be found and nothing restored."""
  rng, folder = random.Random(20), checkpoints / "3"
  paths = files_of(folder)
  assert len(paths) >= 10
  for path in paths:
    original = path.read_bytes()
    flip_bit(path, rng.randrange(8 * len(original)))
    (problem,) = integrity.find_damage(folder)
    assert problem.startswith(path.relative_to(folder).as_posix())
    with pytest.raises(CheckpointError, match="no intact checkpoint for step 3"):
      restore_tree(checkpoints, {}, 3)
    if path.is_relative_to(folder / "state"):
      assert load_extra(checkpoints, 3) == {"rows": 300}, "damaged arrays are not its concern"
    path.write_bytes(original)
  assert_same(restore_tree(checkpoints, make_state(0), 3)[1], make_state(3))


def truncate(folder):
  path = data_file(folder)
  path.write_bytes(path.read_bytes()[:-1])


def take_its_name(folder):
  shutil.rmtree(folder)
  shutil.copytree(folder.parent / "1", folder)


# What happens to checkpoint 3 -> what is said of it.
HARMS = {
  truncate: r"state/\S+ has \d+ bytes instead of \d+",
  lambda folder: data_file(folder).unlink(): r"state/\S+ is missing",
  lambda folder: (folder / "manifest.json").unlink(): "manifest.json is missing",
  lambda folder: flip_bit(folder / "manifest.json", 5001): "manifest.json (has changed|cannot be)",
  take_its_name: "manifest.json says step 1",
}


@pytest.mark.parametrize(("harm", "message"), HARMS.items())
def test_falls_back_to_the_newest_intact_one(checkpoints, harm, message, caplog):
  harm(checkpoints / "3")
  flip_bit(data_file(checkpoints / "2"), 99)
  caplog.set_level("WARNING", "absl")

  # A reader (evaluation, generation) changes nothing ...
  step, tree, _ = restore_tree(checkpoints, make_state(0)["model"], subtree="model")
  assert step == 1
  assert_same(tree, make_state(1)["model"])
  assert committed_steps(checkpoints) == [1, 2, 3]

  # ... training sets the damaged ones aside, so that it can save these steps again.
  with CheckpointManager(checkpoints, CheckpointConfig(keep=2)) as manager:
    step, state, extra = manager.restore_latest(make_state(0))
    assert (step, extra) == (1, {"rows": 100})
    assert_same(state, make_state(1))
    assert manager.steps() == [1]
    manager.save(3, make_state(3), {})
    manager.wait()
    assert manager.steps() == [1, 3]
  assert {p.name for p in checkpoints.iterdir()} == {
    "1", "3", "2.damaged", "3.damaged", "unfinished",
  }  # fmt: skip
  lines = [r.getMessage() for r in caplog.records if "checkpoint 3 is damaged" in r.getMessage()]
  said = rf"checkpoint 3 is damaged: {message}.*\. Using 1 instead"
  assert len(lines) == 2 and all(re.match(said, line) for line in lines)
  assert lines[1].endswith(f"the damaged one is now {checkpoints / '3.damaged'}.")


def test_all_damaged_is_an_error_each_time_and_never_a_fresh_start(checkpoints):
  for step in (1, 2, 3):
    truncate(checkpoints / str(step))
  for _ in range(2):
    with (
      CheckpointManager(checkpoints, CheckpointConfig()) as manager,
      pytest.raises(CheckpointError, match="no intact checkpoint") as error,
    ):
      manager.restore_latest(make_state(0))
    assert all(f"{checkpoints / str(s)}: state/" in str(error.value) for s in (1, 2, 3))
    assert "use a new workdir" in str(error.value)
  for step in (1, 2, 3):
    (checkpoints / str(step)).rename(checkpoints / f"{step}.damaged")
  with (
    CheckpointManager(checkpoints, CheckpointConfig()) as manager,
    pytest.raises(CheckpointError, match=r"but damaged ones \(1.damaged, 2.damaged, 3.damaged\)"),
  ):
    manager.restore_latest(make_state(0))


def test_a_folder_that_no_save_named_is_left_alone(checkpoints):
  names = {"0100", "00", "१००"}
  for name in names:
    (checkpoints / name).mkdir()
  with CheckpointManager(checkpoints, CheckpointConfig(keep=1)) as manager:
    assert manager.steps() == [1, 2, 3]
    assert manager.restore_latest(make_state(0))[0] == 3
    manager.save(4, make_state(4), {}, wait=True)
    assert manager.steps() == [4]
  assert {p.name for p in checkpoints.iterdir()} == {*names, "4", "unfinished"}


def test_second_damaged_copy_of_a_step_gets_a_name_of_its_own(checkpoints):
  (checkpoints / "3.damaged").mkdir()
  truncate(checkpoints / "3")
  with CheckpointManager(checkpoints, CheckpointConfig()) as manager:
    assert manager.restore_latest(make_state(0))[0] == 2
  assert (checkpoints / "3.damaged.2").is_dir()


def test_leftover_of_a_killed_process_is_removed_with_a_line(checkpoints, caplog):
  (checkpoints / "unfinished" / "4.1" / "state").mkdir(parents=True)
  caplog.set_level("WARNING", "absl")
  with CheckpointManager(checkpoints, CheckpointConfig()) as manager:
    assert manager.steps() == [1, 2, 3]
  assert not (checkpoints / "unfinished").exists()
  assert "removing unfinished checkpoints of a stopped process: ['4.1']" in caplog.text


def test_folder_that_cannot_be_written_is_an_error(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(CheckpointError, match=r"checkpoints cannot be written to .*Choose another"):
    CheckpointManager(tmp_path / "file" / "checkpoints", CheckpointConfig())


def test_failed_background_write_surfaces_and_leaves_the_rest_alone(tmp_path, monkeypatch):
  """The commit fails as on a disk that fills up after Orbax has finished."""
  state = {"x": np.arange(5)}
  manager = CheckpointManager(tmp_path, CheckpointConfig())
  manager.save(1, state, {}, wait=True)
  blocked = tmp_path / "2"
  blocked.write_text("in the way of the rename")
  manager.save(2, state, {})
  with pytest.raises(CheckpointError, match=r"checkpoint 2 was not saved .*intact: \[1\]"):
    manager.save(3, state, {})
  manager.save(3, state, {})
  manager.close()
  assert committed_steps(tmp_path) == [1, 3]
  assert integrity.find_damage(tmp_path / "3") == []
  assert not list((tmp_path / "unfinished").iterdir())


def test_another_way_to_scan_restores_the_same_layers(tmp_path):
  """Four layers as one stack, as a pattern of two, as two segments, and one by one."""
  q = jnp.arange(4.0 * 2 * 3, dtype=jnp.float32).reshape(4, 2, 3)
  layer = lambda q: {"attn": {"q": q}, "none": jnp.zeros((len(q), 0))}
  ways = [
    ([[layer(q)]], {"segments/0/layers/0": range(4)}),
    (
      [[layer(q[0::2]), layer(q[1::2])]],
      {"segments/0/layers/0": range(0, 4, 2), "segments/0/layers/1": range(1, 4, 2)},
    ),
    (
      [[layer(q[:1])], [layer(q[1:])]],
      {"segments/0/layers/0": range(1), "segments/1/layers/0": range(1, 4)},
    ),
    (
      [[layer(q[i : i + 1])] for i in range(4)],
      {f"segments/{i}/layers/0": [i] for i in range(4)},
    ),
  ]
  state = lambda tree: {"model": {"segments": [{"layers": s} for s in tree]}, "step": jnp.int32(3)}
  for number, (tree, stacks) in enumerate(ways):
    directory = tmp_path / str(number)
    with CheckpointManager(directory, CheckpointConfig(), stacks=stacks) as manager:
      manager.save(3, state(tree), {})
    for other, other_stacks in ways:
      with CheckpointManager(directory, CheckpointConfig(), stacks=other_stacks) as manager:
        _, restored, _ = manager.restore_latest(jax.tree.map(jnp.zeros_like, state(other)))
      assert_same(restored, state(other))


def test_a_large_state_is_moved_in_groups(tmp_path, monkeypatch):
  monkeypatch.setattr(stream, "MOVING_BYTES", 4 * 8 * 3)  # three layers
  stacks = {"stack": range(10)}
  state = {"stack": {"w": jnp.arange(80.0).reshape(10, 8)}, "rest": jnp.ones(100)}
  sizes = [
    len(g)
    for g in stream.groups(
      {name: part.target(name) for name, part in layout.named_arrays(state, stacks=stacks).items()}
    )
  ]
  assert sizes == [1, 3, 3, 3, 1]
  with CheckpointManager(tmp_path, CheckpointConfig(), stacks=stacks) as manager:
    manager.save(1, state, {})
    state["stack"]["w"].delete()  # as a donated one is
    _, restored, _ = manager.restore_latest(
      {"stack": {"w": jnp.zeros((10, 8))}, "rest": jnp.zeros(100)}
    )
  np.testing.assert_array_equal(restored["stack"]["w"], np.arange(80.0).reshape(10, 8))


def test_what_is_fetched_from_a_device_survives_donation_of_the_state(monkeypatch):
  """As on a GPU, where arrays go through pinned memory, in pieces that threads copy."""
  monkeypatch.setattr(stream, "COPIED_BYTES", 1000)
  monkeypatch.setattr(stream, "MOVING_BYTES", 5000)
  key = jax.random.key(0)
  state = {
    "stack": jax.random.normal(key, (5, 7, 129), jnp.bfloat16),
    "table": jax.random.normal(key, (300, 11)),
    "step": jnp.int32(3),
  }
  expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
  parts = layout.named_arrays(state, stacks={"stack": range(5)})
  fetched = stream.fetch(parts)
  spoil = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
  jax.block_until_ready(spoil(state))
  assert fetched.keys() == parts.keys()
  for name, part in parts.items():
    leaf = expected[name.split("/")[0]] if part.layer is None else expected["stack"][part.layer]
    assert fetched[name].dtype == leaf.dtype
    np.testing.assert_array_equal(fetched[name], leaf, err_msg=name)


def test_what_a_save_holds_is_not_copied_again():
  state = {"stack": jnp.arange(4000.0).reshape(4, 1000), "table": jnp.ones((10, 10))}
  parts = layout.named_arrays(state, stacks={"stack": range(4)})
  for name, array in stream.to_save(parts).items():
    whole = np.asarray(parts[name].leaf)
    assert np.shares_memory(copy.deepcopy(array), whole)  # Orbax makes such a copy


def test_a_number_of_each_layer_is_saved_by_layer(tmp_path):
  """A stack of scalars has arrays without dimensions for layers, not numpy's numbers."""
  stacks, state = {"stack": range(3)}, {"stack": {"threshold": jnp.arange(3.0)}}
  with CheckpointManager(tmp_path, CheckpointConfig(), stacks=stacks) as manager:
    manager.save(1, state, {}, wait=True)
    _, restored, _ = manager.restore_latest(jax.eval_shape(lambda: state))
  np.testing.assert_array_equal(restored["stack"]["threshold"], [0.0, 1.0, 2.0])


def replace_by_another(folder):
  folder.rename(folder.with_name("b"))
  (folder / "checkpoints" / "of_another_run").mkdir(parents=True)


@pytest.mark.parametrize(
  "move",
  [
    lambda folder: folder.rename(folder.with_name("b")),
    lambda folder: folder.parent.rename(folder.parent.with_name("other")),
    shutil.rmtree,
    replace_by_another,
  ],
  ids=["renamed", "parent", "removed", "replaced"],
)
@pytest.mark.parametrize("when", ["before", "during"])
def test_nothing_is_written_by_the_old_name_of_a_folder_that_was_moved(
  tmp_path, monkeypatch, move, when
):
  folder = tmp_path / "runs" / "a"
  folder.mkdir(parents=True)
  says = r"no longer the folder in which this run began: .*--workdir where the run is now"
  with CheckpointManager(folder / "checkpoints", CheckpointConfig()) as manager:
    manager.save(1, {"x": jnp.zeros(4)}, {}, wait=True)
    if when == "before":
      move(folder)
    else:
      done, moves = manager._orbax.wait_until_finished, [move]

      def moved_when_done():
        done()
        if moves:
          moves.pop()(folder)

      monkeypatch.setattr(manager._orbax, "wait_until_finished", moved_when_done)
    with pytest.raises(CheckpointError, match=says) as error:
      manager.save(2, {"x": jnp.ones(4)}, {}, wait=True)
  assert "\n" not in str(error.value)
  if move is replace_by_another:
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["of_another_run"]
    assert f"and is now {tmp_path}/runs/b/checkpoints" in str(error.value)
  else:
    assert not folder.exists()
  assert [p.name for p in tmp_path.glob("**/checkpoints/[0-9]*")] == ["1"] * (
    move is not shutil.rmtree
  )


def test_a_link_to_the_workdir_that_is_set_to_another_one(tmp_path):
  for name in ("a", "b"):
    (tmp_path / name / "checkpoints").mkdir(parents=True)
  (tmp_path / "run").symlink_to("a")
  with CheckpointManager(tmp_path / "run" / "checkpoints", CheckpointConfig()) as manager:
    manager.check_folder()
    (tmp_path / "run").unlink()
    (tmp_path / "run").symlink_to("b")
    with pytest.raises(CheckpointError, match=f"is now {tmp_path}/a/checkpoints"):
      manager.check_folder()


@pytest.mark.parametrize(
  ("error", "says"),
  [
    (OSError(errno.EMFILE, "x"), "ulimit -n"),
    (ValueError("RESOURCE_EXHAUSTED: x [os_error_code='24']"), "ulimit -n"),
    (ValueError("Error [OS error 28: x]"), "Free space"),
    (OSError(errno.EDQUOT, "x"), "quota"),
    (OSError(errno.EACCES, "x"), "permissions"),
    (OSError(errno.EROFS, "x"), "read-only"),
    (OSError(errno.EIO, "x"), "dmesg"),
    (OSError(errno.ESTALE, "x"), "mount it again"),
    (ValueError("x"), ""),
  ],
)
def test_each_error_of_the_system_has_advice_of_its_own(error, says):
  assert paths.advice(error).count(says) and bool(paths.advice(error)) == bool(says)
  wrapped = RuntimeError("of Orbax")
  wrapped.__cause__ = error
  assert paths.advice(wrapped) == paths.advice(error)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/unfinished"])
def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path, monkeypatch, name):
  (tmp_path / "checkpoints" / "unfinished").mkdir(parents=True)

  def refuse(dir):
    if dir == tmp_path / name:
      raise OSError(errno.EROFS, "Read-only file system")
    return contextlib.nullcontext()

  monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
  with pytest.raises(CheckpointError, match=r"cannot be written to .*Read-only.* is read-only"):
    CheckpointManager(tmp_path / "checkpoints", CheckpointConfig())


def test_going_back_is_refused_where_local_snapshots_may_be_later(tmp_path):
  cfg = CheckpointConfig(local_every=1, local_dir=str(tmp_path / "local"))
  run = RunIdentity("r", "s")
  manager = CheckpointManager(tmp_path / "checkpoints", cfg, run)
  with manager, pytest.raises(ValueError, match=r"--resume_step: .*checkpoint\.local_every=0"):
    manager.go_back_to(1)
