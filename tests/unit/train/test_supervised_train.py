"""`train` under the orchestrator: bit-equal when all is well, recovery, resumption, settings."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CACHED, tiny_config

from ats_jax.checkpoint import load_extra, workdir
from ats_jax.config import Config
from ats_jax.config.build import resolve
from ats_jax.data.sources import EvalSet
from ats_jax.data.splits import open_datasets
from ats_jax.metrics.rows import read_jsonl
from ats_jax.orchestrator.actions import Rollback
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.signals.interval import probe_loss
from ats_jax.orchestrator.signals.probe import Probe
from ats_jax.sharding.mesh import make_mesh
from ats_jax.step.program import Program, make_program
from ats_jax.train import loop as train_module
from ats_jax.train.feed import probe_feed

STEPS = 60
WATCHED = {
  "off": {},
  "observe": {"orchestrator.check_interval": 5},
  "act": {"orchestrator.check_interval": 5, "orchestrator.snapshot_interval": 5},
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  folder, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
  words = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
  for i in range(60):
    (folder / f"{i}.txt").write_text(" ".join(rng.choices(words, k=rng.randint(20, 60))))
  return folder


@pytest.fixture(scope="module")
def config(texts, tmp_path_factory):
  cache = tmp_path_factory.mktemp("cache")

  def make(mode: str, **changes) -> Config:
    return tiny_config(
      {
        "num_steps": STEPS,
        **CACHED,
        "model.vocab_size": 384,
        "model.num_layers": 1,
        "data.paths": (str(texts),),
        "data.validation_fraction": 0.3,
        "data.cache_dir": str(cache),
        "log.writers": ("jsonl",),
        "log.every_steps": 1,
        "log.progress": False,
        "sample.max_tokens": 0,
        "checkpoint.every_steps": 20,
        "optimizer.learning_rate": 1e-3,
        "optimizer.schedule": "constant",
        "orchestrator.mode": mode,
        **WATCHED[mode],
        **{name.replace("__", "."): value for name, value in changes.items()},
      }
    )

  return make


class Killed(BaseException):
  """Ends a run as a signal that nobody can catch does, as far as one process can show it."""


def plant(monkeypatch, step, happen):
  """Have `happen(state)` give the state that goes into update `step`."""
  compile_train_step = Program.compile_train_step

  def planted(program, *args):
    compiled, count = compile_train_step(program, *args), None

    def run(state, batch):
      nonlocal count
      count = (int(state.step) if count is None else count) + 1
      return compiled(happen(state) if count == step else state, batch)

    return run

  monkeypatch.setattr(Program, "compile_train_step", planted)


def spoil(state):
  broken = jax.tree.map(lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, state.model)
  return dataclasses.replace(state, model=broken)


def kill(state):
  raise Killed


def weights(state):
  return [np.asarray(x) for x in jax.tree.leaves((state.model, state.opt_state))]


@pytest.fixture(scope="module")
def runs(config, tmp_path_factory):
  """A healthy run in each mode: workdirs and final states."""
  folders = {mode: tmp_path_factory.mktemp(mode) for mode in ("off", "act")}
  return {mode: (d, train_module.train(config(mode), d)) for mode, d in folders.items()}


@pytest.mark.thorough
def test_a_healthy_run_is_the_same_bit_for_bit(runs):
  (off, plain), (act, supervised) = runs["off"], runs["act"]
  for a, b in zip(weights(plain), weights(supervised), strict=True):
    np.testing.assert_array_equal(a, b)
  losses = lambda folder: [
    row["train/loss"] for row in read_jsonl(folder / "metrics.jsonl") if "train/loss" in row
  ]
  assert losses(off) == losses(act) and len(losses(off)) == STEPS
  assert not (off / workdir.DECISIONS).exists()
  rows = ledger.read_lines(act / workdir.DECISIONS)
  assert [row["reading"]["step"] for row in rows if row["kind"] == "check"] == list(range(5, 61, 5))
  assert not ledger.decisions(act / workdir.DECISIONS)
  reports = [r for r in read_jsonl(act / "metrics.jsonl") if "orchestrator/health" in r]
  assert len(reports) == STEPS // 5 and not any(r["orchestrator/decisions"] for r in reports)


@pytest.mark.thorough
def test_weights_that_break_are_replaced_and_no_checkpoint_holds_them(
  config, runs, tmp_path, monkeypatch
):
  plant(monkeypatch, 34, spoil)
  state = train_module.train(config("act"), tmp_path)
  assert all(np.isfinite(x).all() for x in weights(state))
  ((step, decision),) = ledger.decisions(tmp_path / workdir.DECISIONS)
  assert decision.action == Rollback() and step == 40
  assert ledger.replay(tmp_path / workdir.DECISIONS) == [(step, decision)]
  rows = lambda folder: read_jsonl(folder / "metrics.jsonl")
  (reached,) = [row["eval/loss"] for row in rows(tmp_path) if "eval/loss" in row]
  (before_it,) = [row["train/loss"] for row in rows(runs["off"][0])[:-3] if row["step"] == 33]
  assert reached < before_it - 0.3  # training went on


@pytest.mark.thorough
def test_the_probe_is_scored_as_the_model_trains_once_8_bits_are_off(config, tmp_path):
  eight = {"model__num_layers": 3, "precision__fp8": True, "precision__fp8_band": 0.0}
  cfg = config("observe", num_steps=15, eval__every_steps=1, optimizer__learning_rate=0.03, **eight)
  state = train_module.train(cfg, tmp_path)
  assert load_extra(tmp_path / workdir.CHECKPOINTS)["fp8"] is False
  train_set, valid_set = open_datasets(cfg.data, cfg.seed)
  cfg = resolve(cfg, train_set.info.tokenizer.vocab_size)
  with jax.set_mesh(make_mesh(cfg)):
    program = make_program(cfg)
    probe = Probe(program, probe_feed(cfg, (EvalSet("", valid_set),), train_set))
    rules = program.rules(15)
    score = lambda rules: probe_loss(probe.score(program, state.model, rules))
    eight, wide = score(rules), score(dataclasses.replace(rules, fp8=False))
  looks = [
    r["reading"] for r in ledger.read_lines(tmp_path / workdir.DECISIONS) if r["kind"] == "check"
  ]
  assert looks[-1]["step"] == 15 and looks[-1]["probe"] == wide != eight
  assert looks[-1]["rules"] == [False, rules.capacity, rules.horizon, False]


@pytest.mark.thorough
def test_off_ends_as_ever(config, tmp_path, monkeypatch):
  plant(monkeypatch, 34, spoil)
  with pytest.raises(FloatingPointError, match="train/loss is nan at step 34"):
    train_module.train(config("off"), tmp_path)


@pytest.mark.thorough
def test_a_killed_run_goes_on_with_its_memory_and_its_ledger(config, tmp_path, monkeypatch):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  with monkeypatch.context() as patch:
    plant(patch, 14, spoil)
    want = train_module.train(config("act"), whole)
    plant(patch, 53, kill)
    with pytest.raises(Killed):
      train_module.train(config("act"), killed)
  path = killed / workdir.DECISIONS
  with path.open("a") as file:
    file.write('{"v": 1, "kind"')  # the kill came in the middle of a line
  got = train_module.train(config("act"), killed)
  for a, b in zip(weights(want), weights(got), strict=True):
    np.testing.assert_array_equal(a, b)
  kept = lambda p: [
    {k: v for k, v in row.items() if k not in ("host", "health", "lost")}  # of the clock
    for row in ledger.read_lines(p)
    if row["kind"] not in ("start", "resumed_from")
  ]
  assert kept(path) == kept(whole / workdir.DECISIONS)
  assert ledger.replay(path) == ledger.decisions(path) != []
  memories = [load_extra(d / workdir.CHECKPOINTS, STEPS)["orchestrator"] for d in (whole, killed)]
  assert memories[0] == memories[1]


def out_of_memory(times):
  """Raises what XLA does, so many times."""
  left = [True] * times

  def happen(state):
    if left:
      left.pop()
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 42 bytes.")
    return state

  return happen


@pytest.mark.thorough
def test_out_of_memory_halves_the_micro_batch_and_keeps_the_losses(config, tmp_path, monkeypatch):
  """From a snapshot, as there is no newer checkpoint."""
  cfg = config("act", data__batch_size=16, checkpoint__every_steps=STEPS)
  train_module.train(cfg, tmp_path / "whole")
  plant(monkeypatch, 34, out_of_memory(1))
  train_module.train(cfg, tmp_path / "relieved")
  losses = lambda name: [
    row["train/loss"]
    for row in read_jsonl(tmp_path / name / "metrics.jsonl")
    if "train/loss" in row
  ]
  assert len(losses("relieved")) == STEPS
  np.testing.assert_allclose(losses("relieved"), losses("whole"), rtol=1e-5)
  assert losses("relieved") != losses("whole")  # sums in another order
  assert workdir.load_config(tmp_path / "relieved").step.accum_steps == 2
  starts = [
    r for r in ledger.read_lines(tmp_path / "relieved" / workdir.DECISIONS) if r["kind"] == "start"
  ]
  assert [(row["step"], row["accum_steps"]) for row in starts] == [(0, 1), (15, 2)]
  assert ledger.replay(tmp_path / "relieved" / workdir.DECISIONS) == []


@pytest.mark.thorough
def test_out_of_memory_is_an_error_where_nothing_can_be_done(config, tmp_path, monkeypatch):
  plant(monkeypatch, 2, out_of_memory(1))
  with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
    train_module.train(config("act", data__batch_size=8), tmp_path)


@pytest.mark.thorough
def test_a_low_rate_is_raised_by_the_compiled_step_on_its_own_batches(config, runs, tmp_path):
  low = {"optimizer__learning_rate": 1e-4, "orchestrator__raise_learning_rate": True}
  state = train_module.train(config("act", **low), tmp_path)
  path = tmp_path / workdir.DECISIONS
  decisions, rows = ledger.decisions(path), ledger.read_lines(path)
  scales = [decision.action.scale for _, decision in decisions]
  assert scales and scales == [3.0**n for n in range(1, len(scales) + 1)]
  assert float(state.control.lr_scale) == scales[-1] and int(state.step) == STEPS
  assert ledger.replay(path) == decisions
  assert sum(row["kind"] == "trial" for row in rows) >= len(scales)
  final = lambda folder: [
    row["eval/loss"] for row in read_jsonl(folder / "metrics.jsonl") if "eval/loss" in row
  ][-1]
  train_module.train(config("off", optimizer__learning_rate=1e-4), tmp_path / "slow")
  assert final(runs["off"][0]) < final(tmp_path) < final(tmp_path / "slow") - 0.1


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"orchestrator.check_interval": 21}, "check_interval=21 exceeds num_steps=20"),
    ({"orchestrator.check_interval": 0}, "check_interval=0 is too small"),
    ({"orchestrator.confidence": 1.5}, "confidence=1.5 is too large"),
    ({"orchestrator.snapshot_gb": 0.0}, "leave nothing to roll back to"),
    ({"orchestrator.snapshot_interval": 0}, "snapshot_interval=0 is too small"),
    ({"orchestrator.mode": "on"}, "Choose one of: off, observe, act"),
    (
      {"orchestrator.mode": "observe", "orchestrator.raise_learning_rate": True},
      "raise_learning_rate=True does nothing with orchestrator.mode=observe",
    ),
  ],
)
def test_wrong_settings_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    tiny_config({"orchestrator.mode": "act", "orchestrator.check_interval": 5, **changes})
