"""`train` under the orchestrator: bit-equal when all is well, recovery, resumption, settings."""

import dataclasses
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config
from in_process import printed_by
from train_helpers import assert_same, logged, on_texts

from ats_jax.checkpoint import committed_steps, load_extra, workdir
from ats_jax.config.build import resolve
from ats_jax.data.sources import EvalSet
from ats_jax.data.splits import open_datasets
from ats_jax.metrics.rows import read_jsonl
from ats_jax.orchestrator.actions import Repeat
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.signals.interval import probe_loss
from ats_jax.orchestrator.signals.probe import Probe
from ats_jax.report.read import read_run
from ats_jax.sharding.mesh import make_mesh
from ats_jax.step.program import Program, make_program
from ats_jax.train.loop import train
from ats_jax.train.probe_rows import probe_feed

STEPS = 60
WATCHED = {
  "off": {},
  "observe": {"orchestrator__check_interval": 5},
  "act": {"orchestrator__check_interval": 5, "orchestrator__snapshot_interval": 5},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  settings = {
    "num_steps": STEPS,
    "checkpoint.every_steps": 20,
    "optimizer.learning_rate": 1e-3,
    "optimizer.schedule": "constant",
  }
  make = on_texts(tmp_path_factory.mktemp("supervised"), settings, count=60)
  return lambda mode, **changes: make(orchestrator__mode=mode, **WATCHED[mode] | changes)


class Killed(BaseException):
  """Ends a run as a signal that nobody can catch does, as far as one process can show it."""


def plant(monkeypatch, step, happen):
  """Have `happen(state)` give the state that goes into update `step`, the first time."""
  compile_train_step = Program.compile_train_step

  def planted(program, *args):
    compiled, is_over = compile_train_step(program, *args), False

    def run(state, batch):
      nonlocal is_over
      is_now = not is_over and int(state.step) + 1 == step
      is_over |= is_now
      return compiled(happen(state) if is_now else state, batch)

    return run

  monkeypatch.setattr(Program, "compile_train_step", planted)


def spoil(state):
  broken = jax.tree.map(lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, state.model)
  return dataclasses.replace(state, model=broken)


def weights(state):
  return state.model, state.opt_state


def checks(folder):
  return [row for row in ledger.read_lines(folder / workdir.DECISIONS) if row["kind"] == "check"]


@pytest.fixture(scope="module")
def runs(config, tmp_path_factory):
  """A healthy run in each mode: workdirs and final states."""
  folders = {mode: tmp_path_factory.mktemp(mode) for mode in ("off", "act")}
  return {mode: (d, train(config(mode), d)) for mode, d in folders.items()}


@pytest.mark.thorough
def test_a_healthy_run_is_the_same_bit_for_bit(runs):
  (off, plain), (act, supervised) = runs["off"], runs["act"]
  assert_same(weights(plain), weights(supervised))
  losses = logged(off, "train/loss")
  assert losses == logged(act, "train/loss") and len(losses) == STEPS
  assert not (off / workdir.DECISIONS).exists()
  assert [row["reading"]["step"] for row in checks(act)] == list(range(5, 61, 5))
  assert not ledger.decisions(act / workdir.DECISIONS)
  reports = [r for r in read_jsonl(act / "metrics.jsonl") if "orchestrator/health" in r]
  assert len(reports) == STEPS // 5 and not any(r["orchestrator/decisions"] for r in reports)


@pytest.mark.thorough
def test_weights_that_break_are_replaced_and_no_checkpoint_holds_them(
  config, runs, tmp_path, monkeypatch
):
  plant(monkeypatch, 34, spoil)
  state = train(config("act"), tmp_path)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(weights(state)))
  ((step, decision),) = ledger.decisions(tmp_path / workdir.DECISIONS)
  assert decision.action == Repeat() and step == 40
  assert ledger.replay(tmp_path / workdir.DECISIONS) == [(step, decision)]
  (reached,) = logged(tmp_path, "eval/loss").values()
  assert reached < logged(runs["off"][0], "train/loss")[33] - 0.3  # training went on

  run = read_run(str(tmp_path))
  (again,) = run.again
  assert again.since < 34 and again.last == step
  healthy = list(logged(runs["off"][0], "train/loss").values())
  np.testing.assert_array_equal(run.column("train/loss").values[:step], healthy[:step])


@pytest.mark.thorough
def test_eight_bits_that_cost_too_much_are_switched_off_for_good(config, tmp_path, caplog):
  """And the probe is scored as the model trains from then on."""
  eight = {"model__num_layers": 3, "precision__fp8": True, "precision__fp8_band": 0.0}
  often = {"eval__every_steps": 1, "checkpoint__every_steps": 5}
  cfg = config("observe", num_steps=15, optimizer__learning_rate=0.03, **often, **eight)
  state = train(cfg, tmp_path)
  gaps = logged(tmp_path, "eval/fp8_gap")
  off = max(gaps)
  assert gaps[off] > 0.0 and off < 15
  assert f"they raise the validation loss by {gaps[off]:.4f}" in caplog.text
  assert load_extra(tmp_path / workdir.CHECKPOINTS)["fp8"] is False

  train_set, valid_set = open_datasets(cfg.data, cfg.seed)
  resolved = resolve(cfg, train_set.info.tokenizer.vocab_size)
  with jax.set_mesh(make_mesh(resolved)):
    program = make_program(resolved)
    probe = Probe(*probe_feed(resolved, (EvalSet("", valid_set),), train_set))
    rules = program.rules(15)
    score = lambda rules: probe_loss(probe.score(program, state.model, rules))
    with_8_bits, without = score(rules), score(dataclasses.replace(rules, fp8=False))
  last = checks(tmp_path)[-1]["reading"]
  assert last["step"] == 15 and last["held"] == {"": without} != {"": with_8_bits}
  assert last["rules"] == [False, rules.capacity, rules.horizon, False]

  caplog.clear()
  train(dataclasses.replace(cfg, num_steps=17), tmp_path)
  assert "switched off for the rest" not in caplog.text
  assert logged(tmp_path, "eval/fp8_gap") == gaps


@pytest.mark.thorough
def test_a_killed_run_goes_on_with_its_memory_and_its_ledger(config, tmp_path, monkeypatch):
  """From what was on the disk when it was killed."""
  whole, killed, left = (tmp_path / name for name in ("whole", "killed", "left"))

  def kill(state):
    while 40 not in committed_steps(killed / workdir.CHECKPOINTS):
      time.sleep(0.01)  # files are renamed, of which a copy may have some twice and miss others
    shutil.copytree(killed, left)
    raise Killed

  with monkeypatch.context() as patch:
    plant(patch, 14, spoil)
    want = train(config("act"), whole)
    plant(patch, 53, kill)
    with pytest.raises(Killed):
      train(config("act"), killed)
  path = left / workdir.DECISIONS
  with path.open("a") as file:
    file.write('{"v": 1, "kind"')  # the kill came in the middle of a line
  assert_same(weights(train(config("act"), left)), weights(want))
  kept = lambda p: [
    {k: v for k, v in row.items() if k not in ("host", "health", "lost")}  # of the clock
    for row in ledger.read_lines(p)
    if row["kind"] not in ("start", "resumed_from")
  ]
  assert kept(path) == kept(whole / workdir.DECISIONS)
  assert ledger.replay(path) == ledger.decisions(path) != []
  memories = [load_extra(d / workdir.CHECKPOINTS, STEPS)["orchestrator"] for d in (whole, left)]
  assert memories[0] == memories[1]
  told = printed_by("decisions", str(left), "--replay")
  assert "resumed from here" in told and "replayed: the same decisions" in told


def out_of_memory(state):
  """What XLA does: the state was donated, and is gone."""
  for x in jax.tree.leaves(state):
    x.delete()
  raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 42 bytes.")


@pytest.mark.thorough
def test_out_of_memory_halves_the_micro_batch_and_keeps_the_losses(config, tmp_path, monkeypatch):
  """From a snapshot, as there is no newer checkpoint."""
  whole, relieved = tmp_path / "whole", tmp_path / "relieved"
  cfg = config("act", data__batch_size=16, checkpoint__every_steps=STEPS)
  train(cfg, whole)
  happen = [out_of_memory]
  plant(monkeypatch, 34, lambda state: happen.pop()(state) if happen else state)
  train(cfg, relieved)
  losses, want = logged(relieved, "train/loss"), logged(whole, "train/loss")
  assert list(losses) == list(want) == list(range(1, STEPS + 1))
  np.testing.assert_allclose(list(losses.values()), list(want.values()), rtol=1e-5)
  assert losses != want  # sums in another order
  assert logged(relieved, "train/tokens") == logged(whole, "train/tokens")
  assert workdir.load_config(relieved).step.accum_steps == 2
  path = relieved / workdir.DECISIONS
  starts = [row for row in ledger.read_lines(path) if row["kind"] == "start"]
  assert [(row["step"], row["accum_steps"]) for row in starts] == [(0, 1), (15, 2)]
  assert ledger.replay(path) == []


@pytest.mark.thorough
def test_a_low_rate_is_raised_by_the_compiled_step_on_its_own_batches(config, runs, tmp_path):
  low = {"optimizer__learning_rate": 1e-4, "orchestrator__raise_learning_rate": True}
  state = train(config("act", **low), tmp_path)
  path = tmp_path / workdir.DECISIONS
  decisions, rows = ledger.decisions(path), ledger.read_lines(path)
  scales = [decision.action.scale for _, decision in decisions]
  assert scales and scales == [3.0**n for n in range(1, len(scales) + 1)]
  assert float(state.control.lr_scale) == scales[-1] and int(state.step) == STEPS
  assert ledger.replay(path) == decisions
  assert sum(row["kind"] == "comparison" for row in rows) >= len(scales)
  train(config("off", optimizer__learning_rate=1e-4), tmp_path / "slow")
  final = lambda folder: logged(folder, "eval/loss")[STEPS]
  assert final(runs["off"][0]) < final(tmp_path) < final(tmp_path / "slow") - 0.1


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"check_interval": 21}, "check_interval=21 exceeds num_steps=20"),
    ({"snapshot_gb": 0.0}, "leave nothing to roll back to"),
    ({"mode": "on"}, "Choose one of: off, observe, act"),
    (
      {"mode": "observe", "raise_learning_rate": True},
      "raise_learning_rate=True does nothing with orchestrator.mode=observe",
    ),
  ],
)
def test_wrong_settings_are_refused(changes, message):
  settings = {"mode": "act", "check_interval": 5} | changes
  with pytest.raises(ValueError, match=message):
    tiny_config({f"orchestrator.{name}": value for name, value in settings.items()})
