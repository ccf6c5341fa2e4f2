"""Runs on rows of several lengths: each step compiled once, resumed bit for bit, measured right."""

import json

import jax
import numpy as np
import pytest
from helpers import assert_trees_close, make_test_mesh
from train_helpers import assert_same, compiled_steps, configs, logged

from ats_jax.checkpoint import workdir
from ats_jax.data.sources import open_data
from ats_jax.model.count import count
from ats_jax.orchestrator.trials.snapshots import Snapshots
from ats_jax.sharding.mesh import to_global
from ats_jax.step.program import make_program, predicted_bytes
from ats_jax.train.loop import train
from ats_jax.train.open import open_run
from ats_jax.train.supervise import SupervisedLoop

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def make(tmp_path_factory):
  """A config of a text of short and long documents, which gives rows of 16 and of 64."""
  folder = tmp_path_factory.mktemp("lengths")
  texts = [f"{i} short\n" if i % 9 else f"{i} " + "long " * 11 for i in range(900)]
  (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
  return configs({
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
    "log.every_steps": 2,
  })  # fmt: skip


def lengths(cfg):
  train_set, _ = open_data(cfg.data, cfg.seed)
  return [train_set.length(step * cfg.data.batch_size) for step in range(cfg.num_steps)]


def test_two_lengths_are_two_programs_and_a_resumed_run_is_bit_equal(make, tmp_path, monkeypatch):
  """Their meter knows what each costs."""
  cfg, compiled = make(), compiled_steps(monkeypatch)
  assert sorted(set(lengths(cfg))) == [16, 64]
  assert len({tuple(lengths(cfg)[:n]) for n in (2, 4)}) == 2
  whole = train(cfg, tmp_path / "whole")
  programs = {seq_len: step for _, seq_len, step in compiled}
  assert len(compiled) == 2  # once each, however they alternate
  assert list(programs) == list(dict.fromkeys(lengths(cfg)))  # when first needed
  tokens = {step.in_avals[0][1]["tokens"].shape for step in programs.values()}
  assert tokens == {(2, 32, 16), (2, 8, 64)}
  train(make(num_steps=4), tmp_path / "cut")
  assert_same(train(cfg, tmp_path / "cut").model, whole.model)
  assert logged(tmp_path / "cut", "train/loss") == logged(tmp_path / "whole", "train/loss")

  metadata = json.loads((tmp_path / "whole" / workdir.METADATA).read_text())
  assert "rows of 16" in metadata["run"]["training text"]
  performance = json.loads((tmp_path / "whole" / workdir.PERFORMANCE).read_text())
  needed = {predicted_bytes(step) for step in programs.values()}
  assert len(needed) == 2 and performance["memory/predicted_gib"] == max(needed) / 2**30

  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    model = make_program(cfg).init(abstract=True).model
  flops = {n: count(cfg, model, n).flops_causal for n in (16, 64)}
  assert flops[16] < flops[64]
  read = lambda name: logged(tmp_path / "whole", f"train/{name}")
  speed, rate = read("tflops_per_device"), read("tokens_per_sec")
  assert speed
  for step, teraflops in speed.items():
    got = teraflops * 1e12 * jax.device_count() / rate[step]
    np.testing.assert_allclose(
      got, np.mean([flops[n] for n in lengths(cfg)[step - 2 : step]]), rtol=1e-9
    )
    assert rate[step] == read("steps_per_sec")[step] * cfg.data.batch_size * 64


def test_a_step_of_short_rows_is_that_of_the_same_rows_laid_end_to_end(make):
  """Loss and update are those of whole rows in which no document sees another, on a mesh."""
  cfg = make(step__accum_steps=1, optimizer__warmup_steps=1)
  train_set, _ = open_data(cfg.data, cfg.seed)
  at = lengths(cfg).index(16) * cfg.data.batch_size
  indices = np.arange(at, at + cfg.data.batch_size)
  # A row without documents in common has the segments of both.
  short, whole = train_set.read(indices[None]), train_set.read_once(indices[None])
  assert short["tokens"].shape == (1, 64, 16) and whole["tokens"].shape == (1, 16, 64)
  found = []
  with jax.set_mesh(mesh := make_test_mesh(2, 2, 1)):
    program = make_program(cfg)
    for batch in (short, whole):
      state, metrics = program.train_step(
        program.init(), to_global(batch, mesh), program.training_rules(1)
      )
      found.append((float(metrics["train/loss"]), jax.device_get(state.model)))
  (loss, weights), (other_loss, other_weights) = found
  np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
  assert_trees_close(weights, other_weights, rtol=2e-4, atol=2e-5)


def test_a_supervised_run_tries_steps_of_every_length(make, tmp_path, monkeypatch):
  """What the supervisor makes finds the program of each batch."""
  compiled = compiled_steps(monkeypatch)
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
