"""Log-probabilities of targets and their gradients, against all logits at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh, sizes

from ats_jax.ops.cross_entropy import token_logprobs
from ats_jax.sharding.rules import spec

# float32 sums of up to 64 terms in another order.
RTOL, ATOL = 2e-5, 2e-6
# bfloat16 keeps 8 bits: 2^-8 for each rounding of an operand.
BF16_RTOL, BF16_ATOL = 2e-2, 4e-3


def make_inputs(batch, seq, d_model, vocab, seed=0):
  rng = np.random.default_rng(seed)
  x_BTD = rng.normal(size=(batch, seq, d_model)).astype(np.float32)
  head_VD = rng.normal(size=(vocab, d_model)).astype(np.float32)
  targets_BT = rng.integers(0, vocab, (batch, seq)).astype(np.int32)
  weights_BT = rng.normal(size=(batch, seq)).astype(np.float32)
  return x_BTD, head_VD, targets_BT, weights_BT


def dense(x_BTD, head_VD, targets_BT, soft_cap=0.0):
  logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, head_VD)
  if soft_cap:
    logits_BTV = soft_cap * jnp.tanh(logits_BTV / soft_cap)
  logprobs_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
  return jnp.take_along_axis(logprobs_BTV, targets_BT[..., None], axis=-1)[..., 0]


def loss(logprobs_of, x_BTD, head_VD, targets_BT, weights_BT):
  """Not linear in the log-probabilities, and of tokens together: no weight is known beforehand."""
  logprobs_BT = logprobs_of(x_BTD, head_VD, targets_BT)
  rows_B = jnp.sum(weights_BT * logprobs_BT, axis=1)
  return jnp.sum(jax.nn.softplus(rows_B)) + jnp.sum(jnp.square(logprobs_BT) / 7), logprobs_BT


def value_and_grads(logprobs_of, *inputs):
  f = functools.partial(loss, logprobs_of)
  (_, logprobs_BT), grads = jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(*inputs)
  return logprobs_BT, grads


@pytest.mark.parametrize(("chunk", "soft_cap"), [(4, 1.5), (1000, 0.0)])
def test_value_and_gradient(mesh, chunk, soft_cap):
  inputs = make_inputs(3, 7, 9, 33)
  of = lambda *args: token_logprobs(*args, chunk, soft_cap=soft_cap)
  got, grads = value_and_grads(of, *inputs)
  want, want_grads = value_and_grads(functools.partial(dense, soft_cap=soft_cap), *inputs)
  assert got.dtype == jnp.float32 and got.shape == (3, 7)
  np.testing.assert_allclose(got, want, RTOL, ATOL)
  for g, w in zip(grads, want_grads, strict=True):
    np.testing.assert_allclose(g, w, RTOL, ATOL)


def test_bfloat16_operands(mesh):
  x, head, targets, weights = make_inputs(4, 15, 32, 61, seed=3)
  narrow = [
    jax.device_put(jnp.asarray(x, jnp.bfloat16), spec("batch", "seq", "act_embed")),
    jax.device_put(jnp.asarray(0.2 * head, jnp.bfloat16), spec("vocab", "embed")),
  ]
  wide = [np.asarray(a, np.float32) for a in narrow]
  of = lambda *args: token_logprobs(*args, 24)
  got, grads = value_and_grads(of, *narrow, targets, weights)
  want, want_grads = value_and_grads(dense, *wide, targets, weights)
  assert got.dtype == jnp.float32 and {g.dtype for g in grads} == {jnp.dtype(jnp.bfloat16)}
  np.testing.assert_allclose(got, want, RTOL, ATOL)
  for g, w in zip(grads, want_grads, strict=True):
    scale = np.abs(w).max()
    np.testing.assert_allclose(np.float32(g) / scale, w / scale, BF16_RTOL, BF16_ATOL)


def test_all_logits_never_exist(mesh):
  batch, seq, vocab, chunk = 4, 16, 512, 16
  inputs = make_inputs(batch, seq, 8, vocab)

  def largest(of):
    f = jax.value_and_grad(functools.partial(loss, of), argnums=(0, 1), has_aux=True)
    return max(sizes(jax.make_jaxpr(f)(*inputs).jaxpr))

  assert largest(dense) >= batch * seq * vocab
  fused = largest(lambda *args: token_logprobs(*args, chunk))
  assert chunk * vocab <= fused < batch * seq * vocab / 2


@pytest.mark.compat
def test_a_mesh_agrees_with_one_device():
  inputs = make_inputs(8, 3, 16, 24)
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    want, want_grads = value_and_grads(lambda *args: token_logprobs(*args, 5), *inputs)
  axes = (("batch", "seq", "act_embed"), ("vocab", "embed"), ("batch", "seq"), ("batch", "seq"))
  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    sharded = [jax.device_put(a, spec(*names)) for a, names in zip(inputs, axes, strict=True)]
    of = lambda x, head, targets: token_logprobs(x, head, targets, 5)
    got, grads = value_and_grads(of, *sharded)
  np.testing.assert_allclose(np.asarray(got), np.asarray(want), RTOL, ATOL)
  for g, w, a in zip(grads, want_grads, sharded, strict=False):
    np.testing.assert_allclose(np.asarray(g), np.asarray(w), RTOL, ATOL)
    assert g.sharding == a.sharding
