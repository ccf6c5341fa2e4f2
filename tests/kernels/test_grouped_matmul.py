"""Grouped matmul kernels: values and races in the simulator, and lowering for a GPU.

Variants are tiles, their order, operands in 8 bits, and SwiGLU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import thorough_but
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul import reference, slots
from kernels_pallas.grouped_matmul.forward import grouped_matmul, grouped_swiglu, interleave
from kernels_pallas.grouped_matmul.wgrad import align_rows, grouped_matmul_dw
from kernels_pallas.grouped_matmul.worklist import Tiling, groups_by_size, row_tiles

pytestmark = pytest.mark.compat

M, K, N = 272, 128, 192  # two row tiles and a bit; N fills one and a half tiles of 128
SMALL = dict(block_n=128, stages=2, strip=2, num_blocks=2)
AROUND_A_TILE = [127, 1, 129]  # tile - 1, tile and tile + 1 rows in all
NO_ROWS = [0, 0, 0]
EIGHT = [17, 0, 64, 1, 63, 0, 65, 31]
RAGGED = [17, 0, 130, 1, 0, 60, 31]  # short and whole tiles, empty groups, halves without work
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@pytest.fixture(autouse=True)
def _simulator_state():
  yield
  gpu_callbacks.reset_gpu_interpret_mode_state()  # Or a failure disturbs the next test.


def simulated(f, *args, **changes):
  """The result of a kernel in small tiles, or those of `changes`; without races."""
  tiles = {k: changes.pop(k) for k in ("block_k", "block_m", "strip", "stages") if k in changes}
  simulator = plgpu.InterpretGPUParams(detect_races=True)
  result = f(*args, tiling=Tiling(**SMALL | tiles), interpret=simulator, **changes)
  assert not gpu_callbacks.get_races().races_found
  return result


def operand(seed, *shape, rows=None, dtype=jnp.bfloat16):
  """Random values; NaN from row `rows` on."""
  x = np.random.default_rng(seed).standard_normal(shape, np.float32)
  x[rows if rows is not None else len(x) :] = np.nan
  return jnp.asarray(x, dtype)


def assert_close(got, want, tolerance):
  """Finite, zero where it must be, and close in each slice along the first axis."""
  got = np.asarray(got, np.float64)
  axes = tuple(range(1, got.ndim))
  norm = lambda a: np.sqrt(np.sum(a * a, axis=axes))
  assert np.all(norm(got - want) <= tolerance * norm(want))


ROUNDED, EXACT = 4e-3, 1e-6  # a row at a time: bf16 rounds to 2e-3; its products are exact in fp32


@pytest.mark.parametrize("sizes", thorough_but([AROUND_A_TILE, NO_ROWS], 0), ids=str)
def test_forward(sizes):
  x, w = operand(0, M, K, rows=sum(sizes)), operand(1, len(sizes), K, N)
  y = simulated(grouped_matmul, x, w, jnp.array(sizes))
  assert_close(y, reference.grouped_matmul(x, w, sizes), ROUNDED)


@pytest.mark.thorough
def test_input_gradient():
  dy, w = operand(0, M, N, rows=sum(EIGHT)), operand(1, len(EIGHT), K, N)
  dx = simulated(grouped_matmul, dy, w, jnp.array(EIGHT), transpose_w=True)
  assert_close(dx, reference.grouped_matmul(dy, w, EIGHT, transpose_w=True), ROUNDED)


@pytest.mark.parametrize("sizes", thorough_but([NO_ROWS, EIGHT], 0), ids=str)
def test_weight_gradient(sizes):
  x, dy = operand(0, M, K, rows=sum(sizes)), operand(1, M, N, rows=sum(sizes))
  dw = simulated(grouped_matmul_dw, x, dy, jnp.array(sizes), out_dtype=jnp.float32)
  assert_close(dw, reference.grouped_matmul_dw(x, dy, sizes), EXACT)


@pytest.mark.thorough
def test_rows_that_are_no_multiple_of_eight():
  sizes, m = [2, 0, 3], 5
  x, w, dy = operand(0, m, 64), operand(1, 3, 64, 64), operand(2, m, 64)
  y = simulated(grouped_matmul, x, w, jnp.array(sizes))
  assert y.shape == (m, 64)
  assert_close(y, reference.grouped_matmul(x, w, sizes), ROUNDED)
  dw = simulated(grouped_matmul_dw, x, dy, jnp.array(sizes))
  assert_close(dw, reference.grouped_matmul_dw(x, dy, sizes), ROUNDED)


@pytest.mark.parametrize(("num_groups", "block_m"), [(1, 128), (7, 256), (128, 128)])
def test_tiles_own_each_row_once(num_groups, block_m):
  rng, m = np.random.default_rng(num_groups), 4096
  sizes = np.diff(np.sort(rng.integers(0, m + 1, num_groups + 1)))
  tiles, bounds = jax.jit(row_tiles, static_argnums=(1, 2))(jnp.array(sizes), m, block_m)
  owner = np.full(m, -1)
  for i, (group, row, begin, end) in enumerate(np.asarray(tiles)):
    assert (begin < end) == (i < bounds[-1])
    if begin < end:
      assert bounds[group] <= i < bounds[group + 1]
    assert row % 8 == 0
    assert 0 <= begin <= 7
    assert end <= block_m
    assert np.all(owner[row + begin : row + end] == -1)
    owner[row + begin : row + end] = group
  want = np.repeat(np.arange(num_groups + 1), [*sizes, m - sizes.sum()])
  np.testing.assert_array_equal(owner, want)


def test_groups_come_largest_first():
  groups, bounds = groups_by_size(jnp.array([3, 0, 9, 3, 4]))
  np.testing.assert_array_equal(groups, [[2, 3, 9], [4, 15, 4], [0, 0, 3], [3, 12, 3], [1, 3, 0]])
  assert bounds.tolist() == [0, 3, 3, 12, 15, 19]


@pytest.mark.thorough
@pytest.mark.parametrize(
  "tiles", [dict(strip=1, stages=3), dict(block_m=256)], ids=["strips", "tall"]
)
def test_variants_agree(tiles):
  m, sizes = 280, jnp.array(RAGGED)
  x, dy = operand(0, m, K, rows=sum(RAGGED)), operand(1, m, N, rows=sum(RAGGED))
  dw = simulated(grouped_matmul_dw, x, dy, sizes, out_dtype=jnp.float32, **tiles)
  assert_close(dw, reference.grouped_matmul_dw(x, dy, RAGGED), EXACT)
  if "strip" in tiles:  # as for tall tiles, see below
    w = operand(2, len(RAGGED), K, N)
    dx = simulated(grouped_matmul, dy, w, sizes, transpose_w=True, **tiles)
    assert_close(dx, reference.grouped_matmul(dy, w, RAGGED, transpose_w=True), ROUNDED)


@pytest.mark.thorough
def test_tall_tiles_are_stored_in_turn():
  """Four parts of 64 rows and columns; eight steps a tile, several tiles to a thread block."""
  x, w = operand(0, 280, 512, rows=sum(RAGGED)), operand(1, len(RAGGED), 512, N)
  y = simulated(grouped_matmul, x, w, jnp.array(RAGGED), block_m=256)
  assert_close(y, reference.grouped_matmul(x, w, RAGGED), ROUNDED)


@pytest.mark.thorough
def test_products_are_added():
  """Four pairs, with a contraction that the steps do not divide; empty groups stay zero.

  A float32 tile of 128 columns is stored in four parts: in turn by two warpgroups, that takes just
  the eight steps of a tile.
  """
  sizes = RAGGED[:4]
  gradients = [operand(i, 160, N, rows=sum(sizes)) for i in range(4)]
  weights = [operand(4 + i, len(sizes), K, N) for i in range(4)]
  first, *more = zip(gradients, weights, strict=True)
  run = dict(transpose_w=True, more=more, out_dtype=jnp.float32, block_k=128)
  dx = simulated(grouped_matmul, *first, jnp.array(sizes), **run)
  parts = [reference.grouped_matmul(*p, sizes, transpose_w=True) for p in (first, *more)]
  assert_close(dx, sum(parts), EXACT)  # rounded once, not three times


@pytest.mark.thorough
def test_weight_gradients_are_stored_in_turn_or_first():
  """Tiles of four steps (enough for that), of one and of none follow each other."""
  sizes, m = [200, 0, 17, 0, 55], 280
  x, dy = operand(0, m, 256, rows=sum(sizes)), operand(1, m, N, rows=sum(sizes))
  dw = simulated(grouped_matmul_dw, x, dy, jnp.array(sizes))
  assert_close(dw, reference.grouped_matmul_dw(x, dy, sizes), ROUNDED)


@pytest.mark.thorough
def test_eight_bits_forward_and_input_gradient():
  sizes, k, n, m = RAGGED[:4], 256, 128, 160
  used = sum(sizes)
  scale = jnp.asarray(np.random.default_rng(5).uniform(0.5, 2, len(sizes)), jnp.float32)
  of_row = np.pad(np.repeat(scale, sizes), (0, m - used))[:, None]
  x, dy = operand(0, m, k, rows=used, dtype=E4M3), operand(1, m, n, rows=used, dtype=E5M2)
  w = operand(2, len(sizes), k, n, dtype=E4M3)
  run = dict(transpose_w=True, out_dtype=jnp.float32, block_k=128)
  y = simulated(grouped_matmul, x, w.swapaxes(1, 2), jnp.array(sizes), scale=scale, **run)
  assert_close(y, of_row * reference.grouped_matmul(x, w, sizes), EXACT)
  dx = simulated(grouped_matmul, dy, w, jnp.array(sizes), scale=scale[:1], **run)
  assert_close(dx, scale[0] * reference.grouped_matmul(dy, w, sizes, transpose_w=True), EXACT)


@pytest.mark.thorough
def test_eight_bits_weight_gradient():
  sizes, m = [5, 0, 130, 128, 1], 272
  x, dy = operand(0, m, 64, rows=264, dtype=E4M3), operand(1, m, 128, rows=264, dtype=E5M2)
  copies = [align_rows(a, jnp.array(sizes)).T for a in (x, dy)]
  run = dict(scale=jnp.array([0.25], jnp.float32), out_dtype=jnp.float32, block_k=128)
  dw = simulated(grouped_matmul_dw, *copies, jnp.array(sizes), **run)
  assert_close(dw, 0.25 * reference.grouped_matmul_dw(x, dy, sizes), EXACT)


@pytest.mark.thorough
def test_eight_bits_come_out_as_bfloat16():
  x, w = operand(0, 128, 128, dtype=E4M3), operand(1, 1, 128, 128, dtype=E4M3)
  make = functools.partial(grouped_matmul, transpose_w=True)
  assert jax.eval_shape(make, x, w, jnp.array([128])).dtype == jnp.bfloat16
  assert jax.eval_shape(grouped_matmul_dw, x, x, jnp.array([1])).dtype == jnp.bfloat16


@pytest.mark.thorough
def test_aligned_rows():
  x = jnp.arange(1, 15, dtype=jnp.float32)[:, None]
  got = align_rows(x, jnp.array([3, 0, 4, 5]), 4)[:, 0]
  want = [1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 10, 11, 12]
  np.testing.assert_array_equal(got, want + [0] * (got.size - len(want)))
  assert got.size == (14 // 4 + 4) * 4


@pytest.mark.thorough
def test_swiglu():
  sizes, m, k, f = RAGGED[:4], 160, 384, 128
  x = operand(0, m, k, rows=sum(sizes))
  gate, up = (operand(s, len(sizes), k, f) / 8 for s in (1, 2))
  w = interleave(gate, up, 64)
  h, kept = simulated(grouped_swiglu, x, w, jnp.array(sizes), keep=True)
  g, u = (reference.grouped_matmul(x, a, sizes) for a in (gate, up))
  assert_close(h, g / (1 + np.exp(-g)) * u, ROUNDED)
  assert_close(kept, reference.grouped_matmul(x, w, sizes), ROUNDED)


def lowered(kernels, *operands):
  text = jax.jit(kernels).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
  return text.count("@mosaic_gpu")


@pytest.mark.thorough
def test_lowers_for_cuda():
  """The layouts, the tile sizes and the shared memory fit an H200 at production shapes."""
  m, k, n, num_groups = 65536, 2048, 1024, 64
  struct = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
  sizes = struct(num_groups, dtype=jnp.int32)

  def kernels(x, w, dy, sizes, tiling):
    h = grouped_swiglu(x, w, sizes, keep=True, tiling=tiling)
    return h, grouped_matmul_dw(x, dy, sizes, tiling=tiling)

  def all_kernels(x, w, dy, sizes):
    y = grouped_matmul(x, w, sizes)
    dx = grouped_matmul(dy, w, sizes, transpose_w=True, more=[(2 * dy, w)])
    return y, dx, kernels(x, w, dy, sizes, Tiling())

  operands = struct(m, k), struct(num_groups, k, n), struct(m, n), sizes
  assert lowered(all_kernels, *operands) == 4
  tall = functools.partial(kernels, tiling=Tiling(block_m=256, block_n=128))
  assert lowered(tall, *operands) == 2


@pytest.mark.thorough
def test_eight_bits_lower_for_cuda():
  m, k, n, num_groups = 65536, 2048, 1024, 64
  struct = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)

  def kernels(x, w_t, dy, w, sizes, scale):
    run = dict(tiling=Tiling(block_k=128), scale=scale)
    y = grouped_matmul(x, w_t, sizes, transpose_w=True, **run)
    dx = grouped_matmul(dy, w, sizes, transpose_w=True, **run)
    h = grouped_swiglu(x, w_t, sizes, transpose_w=True, **run)
    return y, dx, h, grouped_matmul_dw(*(align_rows(a, sizes).T for a in (x, dy)), sizes, **run)

  operands = (
    struct(E4M3, m, k),
    struct(E4M3, num_groups, n, k),
    struct(E5M2, m, n),
    struct(E4M3, num_groups, k, n),
    struct(jnp.int32, num_groups),
    struct(jnp.float32, 1),
  )
  assert lowered(kernels, *operands) == 4


@pytest.mark.parametrize("slot", ["forward", "input_gradient"])
def test_calls_with_the_same_shapes_share_a_program(slot):
  """Which is then lowered once."""
  call = {
    "forward": slots.forward,
    "input_gradient": lambda x, w, sizes: slots.input_gradient([x], [w], sizes),
  }[slot]
  x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 128), (2, 128, 128)))
  sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
  jaxpr = jax.make_jaxpr(lambda x, w, s: call(call(x, w, s), w, s))(x, w, sizes)
  first, second = (e.params["jaxpr"] for e in jaxpr.eqns if "jaxpr" in e.params)
  assert first is second


def test_rejects():
  x, w, sizes = jnp.zeros((128, 128), jnp.bfloat16), jnp.zeros((2, 128, 128), jnp.bfloat16), [0, 0]
  x8, w8, sizes = x.astype(E4M3), w.astype(E4M3), jnp.array(sizes, jnp.int32)
  transposed = functools.partial(grouped_matmul, transpose_w=True)
  more = functools.partial(grouped_matmul, more=[(x[:64], w)])
  scaled = functools.partial(transposed, scale=jnp.ones(3))
  for f, args, message in (
    (grouped_matmul, (jnp.zeros((128, 192), x.dtype), w, sizes), "expected x"),
    (grouped_matmul, (x[:, :100], w[:, :100], sizes), "multiple of 64"),
    (grouped_matmul, (x, w, jnp.zeros(3, jnp.int32)), "group_sizes"),
    (grouped_matmul, (x.astype(jnp.float32), w.astype(jnp.float32), sizes), "bfloat16"),
    (grouped_matmul_dw, (x[:64], x[:72], sizes[:1]), "rows"),
    (more, (x, w, sizes), r"a further pair .* of the first pair are expected"),
    (grouped_matmul, (x8, w8, sizes), "along the contraction"),
    (transposed, (x, w8, sizes), "float8"),
    (scaled, (x8, w8, sizes), "scale"),
    (grouped_matmul, (x8[:, :64], w8[:, :64], sizes), "multiple of 128"),
    (grouped_swiglu, (x, w, sizes), "gate and up"),
  ):
    with pytest.raises(ValueError, match=message):
      f(*args)
  for bad in (
    dict(block_m=64), dict(block_n=192), dict(block_m=256), dict(stages=1), dict(strip=0),
  ):  # fmt: skip
    with pytest.raises(ValueError, match="Tiling"):
      Tiling(**bad)
