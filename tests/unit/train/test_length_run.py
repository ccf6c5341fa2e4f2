"""Runs on rows of several lengths: each step compiled once, resumed bit for bit, measured right."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from helpers import make_test_mesh, tiny_config

from ats_jax.checkpoint import workdir
from ats_jax.data.sources import open_data
from ats_jax.metrics.rows import read_jsonl
from ats_jax.model.count import count
from ats_jax.orchestrator.trials.snapshots import Snapshots
from ats_jax.sharding.mesh import to_global
from ats_jax.step.program import Program, make_program, predicted_bytes
from ats_jax.train.loop import train
from ats_jax.train.open import open_run
from ats_jax.train.supervise import SupervisedLoop


@pytest.fixture(scope="module")
def make(tmp_path_factory):
  """A config of a text of short and long documents, which gives rows of 16 and of 64."""
  folder = tmp_path_factory.mktemp("lengths")
  texts = [f"{i} short\n" if i % 9 else f"{i} " + "long " * 11 for i in range(900)]
  (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))

  def config(**changes):
    return tiny_config({
      "num_steps": 8,
      "model.vocab_size": 260,
      "data.paths": (f"{folder}/a.jsonl",),
      "data.cache_dir": f"{folder}/cache",
      "data.seq_len": 64,
      "data.order": {"name": "buckets", "lengths": 2},
      "data.batch_size": 16,
      "step.accum_steps": 2,
      "optimizer.schedule": "constant",  # of no other length
      "eval.every_steps": 0,
      "eval.num_batches": 2,
      "log.every_steps": 1,
      "log.progress": False,
      "log.writers": ("jsonl",),
      "sample.max_tokens": 0,
    } | {name.replace("__", "."): value for name, value in changes.items()})  # fmt: skip

  return config


@pytest.fixture
def compiled(monkeypatch):
  """The lengths of rows for which a step was compiled, and what came of it."""
  found, compile_train_step = [], Program.compile_train_step

  def counted(program, state, rules, seq_len):
    step = compile_train_step(program, state, rules, seq_len)
    found.append((seq_len, step))
    return step

  monkeypatch.setattr(Program, "compile_train_step", counted)
  return found


def lengths(cfg):
  train_set, _ = open_data(cfg.data, cfg.seed)
  return [train_set.length(step * cfg.data.batch_size) for step in range(cfg.num_steps)]


def losses(folder):
  rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "train/loss" in row]
  return {row["step"]: row["train/loss"] for row in rows}


@pytest.mark.thorough
def test_two_lengths_are_two_programs_and_a_resumed_run_is_bit_equal(make, tmp_path, compiled):
  cfg = make()
  assert sorted(set(lengths(cfg))) == [16, 64]
  assert len({tuple(lengths(cfg)[:n]) for n in (2, 4)}) == 2
  whole = train(cfg, tmp_path / "whole")
  assert sorted(seq_len for seq_len, _ in compiled) == [16, 64]  # once each, however they alternate
  assert [n for n, _ in compiled] == list(dict.fromkeys(lengths(cfg)))  # when first needed
  tokens = {step.in_avals[0][1]["tokens"].shape for _, step in compiled}
  assert tokens == {(2, 32, 16), (2, 8, 64)}
  train(make(num_steps=3), tmp_path / "cut")
  resumed = train(cfg, tmp_path / "cut")
  for a, b in zip(jax.tree.leaves(whole.model), jax.tree.leaves(resumed.model), strict=True):
    np.testing.assert_array_equal(a, b)
  assert losses(tmp_path / "whole") == losses(tmp_path / "cut")

  metadata = json.loads((tmp_path / "whole" / workdir.METADATA).read_text())
  assert "rows of 16" in metadata["run"]["training text"]
  performance = json.loads((tmp_path / "whole" / workdir.PERFORMANCE).read_text())
  most = max(predicted_bytes(step) for _, step in compiled[:2])
  assert performance["memory/predicted_gib"] == most / 2**30
  assert len({predicted_bytes(step) for _, step in compiled[:2]}) == 2


@pytest.mark.thorough
def test_the_meter_knows_what_each_length_costs(make, tmp_path):
  cfg = make(data__order={"name": "length", "lengths": 2}, log__every_steps=2)
  first = lengths(dataclasses.replace(cfg, num_steps=200)).index(64)
  cfg = make(data__order={"name": "length", "lengths": 2}, log__every_steps=2, num_steps=first + 3)
  with open_run(cfg, tmp_path, Snapshots.of(cfg.orchestrator)) as run:
    program = run.program
    for step in range(1, cfg.num_steps + 1):
      train_step = run.compiled_step(step)
      run.finish_update(step, *train_step(run.state, run.next_batch()))
    assert run.valid_set.info.seq_len == 64
    model = program.init(abstract=True).model
  flops = {n: count(cfg, model, n).flops_causal for n in (16, 64)}
  assert flops[16] < flops[64]
  rows = [r for r in read_jsonl(tmp_path / "metrics.jsonl") if "train/tflops_per_device" in r]
  devices = jax.device_count()
  for row in rows:
    got = row["train/tflops_per_device"] * 1e12 * devices / row["train/tokens_per_sec"]
    of_steps = [flops[n] for n in lengths(cfg)[row["step"] - 2 : row["step"]]]
    np.testing.assert_allclose(got, np.mean(of_steps), rtol=1e-9)
    assert row["train/tokens_per_sec"] == row["train/steps_per_sec"] * cfg.data.batch_size * 64


@pytest.mark.thorough
@pytest.mark.slow
def test_a_step_of_short_rows_is_that_of_the_same_rows_laid_end_to_end(make):
  """Loss and update are those of whole rows in which no document sees another; on a mesh too."""
  cfg = make(step__accum_steps=1, optimizer__warmup_steps=1)
  train_set, _ = open_data(cfg.data, cfg.seed)
  at = lengths(cfg).index(16) * cfg.data.batch_size
  indices = np.arange(at, at + cfg.data.batch_size)
  # A row without documents in common has the segments of both.
  short, whole = train_set.read(indices[None]), train_set.read_once(indices[None])
  assert short["tokens"].shape == (1, 64, 16) and whole["tokens"].shape == (1, 16, 64)
  found = []
  for mesh in (make_test_mesh(1, 1, 1), make_test_mesh(2, 2, 1)):
    with jax.set_mesh(mesh):
      program = make_program(cfg)
      for batch in (short, whole):
        state, metrics = program.train_step(
          program.init(), to_global(batch, mesh), program.training_rules(1)
        )
        found.append((float(metrics["train/loss"]), jax.device_get(jax.tree.leaves(state.model))))
  for loss, weights in found[1:]:
    np.testing.assert_allclose(loss, found[0][0], rtol=1e-5)
    for a, b in zip(found[0][1], weights, strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.thorough
def test_a_supervised_run_tries_steps_of_every_length(make, tmp_path, compiled):
  """What the supervisor makes ahead and again finds the program of each batch."""
  cfg = make(orchestrator__mode="act", orchestrator__check_interval=2)
  with open_run(cfg, tmp_path, Snapshots.of(cfg.orchestrator)) as run:
    for step in (1, 2):
      train_step = run.compiled_step(step)
      run.finish_update(step, *train_step(run.state, run.next_batch()))
    ahead, shapes, seen = SupervisedLoop(run).ahead(), set(), []
    state = run.state
    with ahead.batches() as batches:
      for _ in range(6):
        batch = next(batches)
        shapes.add(batch["tokens"].shape[-1])
        state, metrics = ahead.train_step(state, batch)
        seen.append(float(metrics["train/loss"]))
    assert shapes == {16, 64} and len(compiled) == 2
    assert np.isfinite(seen).all()
    state, metrics = SupervisedLoop(run).again()(state)
    assert np.isfinite(float(metrics["train/loss"])) and len(compiled) == 2
