"""SwiGLU, RMSNorm, RoPE, routing and AdamW: values and gradients against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ats_jax.ops.adamw import UpdateScalars, adamw_update, clip_scale
from ats_jax.ops.rms_norm import rms_norm
from ats_jax.ops.rope import rope, rope_table
from ats_jax.ops.routing import RoutingRule, route
from ats_jax.ops.swiglu import clamped_swiglu, swiglu

pytestmark = pytest.mark.compat

BF16 = 2.0**-8  # the most that one rounding to bfloat16 changes a number


def draw(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape)


def slopes(f, args, i, dy, step=1e-6):
  """Gradient of sum(f * dy) with respect to argument i, by central differences in float64."""
  found = np.zeros_like(args[i])
  for at in np.ndindex(found.shape):
    ends = []
    for sign in (1, -1):
      moved = [a.copy() for a in args]
      moved[i][at] += sign * step
      ends.append(np.sum(f(*moved) * dy))
    found[at] = (ends[0] - ends[1]) / (2 * step)
  return found


def check_gradients(op, f, args, dy, wrt):
  """The op's gradients in float64 against differences of its definition `f` in numpy."""

  @jax.jit
  def run(args, dy):
    y, pullback = jax.vjp(op, *args)
    return y, pullback(dy)

  with jax.enable_x64(True):
    y, grads = run(args, dy)
    np.testing.assert_allclose(y, f(*args), rtol=1e-12, atol=1e-12)
  for i in wrt:
    np.testing.assert_allclose(grads[i], slopes(f, args, i, dy), rtol=1e-6, atol=1e-8)


def np_silu(x):
  return x / (1 + np.exp(-x))


def test_swiglu():
  args = [3 * draw(0, 3, 5), draw(1, 3, 5)]
  check_gradients(swiglu, lambda g, u: np_silu(g) * u, args, draw(2, 3, 5), wrt=(0, 1))
  y, pullback = jax.vjp(swiglu, jnp.array([-1e4, -90.0, 0.0, 90.0, 1e4]), jnp.ones(5))
  assert np.all(np.isfinite([y, *pullback(jnp.ones(5))]))
  np.testing.assert_allclose(y, [0, 0, 0, 90, 1e4], atol=1e-30)


def test_clamped_swiglu():
  """Beyond its limit a gate has no gradient, and below minus the limit only `up` has none."""

  def define(gate, up):
    gate, up = np.minimum(gate, 2.0), np.clip(up, -2.0, 2.0)
    return gate / (1 + np.exp(-1.5 * gate)) * (up + 1)

  args = [3 * draw(0, 4, 5), 3 * draw(1, 4, 5)]
  for values in args:
    assert (
      np.any(values > 2.1) and np.any(values < -2.1) and np.all(np.abs(np.abs(values) - 2) > 1e-3)
    )
  op = lambda gate, up: clamped_swiglu(gate, up, 2.0, 1.5)
  check_gradients(op, define, args, draw(2, 4, 5), wrt=(0, 1))
  in_bfloat16 = [jnp.asarray(a, jnp.bfloat16) for a in args]
  want = define(*(np.asarray(a, np.float64) for a in in_bfloat16))
  got = op(*in_bfloat16)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1.01 * BF16)


def test_swiglu_in_bfloat16_is_rounded_once():
  gate, up = (jnp.asarray(draw(i, 64, 32), jnp.bfloat16) for i in (0, 1))
  want = np_silu(np.asarray(gate, np.float64)) * np.asarray(up, np.float64)
  got = swiglu(gate, up)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1.01 * BF16, atol=1e-30)


@pytest.mark.parametrize("rows", [(2, 3), (1, 1), ()], ids=str)
def test_rms_norm(rows):
  eps = 0.5
  define = lambda x, s: x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * s
  args = [draw(0, *rows, 5), draw(1, 5)]
  op = lambda x, s: rms_norm(x, s, eps=eps)
  check_gradients(op, define, args, draw(2, *rows, 5), wrt=(0, 1))


def test_gradient_of_a_norm_scale_is_summed_in_float32():
  """In bfloat16 a sum of 4096 ones stops at 256."""
  x = jnp.ones((4096, 8), jnp.bfloat16)
  grad = jax.grad(lambda s: rms_norm(x, s, eps=0.0).astype(jnp.float32).sum())(jnp.ones(8))
  np.testing.assert_allclose(grad, 4096)


def test_rope_turns_gradients_back():
  positions = jnp.asarray([[0, 1, 5], [7, 8, 2]])
  with jax.enable_x64(True):
    table = tuple(np.asarray(t, np.float64) for t in rope_table(positions, 6, 100.0))

  def define(x):
    cos, sin = table
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

  op = lambda x: rope(x, tuple(jnp.asarray(t) for t in table))
  check_gradients(op, define, [draw(0, 2, 3, 2, 6)], draw(1, 2, 3, 2, 6), wrt=(0,))


def np_route(logits, selection, rule):
  """One token at a time."""
  columns = np.argsort(-selection, axis=-1, kind="stable")[..., : rule.top_k]
  exp = np.exp(logits - logits.max(-1, keepdims=True))
  scores = 1 / (1 + np.exp(-logits))
  if rule.score == "softmax":
    scores = exp / exp.sum(-1, keepdims=True)
  weights = np.take_along_axis(scores, columns, -1)
  if rule.renormalize:
    weights = weights / weights.sum(-1, keepdims=True)
  return columns, rule.scale * weights


@pytest.mark.parametrize(
  ("score", "renormalize", "top_k"),
  [("softmax", True, 3), ("sigmoid", True, 3), ("softmax", False, 1)],
)
def test_routing(score, renormalize, top_k):
  rule = RoutingRule(top_k, score, renormalize, 2.5)
  logits, bias = draw(0, 2, 3, 7), draw(1, 7)
  valid = np.array([[True, True, False], [True, False, True]])
  selection = logits + bias
  selection[0, 1, :2] = selection[0, 1].max() + 1  # equals: the lower column first
  columns, _ = np_route(logits, selection, rule)
  with jax.enable_x64(True):
    got_columns, _, load = jax.jit(route, static_argnums=3)(logits, selection, valid, rule)
  np.testing.assert_array_equal(got_columns, columns)
  want_load = [
    np.bincount(columns[b][valid[b]].ravel(), minlength=7) for b in range(valid.shape[0])
  ]
  np.testing.assert_array_equal(load, want_load)
  op = lambda logits: route(logits, jnp.asarray(selection), jnp.asarray(valid), rule)[1]
  define = lambda logits: np_route(logits, selection, rule)[1]
  check_gradients(op, define, [logits], draw(2, 2, 3, top_k), wrt=(0,))


def test_routing_where_all_scores_vanish():
  rule, valid = RoutingRule(2, "sigmoid", True, 1.0), np.ones((1, 2), bool)
  f = lambda x: route(x, x, valid, rule)[1].sum()
  assert np.all(np.isfinite(jax.jit(jax.grad(f))(np.full((1, 2, 4), -1e30, np.float32))))


@pytest.mark.parametrize("moments", [jnp.float32, jnp.bfloat16])
def test_adamw_follows_its_definition(moments):
  b1, b2, eps, decay, lr, max_norm = 0.9, 0.95, 1e-8, 0.1, 1e-2, 0.5

  @jax.jit
  def update(param, mu, nu, grad, corrections):
    rates = UpdateScalars(clip_scale([grad], max_norm), lr, *corrections)
    constants = dict(b1=b1, b2=b2, eps=eps, weight_decay=decay)
    return adamw_update(param, grad, mu, nu, rates, **constants)

  param = draw(0, 6, 5)
  got = [jnp.asarray(param, jnp.float32), *[jnp.zeros((6, 5), moments)] * 2]
  p, m, v = param.copy(), np.zeros((6, 5)), np.zeros((6, 5))
  for step in range(1, 5):
    grad = draw(step, 6, 5) * (0.01 if step == 2 else 1.0)  # one that needs no clipping
    corrections = np.float32([1 - b1**step, 1 - b2**step])
    updated = update(*got, grad.astype(np.float32), corrections)
    got = list(updated[:3])
    g = grad * min(1.0, max_norm / np.sqrt((grad**2).sum()))
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    direction = m / (1 - b1**step) / (np.sqrt(v / (1 - b2**step)) + eps) + decay * p
    p = p - lr * direction
    if moments == jnp.float32:
      assert float(updated.squares) == pytest.approx((direction**2).sum(), rel=1e-5)
  rtol = 1e-5 if moments == jnp.float32 else 4 * BF16
  for a, b in zip(got, (p, m, v), strict=True):
    np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=rtol, atol=rtol * 0.1)
  assert [a.dtype for a in got] == [jnp.float32, moments, moments]


def test_nothing_is_clipped_with_max_norm_0():
  clip = clip_scale({"a": jnp.full(4, 50.0), "b": jnp.zeros(3)}, 0.0)
  assert float(clip) == 1.0


def test_rope_is_a_rotation_in_the_complex_plane():
  """Each pair (i, i + H/2) as a complex number times exp(i * position * frequency)."""
  x = draw(0, 2, 5, 3, 8).astype(np.float32)
  positions = np.array([[0, 1, 2, 3, 4], [7, 0, 1, 100, 2000]], np.int32)
  run = jax.jit(lambda x, positions: rope(x, rope_table(positions, 8, 500_000.0)))
  got = np.asarray(run(x, positions))
  angle = np.exp(1j * positions[..., None, None] * 500_000.0 ** (-np.arange(4) / 4))
  z = (x[..., :4] + 1j * x[..., 4:]) * angle
  # An angle of up to 2000 radians is rounded to float32 (2^-24 of it) before its cosine is taken.
  np.testing.assert_allclose(got, np.concatenate([z.real, z.imag], -1), 1e-5, 1e-3)
  np.testing.assert_array_equal(got[0, 0], x[0, 0])  # position 0 is the identity
  assert run(jnp.asarray(x, jnp.bfloat16), positions).dtype == jnp.bfloat16


def test_rms_norm_of_bfloat16_is_computed_in_float32():
  # In bfloat16 the mean of 4096 squares is off by far more than the one rounding allowed here.
  x, scale = jnp.asarray(draw(3, 2, 4096), jnp.bfloat16), jnp.full(4096, 1.5, jnp.bfloat16)
  got = rms_norm(x, scale, eps=1e-6)
  x64 = np.asarray(x, np.float64)
  want = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * 1.5
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=BF16)
