"""Loss and gradients against a float64 loss that holds all logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh, sizes

from ats_jax.ops.cross_entropy import LossSums, linear_cross_entropy
from ats_jax.sharding.rules import spec

pytestmark = pytest.mark.compat

# float32 sums of a few hundred terms against float64; gradients here are of order 0.01 to 1.
RTOL, ATOL = 2e-5, 2e-6
# bfloat16 keeps 8 bits: 2^-8 for each rounding of an operand.
BF16_RTOL, BF16_ATOL = 2e-2, 4e-3
# Central differences in float64: error h^2 of a smooth function plus rounding / h.
STEP = 1e-5


def reference(x, head, targets, mask, z_loss=0.0, label_smoothing=0.0):
  """The four sums, in float64, from all logits at once."""
  logits = x.astype(np.float64) @ head.astype(np.float64).T
  lse = np.log(np.exp(logits).sum(-1))
  label = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
  uniform = lse - logits.mean(-1)
  objective = (1 - label_smoothing) * (lse - label) + label_smoothing * uniform + z_loss * lse**2
  correct = label >= logits.max(-1)
  return LossSums(*((v * mask).sum() for v in (objective, lse - label, lse**2, correct)))


def numeric_gradient(f, at):
  """d f / d at by central differences."""
  gradient = np.zeros_like(at)
  for i in np.ndindex(at.shape):
    above, below = at.copy(), at.copy()
    above[i] += STEP
    below[i] -= STEP
    gradient[i] = (f(above) - f(below)) / (2 * STEP)
  return gradient


def make_inputs(batch=2, seq=5, d_model=4, vocab=7, seed=0, dtype=np.float32):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(batch, seq, d_model)).astype(dtype)
  head = rng.normal(size=(vocab, d_model)).astype(dtype)
  targets = rng.integers(0, vocab, (batch, seq)).astype(np.int32)
  mask = (rng.random((batch, seq)) < 0.7).astype(np.float32)
  mask[0, 0], mask[-1, -1] = 0.5, 0.0  # weights need not be 0 or 1
  return x, head, targets, mask


@functools.partial(jax.jit, static_argnames=("z_loss", "label_smoothing", "chunk"))
def value_and_grads(x, head, targets, mask, z_loss=0.1, label_smoothing=0.2, chunk=4, scale=1.0):
  """LossSums and (dx, dhead) of scale * objective."""

  def f(x, head):
    sums = linear_cross_entropy(x, head, targets, mask, z_loss, label_smoothing, chunk)
    return scale * sums.objective, sums

  (_, sums), grads = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(x, head)
  return sums, grads


@pytest.mark.parametrize(
  ("z_loss", "smoothing", "chunk"), [(0.1, 0.0, 1), (0.0, 0.2, 4), (0.1, 0.2, 1000)]
)
def test_sums_and_gradients(mesh, z_loss, smoothing, chunk):
  x, head, targets, mask = inputs = make_inputs()
  objective = lambda x, head: reference(x, head, targets, mask, z_loss, smoothing).objective
  x64, head64 = x.astype(np.float64), head.astype(np.float64)
  sums, (dx, dhead) = value_and_grads(*inputs, z_loss, smoothing, chunk)
  want = reference(x, head, targets, mask, z_loss, smoothing)
  np.testing.assert_allclose(sums, want, RTOL, ATOL)
  np.testing.assert_allclose(dx, numeric_gradient(lambda a: objective(a, head64), x64), RTOL, ATOL)
  want_dhead = numeric_gradient(lambda a: objective(x64, a), head64)
  np.testing.assert_allclose(dhead, want_dhead, RTOL, ATOL)
  # Without gradients the same sums come out of another branch.
  plain = jax.jit(lambda *a: linear_cross_entropy(*a, z_loss, smoothing, chunk))(*inputs)
  np.testing.assert_allclose(plain, want, RTOL, ATOL)


def test_each_token():
  """Its terms in the place of the cross-entropy; everything else stays bit for bit."""
  x, head, targets, mask = make_inputs(batch=4, vocab=8)
  logits = x.astype(np.float64) @ head.astype(np.float64).T
  label = np.take_along_axis(logits, targets[..., None], -1)[..., 0]

  @functools.partial(jax.jit, static_argnums=2)
  @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
  def f(x, head, per_token):
    sums = linear_cross_entropy(x, head, targets, mask, 0.1, 0.2, 6, per_token=per_token)
    return sums.objective, sums

  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    (loss, sums), grads = f(x, head, True)
    (plain_loss, plain), plain_grads = f(x, head, False)
  want = (np.log(np.exp(logits).sum(-1)) - label) * mask
  np.testing.assert_allclose(sums.cross_entropy, want, RTOL, ATOL)
  assert (loss, sums.z, sums.correct) == (plain_loss, plain.z, plain.correct)
  for got, same in zip(grads, plain_grads, strict=True):
    np.testing.assert_array_equal(got, same)


def test_tokens_with_mask_0_have_no_influence(mesh):
  x, head, targets, mask = make_inputs()
  hidden = mask == 0
  other_x = np.where(hidden[..., None], 37.0, x).astype(np.float32)
  other_targets = np.where(hidden, 0, targets)
  sums, (dx, dhead) = value_and_grads(x, head, targets, mask)
  other_sums, (other_dx, other_dhead) = value_and_grads(other_x, head, other_targets, mask)
  np.testing.assert_array_equal(sums, other_sums)
  np.testing.assert_array_equal(dx, other_dx)
  np.testing.assert_array_equal(dhead, other_dhead)
  assert not np.any(np.asarray(dx)[hidden])


def test_a_mask_of_zeros_gives_zeros_and_large_logits_do_not_overflow(mesh):
  x, head, targets, mask = make_inputs()
  sums, grads = value_and_grads(x, head, targets, 0 * mask)
  assert all(not np.asarray(v).any() for v in (*sums, *grads))
  sums, grads = value_and_grads(x * 300, head, targets, mask)
  assert np.isfinite(np.array(sums)).all() and all(np.isfinite(g).all() for g in grads)


def test_ties_count_as_correct(mesh):
  head = np.array([[1.0], [1.0], [0.0]], np.float32)
  x = np.full((1, 4, 1), 2.0, np.float32)
  targets = np.array([[0, 1, 2, 0]], np.int32)
  run = jax.jit(lambda *args: linear_cross_entropy(*args, 0.0, 0.0, 3))
  sums = run(x, head, targets, np.ones((1, 4), np.float32))
  assert sums.correct == 3.0
  np.testing.assert_allclose(sums.z, 4 * np.log(2 * np.exp(2.0) + 1) ** 2, RTOL)


def test_gradients_scale_with_the_cotangent(mesh):
  inputs = make_inputs()
  _, grads = value_and_grads(*inputs)
  _, scaled = value_and_grads(*inputs, scale=-3.0)
  for g, s in zip(grads, scaled, strict=True):
    np.testing.assert_allclose(-3.0 * g, s, RTOL, ATOL)


def test_bfloat16_operands(mesh):
  x, head, targets, mask = make_inputs(batch=4, seq=16, d_model=32, vocab=64, seed=3)
  x = jax.device_put(x.astype(jnp.bfloat16), spec("batch", "seq", "act_embed"))
  head = jax.device_put((head * 0.2).astype(jnp.bfloat16), spec("vocab", "embed"))
  sums, (dx, dhead) = value_and_grads(x, head, targets, mask, 1e-2, 0.1, chunk=24)
  assert dx.dtype == dhead.dtype == jnp.bfloat16
  assert all(s.dtype == jnp.float32 for s in sums)
  exact = [np.asarray(a, np.float32) for a in (x, head)]
  # The rounded operands are the input: the sums stay float32-exact, products accumulate in float32.
  np.testing.assert_allclose(sums, reference(*exact, targets, mask, 1e-2, 0.1), RTOL)
  _, (want_dx, want_dhead) = value_and_grads(*exact, targets, mask, 1e-2, 0.1)
  np.testing.assert_allclose(np.float32(dx), want_dx, BF16_RTOL, BF16_ATOL)
  np.testing.assert_allclose(np.float32(dhead), want_dhead, BF16_RTOL, BF16_ATOL)


def test_all_logits_never_exist(mesh):
  batch, seq, d_model, vocab, chunk = 4, 16, 8, 512, 16
  inputs = make_inputs(batch, seq, d_model, vocab)

  def fused(x, head, targets, mask):
    return linear_cross_entropy(x, head, targets, mask, 0.1, 0.1, chunk).objective

  def naive(x, head, targets, mask):
    return jnp.sum(jax.nn.logsumexp(jnp.einsum("btd,vd->btv", x, head), axis=-1) * mask)

  for transform in (lambda f: f, lambda f: jax.value_and_grad(f, argnums=(0, 1))):
    largest = lambda f, t=transform: max(sizes(jax.make_jaxpr(t(f))(*inputs).jaxpr))
    assert largest(naive) >= batch * seq * vocab  # the walk finds such an array where there is one
    assert chunk * vocab <= largest(fused) < batch * seq * vocab / 2


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 2, 2)])
@pytest.mark.thorough
def test_meshes_agree_with_one_device(shape):
  inputs = make_inputs(batch=8, seq=3, d_model=16, vocab=24)
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    want_sums, want_grads = value_and_grads(*inputs, chunk=5)
  axes = (("batch", "seq", "act_embed"), ("vocab", "embed"), ("batch", "seq"), ("batch", "seq"))
  with jax.set_mesh(make_test_mesh(*shape)):
    sharded = [jax.device_put(a, spec(*names)) for a, names in zip(inputs, axes, strict=True)]
    sums, grads = value_and_grads(*sharded, chunk=5)
  for got, want in ((sums, want_sums), (grads, want_grads)):
    for g, w in zip(got, want, strict=True):
      np.testing.assert_allclose(np.asarray(g), np.asarray(w), RTOL, ATOL)
  assert [g.sharding for g in grads] == [a.sharding for a in sharded[:2]]


def test_only_the_objective_is_differentiated(mesh):
  """A statistic's gradient would be zeros, and nobody would know."""
  x, head, targets, mask = make_inputs()
  sums = lambda x, mask: linear_cross_entropy(x, head, targets, mask, 0.1, 0.2, 4)
  for name in ("cross_entropy", "z", "correct"):
    with pytest.raises(TypeError, match="only `objective`"):
      jax.jit(jax.grad(lambda x, name=name: getattr(sums(x, mask), name)))(x)
  with pytest.raises(TypeError, match="the mask"):
    jax.grad(lambda mask: sums(x, mask).objective)(mask)
