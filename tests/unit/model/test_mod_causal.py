"""The causal rule: never looks ahead, bit for bit, and learns to do what training does."""

import dataclasses
import functools

import canonical
import jax
import numpy as np
import pytest
from helpers import micro_batches, pack, random_rows, tiny_config

from ats_jax.model.forward_pass import Pass, rules_at
from ats_jax.model.stats import by_layer
from ats_jax.step.objective import make_eval_step
from ats_jax.step.parts.sparse import with_buffers
from ats_jax.step.program import make_program

ROWS, SEQ = 4, 24
VOCAB = 384
CUTS = np.array([0, 7, 13, 19])  # of each row: what comes from here on is changed
MOE = {"moe.num_experts": 4}
MOD = {"mod.every": 1, "mod.capacity": 0.25}
mod = lambda routing, scope="block", decision="threshold": MOD | {
  "mod.routing": routing, "mod.scope": scope, "mod.decision": decision
}  # fmt: skip
VARIANTS = {
  "hybrid": MOE | mod("learned"),
  "predictor": mod("learned", "ffn", "predictor"),
}


@functools.cache
def config(name):
  # Weights larger than at initialisation, so that tokens differ clearly.
  small = {"model.d_model": 16, "model.d_ff": 32, "model.init_std": 0.3, "data.seq_len": SEQ}
  return tiny_config(small | {"model.vocab_size": VOCAB} | VARIANTS[name])


@functools.partial(jax.jit, static_argnames="rules")
def forward(model, tokens, segments, positions, rules):
  around = dict(positions_BT=positions, segment_ids_BT=segments, rules=rules)
  x, stats = model(tokens, **around)
  return model.logits(x), stats


def logits_of(model, rows, rules):
  arrays = (rows[name] for name in ("tokens", "segment_ids", "positions"))
  return forward(model, *arrays, rules)


def rules_of(cfg, training: bool) -> Pass:
  return rules_at(cfg, cfg.num_steps, training=training)


def settled(name, rows):
  """A model whose thresholds are quantiles of the scores of `rows`."""
  cfg, model = config(name), canonical.model(config(name))
  if name == "hybrid":
    rules = rules_of(cfg, False)
    _, stats = logits_of(model, rows, rules)
    model = with_buffers(cfg, model, stats, np.int32(0), rules)
    thresholds = np.concatenate([layer.depth.threshold[...] for layer in skipping(model)])
    assert thresholds.all() and len(set(thresholds)) == thresholds.size
  return model


def skipping(model):
  layers = [layer for segment in model.segments for layer in segment.layers]
  return [layer for layer in layers if layer.depth is not None]


def futures(rows):
  """Rows that differ from `rows` from each row's cut on: other tokens, or none."""
  later = np.arange(SEQ) >= CUTS[:, None]
  other = (rows["tokens"] + np.random.default_rng(1).integers(1, VOCAB, (ROWS, SEQ))) % VOCAB
  tokens = rows | {"tokens": np.where(later, other, rows["tokens"]).astype(np.int32)}
  nothing = rows | {"segment_ids": np.where(later, 0, rows["segment_ids"])}
  return tokens, nothing


def is_past(rows):
  return (np.arange(SEQ) < CUTS[:, None]) & (rows["segment_ids"] > 0)


@pytest.mark.parametrize("name", VARIANTS)
def test_later_tokens_leave_earlier_logits_as_they_are(mesh, name):
  cfg, rows = config(name), random_rows(config(name), ROWS, seed=2)
  model, past = settled(name, rows), is_past(rows)
  assert past.sum() == CUTS.sum() - (rows["segment_ids"] == 0)[np.arange(SEQ) < CUTS[:, None]].sum()
  results = [logits_of(model, r, rules_of(cfg, False)) for r in (rows, *futures(rows))]
  (want, stats), *changed = [(np.asarray(logits), stats) for logits, stats in results]
  for logits, _ in changed:
    np.testing.assert_array_equal(logits[past], want[past])
    assert (logits[~past] != want[~past]).any()
  if stats.depth_L is not None:  # some tokens go through, others do not
    assert (np.asarray(stats.depth_L) > 0).sum() >= 2


def test_the_eval_step_does_not_look_ahead(mesh):
  cfg = config("hybrid")
  rows = random_rows(cfg, ROWS, seed=2)
  model, eval_step = settled("hybrid", rows), make_eval_step(cfg)
  past = {"loss_mask": is_past(rows).astype(np.float32)}
  score = lambda r: np.asarray(eval_step(model, r | past, rules_of(cfg, False)))
  want, *changed = map(score, (rows, *futures(rows)))
  assert want[2] == is_past(rows).sum() and 0 <= want[1] <= want[2] < want[0]
  for sums in changed:
    np.testing.assert_array_equal(sums, want)
  with pytest.raises(AssertionError, match="future"):
    eval_step(model, rows | past, rules_of(cfg, True))


# Training. 32 tokens, of which each follows from the one before but for a quarter drawn anew.
LONG = 32
TRAINED = {"model.d_ff": 64, "data.seq_len": LONG, "mod.routing": "learned", "mod.capacity": 0.25}


def learnable(cfg, seed):
  """Full rows, half of them of two documents."""
  rng, size = np.random.default_rng(seed), cfg.data.batch_size
  tokens = rng.integers(0, 64, (size, LONG + 1))
  for t in range(LONG):
    follows = (3 * tokens[:, t] + 1) % 64
    tokens[:, t + 1] = np.where(rng.random(size) < 0.25, tokens[:, t + 1], follows)
  segments, positions = pack([[LONG], [20, 12]] * (size // 2), LONG)
  tokens = tokens.astype(np.int32)
  return {
    "tokens": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "loss_mask": np.ones((size, LONG), np.float32),
    "segment_ids": segments,
    "positions": positions,
  }


def train(cfg, only=None):
  """The plan, the state after all steps and the metrics of each, by name.

  `only`: from the middle on, the one part of the model that still moves.
  """
  program = make_program(cfg)
  state, rows, still = program.init(), [], None
  for step in range(cfg.num_steps):
    state, metrics = program.train_step(
      state, micro_batches(learnable(cfg, step), 1), program.training_rules(step + 1)
    )
    if only and step >= cfg.num_steps // 2:
      still = still or jax.tree.map(np.asarray, state.model)
      keep = lambda path, new, old: new if only in jax.tree_util.keystr(path) else (0 * new + old)
      model = jax.tree_util.tree_map_with_path(keep, state.model, still)
      state = dataclasses.replace(state, model=model)
    rows.append(metrics.on_host())
  return program, state, {name: np.array([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.thorough
def test_the_predictor_learns_a_router_that_stands_still(mesh):
  # It follows a router that moves with a delay, which grows with the learning rate.
  steps = {"num_steps": 160, "optimizer.learning_rate": 1e-2, "mod.decision": "predictor"}
  _, _, values = train(tiny_config(TRAINED | steps), only="predict")
  assert np.isfinite(values["train/loss"]).all()
  moving, still = values["mod/agreement"][60:80].mean(), values["mod/agreement"][-20:].mean()
  assert still > 0.85 and still > moving + 0.1  # 0.75 if none passed


def test_capacity_falls_in_rungs():
  changes = {"mod.routing": "learned", "mod.capacity": 0.125, "num_steps": 100}
  cfg = tiny_config(changes | {"mod.anneal_fraction": 0.3, "mod.rungs": 3})
  for training in (True, False):
    found = [rules_at(cfg, step, training=training) for step in range(100)]
    assert all(rules.training == training for rules in found)
    want = [1.0] * 10 + [0.5] * 10 + [0.25] * 10 + [0.125] * 70
    np.testing.assert_allclose([rules.capacity for rules in found], want, 1e-12)
    assert len(set(found)) == 4  # each is compiled once
  at_once = tiny_config(changes)
  assert rules_at(at_once, 0, training=True) == Pass(True, 0.125)


@pytest.mark.thorough
def test_down_the_rungs_the_threshold_comes_to_choose_what_training_chooses(mesh):
  ladder = {"mod.start_capacity": 0.5, "mod.anneal_fraction": 0.05, "mod.rungs": 1}
  steps = {"num_steps": 160, "optimizer.learning_rate": 1e-3}
  cfg = tiny_config(TRAINED | ladder | steps)
  rungs = [0.5] * 8 + [0.25] * 152
  program, state, values = train(cfg)
  np.testing.assert_allclose(values["mod/routed"], rungs, 1e-6)
  assert [program.training_rules(step).capacity for step in range(1, 161)] == rungs
  (depth,) = (layer.depth for layer in skipping(state.model))
  assert depth.capacity[...] == program.rules(160).capacity == 0.25
  assert depth.updates[...] == 152  # the quantile of the other rung is forgotten
  assert program.train_step._cache_size() == 2
  assert values["train/loss"][-10:].mean() < values["train/loss"][0] - 1.5
  assert values["mod/agreement"][0] == 0.5  # all pass before the first update
  assert values["mod/agreement"][-20:].mean() > 0.9  # 0.75 if none passed
  shares = []
  for seed in range(4):  # rows that training has not seen
    _, stats = logits_of(state.model, learnable(cfg, 1000 + seed), rules_of(cfg, False))
    mod_stats = by_layer(stats, state.model.layout, "mod")
    shares.append(mod_stats.routed / mod_stats.tokens)
  assert 0.18 < np.mean(shares) < 0.32
