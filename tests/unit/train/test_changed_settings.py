"""`train` goes on from its checkpoint with other settings: effect, undo, resume, compilations."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from helpers import CACHED, tiny_config

from ats_jax.checkpoint import committed_steps, load_extra, workdir
from ats_jax.inference.load import load_run
from ats_jax.metrics.rows import read_jsonl
from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions import SaveCheckpoint
from ats_jax.orchestrator.actions.settings import ChangeSettings, decay_now, grow_batch
from ats_jax.orchestrator.record import ledger
from ats_jax.step.program import Program
from ats_jax.train import loop as train_module

pytestmark = pytest.mark.thorough

STEPS, EVERY, LOOK = 40, 20, 4


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  folder, cache = tmp_path_factory.mktemp("texts"), tmp_path_factory.mktemp("cache")
  rng = random.Random(0)
  words = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
  for i in range(60):
    (folder / f"{i}.txt").write_text(" ".join(rng.choices(words, k=rng.randint(20, 60))))

  def make(**changes):
    return tiny_config(
      {
        "num_steps": STEPS,
        **CACHED,
        "model.vocab_size": 384,
        "model.num_layers": 1,
        "data.paths": (str(folder),),
        "data.validation_fraction": 0.3,
        "data.cache_dir": str(cache),
        "log.writers": ("jsonl",),
        "log.every_steps": 1,
        "log.progress": False,
        "sample.max_tokens": 0,
        "checkpoint.every_steps": EVERY,
        "checkpoint.keep": 20,
        "optimizer.learning_rate": 1e-3,
        "optimizer.schedule": "constant",
        "orchestrator.mode": "act",
        "orchestrator.check_interval": LOOK,
        "orchestrator.snapshot_interval": LOOK,
        **{name.replace("__", "."): value for name, value in changes.items()},
      }
    )

  return make


@pytest.fixture
def asked():
  """Hooks for one test: what is asked for, by the step of the look."""
  actions = {}
  hook = hooks.register(lambda look: actions.get(look.step))
  yield actions
  hooks.unregister(hook)


@pytest.fixture
def compiled(monkeypatch):
  """The configs for which the step was compiled."""
  found, compile_train_step = [], Program.compile_train_step

  def counted(program, *args):
    found.append(program.cfg)
    return compile_train_step(program, *args)

  monkeypatch.setattr(Program, "compile_train_step", counted)
  return found


def rows(folder, name):
  found = [row for row in read_jsonl(folder / "metrics.jsonl") if name in row]
  return {row["step"]: row[name] for row in found}


@pytest.mark.slow
def test_expert_capacity_is_raised_and_put_back(config, tmp_path, asked, compiled):
  cfg = config(moe__num_experts=4, moe__d_ff=32, moe__dispatch="capacity",
               moe__capacity_factor=0.25)  # fmt: skip
  asked |= {8: ChangeSettings((("moe.capacity_factor", 4.0),)),
            28: ChangeSettings((("moe.capacity_factor", 0.25),))}  # fmt: skip
  train_module.train(cfg, tmp_path)
  assert [c.moe.capacity_factor for c in compiled] == [0.25, 4.0, 0.25]
  assert committed_steps(tmp_path / workdir.CHECKPOINTS) == [12, 20, 32, 40]
  dropped = rows(tmp_path, "moe/dropped")
  assert sorted(dropped) == list(range(1, STEPS + 1))  # no step is lost, none is made twice
  assert all(dropped[step] > 0.3 for step in (*range(1, 13), *range(33, 41)))
  assert all(dropped[step] == 0.0 for step in range(13, 33))
  settings = [load_extra(tmp_path / workdir.CHECKPOINTS, s)["settings"] for s in (12, 20, 32)]
  changed = {"moe.capacity_factor": [0.25, 4.0]}
  assert settings == [changed, changed, {}]
  path = tmp_path / workdir.DECISIONS
  made = [row for row in ledger.read_lines(path) if row["kind"] == "decision"]
  assert [row["step"] for row in made] == [12, 32] and all(row["applied"] for row in made)
  assert any(row["kind"] == "outcome" for row in ledger.read_lines(path))  # across the restart
  assert ledger.replay(path) == ledger.decisions(path)


class Killed(BaseException):
  """Ends a run as a signal that nobody can catch does."""


@pytest.mark.slow
def test_depth_capacity_goes_with_each_checkpoint(config, tmp_path, asked, monkeypatch):
  """Also when the run is killed and the same command goes on."""
  cfg = config(mod__routing="learned", mod__capacity=0.25, mod__every=1)
  asked |= {8: ChangeSettings((("mod.capacity", 0.75),))}
  whole = train_module.train(cfg, tmp_path / "whole")

  def dying(look):
    if look.step == 36:
      raise Killed

  hooks.register(dying)
  try:
    with pytest.raises(Killed):
      train_module.train(cfg, tmp_path / "killed")
  finally:
    hooks.unregister(dying)
  state = train_module.train(cfg, tmp_path / "killed")
  for a, b in zip(jax.tree.leaves(whole.model), jax.tree.leaves(state.model), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
  routed = rows(tmp_path / "killed", "mod/routed")
  assert max(routed[step] for step in range(1, 13)) < 0.3
  assert min(routed[step] for step in range(13, STEPS + 1)) > 0.7
  with load_run(tmp_path / "killed", "20") as run:
    assert run.program.rules(20).capacity == 0.75
  assert workdir.load_config(tmp_path / "killed").mod.capacity == 0.25  # what the user wrote


@pytest.mark.slow
def test_decay_begins_when_a_hook_says_so(config, tmp_path, asked):
  cfg = config(optimizer__schedule="wsd", optimizer__schedule__decay_fraction=0.25)
  asked |= {12: decay_now(cfg, 12)}
  state = train_module.train(cfg, tmp_path)
  assert int(state.step) == 18
  rate = rows(tmp_path, "train/learning_rate")
  assert sorted(rate) == list(range(1, 19))
  assert rate[13] == pytest.approx(1e-3) and rate[18] == pytest.approx(1e-4)
  assert int(train_module.train(cfg, tmp_path).step) == 18  # the same command: it is complete
  asked.clear()
  longer = dataclasses.replace(cfg, num_steps=21)  # who sets it anew has the last word
  assert int(train_module.train(longer, tmp_path).step) == 21


def test_a_larger_batch_reads_each_row_once(config, tmp_path, asked):
  cfg = config(num_steps=32)
  asked |= {8: grow_batch(cfg, 12)}
  state = train_module.train(cfg, tmp_path)
  assert int(state.step) == 22
  tokens = rows(tmp_path, "train/tokens")
  assert tokens[1] < 0.6 * tokens[20]
  last = load_extra(tmp_path / workdir.CHECKPOINTS, 22)
  assert last["position"]["row"] == 12 * 8 + 10 * 16 == 32 * 8
  assert rows(tmp_path, "train/learning_rate")[22] == pytest.approx(2**0.5 * 1e-3)


def test_precision_changes_and_a_checkpoint_is_saved_on_request(config, tmp_path, asked, compiled):
  asked |= {8: SaveCheckpoint(), 20: ChangeSettings((("precision.compute_dtype", "bfloat16"),))}
  train_module.train(config(num_steps=24), tmp_path)
  assert committed_steps(tmp_path / workdir.CHECKPOINTS) == [12, 20, 24]
  assert [c.precision.compute_dtype for c in compiled] == ["float32", "bfloat16"]
  with load_run(tmp_path) as run:
    assert run.program.num.compute_dtype == "bfloat16"
  loss = rows(tmp_path, "train/loss")
  assert loss[21] == pytest.approx(loss[20], rel=0.2)
