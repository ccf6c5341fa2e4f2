"""`train` goes on from its checkpoint with other settings: effect, undo, resume, compilations."""

import dataclasses

import pytest
from train_helpers import assert_same, compiled_steps, logged, on_texts

from ats_jax.checkpoint import committed_steps, load_extra, workdir
from ats_jax.inference.load import load_run
from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions import (
  ChangeSettings,
  DecayNow,
  EndRun,
  FullPrecision,
  GrowBatch,
  SaveCheckpoint,
  SetLearningRateScale,
)
from ats_jax.orchestrator.policy import triggers
from ats_jax.orchestrator.record import ledger
from ats_jax.train.loop import train
from ats_jax.train.run import Run

pytestmark = pytest.mark.thorough

LOOK = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  settings = {
    "checkpoint.every_steps": 20,
    "checkpoint.keep": 20,
    "optimizer.learning_rate": 1e-3,
    "optimizer.schedule": "constant",
    "orchestrator.mode": "act",
    "orchestrator.check_interval": LOOK,
    "orchestrator.snapshot_interval": LOOK,
  }
  return on_texts(tmp_path_factory.mktemp("changed"), settings, count=60)


class Killed(BaseException):
  """Ends a run as a signal that nobody can catch does."""


@pytest.mark.slow
def test_capacity_is_changed_and_put_back(config, tmp_path, asked, monkeypatch):
  """Each checkpoint has it, also when the run is killed and the same command goes on."""
  cfg = config(num_steps=40, mod__routing="learned", mod__capacity=0.25, mod__every=1)
  change = lambda capacity: ChangeSettings((("mod.capacity", capacity),))
  asked |= {8: change(0.75), 28: change(0.25)}
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  state = train(cfg, whole)
  assert committed_steps(whole / workdir.CHECKPOINTS) == [12, 20, 32, 40]
  settings = [load_extra(whole / workdir.CHECKPOINTS, s)["settings"] for s in (12, 20, 32)]
  changed = {"mod.capacity": [0.25, 0.75]}
  assert settings == [changed, changed, {}]
  path = whole / workdir.DECISIONS
  made = [row for row in ledger.read_lines(path) if row["kind"] == "decision"]
  assert [row["step"] for row in made] == [12, 32] and all(row["applied"] for row in made)
  assert ledger.replay(path) == ledger.decisions(path)

  finish_update = Run.finish_update

  def dying(run, step, *args):
    if step == 26:
      raise Killed
    finish_update(run, step, *args)

  with monkeypatch.context() as patch, pytest.raises(Killed):
    patch.setattr(Run, "finish_update", dying)
    train(cfg, killed)
  with load_run(killed) as run:
    assert run.program.rules(20).capacity == 0.75
  assert workdir.load_config(killed).mod.capacity == 0.25  # what the user wrote
  assert_same(train(cfg, killed).model, state.model)
  routed = logged(killed, "mod/routed")
  assert sorted(routed) == list(range(1, 41))  # no step is lost, none is made twice
  assert all(routed[step] > 0.7 if 12 < step <= 32 else routed[step] < 0.3 for step in routed)


def test_decay_begins_when_a_hook_says_so(config, tmp_path, asked):
  cfg = config(num_steps=40, optimizer__schedule="wsd", optimizer__schedule__decay_fraction=0.25)
  asked |= {12: DecayNow()}  # it is done at the next look, and counts from there
  assert int(train(cfg, tmp_path).step) == 23
  rate = logged(tmp_path, "train/learning_rate")
  assert sorted(rate) == list(range(1, 24))
  assert rate[17] == pytest.approx(1e-3) and rate[18] < rate[17]
  assert rate[23] == pytest.approx(1e-4)
  assert int(train(cfg, tmp_path).step) == 23  # the same command: it is complete
  asked.clear()
  longer = dataclasses.replace(cfg, num_steps=26)  # who sets it anew has the last word
  assert int(train(longer, tmp_path).step) == 26


def test_a_larger_batch_reads_each_row_once(config, tmp_path, asked):
  cfg = config(num_steps=32)
  asked |= {8: GrowBatch(2)}
  assert int(train(cfg, tmp_path).step) == 22
  tokens = logged(tmp_path, "train/tokens")
  assert tokens[1] < 0.6 * tokens[20]
  last = load_extra(tmp_path / workdir.CHECKPOINTS, 22)
  assert last["position"]["row"] == 12 * 8 + 10 * 16 == 32 * 8
  assert logged(tmp_path, "train/learning_rate")[22] == pytest.approx(2**0.5 * 1e-3)


def test_precision_and_remat_change_and_a_checkpoint_is_saved_on_request(
  config, tmp_path, asked, monkeypatch
):
  compiled = compiled_steps(monkeypatch)
  other = (("precision.compute_dtype", "bfloat16"), ("step.remat", "full"))
  asked |= {8: SaveCheckpoint(), 20: ChangeSettings(other)}
  train(config(num_steps=24), tmp_path)
  assert committed_steps(tmp_path / workdir.CHECKPOINTS) == [12, 20, 24]
  changed = [(c.precision.compute_dtype, c.step.remat) for c, *_ in compiled]
  assert changed == [("float32", "none"), ("bfloat16", "full")]
  with load_run(tmp_path) as run:
    assert run.program.num.compute_dtype == "bfloat16"
  loss = logged(tmp_path, "train/loss")
  assert loss[21] == pytest.approx(loss[20], rel=0.2)


PATIENT = {
  "eval__every_steps": 4,
  "checkpoint__every_steps": 4,
  "checkpoint__keep": 1,
  "checkpoint__keep_best": True,
  "orchestrator__patience": 2,
  "orchestrator__compare_share": 0.0,  # or the rate would be lowered
}


def test_a_run_that_does_not_improve_ends_with_its_best_kept(config, tmp_path, asked, monkeypatch):
  """From some step on the rate is so high that no evaluation is as good as those before."""
  cfg = config(num_steps=60, optimizer__learning_rate=0.1, **PATIENT)
  asked |= {16: SetLearningRateScale(32.0)}
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  state = train(cfg, whole)
  end = int(state.step)
  losses = logged(whole, "eval/loss")
  best = min(losses, key=lambda step: losses[step])
  assert end < 60 and end - best >= 2 * 4
  assert committed_steps(whole / workdir.CHECKPOINTS) == [best, end]
  (decision,) = [d for _, d in ledger.decisions(whole / workdir.DECISIONS) if d.cause == "patience"]
  assert isinstance(decision.action, EndRun)
  assert ledger.replay(whole / workdir.DECISIONS) == ledger.decisions(whole / workdir.DECISIONS)
  assert int(train(cfg, whole).step) == end  # the same command: it is complete

  finish_update = Run.finish_update

  def dying(run, step, *args):
    if step == end - 1:
      raise Killed
    finish_update(run, step, *args)

  with monkeypatch.context() as patch, pytest.raises(Killed):
    patch.setattr(Run, "finish_update", dying)
    train(cfg, killed)
  assert_same(train(cfg, killed).model, state.model)
  assert committed_steps(killed / workdir.CHECKPOINTS) == [best, end]
  asked_for = dataclasses.replace(cfg, num_steps=end + 2)
  assert int(train(asked_for, whole).step) == end + 2  # who sets it anew has the last word


def test_patience_needs_what_keeps_the_best(config):
  with pytest.raises(ValueError, match=r"needs checkpoint\.keep_best"):
    config(num_steps=60, **PATIENT | {"checkpoint__keep_best": False})
  with pytest.raises(ValueError, match=r"eval\.every_steps=6 is no multiple of .*steps=4"):
    config(num_steps=60, **PATIENT | {"eval__every_steps": 6})


@pytest.mark.parametrize("wins", [True, False])
def test_8_bits_are_tried_without_and_stay_off_if_that_wins(
  config, tmp_path, asked, monkeypatch, wins
):
  monkeypatch.setattr(triggers, "HARMLESS", -100.0 if wins else 100.0)
  compiled = compiled_steps(monkeypatch)
  asked |= {8: hooks.Try(FullPrecision())}
  share = {"orchestrator__compare_share": 0.5}  # there is room for one arm
  cfg = config(num_steps=24, model__num_layers=3, precision__fp8=True, **share)
  train(cfg, tmp_path)
  path = tmp_path / workdir.DECISIONS
  (row,) = [row for row in ledger.read_lines(path) if row["kind"] == "comparison"]
  assert row["made"] == 2 * LOOK and row["scores"][0]["held"] != row["waiting"]["held"]
  made = ledger.decisions(path)
  assert [decision.action for _, decision in made] == ([FullPrecision()] if wins else [])
  assert made == ledger.replay(path)
  changes = load_extra(tmp_path / workdir.CHECKPOINTS, 24)["settings"]
  assert changes == ({"precision.fp8": [True, False]} if wins else {})
  assert compiled[-1][0].precision.fp8 != wins
  train(dataclasses.replace(cfg, num_steps=25), tmp_path)  # the same command, for longer
  assert compiled[-1][0].precision.fp8 != wins
