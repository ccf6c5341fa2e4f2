"""Metrics of layers that skip tokens, by hand."""

import functools
import math
from fractions import Fraction

import jax
import numpy as np
from helpers import make_decoder, random_rows, tiny_config

from ats_jax.model.forward_pass import rules_at
from ats_jax.step.parts.sparse import sparse_metrics


def test_metrics_by_hand(mesh):
  """Static routing: who goes through follows from the positions."""
  static = {"mod.routing": "static", "mod.capacity": 0.3, "mod.every": 2, "model.num_layers": 4}
  cfg = tiny_config(static)
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
