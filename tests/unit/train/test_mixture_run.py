"""A run on a mixture: the losses of its sources, another phase on the way, evaluation by source."""

import dataclasses
import math
import shutil

import jax
import numpy as np
import pytest
from helpers import make_test_mesh
from train_helpers import assert_same, configs, logged

from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table
from ats_jax.data.sources import open_data, open_eval_sets
from ats_jax.metrics.rows import read_jsonl
from ats_jax.sharding.mesh import to_global
from ats_jax.step.by_source import BySource
from ats_jax.step.objective import Pretraining, batch_totals
from ats_jax.step.program import make_program
from ats_jax.train.loop import train

pytestmark = pytest.mark.thorough

NAMES = ("web", "code", "talk")
SWITCHED = (Phase(Table(web=1, code=3), steps=4), Phase(Table(talk=1)))


@pytest.fixture(scope="module")
def make(tmp_path_factory):
  """A config of three sources in a folder of their own."""
  folder = tmp_path_factory.mktemp("mixture")
  for name in NAMES:
    lines = [f"{name} {i} {'x' * (i % 9)}\n" for i in range(400)]
    (folder / f"{name}.txt").write_text("".join(lines))
  return configs({
    "model.vocab_size": 259,
    "data.sources": {name: (f"{folder}/{name}.txt",) for name in NAMES},
    "data.cache_dir": f"{folder}/cache",
    "data.phases": SWITCHED,
    "data.batch_size": 16,
    "step.accum_steps": 2,
    "optimizer.schedule": "constant",  # of no other length
    "optimizer.warmup_steps": 1,
    "optimizer.phase_moments": "reset",
    "eval.every_steps": 0,
    "checkpoint.every_steps": 3,
  })  # fmt: skip


def test_a_phase_is_as_if_it_had_been_there_whenever_the_run_stops(make, tmp_path):
  """A run that ends just before the change, gets its phase then, and ends just behind it.

  With new moments for each phase.
  """
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  state = train(make(), whole)
  alone = {"data__phases": (Phase(Table(web=1, code=3)),), "optimizer__phase_moments": "keep"}
  train(make(num_steps=4, **alone), cut)
  with pytest.raises(ValueError, match=r"phases: the first 64 rows .* append the new phase"):
    train(make(**alone | {"data__phases": (Phase(Table(talk=1)),)}), cut)
  train(make(num_steps=5), cut)
  assert_same(train(make(), cut), state)
  losses = logged(whole, "train/loss")
  assert losses == logged(cut, "train/loss")
  # Update 5 is the first of phase 2: the loss of step 6 is the first that its moments change.
  train(make(optimizer__phase_moments="keep"), tmp_path / "kept")
  kept = logged(tmp_path / "kept", "train/loss")
  assert [losses[step] == kept[step] for step in losses] == [True] * 5 + [False]

  # A phase in epochs is the same as one in the steps that they make.
  sizes = {n: rows.info.num_rows for n, rows in open_data(make().data, 0)[0].info.parts.items()}
  epochs = 63 / (sizes["web"] + sizes["code"])
  counted = (Phase(Table(web=1, code=3), epochs=epochs), Phase(Table(talk=1)))
  assert_same(train(make(data__phases=counted), tmp_path / "epochs"), state)

  # The rows name each source's loss, its tokens, and how often it has been read.
  rows = [row for row in read_jsonl(whole / "metrics.jsonl") if "train/loss" in row]
  for row in rows:
    read = {n for n in NAMES if row[f"train/{n}/tokens"]}
    assert read == ({"web", "code"} if row["step"] <= 4 else {"talk"})
    assert {n for n in NAMES if f"train/{n}/loss" in row} == read
    assert sum(row[f"train/{n}/tokens"] for n in read) == row["train/tokens"]
    mean = sum(row[f"train/{n}/loss"] * row[f"train/{n}/tokens"] for n in read)
    assert math.isclose(mean / row["train/tokens"], row["train/loss"], rel_tol=1e-6)
  sizes = {n: part.info.num_rows for n, part in open_data(make().data, 0)[0].info.parts.items()}
  assert rows[3]["train/web/epochs"] == 16 / sizes["web"]
  assert rows[5]["train/talk/epochs"] == 32 / sizes["talk"]
  score = [row for row in read_jsonl(whole / "metrics.jsonl") if "eval/loss" in row][-1]
  assert all(score[f"eval/{name}/tokens"] for name in NAMES)
  total = sum(score[f"eval/{n}/loss"] * score[f"eval/{n}/tokens"] for n in NAMES)
  assert math.isclose(total / score["eval/tokens"], score["eval/loss"], rel_tol=1e-6)


def test_phases_that_train_some_roles_resume_bit_for_bit(make, tmp_path):
  """From a checkpoint before, at and behind the step at which other roles begin to move."""
  first, second = SWITCHED
  phases = (
    dataclasses.replace(first, trains=("head",)),
    dataclasses.replace(second, trains=("embedding", "matrix")),
  )
  cfg = make(data__phases=phases, checkpoint__every_steps=1, checkpoint__keep=6)
  state = train(cfg, tmp_path / "run")
  losses = logged(tmp_path / "run", "train/loss")
  for step in (3, 4, 5):
    resumed = shutil.copytree(tmp_path / "run", tmp_path / f"from_{step}")
    assert_same(train(cfg, resumed, resume_step=step), state)
    assert logged(resumed, "train/loss") == losses
  # The other order ends elsewhere, as does a run in which all of them move.
  swapped = tuple(
    dataclasses.replace(a, trains=b.trains) for a, b in zip(phases, reversed(phases), strict=True)
  )
  for other in (swapped, SWITCHED):
    end = train(make(data__phases=other), tmp_path / str(other is swapped))
    assert not np.array_equal(end.model.head.weight[...], state.model.head.weight[...])


def test_the_loss_of_a_source_is_that_of_its_tokens_alone(make):
  """And the objective that is minimised is that of a run on one text, bit for bit."""
  one = (Phase(Table(web=2, code=1, talk=1)),)
  cfg = make(data__phases=one, optimizer__phase_moments="keep")
  train_set, main = open_data(cfg.data, cfg.seed)
  assert [s.name for s in open_eval_sets(cfg.data, main)] == ["", "web", "code", "talk"]
  with jax.set_mesh(make_test_mesh(2, 1, 1)):
    program = make_program(cfg)
    model, rules = program.init().model, program.training_rules(1)
    batch = to_global(train_set.read(np.arange(16)), jax.sharding.get_mesh())

    def contribution(objective, batch):
      whole = batch_totals(batch, rules)
      part = objective(model, batch, whole, rules, None)
      return part.loss, objective.means(part.sums, whole)

    plain, by_source = Pretraining(cfg), BySource(cfg)
    loss, means = jax.jit(lambda b: contribution(by_source, b))(batch)
    alone = jax.jit(lambda b: contribution(plain, b))
    assert loss == alone(batch)[0]
    assert len(means.keys() - alone(batch)[1].keys()) == 6
    for number, name in enumerate(("web", "code", "talk")):
      only = dict(batch, loss_mask=batch["loss_mask"] * (batch["source"] == number))
      np.testing.assert_allclose(
        means[f"train/{name}/loss"], alone(only)[1]["train/loss"], rtol=1e-6
      )
      assert means[f"train/{name}/tokens"] == np.sum(only["loss_mask"])
