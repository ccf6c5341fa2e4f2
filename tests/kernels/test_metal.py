"""The Metal shaders, compiled as C++ and run on the CPU, against numpy in float64."""

import metal_host
import ml_dtypes
import numpy as np
import pytest

SOURCES = metal_host.FOLDER.parents[1] / "kernels_metal" / "csrc"
TYPES = {"float": np.float32, "half": np.float16, "bfloat": ml_dtypes.bfloat16}
BOUND = {"float": 1e-6, "half": 5e-4, "bfloat": 4e-3}  # relative, of a whole array


def source(element):
  """As kernels_metal.library joins it, which imports torch."""
  common = SOURCES / "common.metal"
  others = sorted(set(SOURCES.glob("*.metal")) - {common})
  return "\n".join(
    [common.read_text(), f"using Element = {element};", *(p.read_text() for p in others)]
  )


def library(element):
  return metal_host.compile_shader(source(element))


def random(seed, *shape, dtype=np.float32):
  return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def wide(x):
  return np.asarray(x).astype(np.float64)


def assert_close(got, want, element):
  error = np.linalg.norm(wide(got) - want) / np.linalg.norm(want)
  assert error <= BOUND[element], error  # NaN never passes


def in_every_order(lib, run):
  """The results of `run` have the same bits in whatever order threads run."""
  results = []
  for name in metal_host.ORDERS:
    with lib.order(name):
      results.append(run())
  first, *others = [[x.tobytes() for x in r] for r in results]
  assert all(other == first for other in others)
  return results[0]


@pytest.mark.parametrize(
  ("element", "rows", "width", "group"),
  [("float", 3, 1, 32), ("half", 2, 33, 64), ("bfloat", 3, 257, 96), ("float", 3, 257, 96)],
)
def test_rms_norm(element, rows, width, group):
  lib, dtype = library(element), TYPES[element]
  x, dy, scale = (
    random(0, rows, width, dtype=dtype),
    random(1, rows, width, dtype=dtype),
    random(2, width),
  )
  x[0] = 0  # only eps is under the root
  size = dict(threads=rows * group, group_size=group)

  def run():
    y, dx, normal = (
      np.full_like(x, np.nan),
      np.full_like(x, np.nan),
      np.full(x.shape, np.nan, np.float32),
    )
    lib.rms_norm(y, x, scale, width, 1e-5, **size)
    lib.rms_norm_backward(dx, normal, x, scale, dy, width, 1e-5, **size)
    return y, dx, normal

  y, dx, normal = in_every_order(lib, run)
  inverse = 1 / np.sqrt(np.mean(wide(x) ** 2, axis=-1, keepdims=True) + 1e-5)
  unit, d = wide(x) * inverse, wide(dy) * scale
  assert_close(y, unit * scale, element)
  assert_close(normal, unit, "float")
  # A row of one element has almost no gradient: what is left is compared with what cancelled.
  want = inverse * (d - unit * np.mean(d * unit, axis=-1, keepdims=True))
  assert np.abs(wide(dx) - want).max() <= BOUND[element] * np.abs(inverse * d).max()


@pytest.mark.parametrize(
  ("element", "tokens", "heads", "pairs"),
  [("half", 1, 1, 1), ("bfloat", 5, 3, 4), ("float", 7, 2, 33)],
)
def test_rope_and_back(element, tokens, heads, pairs):
  lib, dtype = library(element), TYPES[element]
  x = random(0, tokens, heads, 2 * pairs, dtype=dtype)
  angle = random(1, tokens, pairs)
  cos, sin = np.cos(angle), np.sin(angle)
  y, back = np.full_like(x, np.nan), np.full_like(x, np.nan)
  lib.rope(y, x, cos, sin, heads, pairs, 1.0, threads=x.size // 2)
  a, b = np.split(wide(x), 2, axis=-1)
  c, s = (wide(t)[:, None] for t in (cos, sin))
  assert_close(y, np.concatenate([a * c - b * s, b * c + a * s], -1), element)
  lib.rope(back, y, cos, sin, heads, pairs, -1.0, threads=x.size // 2)
  assert_close(back, wide(x), element)


@pytest.mark.parametrize(("element", "size"), [("bfloat", 1), ("float", 31), ("half", 1500)])
def test_swiglu(element, size):
  lib, dtype = library(element), TYPES[element]
  gate, up, dy = (random(seed, size, dtype=dtype) for seed in range(3))
  gate[: min(size, 3)] = np.array([0.5, -200.0, 200.0], dtype)[: min(size, 3)]
  y, dgate, dup = (np.full_like(gate, np.nan) for _ in range(3))
  lib.swiglu(y, gate, up, threads=size)
  lib.swiglu_backward(dgate, dup, gate, up, dy, threads=size)
  g, u, d = wide(gate), wide(up), wide(dy)
  s = 1 / (1 + np.exp(-g))
  assert_close(y, g * s * u, element)
  assert_close(dgate, d * u * s * (1 + g * (1 - s)), element)
  assert_close(dup, d * g * s, element)


def routed(selection, logits, top_k, score, renormalize, scale):
  """Columns in falling order, the lower one first among equals, and their weights."""
  columns = np.argsort(-wide(selection), axis=-1, kind="stable")[:, :top_k]
  exponentials = np.exp(wide(logits) - logits.max(-1, keepdims=True))
  soft = exponentials / exponentials.sum(-1, keepdims=True)
  scores = soft if score == "softmax" else 1 / (1 + np.exp(-wide(logits)))
  weight = np.take_along_axis(scores, columns, -1)
  return columns, scale * (weight / weight.sum(-1, keepdims=True) if renormalize else weight)


@pytest.mark.parametrize(
  ("columns", "top_k", "score", "renormalize"),
  [
    (1, 1, "softmax", 1),
    (7, 2, "softmax", 0),
    (32, 32, "sigmoid", 1),
    (65, 8, "softmax", 1),
    (257, 4, "sigmoid", 1),
    (257, 4, "softmax", 0),
  ],
)
def test_routing(columns, top_k, score, renormalize):
  lib, tokens = library("float"), 6
  logits = 3 * random(0, tokens, columns)
  selection = logits + random(1, columns)
  selection[1] = np.round(selection[1])  # many equals
  selection[2, : columns - top_k] = -np.inf  # closed
  selection[3] = 0
  rule = (columns, top_k, int(score == "softmax"), renormalize, 2.5)

  def run():
    chosen = np.full((tokens, top_k), -1, np.int32)
    weight = np.full((tokens, top_k), np.nan, np.float32)
    lib.route(chosen, weight, logits, selection, *rule, threads=32 * tokens, group_size=32)
    return chosen, weight

  chosen, weight = in_every_order(lib, run)
  want_chosen, want_weight = routed(selection, logits, top_k, score, renormalize, 2.5)
  np.testing.assert_array_equal(chosen, want_chosen)
  np.testing.assert_allclose(weight, want_weight, rtol=2e-6)


def test_routing_of_nan_stays_in_range():
  lib = library("float")
  logits = np.full((1, 5), np.nan, np.float32)
  chosen, weight = np.full((1, 3), -1, np.int32), np.zeros((1, 3), np.float32)
  lib.route(chosen, weight, logits, logits, 5, 3, 1, 1, 1.0, threads=32, group_size=32)
  assert ((chosen >= 0) & (chosen < 5)).all() and np.isnan(weight).all()


def test_a_missing_barrier_is_seen():
  """The shim tells a shader that is right in one order of its threads only."""
  text = source("float")
  barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
  assert barrier in text
  lib, x, scale = (
    metal_host.compile_shader(text.replace(barrier, "")),
    random(0, 1, 96),
    random(1, 96),
  )
  results = set()
  for name in metal_host.ORDERS:
    with lib.order(name):
      y = np.zeros_like(x)
      lib.rms_norm(y, x, scale, 96, 1e-5, threads=96, group_size=96)
      results.add(y.tobytes())
  assert len(results) > 1
