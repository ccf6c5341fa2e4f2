"""Table lookup: the deterministic gradient is the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh

from ats_jax.ops import embedding
from ats_jax.ops.embedding import embedding_lookup
from ats_jax.sharding.rules import spec

pytestmark = pytest.mark.compat

RTOL, ATOL = 1e-5, 1e-6
VOCAB, D_MODEL, BATCH, SEQ = 16, 8, 8, 12


def make(dtype):
  rng = np.random.default_rng(0)
  table = rng.normal(size=(VOCAB, D_MODEL)).astype(np.float32)
  tokens = rng.integers(0, VOCAB // 2, (BATCH, SEQ)).astype(np.int32)  # many repeats, half unused
  weights = rng.normal(size=(BATCH, SEQ, D_MODEL)).astype(np.float32)
  return jax.device_put(table.astype(dtype), spec("vocab", "embed")), tokens, weights


@pytest.mark.parametrize(
  ("shape", "deterministic", "chunk"),
  [
    ((1, 1, 1), True, 1024),
    ((2, 2, 2), True, 5),  # does not divide 12: 4 is taken
    ((2, 2, 2), True, 12),
    ((2, 2, 2), False, 12),
  ],
)
def test_value_and_gradient(monkeypatch, shape, deterministic, chunk):
  monkeypatch.setattr(embedding, "CHUNK_POSITIONS", chunk)
  with jax.set_mesh(make_test_mesh(*shape)):
    table, tokens, weights = make(np.float32)

    def loss(table):
      x = embedding_lookup(table, tokens, jnp.float32, deterministic=deterministic)
      return jnp.sum(x * jax.device_put(weights, spec("batch", "seq", "act_embed"))), x

    (_, x), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(table)
  np.testing.assert_array_equal(x, np.asarray(table)[tokens])
  want = np.zeros((VOCAB, D_MODEL))
  np.add.at(want, tokens, weights.astype(np.float64))
  np.testing.assert_allclose(grad, want, RTOL, ATOL)
  assert grad.sharding == table.sharding


@pytest.mark.parametrize("table_dtype", ["float32", "bfloat16"])
def test_bfloat16_activations_add_up_in_float32(mesh, table_dtype):
  table, tokens, weights = make(table_dtype)
  weights = weights.astype(jnp.bfloat16)

  def loss(table):
    x = embedding_lookup(table, tokens, jnp.bfloat16, deterministic=True)
    assert x.dtype == jnp.bfloat16
    return jnp.sum(x.astype(jnp.float32) * weights.astype(jnp.float32))

  grad = jax.jit(jax.grad(loss))(table)
  assert grad.dtype == table.dtype
  want = np.zeros((VOCAB, D_MODEL))
  np.add.at(want, tokens, weights.astype(np.float64))
  # A bfloat16 gradient is rounded once, at the end.
  rtol = 2**-8 if table_dtype == "bfloat16" else RTOL
  np.testing.assert_allclose(np.float64(grad), want, rtol, ATOL)
