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
  make_test_mesh,
  micro_batches,
  named_leaves,
  random_rows,
  tiny_config,
  when,
)

from ats_jax.config.schema import SampleConfig
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.inference.generator import generate_tokens
from ats_jax.model.forward_pass import rules_at
from ats_jax.model.param import Buffer
from ats_jax.model.stats import by_layer
from ats_jax.sharding.mesh import to_global
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
# One layer skips tokens; the other has experts for those that go through.
CFG = tiny_config(
  SMALL
  | {"mod.decision": "predictor", "model.vocab_size": 384}
  | {"moe.num_experts": 4, "moe.dense_first": 1, "moe.aux_loss": 0.01, "moe.num_shared": 1}
)
MESHES = [(8, 1, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2)]  # data, fsdp, tensor, expert


@functools.cache
def run(shape):
  """Metrics, gradients and buffers of a step, metrics of the next; evaluation; a text."""
  mesh = make_test_mesh(*shape)
  with jax.set_mesh(mesh):
    program = make_program(CFG)
    rows = [random_rows(CFG, 8, seed) for seed in (1, 2)]
    first, second = (to_global(micro_batches(r, 1), mesh) for r in rows)
    state, metrics = program.train_step(program.init(), first, program.training_rules(1))
    moments = named_leaves(state.opt_state[0].mu)
    grads = {k: np.asarray(v) / (1 - CFG.optimizer.b1) for k, v in moments.items()}
    buffers = {k: np.asarray(v) for k, v in named_leaves(buffers_of(state.model)).items()}
    _, later = program.train_step(state, second, program.training_rules(1))
    return jax.tree.map(np.asarray, (metrics, grads, buffers, later))


def buffers_of(model):
  keep = lambda x: x.get_value() if isinstance(x, Buffer) else None
  return jax.tree.map(keep, model, is_leaf=lambda x: isinstance(x, nnx.Variable))


@pytest.mark.parametrize(
  "shape", [pytest.param(m, marks=when(i, quick=(2,), ci=(1,))) for i, m in enumerate(MESHES)]
)
def test_a_mesh_computes_what_one_device_does(shape):
  (metrics, grads, buffers, later), (metrics1, grads1, buffers1, later1) = (
    run(shape),
    run((1, 1, 1, 1)),
  )
  for got, want in ((metrics, metrics1), (later, later1)):
    np.testing.assert_allclose(got.values, want.values, RTOL, 1e-6)
    # The same tokens, not about as many.
    assert_trees_close(got.layers, want.layers, rtol=1e-5, atol=1e-6)
  assert grads.keys() == grads1.keys()
  for key, grad in grads1.items():
    np.testing.assert_allclose(grads[key], grad, GRAD_RTOL, GRAD_ATOL, err_msg=key)
    assert np.abs(grad).max() > 10 * GRAD_ATOL, key
  assert len(buffers1) == 3 + 3 + 2  # two thresholds, a router
  assert_trees_close(buffers, buffers1, rtol=1e-5, atol=1e-6)
  assert all(np.any(buffer) for buffer in buffers1.values())
  assert (later1.values != metrics1.values).sum() > 8


@pytest.mark.thorough
def test_evaluation_and_text_of_a_mesh_are_those_of_one_device():
  sampling = SampleConfig(max_tokens=24, temperature=0.9, top_p=0.9)
  sums, texts = [], []
  for shape in ((1, 1, 1, 1), (1, 2, 2, 2)):
    mesh = make_test_mesh(*shape)
    with jax.set_mesh(mesh):
      model, program = make_decoder(CFG), make_program(CFG)
      rules = program.rules(CFG.num_steps)
      sums.append(program.eval_step(model, to_global(random_rows(CFG, 8, seed=3), mesh), rules))
      texts.append(
        list(
          generate_tokens(
            model, ByteTokenizer(), sampling, rules=rules, prompt="some prompt", seed=3
          )
        )
      )
  np.testing.assert_allclose(*map(np.asarray, sums), RTOL)
  assert texts[0] == texts[1] and len(texts[0]) == 24 and len(set(texts[0])) > 3


@pytest.mark.thorough
@pytest.mark.slow
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

  results = [step(model, micro_batches(rows, accum)) for accum in (1, 2, 4)]
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
