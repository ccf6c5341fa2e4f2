"""CUDA kernels, run on the CPU through a C++ shim, against numpy in float64.

The shim has a function over a warp's lanes for each tensor-core instruction, so this proves the
indices, and the pipeline of copies in several orders of threads; not the speed.
"""

import functools
import re
import subprocess

import cuda_host
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_cuda import (
  adamw,
  cross_entropy,
  library,
  quantise,
  rms_norm,
  rope,
  routing,
  rows,
  swiglu,
)
from kernels_cuda.grouped_matmul import grouped_matmul, grouped_matmul_dw
from kernels_cuda.library import KernelsUnavailableError

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


@pytest.mark.parametrize("shape", [(8,), (5, 7, 24)])
def test_swiglu(shape):
  gate, up, dout = (random(seed, *shape) for seed in range(3))
  gate.reshape(-1)[:4] = [-1000.0, 1000.0, 0.0, -88.0]
  g, u, d = wide(gate), wide(up), wide(dout)
  s = 1 / (1 + np.exp(-np.clip(g, -700, None)))
  assert_close(swiglu.swiglu(gate, up), g * s * u, ROUND)
  dgate, dup = swiglu.swiglu_backward(gate, up, dout)
  assert_close(dgate, d * u * s * (1 + g * (1 - s)), ROUND)
  assert_close(dup, d * g * s, ROUND)


@pytest.mark.parametrize(
  ("shape", "dtype"), [((144, 80), ml_dtypes.float8_e4m3fn), ((256, 192), ml_dtypes.float8_e5m2)]
)
def test_quantise_is_the_cast_and_its_transpose(shape, dtype):
  """Every power of two and what lies between, numbers too large, and those that are none."""
  x = random(0, *shape) * np.exp2(random(1, *shape) * 8).astype(BF16)
  x.reshape(-1)[:6] = [np.nan, np.inf, -np.inf, 3e38, -3e38, -0.0]
  largest = float(ml_dtypes.finfo(dtype).max)
  scaled = wide(x) / 4
  finite = np.where(np.isfinite(scaled), np.clip(scaled, -largest, largest), np.nan)
  want = finite.astype(dtype)
  scale = np.float32(4)
  straight, turned = in_every_order(functools.partial(quantise.both, dtype=dtype), x, scale)
  alone = in_every_order(functools.partial(quantise.transposed, dtype=dtype), x, scale)
  none = np.isnan(want.astype(np.float32))  # of which there are several in 8 bits
  for got in (np.asarray(straight), np.asarray(turned).T, np.asarray(alone).T):
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), none)
    np.testing.assert_array_equal(got.view(np.uint8)[~none], want.view(np.uint8)[~none])


def loss_reference(logits, targets, mask, z_loss, smoothing):
  """Gradient and statistics; logits of -inf may be no targets."""
  x, vocab = wide(logits), logits.shape[1]
  top = x.max(1)
  exp = np.exp(x - top[:, None])
  lse = top + np.log(exp.sum(1))
  onehot = np.arange(vocab) == targets[:, None]
  label = np.where(onehot, x, 0).sum(1)
  softmax = exp / exp.sum(1, keepdims=True)
  slope = (1 + 2 * z_loss * lse)[:, None] * softmax - (1 - smoothing) * onehot - smoothing / vocab
  return slope * mask[:, None], np.stack([lse, label, top, x.sum(1)], axis=1)


# A block, and clusters of 2, 4 and 8; then twice as much a thread.
@pytest.mark.parametrize("vocab", [100, 16_384, 16_388, 40_000, 131_072, 131_076])
def test_cross_entropy(vocab):
  tokens = 10 if vocab < 20_000 else 2  # a cluster takes eight, one after the other
  logits = random(0, tokens, vocab, dtype=np.float32) * 5
  logits[0] += 300  # which exp() would not survive
  targets = np.random.default_rng(1).integers(0, vocab, tokens).astype(np.int32)
  targets[-1] = -1  # nowhere
  mask = np.linspace(0, 1, tokens, dtype=np.float32)
  gradient = functools.partial(
    cross_entropy.cross_entropy_gradient, z_loss=0.25, label_smoothing=0.125
  )
  run = in_every_order if vocab == 16_388 else lambda f, *args: f(*args)
  got, statistics = run(gradient, logits, targets, mask)
  want, want_statistics = loss_reference(logits, targets, mask, 0.25, 0.125)
  for t in range(tokens):  # each: a wrong row of small numbers would hide in the others
    assert_close(got[t], want[t], ROUND)
    np.testing.assert_allclose(statistics[t], want_statistics[t], 1e-5, 1e-3)
  value = cross_entropy.cross_entropy(logits, targets, label_smoothing=0.125)
  np.testing.assert_array_equal(value, statistics)


def test_cross_entropy_of_logits_that_are_not_finite():
  """-inf has weight 0, even where a whole block has nothing else; others spoil their own row."""
  logits = random(0, 4, 16_388, dtype=np.float32) - 200
  logits[0, 1024:] = -np.inf  # the cluster's second block has none before
  logits[1, 16_000], logits[2, 7] = np.nan, np.inf
  targets, mask = np.array([7, 8, 9, 10], np.int32), np.ones(4, np.float32)
  got, statistics = cross_entropy.cross_entropy_gradient(
    logits, targets, mask, z_loss=0.0, label_smoothing=0.0
  )
  clean = [0, 3]
  want, want_statistics = loss_reference(logits[clean], targets[clean], mask[clean], 0.0, 0.0)
  assert_close(np.asarray(got)[clean], want, ROUND)
  want_statistics[:, 3] = 0  # which nobody asked for
  np.testing.assert_allclose(np.asarray(statistics)[clean], want_statistics, 1e-5)
  assert np.isnan(np.asarray(statistics)[[1, 2], 0]).all()
  assert np.isnan(wide(got)[[1, 2]]).any(axis=1).all()


def test_cross_entropy_of_no_tokens():
  logits, nothing = jnp.zeros((0, 16)), jnp.zeros(0)
  gradient, statistics = cross_entropy.cross_entropy_gradient(
    logits, nothing.astype(jnp.int32), nothing, z_loss=0.0, label_smoothing=0.0
  )
  assert gradient.shape == (0, 16) and statistics.shape == (0, 4)


@pytest.mark.parametrize("vocab", [6, 262_148])
def test_cross_entropy_refuses_other_vocabularies(vocab):
  logits, targets = jnp.zeros((1, vocab)), jnp.zeros(1, jnp.int32)
  with pytest.raises(ValueError, match=f"rows have {vocab} logits, expected a multiple of 4 and"):
    cross_entropy.cross_entropy(logits, targets, label_smoothing=0.0)


def norm_reference(x, scale, dy):
  x, scale, dy = wide(x), wide(scale), wide(dy)
  r = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS)
  slope = np.mean(dy * scale * x, axis=1, keepdims=True) * r**2
  return x * r * scale, r * (dy * scale - x * slope), np.sum(dy * x * r, axis=0)


# Rows of one lane, of some lanes, of a warp with one pack a lane and with up to 32, in numbers that
# fill no block; 1000 of 128 are more than all blocks take at once.
@pytest.mark.parametrize(
  ("num_rows", "width", "num_partials"),
  [
    *[(1, 8, 10), (3, 24, 10), (1, 264, 10), (150, 40, 1), (150, 256, 5), (37, 520, 37)],
    *[(1000, 128, 10), (70, 2048, 10), (3, 4104, 10), (3, 8192, 10)],
  ],
)
def test_rms_norm(num_rows, width, num_partials, monkeypatch):
  monkeypatch.setattr(rms_norm, "NUM_PARTIALS", num_partials)
  x, dy = random(0, num_rows, width), random(1, num_rows, width)
  scale = random(2, width, dtype=np.float32)
  want_y, want_dx, want_dscale = norm_reference(x, scale, dy)
  run = in_every_order if width < 1000 > num_rows else lambda f, *args: f(*args)
  y = run(functools.partial(rms_norm.rms_norm, eps=EPS), x, scale)
  assert_close(y, want_y, ROUND)
  dx, dscale = run(functools.partial(rms_norm.rms_norm_backward, eps=EPS), x, scale, dy)
  assert_close(dx, want_dx, ROUND)
  assert_close(dscale, want_dscale[None], 1e-5)


@pytest.mark.parametrize("width", [24, 264])
def test_rms_norm_of_rows_that_are_not_there_without_eps(width):
  x, dy, scale = random(0, 5, width), random(1, 5, width), random(2, width, dtype=np.float32)
  dx, dscale = rms_norm.rms_norm_backward(x, scale, dy, eps=0.0)
  for y in (rms_norm.rms_norm(x, scale, eps=0.0), dx, dscale):
    assert np.isfinite(wide(y)).all()


@pytest.mark.parametrize(
  ("batch", "seq", "heads", "head_dim"),
  [(1, 1, 1, 16), (1, 7, 5, 48), (3, 4, 9, 128), (1, 2, 33, 256)],
)
def test_rope(batch, seq, heads, head_dim):
  x = random(0, batch, seq, heads, head_dim)
  angle = 100 * random(1, batch, seq, 1, head_dim // 2, dtype=np.float32)
  cos, sin = np.cos(angle), np.sin(angle)
  turned = in_every_order(rope.rope, x, cos, sin)
  a, b = np.split(wide(x), 2, axis=-1)
  c, s = wide(cos), wide(sin)
  want = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
  # By element: rounded once, at 2^-9 of the result, beside float32's error of two products.
  np.testing.assert_allclose(wide(turned), want, rtol=2.0**-8, atol=1e-6)
  assert_close(rope.rope(turned, cos, -sin), x, 2 * ROUND)


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
  return source_M, choice_M, slot_NK.reshape(tokens, choices)


@pytest.mark.parametrize(
  ("tokens", "slots", "width", "choices"),
  [(1, 1, 8, 1), (13, 29, 264, 3), (40, 37, 1032, 2), (13, 29, 264, 8)],
)
def test_rows(tokens, slots, width, choices):
  places = source, choice, slot = some_places(tokens, choices, slots)
  x, y = random(0, tokens, width), random(1, slots, width)
  weight = random(2, tokens, choices, dtype=np.float32)
  padded = lambda a: np.concatenate([wide(a), np.zeros((1, *a.shape[1:]))])

  np.testing.assert_array_equal(wide(rows.take_rows(x, source)), padded(x)[source])
  assert_close(rows.take_rows_backward(y, slot), padded(y)[slot].sum(1), ROUND)
  want = np.einsum("nk,nkd->nd", weight, padded(y)[slot])
  assert_close(rows.sum_rows(y, weight, slot), want, ROUND)
  dy, dweight = rows.sum_rows_backward(y, weight, *places, x)
  weight_M = np.append(weight.reshape(-1), 0)[choice]
  assert_close(dy, weight_M[:, None] * padded(x)[source], ROUND)
  assert_close(dweight, np.einsum("nd,nkd->nk", wide(x), padded(y)[slot]), 1e-5)


def test_rows_do_not_touch_what_has_no_place():
  places = source, _, slot = some_places(13, 2, 40)
  x, y = random(0, 13, 64), random(1, 40, 64)
  y[source == 13] = np.nan  # what a grouped matmul leaves past its groups
  weight = random(2, 13, 2, dtype=np.float32)
  weight[slot == 40] = np.nan
  results = rows.sum_rows(y, weight, slot), rows.take_rows_backward(y, slot)
  for out in (*results, *rows.sum_rows_backward(y, weight, *places, x)):
    assert np.isfinite(wide(out)).all()


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


@pytest.mark.parametrize(
  ("tokens", "choices", "num_experts"), [(1, 1, 1), (700, 1, 5), (333, 3, 256), (9000, 8, 8)]
)
def test_sort_by_expert(tokens, choices, num_experts):
  rng = np.random.default_rng(tokens)
  chosen = rng.integers(-1, num_experts + 2, (tokens, choices)).astype(np.int32)
  if tokens == 700:
    chosen[chosen > 3] = 2  # most on one expert, others empty
  run = in_every_order if tokens < 1000 else lambda f, *args: f(*args)
  found = run(lambda chosen: routing.sort_by_expert(chosen, num_experts), chosen)
  for got, want in zip(found, sorted_by_expert(chosen, num_experts), strict=True):
    np.testing.assert_array_equal(got, want)


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


def test_distinct_experts_whatever_the_logits():
  logits = np.full((1, 64, 16), np.nan, np.float32)
  logits[:, ::2] = -np.inf
  logits[:, 1::4] = 0.0
  logits[:, 1::4, 3] = -0.0
  settings = dict(top_k=8, score="sigmoid", renormalize=False, scale=1.0)
  chosen = np.asarray(routing.choose(logits, logits, np.ones((1, 64), bool), **settings)[0])
  assert ((chosen >= 0) & (chosen < 16)).all()
  assert (np.diff(np.sort(chosen), axis=-1) > 0).all()
  np.testing.assert_array_equal(chosen[:, 1::4], np.broadcast_to(np.arange(8), (1, 16, 8)))


@pytest.mark.parametrize(
  ("param", "grad", "moments", "size"),
  [
    (np.float32, np.float32, (np.float32, np.float32), (1,)),
    (np.float32, BF16, (BF16, np.float32), (7,)),
    (BF16, np.float32, (BF16, BF16), (8,)),
    (BF16, BF16, (np.float32, np.float32), (3, 1000)),
    (np.float32, np.float32, (BF16, BF16), (50, 333)),
    (BF16, BF16, (BF16, np.float32), (50, 333)),
  ],
  ids=str,
)
def test_adamw(param, grad, moments, size):
  p, g = random(0, *size, dtype=param), random(1, *size, dtype=grad)
  m, v = random(2, *size, dtype=moments[0]), np.abs(random(3, *size, dtype=moments[1]))
  constants = dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
  rates = np.array([0.7, 0.01, 1 - 0.9**3, 1 - 0.95**3], np.float32)
  *new, _ = jax.jit(functools.partial(adamw.adamw, **constants))(p, g, m, v, rates)
  mu = 0.9 * wide(m) + 0.1 * 0.7 * wide(g)
  nu = 0.95 * wide(v) + 0.05 * (0.7 * wide(g)) ** 2
  change = mu / (1 - 0.9**3) / (np.sqrt(nu / (1 - 0.95**3)) + 1e-8) + 0.1 * wide(p)
  for got, want in zip(new, (wide(p) - 0.01 * change, mu, nu), strict=True):
    rounding = 2.0**-8 if got.dtype == jnp.bfloat16 else 3e-6
    np.testing.assert_allclose(wide(got), want, rtol=rounding, atol=1e-6)


def test_squares_of_the_direction_in_every_order():
  p, g, m, v = (random(i, 3, 5001, dtype=np.float32) for i in range(4))
  v, rates = np.abs(v), np.array([0.5, 0.1, 0.3, 0.2], np.float32)
  update = functools.partial(adamw.adamw, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
  param, _, _, squares = in_every_order(update, p, g, m, v, rates)
  direction = (wide(p) - wide(param)) / 0.1
  assert squares.shape == (8,)
  np.testing.assert_allclose(squares.sum(), np.sum(direction**2), rtol=1e-4)


def test_what_is_called_wrongly_is_refused():
  x = jnp.zeros((4, 12), jnp.bfloat16)
  with pytest.raises(ValueError, match=r"scale is float32\[8\], expected float32\[12\]"):
    rms_norm.rms_norm(x, jnp.zeros(8), eps=EPS)
  with pytest.raises(ValueError, match="rows have 12 elements, expected a multiple of 8"):
    rms_norm.rms_norm(x, jnp.zeros(12), eps=EPS)
  with pytest.raises(ValueError, match="rows have 12 elements, expected a multiple of 8"):
    rows.take_rows(x, jnp.zeros(5, jnp.int32))
  with pytest.raises(ValueError, match="9 choices a token, expected 1 to 8"):
    rows.take_rows_backward(x[:, :8], jnp.zeros((4, 9), jnp.int32))
  heads, table = jnp.zeros((2, 3, 4, 24), jnp.bfloat16), jnp.zeros((2, 3, 1, 12))
  with pytest.raises(ValueError, match="heads have 24 elements, expected a multiple of 16"):
    rope.rope(heads, table, table)
  with pytest.raises(ValueError, match=r"sin is .* expected float32\[2, 3, 1, 8\]"):
    rope.rope(heads[..., :16], table[..., :8], table)
  with pytest.raises(ValueError, match="gate is float32"):
    swiglu.swiglu(jnp.zeros(8), jnp.zeros(8))
  with pytest.raises(ValueError, match=r"x is \[16, 24\], expected multiples of 16"):
    quantise.both(jnp.zeros((16, 24), jnp.bfloat16), jnp.float32(1), dtype=jnp.float8_e5m2)
  with pytest.raises(ValueError, match="float16, expected float8"):
    quantise.transposed(jnp.zeros((16, 16), jnp.bfloat16), jnp.float32(1), dtype=jnp.float16)
  logits, settings = jnp.zeros((1, 4, 16)), dict(score="softmax", renormalize=True, scale=1.0)
  with pytest.raises(ValueError, match="top_k is 9, expected 1 to 8"):
    routing.choose(logits, logits, jnp.ones((1, 4), bool), top_k=9, **settings)
  with pytest.raises(ValueError, match="300 experts, expected 1 to 256"):
    routing.sort_by_expert(jnp.zeros((4, 2), jnp.int32), 300)


ROUNDING = {BF16: ROUND, np.float16: 4e-4}
# block_n, dtype, and rows, d_in, d_out, sizes: a tile is 128 rows, 32 deep, block_n columns.
GROUPED = {
  "one tile": (128, BF16, (128, 32, 128, [128])),
  "less than a tile": (256, np.float16, (5, 8, 8, [2, 3])),
  "uneven, empty, a rest": (256, BF16, (300, 72, 136, [0, 130, 0, 1, 100, 0])),
  "no group has rows": (256, np.float16, (140, 40, 16, [0, 0, 0])),
  "one has all": (256, np.float16, (140, 72, 264, [0, 140, 0])),
  "many groups": (128, BF16, (90, 24, 40, [3] * 30)),
  "strips of tiles": (128, BF16, (2100, 8, 136, [700, 0, 1390])),
}


def grouped_operands(rows, d_in, d_out, sizes, dtype=BF16):
  """x, w, dy, sizes and the rows of each group; NaN in x and dy past the last group."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape, np.float32).astype(dtype)
  x, w, dy = draw(rows, d_in), draw(len(sizes), d_in, d_out), draw(rows, d_out)
  ends = np.cumsum(sizes)
  x[ends[-1] :] = dy[ends[-1] :] = np.nan
  of_group = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
  return x, w, dy, np.array(sizes, np.int32), of_group


def assert_each_close(got, want, bound):
  """Relative error of each group; NaN never passes."""
  for g, w in zip(got, want, strict=True):
    assert np.linalg.norm(wide(g) - w) <= bound * np.linalg.norm(w)


@pytest.mark.parametrize(("block_n", "dtype", "case"), GROUPED.values(), ids=GROUPED)
def test_grouped_matmul(block_n, dtype, case):
  x, w, dy, sizes, of_group = grouped_operands(*case, dtype=dtype)
  end = of_group[-1].stop
  want = [wide(x[rows]) @ wide(w[g]) for g, rows in enumerate(of_group)]
  transposed = np.ascontiguousarray(np.swapaxes(w, 1, 2))
  for weights, swap in ((w, False), (transposed, True)):
    y = grouped_matmul(x, weights, sizes, transpose_w=swap, block_n=block_n)
    assert y.dtype == dtype and y.shape == dy.shape
    assert_each_close([y[rows] for rows in of_group], want, ROUNDING[dtype])
    np.testing.assert_array_equal(y[end:], np.zeros_like(dy[end:]))
  dw = grouped_matmul_dw(x, dy, sizes, block_n=block_n)
  assert dw.dtype == dtype and dw.shape == w.shape
  assert_each_close(dw, [wide(x[r]).T @ wide(dy[r]) for r in of_group], ROUNDING[dtype])


@pytest.mark.thorough
def test_the_pipeline_of_the_grouped_matmul_in_every_order():
  """More steps than stages, both ways in depth; the same bits whichever thread is ahead."""
  block_n, (x, w, dy, sizes, _) = 256, grouped_operands(170, 200, 136, [150, 0, 20])
  back = np.ascontiguousarray(np.swapaxes(w, 1, 2))
  runs = [
    lambda: grouped_matmul(x, w, sizes, block_n=block_n),
    lambda: grouped_matmul(x, back, sizes, transpose_w=True, block_n=block_n),
    lambda: grouped_matmul_dw(x, dy, sizes, block_n=block_n),
  ]
  results = {}
  for order in cuda_host.ORDERS:
    with cuda_host.order(order):
      results[order] = [np.asarray(run()).tobytes() for run in runs]
  assert all(result == results["forward"] for result in results.values())


def test_one_row_of_a_grouped_matmul_is_nobody_elses():
  """A NaN in one row reaches that row of the result, and the gradient of its group, only."""
  x, w, dy, sizes, _ = grouped_operands(100, 40, 24, [33, 40, 27])
  x[50] = np.nan
  y = np.asarray(grouped_matmul(x, w, sizes)).astype(np.float32)
  assert np.isnan(y[50]).all() and np.isfinite(np.delete(y, 50, axis=0)).all()
  dw = np.asarray(grouped_matmul_dw(x, dy, sizes)).astype(np.float32)
  assert np.isnan(dw[1]).all() and np.isfinite(dw[[0, 2]]).all()


def test_sizes_of_groups_that_promise_too_much_stay_inside():
  """Nothing past the last row is read or written: the shim's arrays end there."""
  x, w, dy, _, _ = grouped_operands(40, 16, 8, [40, 0])
  sizes = np.array([30, 1000], np.int32)
  want = [wide(x[:30]) @ wide(w[0]), wide(x[30:]) @ wide(w[1])]
  y = grouped_matmul(x, w, sizes)
  assert_each_close([y[:30], y[30:]], want, ROUNDING[BF16])
  want = [wide(x[:30]).T @ wide(dy[:30]), wide(x[30:]).T @ wide(dy[30:])]
  assert_each_close(grouped_matmul_dw(x, dy, sizes), want, ROUNDING[BF16])


def test_grouped_matmul_of_no_rows_and_no_groups():
  empty = jnp.zeros((0, 16), jnp.bfloat16)
  w, sizes = jnp.ones((2, 16, 8), jnp.bfloat16), jnp.zeros(2, jnp.int32)
  assert grouped_matmul(empty, w, sizes).shape == (0, 8)
  assert not grouped_matmul_dw(empty, empty, sizes).any()
  x = jnp.ones((3, 16), jnp.bfloat16)
  assert not grouped_matmul(x, w[:0], sizes[:0]).any()


def test_what_the_grouped_matmul_does_not_take():
  for changes, message in (
    ({"x": jnp.zeros((4, 16))}, r"x is float32\[4, 16\], expected bfloat16 or float16\[any, any\]"),
    ({"w": jnp.zeros((2, 16, 8), jnp.float16)}, r"w is float16\[2, 16, 8\], expected bfloat16"),
    ({"w": jnp.zeros((2, 24, 8), jnp.bfloat16)}, r"expected bfloat16\[any, 16, any\]"),
    ({"w": jnp.zeros((2, 16, 12), jnp.bfloat16)}, "rows have 12 elements, expected a multiple"),
    ({"sizes": jnp.zeros(3, jnp.int32)}, r"sizes is int32\[3\], expected int32\[2\]"),
    ({"transpose_w": True}, r"w is bfloat16\[2, 16, 8\], expected bfloat16\[any, any, 16\]"),
    ({"block_n": 64}, "block_n is 64, expected 128 or 256"),
  ):
    args = {
      "x": jnp.zeros((4, 16), jnp.bfloat16),
      "w": jnp.zeros((2, 16, 8), jnp.bfloat16),
      "sizes": jnp.zeros(2, jnp.int32),
    } | changes
    with pytest.raises(ValueError, match=message):
      grouped_matmul(args.pop("x"), args.pop("w"), args.pop("sizes"), **args)


def test_what_the_weight_gradient_does_not_take():
  x, sizes = jnp.zeros((4, 16), jnp.bfloat16), jnp.zeros(2, jnp.int32)
  with pytest.raises(ValueError, match=r"dy is bfloat16\[3, 16\], expected bfloat16\[4, any\]"):
    grouped_matmul_dw(x, x[:3], sizes)
  with pytest.raises(ValueError, match=r"sizes is int32\[1, 2\], expected int32\[any\]"):
    grouped_matmul_dw(x, x, sizes[None])


def test_a_library_for_older_gpus_is_refused():
  """Its kernels would be empty."""
  x, w, _, sizes, _ = grouped_operands(8, 8, 8, [8])
  cuda_host.host_library().set_compiled_for(75)
  try:
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"capability 8\.0.*compiled for 75"):
      jax.block_until_ready(grouped_matmul(x, w, sizes))
  finally:
    cuda_host.host_library().set_compiled_for(90)


@pytest.mark.slow
def test_nvcc_spills_no_registers(tmp_path):
  try:
    nvcc = library.find_nvcc()
  except KernelsUnavailableError as reason:
    pytest.skip(str(reason))
  source = tmp_path / "only.cu"
  source.write_text('#include "grouped_matmul.cuh"\n')
  command = [nvcc, "-O3", "-std=c++17", "--cubin", "-arch=sm_90", "-Xptxas", "-v"]
  command += ["-Werror", "all-warnings", "-Xcompiler", "-Wall", f"-I{library.SOURCES}"]
  command += ["-isystem", jax.ffi.include_dir(), source, "-o", tmp_path / "only.cubin"]
  run = subprocess.run(command, capture_output=True, text=True)
  assert run.returncode == 0, run.stderr
  spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", run.stdout + run.stderr)
  assert len(spills) == 12 and set(spills) == {("0", "0")}


def test_every_target_has_its_function():
  sources = "".join(path.read_text() for path in sorted(library.SOURCES.glob("*.cuh")))
  assert {n for n in library.TARGETS if f"SYMBOL({n}," in sources} == set(library.TARGETS)
  assert sources.count("XLA_FFI_DEFINE_HANDLER_SYMBOL(") == len(library.TARGETS)
