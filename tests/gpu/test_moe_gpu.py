"""Mixture of experts on a GPU: the fast grouped matmuls against the reference, op and step."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import kernels_of, make_test_mesh, micro_batches, random_rows, tiny_config

from ats_jax.ops.grouped_matmul import grouped_matmul
from ats_jax.step.program import make_program

pytestmark = pytest.mark.gpu
# bfloat16 results of float32 sums in another order, relative to the largest element.
TOLERANCE = 2e-2


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("scale, width", [(1, 256), (16, 1024)], ids=["tile", "tiles"])
@pytest.mark.parametrize("sizes", [[100, 0, 300, 57, 1, 0, 500, 20], [1000, 0, 0, 0, 0, 0, 0, 24]])
def test_grouped_matmul(sizes, scale, width, implementation):
  """One tile to a thread block, and several, which are stored while the next is multiplied."""
  keys, rows = jax.random.split(jax.random.key(0), 3), 1024 * scale
  sizes = [max(scale * size - scale // 16, 0) for size in sizes]
  x = jax.random.normal(keys[0], (rows, width), jnp.bfloat16)
  w = jax.random.normal(keys[1], (8, width, width // 2), jnp.bfloat16) / width**0.5
  dy = jax.random.normal(keys[2], (rows, width // 2), jnp.bfloat16)

  @functools.partial(jax.jit, static_argnums=0)
  def both(implementation, x, w, dy):
    kernels = kernels_of("grouped_matmul", implementation)
    y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.array(sizes), kernels), x, w)
    return y, *pullback(dy)

  for got, want in zip(both(implementation, x, w, dy), both("xla", x, w, dy), strict=True):
    got, want = (np.asarray(a, np.float32) for a in (got, want))
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize(("rows", "sizes"), [(2, [0, 1, 0, 1]), (128, [70, 0, 40, 10])], ids=str)
def test_few_rows(rows, sizes, implementation):
  keys = jax.random.split(jax.random.key(0))
  x = jax.random.normal(keys[0], (rows, 1024), jnp.bfloat16)
  w = jax.random.normal(keys[1], (4, 1024, 448), jnp.bfloat16) / 32

  @functools.partial(jax.jit, static_argnums=0)
  def product(implementation, x, w):
    kernels = kernels_of("grouped_matmul", implementation)
    return grouped_matmul(x, w, jnp.array(sizes), kernels)

  got, want = (np.asarray(product(name, x, w), np.float32) for name in (implementation, "xla"))
  assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"moe.num_shared": 1, "moe.null_experts": 4},
    {"mod.routing": "learned", "mod.capacity": 0.25},
    {"mod.routing": "learned", "mod.scope": "ffn", "mod.every": 1, "mod.capacity": 0.5},
    {"moe.dispatch": "capacity"},
  ],
  ids=["moe", "shared-null", "hybrid", "hybrid-ffn", "capacity"],
)
def test_steps_follow_the_reference(changes):
  """Losses of ten steps with the GPU's implementations, and with XLA's."""
  shape = {"model.d_model": 128, "model.d_ff": 256, "model.head_dim": 64, "data.seq_len": 128}
  sparse = {"moe.num_experts": 4, "moe.d_ff": 128, "precision.compute_dtype": "bfloat16"}
  losses = []
  for ops in ({"ops.strict": True}, {"ops.kernels": {"attention": "xla", "grouped_matmul": "xla"}}):
    cfg = tiny_config(shape | sparse | changes | ops | {"optimizer.learning_rate": 1e-3})
    with jax.set_mesh(make_test_mesh(1, 1, 1)):
      program = make_program(cfg)
      kernels, fast = program.num.kernels, "ops.strict" in ops
      flash = "triton" if importlib.util.find_spec("triton") else "cudnn"  # of many documents
      assert kernels.of("attention", "forward") == (flash if fast else "xla")
      assert kernels.of("grouped_matmul", "forward") == ("mosaic" if fast else "xla")
      state, found = program.init(), []
      batch = micro_batches(random_rows(cfg, 8), 1)
      for _ in range(10):
        state, metrics = program.train_step(state, batch, program.training_rules(1))
        found.append(float(metrics["train/loss"]))
    losses.append(found)
  assert losses[0][-1] < losses[0][0] - 0.05
  np.testing.assert_allclose(*losses, rtol=5e-3)
