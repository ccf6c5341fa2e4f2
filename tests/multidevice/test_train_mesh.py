"""One run on four meshes: the same losses and gradients, matching shardings, one compilation."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from helpers import (
  make_test_mesh,
  micro_batches,
  named_leaves,
  random_rows,
  tiny_config,
  when,
)

from ats_jax.sharding.mesh import to_global
from ats_jax.step.program import make_program

pytestmark = pytest.mark.compat

MESHES = [(1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 4, 2)]
SEVERAL = [
  pytest.param(mesh, marks=when(i, quick=(3,), ci=(2,))) for i, mesh in enumerate(MESHES) if i
]
STEPS = 5
# float32 sums in another order; Adam amplifies the difference of the smallest gradients.
LOSS_RTOL = 1e-4
# One backward pass: gradients are of order 1e-3 to 1.
GRAD_RTOL, GRAD_ATOL = 1e-4, 1e-6

CFG = tiny_config(
  {
    "data.batch_size": 16,
    "step.accum_steps": 2,
    "step.z_loss": 1e-3,
    "step.remat": "names",
    "model.dropout": 0.1,
    "model.qk_norm": True,
    "model.attn_out_bias": True,
    "model.attn_sinks": True,
    "optimizer.ema_decay": 0.9,
    "optimizer.grad_clip": 0.0,
  }
)


class Run(NamedTuple):
  losses: np.ndarray
  grads: dict[str, np.ndarray]
  before: dict[str, Any]  # shardings of the state
  after: dict[str, Any]
  shards: dict[str, tuple[int, ...]]
  compilations: int
  eval_sums: np.ndarray


@functools.cache
def run(shape: tuple[int, int, int]) -> Run:
  mesh = make_test_mesh(*shape)
  with jax.set_mesh(mesh):
    program = make_program(CFG)
    state = program.init()
    shardings = lambda: {k: v.sharding for k, v in named_leaves(state).items()}
    before = shardings()
    rows = [random_rows(CFG, CFG.data.batch_size, seed=s) for s in range(STEPS)]
    batches = [to_global(micro_batches(r, 2), mesh) for r in rows]
    losses, grads = [], {}
    for batch in batches:
      state, metrics = program.train_step(state, batch, program.training_rules(1))
      losses.append(float(metrics["train/loss"]))
      if not grads:  # after one update the first moment is (1 - b1) times the gradient
        mu = named_leaves(state.opt_state[0].mu)
        grads = {k: np.asarray(v) / (1 - CFG.optimizer.b1) for k, v in mu.items()}
    eval_batch = to_global({k: v[:8] for k, v in rows[0].items()}, mesh)
    shards = {k: v.addressable_shards[0].data.shape for k, v in named_leaves(state.model).items()}
    return Run(
      np.array(losses),
      grads,
      before,
      shardings(),
      shards,
      program.train_step._cache_size(),
      np.asarray(program.eval_step(state.weights, eval_batch, program.rules(1))),
    )


@pytest.mark.parametrize("shape", SEVERAL)
def test_losses_and_evaluation_equal_those_of_one_device(shape):
  one, many = run(MESHES[0]), run(shape)
  np.testing.assert_allclose(many.losses, one.losses, LOSS_RTOL)
  np.testing.assert_allclose(many.eval_sums[0], one.eval_sums[0], LOSS_RTOL)
  assert many.eval_sums[2] == one.eval_sums[2]
  assert len(set(one.losses.tolist())) == STEPS  # there is something to compare


@pytest.mark.parametrize("shape", SEVERAL)
def test_gradients_equal_those_of_one_device(shape):
  one, many = run(MESHES[0]).grads, run(shape).grads
  assert one.keys() == many.keys()
  for name, grad in one.items():
    np.testing.assert_allclose(many[name], grad, GRAD_RTOL, GRAD_ATOL, err_msg=name)
    assert np.abs(grad).max() > 100 * GRAD_ATOL, name


@pytest.mark.parametrize("shape", [MESHES[0], *SEVERAL])
def test_moments_and_average_live_where_their_parameter_lives(shape):
  for shardings in (run(shape).before, run(shape).after):
    of_model = {k: s for k, s in shardings.items() if k.startswith(".model")}
    parameters = {k.removeprefix(".model"): s for k, s in of_model.items()}
    assert len(parameters) > 10
    for name, sharding in parameters.items():
      copies = [k for k in shardings if k.endswith(name) and k not in of_model]
      assert len(copies) == 3, name  # mu, nu, ema
      assert {shardings[k] for k in copies} == {sharding}, name
  assert run(shape).before == run(shape).after


def test_every_matrix_is_sharded():
  shards = run((1, 4, 2)).shards
  whole = run((1, 1, 1)).shards
  for name, shape in whole.items():
    ways = np.prod(shape) / np.prod(shards[name])
    vector = {"scale": 1, "bias": 1, "sinks": 2}  # of heads, which `tensor` cuts
    assert ways == vector.get(name.removesuffix(".value").split(".")[-1], 8), name


@pytest.mark.parametrize("shape", [MESHES[0], *SEVERAL])
def test_a_run_compiles_once(shape):
  assert run(shape).compilations == 1


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(2, 2, 2)])
def test_the_step_compiled_ahead_takes_real_batches_and_its_own_result(shape):
  mesh = make_test_mesh(*shape)
  with jax.set_mesh(mesh):
    program = make_program(CFG)
    state = program.init()
    step = program.compile_train_step(state, program.training_rules(1))
    losses = []
    for seed in range(2):
      rows = random_rows(CFG, CFG.data.batch_size, seed=seed)
      state, metrics = step(state, to_global(micro_batches(rows, 2), mesh))
      losses.append(float(metrics["train/loss"]))
  np.testing.assert_array_equal(losses, run(shape).losses[:2])
