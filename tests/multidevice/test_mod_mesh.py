"""A step with layers that skip tokens: by hand, over micro-batches, and on meshes."""

import functools
import math
from fractions import Fraction

import jax
import numpy as np
import pytest
from flax import nnx
from helpers import (
  assert_trees_close,
  make_decoder,
  micro_batches,
  named_leaves,
  random_rows,
  tiny_config,
)

from ats_jax.model.forward_pass import rules_at
from ats_jax.model.param import Buffer
from ats_jax.model.stats import by_layer
from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import Pretraining, batch_totals
from ats_jax.step.parts.sparse import sparse_metrics, with_buffers
from ats_jax.step.program import make_program

# float32 sums in another order; gradients are of order 1e-3 to 1.
RTOL, GRAD_RTOL, GRAD_ATOL = 1e-4, 1e-4, 2e-6
SMALL = {
  "model.d_model": 16,
  "model.d_ff": 32,
  # Weights larger than at initialisation: the scores of two tokens are not within rounding.
  "model.init_std": 0.3,
  "optimizer.grad_clip": 0.0,
  "mod.capacity": 0.25,
  "mod.every": 1,
  "mod.routing": "learned",
}


def buffers_of(model):
  keep = lambda x: x.get_value() if isinstance(x, Buffer) else None
  return jax.tree.map(keep, model, is_leaf=lambda x: isinstance(x, nnx.Variable))


@pytest.mark.thorough
def test_micro_batches_change_nothing(mesh):
  cfg = tiny_config(SMALL | {"mod.scope": "ffn", "mod.decision": "predictor"})
  rows, model, rules = (
    random_rows(cfg, 8, seed=1),
    make_decoder(cfg),
    make_program(cfg).training_rules(1),
  )
  lengths = (rows["segment_ids"] > 0).reshape(4, -1).sum(1)
  assert len(set(lengths)) == 4  # ragged: a mean of means would differ

  @jax.jit
  def step(model, batch):
    whole = batch_totals(batch, rules)
    _, stats, grads = sums_and_grads(
      Pretraining(cfg), model, batch, whole, jax.random.key(0), rules
    )
    model = with_buffers(cfg, model, stats, 0, rules)
    return stats, grads, buffers_of(model)

  results = [step(model, micro_batches(rows, accum)) for accum in (1, 4)]
  for got in results[1:]:
    assert_trees_close(got, results[0], rtol=1e-4, atol=2e-6)
  stats, grads, _ = results[0]
  mod = by_layer(stats, model.layout, "mod")
  np.testing.assert_array_equal(mod.tokens, [lengths.sum()] * 2)
  predictor = {k: v for k, v in named_leaves(grads).items() if "predict" in k}
  assert len(predictor) == 2 and all(np.abs(v).max() > 1e-4 for v in predictor.values())


def test_metrics_by_hand(mesh):
  """Static routing: who goes through follows from the positions."""
  static = {"mod.routing": "static", "mod.capacity": 0.3, "mod.every": 2, "model.num_layers": 4}
  cfg = tiny_config(SMALL | static)
  rows, model = random_rows(cfg, 8, seed=1), make_decoder(cfg)
  positions, ids = rows["positions"], rows["segment_ids"]
  rules = rules_at(cfg, 0, training=True)
  run = jax.jit(
    lambda m: m(rows["tokens"], positions_BT=positions, segment_ids_BT=ids, rules=rules)[1]
  )
  metrics = sparse_metrics(cfg, model, run(model))
  valid, depth, routed, overflow = ids > 0, np.zeros(ids.shape, int), [], []
  for layer in (1, 3):
    steps = [math.floor(Fraction(3, 10) * (p + layer)) for p in range(17)]
    wanted = valid & (np.diff(steps)[positions] > 0)
    went = wanted & (np.cumsum(wanted, axis=1) <= 5)  # ceil(0.3 * 16) places
    depth += went
    routed.append(went.sum() / valid.sum())
    overflow.append((wanted & ~went).sum() / valid.sum())
  assert sum(overflow) > 0
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
  close(metrics["mod/depths"], np.bincount(depth[valid], minlength=3) / valid.sum())
  close(metrics["mod/layer_routed"], routed)
  close(metrics["mod/layer_overflow"], overflow)
  close(metrics["mod/routed"], np.mean(routed))
  close(metrics["mod/overflow"], np.mean(overflow))
  close(metrics["mod/depth"], 2 + depth[valid].mean())
  close(metrics["mod/gate"], 1.0)
  close(metrics["mod/agreement"], 1.0)
