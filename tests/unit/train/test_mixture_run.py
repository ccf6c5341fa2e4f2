"""A run on a mixture: the losses of its sources, another phase on the way, evaluation by source."""

import math

import jax
import numpy as np
import pytest
from helpers import make_test_mesh, tiny_config

from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table
from ats_jax.data.sources import open_data, open_eval_sets
from ats_jax.metrics.rows import read_jsonl
from ats_jax.sharding.mesh import to_global
from ats_jax.step.by_source import BySource
from ats_jax.step.objective import Pretraining, batch_totals
from ats_jax.step.program import make_program
from ats_jax.train.loop import train

SWITCHED = (Phase(Table(web=1, code=3), steps=4), Phase(Table(talk=1)))


@pytest.fixture(scope="module")
def make(tmp_path_factory):
  """A config of three sources in a folder of their own."""
  folder = tmp_path_factory.mktemp("mixture")
  for name in ("web", "code", "talk"):
    lines = [f"{name} {i} {'x' * (i % 9)}\n" for i in range(400)]
    (folder / f"{name}.txt").write_text("".join(lines))

  def config(**changes):
    return tiny_config({
      "num_steps": 6,
      "model.vocab_size": 259,
      "data.sources": {n: (f"{folder}/{n}.txt",) for n in ("web", "code", "talk")},
      "data.cache_dir": f"{folder}/cache",
      "data.phases": SWITCHED,
      "data.batch_size": 16,
        "step.accum_steps": 2,
        "optimizer.schedule": "constant",  # of no other length
        "optimizer.warmup_steps": 1,
      "eval.every_steps": 0,
      "checkpoint.every_steps": 3,
      "log.every_steps": 1,
      "log.progress": False,
      "log.writers": ("jsonl",),
      "sample.max_tokens": 0,
    } | {name.replace("__", "."): value for name, value in changes.items()})  # fmt: skip

  return config


def rows_of(folder):
  return [row for row in read_jsonl(folder / "metrics.jsonl") if "train/loss" in row]


@pytest.mark.thorough
def test_an_appended_phase_goes_on_as_if_it_had_been_there(make, tmp_path):
  """A run that is stopped and gets a further phase is bit-equal to one that had it from the start.

  Its rows name each source's loss, its tokens, and how often it has been read.
  """
  whole = train(make(), tmp_path / "whole")
  train(make(num_steps=3, data__phases=(Phase(Table(web=1, code=3)),)), tmp_path / "changed")
  with pytest.raises(ValueError, match=r"phases: the first 48 rows .* append the new phase"):
    train(make(data__phases=(Phase(Table(talk=1)),)), tmp_path / "changed")
  resumed = train(make(), tmp_path / "changed")
  for a, b in zip(jax.tree.leaves(whole.model), jax.tree.leaves(resumed.model), strict=True):
    np.testing.assert_array_equal(a, b)

  rows = rows_of(tmp_path / "whole")
  changed = rows_of(tmp_path / "changed")
  assert [r["train/loss"] for r in rows] == [r["train/loss"] for r in changed]
  for row in rows:
    early = row["step"] <= 4
    read = {n for n in ("web", "code", "talk") if row[f"train/{n}/tokens"]}
    assert read == ({"web", "code"} if early else {"talk"})
    assert {n for n in ("web", "code", "talk") if f"train/{n}/loss" in row} == read
    assert sum(row[f"train/{n}/tokens"] for n in read) == row["train/tokens"]
    mean = sum(row[f"train/{n}/loss"] * row[f"train/{n}/tokens"] for n in read)
    assert math.isclose(mean / row["train/tokens"], row["train/loss"], rel_tol=1e-6)
  sizes = {n: part.info.num_rows for n, part in open_data(make().data, 0)[0].info.parts.items()}
  assert rows[3]["train/web/epochs"] == 16 / sizes["web"]
  assert rows[5]["train/talk/epochs"] == 32 / sizes["talk"]
  scores = [row for row in read_jsonl(tmp_path / "whole" / "metrics.jsonl") if "eval/loss" in row]
  for name in ("web", "code", "talk"):
    assert scores[-1][f"eval/{name}/tokens"]
  parts = [scores[-1][f"eval/{n}/loss"] * scores[-1][f"eval/{n}/tokens"] for n in sizes]
  assert math.isclose(sum(parts) / scores[-1]["eval/tokens"], scores[-1]["eval/loss"], rel_tol=1e-6)


@pytest.mark.thorough
def test_new_moments_at_a_phase_whenever_the_run_stops(make, tmp_path):
  """A run that ends just before the change, or just behind it, goes on bit for bit."""
  reset = dict(optimizer__phase_moments="reset")
  whole = train(make(**reset), tmp_path / "whole")
  for stop in (4, 5):
    train(make(num_steps=stop, **reset), tmp_path / "cut")
  resumed = train(make(**reset), tmp_path / "cut")
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
    np.testing.assert_array_equal(jax.random.key_data(a) if _is_key(a) else a,
                                  jax.random.key_data(b) if _is_key(b) else b)  # fmt: skip
  train(make(), tmp_path / "kept")
  loss = lambda folder: [row["train/loss"] for row in rows_of(tmp_path / folder)]
  assert loss("whole") == loss("cut")
  # Update 5 is the first of phase 2: the loss of step 6 is the first that its moments change.
  assert [a == b for a, b in zip(loss("whole"), loss("kept"), strict=True)] == [True] * 5 + [False]


def _is_key(x):
  return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


@pytest.mark.thorough
def test_the_loss_of_a_source_is_that_of_its_tokens_alone(make):
  """And the objective that is minimised is that of a run on one text, bit for bit."""
  cfg = make(data__phases=(Phase(Table(web=2, code=1, talk=1)),))
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
