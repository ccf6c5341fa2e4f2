"""CUDA kernels, run on the CPU through a C++ shim, against numpy in float64."""

import functools

import cuda_host
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_cuda import adamw, grouped_matmul, library, rms_norm, routing, rows, swiglu

pytestmark = pytest.mark.compat

BF16 = ml_dtypes.bfloat16
EPS = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _host_library():
  cuda_host.host_library()


def random(seed, *shape, dtype=BF16):
  return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def wide(x):
  return np.asarray(x).astype(np.float64)


def assert_close(got, want, bound):
  """Relative Frobenius error; NaN never passes."""
  got, want = wide(got), wide(want)
  assert got.shape == want.shape
  assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want), np.linalg.norm(
    got - want
  ) / np.linalg.norm(want)


def in_every_order(f, *args):
  """Call `f` with blocks and threads in several orders; the results must have the same bits."""
  results = []
  for name in cuda_host.ORDERS:
    with cuda_host.order(name):
      results.append(jax.block_until_ready(jax.jit(lambda *a: f(*a))(*args)))
  first, *others = [[np.asarray(x).tobytes() for x in jax.tree.leaves(r)] for r in results]
  assert all(other == first for other in others)
  return results[0]


ROUND = 3e-3  # bfloat16 rounds to 2^-9; the mean over many elements is less


@pytest.mark.parametrize("shape", [(8,), (3, 40), (5, 7, 24)])
def test_swiglu(shape):
  gate, up, dout = (random(seed, *shape) for seed in range(3))
  gate.reshape(-1)[:4] = [-1000.0, 1000.0, 0.0, -88.0]
  y, pullback = jax.vjp(swiglu.swiglu, gate, up)
  g, u, d = wide(gate), wide(up), wide(dout)
  s = 1 / (1 + np.exp(-np.clip(g, -700, None)))
  assert_close(y, g * s * u, ROUND)
  dgate, dup = pullback(jnp.asarray(dout))
  assert_close(dgate, d * u * s * (1 + g * (1 - s)), ROUND)
  assert_close(dup, d * g * s, ROUND)


def norm_reference(x, scale, dy):
  x, scale, dy = wide(x), wide(scale), wide(dy)
  r = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS)
  slope = np.mean(dy * scale * x, axis=1, keepdims=True) * r**2
  return x * r * scale, r * (dy * scale - x * slope), np.sum(dy * x * r, axis=0)


@pytest.mark.parametrize(
  ("num_rows", "width"), [(1, 8), (37, 72), (19, 264), (70, 2048), (9, 2056), (5, 4104), (3, 8192)]
)
def test_rms_norm(num_rows, width):
  x, dy = random(0, num_rows, width), random(1, num_rows, width)
  scale = random(2, width, dtype=np.float32)
  y, pullback = jax.vjp(lambda x, s: rms_norm.rms_norm(x, s, EPS), x, scale)
  want_y, want_dx, want_dscale = norm_reference(x, scale, dy)
  assert_close(y, want_y, ROUND)
  dx, dscale = pullback(jnp.asarray(dy))
  assert_close(dx, want_dx, ROUND)
  assert_close(dscale, want_dscale, 1e-5)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (37, 200), (20, 2064), (5, 8184)])
def test_add_rms_norm(num_rows, width):
  x, residual, dy, dsum = (random(seed, num_rows, width) for seed in range(4))
  scale = random(4, width, dtype=np.float32)
  total, y = rms_norm.add_rms_norm(x, residual, scale, EPS)
  np.testing.assert_array_equal(total, (wide(x) + wide(residual)).astype(BF16))
  want_y, want_dx, want_dscale = norm_reference(total, scale, dy)
  assert_close(y, want_y, ROUND)
  f = lambda x, r, s: rms_norm.add_rms_norm(x, r, s, EPS)
  _, pullback = jax.vjp(f, x, residual, scale)
  dx, dresidual, dscale = pullback((jnp.asarray(dsum), jnp.asarray(dy)))
  assert_close(dx, want_dx + wide(dsum), ROUND)
  np.testing.assert_array_equal(dx, dresidual)
  assert_close(dscale, want_dscale, 1e-5)


@pytest.mark.parametrize("num_partials", [1, 5, 37])
def test_rms_norm_is_the_same_in_every_order(num_partials):
  x, dy = random(0, 37, 520), random(1, 37, 520)
  scale = random(2, 520, dtype=np.float32)
  backward = functools.partial(rms_norm.rms_norm_backward, eps=EPS, num_partials=num_partials)
  dx, dscale = in_every_order(backward, x, scale, dy)
  _, want_dx, want_dscale = norm_reference(x, scale, dy)
  assert_close(dx, want_dx, ROUND)
  assert_close(dscale, want_dscale, 1e-5)
  in_every_order(lambda *a: rms_norm.add_rms_norm(*a, EPS), x, dy, scale)


def some_places(tokens, choices, slots, seed=0):
  """A map in which some choices have no slot and some slots no choice."""
  rng = np.random.default_rng(seed)
  used = min(tokens * choices, slots) * 3 // 4
  choice_of = rng.permutation(tokens * choices)[:used]
  slot_of = rng.permutation(slots)[:used]
  choice_M = np.full(slots, tokens * choices, np.int32)
  slot_NK = np.full(tokens * choices, slots, np.int32)
  choice_M[slot_of], slot_NK[choice_of] = choice_of, slot_of
  source_M = (choice_M // choices).astype(np.int32)
  return rows.Places(*map(jnp.asarray, (source_M, choice_M, slot_NK.reshape(tokens, choices))))


@pytest.mark.parametrize("choices", [1, 2, 3, 8])
@pytest.mark.parametrize(("tokens", "slots", "width"), [(1, 1, 8), (13, 29, 264), (40, 37, 1032)])
def test_rows(tokens, slots, width, choices):
  places = some_places(tokens, choices, slots)
  x, y = random(0, tokens, width), random(1, slots, width)
  weight = random(2, tokens, choices, dtype=np.float32)
  source, choice, slot = (np.asarray(a) for a in places)
  padded = lambda a: np.concatenate([wide(a), np.zeros((1, *a.shape[1:]))])

  out, pullback = jax.vjp(lambda x: rows.take_rows(x, places), x)
  np.testing.assert_array_equal(wide(out), padded(x)[source])
  (dx,) = pullback(jnp.asarray(y))
  assert_close(dx, padded(y)[slot].sum(1), ROUND)

  out, pullback = jax.vjp(lambda y, w: rows.sum_rows(y, w, places), y, weight)
  assert_close(out, np.einsum("nk,nkd->nd", weight, padded(y)[slot]), ROUND)
  dy, dweight = pullback(jnp.asarray(x))
  weight_M = np.append(weight.reshape(-1), 0)[choice]
  assert_close(dy, weight_M[:, None] * padded(x)[source], ROUND)
  assert_close(dweight, np.einsum("nd,nkd->nk", wide(x), padded(y)[slot]), 1e-5)


def test_rows_do_not_touch_what_has_no_place():
  places = some_places(13, 2, 40)
  source, _, slot = (np.asarray(a) for a in places)
  x, y = random(0, 13, 64), random(1, 40, 64)
  y[source == 13] = np.nan  # what a grouped matmul leaves past its groups
  weight = random(2, 13, 2, dtype=np.float32)
  weight[slot == 40] = np.nan
  out, pullback = jax.vjp(lambda y, w: rows.sum_rows(y, w, places), y, weight)
  assert np.isfinite(wide(out)).all()
  dy, dweight = pullback(jnp.asarray(x))
  assert np.isfinite(wide(dy)).all()
  assert np.isfinite(dweight).all()
  assert np.isfinite(wide(rows.add_rows(y, places.slot_NK))).all()


def sorted_by_expert(chosen, num_experts):
  """Stable sort in numpy: source, choice, slot, sizes."""
  flat = np.where((chosen < 0) | (chosen >= num_experts), num_experts, chosen).reshape(-1)
  order, total = np.argsort(flat, kind="stable"), flat.size
  used = np.arange(total) < np.sum(flat < num_experts)
  slot = np.empty(total, np.int64)
  slot[order] = np.arange(total)
  return (
    np.where(used, order // chosen.shape[1], chosen.shape[0]),
    np.where(used, order, total),
    np.where(flat < num_experts, slot, total).reshape(chosen.shape),
    np.bincount(flat, minlength=num_experts + 1)[:num_experts],
  )


def assert_places(places, sizes, want):
  for got, expected in zip((*places, sizes), want, strict=True):
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
  ("tokens", "choices", "num_experts"), [(1, 1, 1), (700, 1, 5), (333, 3, 256), (9000, 8, 8)]
)
def test_sort_by_expert(tokens, choices, num_experts):
  rng = np.random.default_rng(tokens)
  chosen = rng.integers(-1, num_experts + 2, (tokens, choices)).astype(np.int32)
  places, sizes = routing.sort_by_expert(chosen, num_experts)
  assert_places(places, sizes, sorted_by_expert(chosen, num_experts))


def test_sort_by_expert_of_uneven_groups_in_every_order():
  chosen = np.random.default_rng(0).integers(0, 12, (300, 4)).astype(np.int32)
  chosen[chosen > 3] = 2  # most on one expert, experts from 4 on empty
  places, sizes = in_every_order(lambda c: routing.sort_by_expert(c, 12), chosen)
  assert_places(places, sizes, sorted_by_expert(chosen, 12))


def route_reference(logits, bias, choices, score, renormalize, scale):
  """Weights and choices in numpy."""
  biased = np.where(logits > routing.CLOSED, logits + bias, -np.inf)
  chosen = np.argsort(-biased, axis=1, kind="stable")[:, :choices]
  x = logits.astype(np.float64)
  if score == "softmax":
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
  else:
    p = 1 / (1 + np.exp(-np.clip(x, -700, None)))
  weight = np.take_along_axis(p, chosen, 1)
  if renormalize and choices > 1:
    weight /= weight.sum(1, keepdims=True) + 1e-20
  return scale * weight, chosen


ROUTES = [
  (1, 1, 1, 1, "softmax", False),
  (130, 8, 8, 2, "softmax", True),
  (97, 11, 8, 3, "sigmoid", True),  # three null experts
  (70, 33, 33, 1, "softmax", True),
  (65, 128, 128, 8, "softmax", True),
  (200, 256, 250, 8, "sigmoid", False),
]


@pytest.mark.parametrize(("tokens", "outputs", "num_experts", "top_k", "score", "renorm"), ROUTES)
def test_route(tokens, outputs, num_experts, top_k, score, renorm):
  rng = np.random.default_rng(outputs)
  logits = rng.standard_normal((tokens, outputs), np.float32)
  bias = rng.standard_normal(outputs, np.float32)
  if outputs > top_k + 2:
    logits[:, 1] = -1e30  # closed
    logits[:, 2], bias[2] = logits[:, 0], bias[0]  # ties
  valid = rng.random(tokens) < 0.8
  result = routing.route(logits, bias, valid, top_k, num_experts, score, renorm, 1.5)
  weight, chosen = route_reference(logits, bias, top_k, score, renorm, 1.5)
  np.testing.assert_array_equal(result.chosen_NK, chosen)
  np.testing.assert_allclose(result.weight_NK, weight, rtol=3e-6)
  goes = np.where(valid[:, None], chosen, num_experts)
  assert_places(result.places, result.sizes_S, sorted_by_expert(goes, num_experts))


@pytest.mark.parametrize(
  ("batch", "seq", "outputs", "top_k", "score", "renormalize"),
  [
    (1, 1, 1, 1, "softmax", True),
    (3, 130, 33, 3, "softmax", True),
    (2, 64, 8, 2, "sigmoid", True),
    (2, 70, 256, 8, "sigmoid", False),
    (1, 33, 100, 8, "softmax", False),
  ],
)
def test_choose(batch, seq, outputs, top_k, score, renormalize):
  rng = np.random.default_rng(outputs)
  logits = rng.standard_normal((batch, seq, outputs), np.float32)
  selection = rng.standard_normal((batch, seq, outputs), np.float32)
  if outputs > top_k + 2:
    selection[..., 1] = -np.inf
    selection[..., 2] = selection[..., 0]  # ties
  valid = rng.random((batch, seq)) < 0.8
  settings = dict(top_k=top_k, score=score, renormalize=renormalize, scale=1.5)
  run = functools.partial(routing.choose, **settings)
  chosen, weight, load = in_every_order(run, logits, selection, valid)
  want = np.argsort(-selection, axis=-1, kind="stable")[..., :top_k]
  np.testing.assert_array_equal(chosen, want)
  x = logits.astype(np.float64)
  p = 1 / (1 + np.exp(-x))
  if score == "softmax":
    p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
  p = np.take_along_axis(p, want, -1)
  p /= p.sum(-1, keepdims=True) if renormalize else 1
  np.testing.assert_allclose(weight, 1.5 * p, rtol=3e-6)
  counts = [np.bincount(want[b][valid[b]].ravel(), minlength=outputs) for b in range(batch)]
  np.testing.assert_array_equal(load, counts)


def test_route_in_every_order():
  logits, bias = random(0, 150, 64, dtype=np.float32), random(1, 64, dtype=np.float32)
  valid = np.arange(150) % 7 > 0
  in_every_order(lambda *a: routing.route(*a, 4, 60, "softmax", True, 1.0), logits, bias, valid)


def test_route_gives_distinct_experts_whatever_the_logits():
  logits = np.full((64, 16), np.nan, np.float32)
  logits[::2] = -np.inf
  logits[1::4] = 0.0
  logits[1::4, 3] = -0.0
  result = routing.route(
    logits, np.zeros(16, np.float32), np.ones(64, bool), 8, 16, "sigmoid", False, 1.0
  )
  chosen = np.asarray(result.chosen_NK)
  assert ((chosen >= 0) & (chosen < 16)).all()
  assert (np.diff(np.sort(chosen, axis=1), axis=1) > 0).all()
  np.testing.assert_array_equal(chosen[1::4], np.broadcast_to(np.arange(8), (16, 8)))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradient_of_the_weights(score):
  logits, dweight = random(0, 33, 12, dtype=np.float32), random(1, 33, 3, dtype=np.float32)
  bias, valid = random(2, 12, dtype=np.float32), np.ones(33, bool)
  loss = lambda x: jnp.sum(
    routing.route(x, bias, valid, 3, 12, score, True, 2.0).weight_NK * dweight
  )
  got = jax.grad(loss)(logits)
  step, want = 1e-6, np.zeros(logits.shape)
  _, chosen = route_reference(logits, bias, 3, score, True, 2.0)
  for e in range(12):
    sides = []
    for sign in (1, -1):
      x = logits.astype(np.float64)
      x[:, e] += sign * step
      p = (
        np.exp(x) / np.exp(x).sum(1, keepdims=True) if score == "softmax" else 1 / (1 + np.exp(-x))
      )
      w = np.take_along_axis(p, chosen, 1)
      sides.append(np.sum(2 * w / w.sum(1, keepdims=True) * dweight, axis=1))
    want[:, e] = (sides[0] - sides[1]) / (2 * step)
  assert_close(got, want, 1e-5)


SIZES = [(1,), (7,), (8,), (3, 1000), (50, 333)]


@pytest.mark.parametrize("param", [np.float32, BF16])
@pytest.mark.parametrize("grad", [np.float32, BF16])
@pytest.mark.parametrize("moments", [(np.float32, np.float32), (BF16, np.float32), (BF16, BF16)])
@pytest.mark.parametrize("max_norm", [None, 1.0, 1e6])
def test_adamw(param, grad, moments, max_norm):
  p = [random(i, *size, dtype=param) for i, size in enumerate(SIZES)]
  g = [random(10 + i, *size, dtype=grad) for i, size in enumerate(SIZES)]
  m = [random(20 + i, *size, dtype=moments[0]) for i, size in enumerate(SIZES)]
  v = [np.abs(random(30 + i, *size, dtype=moments[1])) for i, size in enumerate(SIZES)]
  decays = [False, True, True, True, False]
  step = functools.partial(
    adamw.adamw, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, decays=decays, max_norm=max_norm
  )
  new = jax.jit(step)(p, g, m, v, steps=jnp.int32(3), learning_rate=0.01)
  norm = np.sqrt(sum(np.sum(wide(x) ** 2) for x in g))
  np.testing.assert_allclose(new.grad_norm, norm, rtol=1e-6)
  clip = 1.0 if max_norm is None else min(1.0, max_norm / norm)
  for i, decay in enumerate(decays):
    mu = 0.9 * wide(m[i]) + 0.1 * clip * wide(g[i])
    nu = 0.95 * wide(v[i]) + 0.05 * (clip * wide(g[i])) ** 2
    change = mu / (1 - 0.9**3) / (np.sqrt(nu / (1 - 0.95**3)) + 1e-8) + 0.1 * decay * wide(p[i])
    want = (wide(p[i]) - 0.01 * change, mu, nu)
    for got, expected in zip((new.params[i], new.mu[i], new.nu[i]), want, strict=True):
      rounding = 2.0**-8 if got.dtype == jnp.bfloat16 else 3e-6
      np.testing.assert_allclose(wide(got), expected, rtol=rounding, atol=1e-6)


def test_squares_of_the_direction_in_every_order():
  p, g, m, v = (random(i, 3, 5001, dtype=np.float32) for i in range(4))
  v, rates = np.abs(v), np.array([0.5, 0.1, 0.3, 0.2], np.float32)
  leaf = functools.partial(adamw.adamw_leaf, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
  param, _, _, squares = in_every_order(leaf, p, g, m, v, rates)
  direction = (wide(p) - wide(param)) / 0.1
  assert squares.shape == (8,)
  np.testing.assert_allclose(squares.sum(), np.sum(direction**2), rtol=1e-4)


def test_sum_squares_in_every_order():
  x = random(0, 3, 30001)
  got = in_every_order(adamw.sum_squares, x)
  np.testing.assert_allclose(got, np.sum(wide(x) ** 2), rtol=1e-6)


def test_what_is_called_wrongly_is_refused():
  x = jnp.zeros((4, 12), jnp.bfloat16)
  with pytest.raises(ValueError, match=r"scale is float32\[8\], expected float32\[12\]"):
    rms_norm.rms_norm(x, jnp.zeros(8), EPS)
  with pytest.raises(ValueError, match="rows have 12 elements, expected a multiple of 8"):
    rms_norm.rms_norm(x, jnp.zeros(12), EPS)
  with pytest.raises(ValueError, match="gate is float32"):
    swiglu.swiglu(jnp.zeros(8), jnp.zeros(8))
  with pytest.raises(ValueError, match="top_k is 9, expected 1 to 8"):
    routing.route(jnp.zeros((4, 16)), jnp.zeros(16), jnp.ones(4, bool), 9, 16, "softmax", True, 1.0)


def test_calls_lower_for_cuda_without_a_gpu():
  """At real shapes, forward and backward; every target is called."""
  tokens, width, experts, choices = 32768, 4096, 64, 8
  shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)
  x, scale = shape(tokens, width), shape(width, dtype=jnp.float32)
  logits, bias = shape(tokens, experts, dtype=jnp.float32), shape(experts, dtype=jnp.float32)
  leaf, step = shape(16, 2048, 2048), shape(dtype=jnp.int32)

  def layer(x, residual, scale, logits, bias, valid):
    h, y = rms_norm.add_rms_norm(x, residual, scale, EPS)
    to = routing.route(logits, bias, valid, choices, experts, "softmax", True, 1.0)
    places, _ = routing.sort_by_expert(to.chosen_NK, experts)
    z = rows.take_rows(y, to.places)
    out = h + rows.sum_rows(swiglu.swiglu(z, z), to.weight_NK, places)
    return jnp.sum(rms_norm.rms_norm(out, scale, EPS).astype(jnp.float32))

  def update(p, g, m, v, t):
    settings = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "max_norm": 1.0}
    return adamw.adamw([p], [g], [m], [v], steps=t, learning_rate=0.1, decays=[True], **settings)

  def choose(logits, valid):
    logits = logits.reshape(8, -1, experts)
    settings = dict(top_k=choices, score="softmax", renormalize=True, scale=1.0)
    return routing.choose(logits, logits, valid.reshape(8, -1), **settings)

  def experts_backward(x, w, dy, sizes):
    dx = grouped_matmul.grouped_matmul(dy, w, sizes, transpose_w=True)
    return dx, grouped_matmul.grouped_matmul_dw(x, dy, sizes)

  grads = jax.jit(jax.value_and_grad(layer, argnums=(0, 1, 2, 3)))
  valid = shape(tokens, dtype=jnp.bool_)
  traced = [grads.trace(x, x, scale, logits, bias, valid)]
  traced.append(jax.jit(update).trace(leaf, leaf, leaf, leaf, step))
  traced.append(jax.jit(choose).trace(logits, valid))
  matmuls = shape(65536, 2048), shape(8, 2048, 5632), shape(65536, 5632), shape(8, dtype=jnp.int32)
  traced.append(jax.jit(experts_backward).trace(*matmuls))
  text = "".join(t.lower(lowering_platforms=("cuda",)).as_text() for t in traced)
  assert {name for name in library.TARGETS if f"@{name}(" in text} == set(library.TARGETS)


def test_every_target_has_its_function():
  sources = "".join(path.read_text() for path in sorted(library.FOLDER.glob("*.cuh")))
  assert {n for n in library.TARGETS if f"SYMBOL({n}," in sources} == set(library.TARGETS)
  assert sources.count("XLA_FFI_DEFINE_HANDLER_SYMBOL(") == len(library.TARGETS)
