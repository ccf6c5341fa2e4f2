"""Variants of the grouped matmul kernels: tiles, order, 8-bit operands, SwiGLU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul import reference
from kernels_pallas.grouped_matmul.forward import grouped_matmul, grouped_swiglu, interleave
from kernels_pallas.grouped_matmul.wgrad import align_rows, grouped_matmul_dw
from kernels_pallas.grouped_matmul.worklist import Tiling

pytestmark = [pytest.mark.compat, pytest.mark.thorough]

SIMULATOR = plgpu.InterpretGPUParams(detect_races=True)
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SMALL = dict(block_n=128, stages=2, strip=2, num_blocks=2)
# Short and whole tiles, empty groups, halves without work; multiples of 8 and not.
GROUPS = {"ragged": [17, 0, 130, 1, 0, 60, 31], "eights": [16, 0, 136, 0, 8, 72, 40]}


@pytest.fixture(autouse=True)
def _simulator_state():
  yield
  gpu_callbacks.reset_gpu_interpret_mode_state()  # Or a failure disturbs the next test.


def operand(seed, *shape, rows=None, dtype=jnp.bfloat16):
  """Random values; NaN from row `rows` on."""
  x = np.random.default_rng(seed).standard_normal(shape, np.float32)
  x[rows if rows is not None else len(x) :] = np.nan
  return jnp.asarray(x, dtype)


def relative_error(got, want):
  got = np.asarray(got, np.float64)
  return np.linalg.norm(got - want) / np.linalg.norm(want)


def close(got, want, tolerance):
  """Finite, zero where it must be, and close in each slice along the first axis."""
  got = np.asarray(got, np.float64)
  axes = tuple(range(1, got.ndim))
  norm = lambda a: np.sqrt(np.sum(a * a, axis=axes))
  return np.all(norm(got - want) <= tolerance * norm(want))


def assert_no_races():
  assert not gpu_callbacks.get_races().races_found


# Both halves of each tiling are in one of these cases or in a test below.
@pytest.mark.parametrize(
  ("changes", "groups"),
  [
    (dict(block_k=128), "eights"),
    (dict(strip=1, stages=3), "ragged"),
    (dict(block_m=256), "ragged"),
  ],
  ids=["single steps", "strips", "tall"],
)
def test_variants_agree(changes, groups):
  tiling, sizes = Tiling(**SMALL | changes), GROUPS[groups]
  run = dict(tiling=tiling, interpret=SIMULATOR)
  m, k, n, used = 280, 128, 192, sum(sizes)
  x, dy = operand(0, m, k, rows=used), operand(1, m, n, rows=used)
  w, sizes = operand(2, len(sizes), k, n), jnp.array(sizes)
  if groups == "eights":
    y = grouped_matmul(x, w, sizes, **run)
    assert_no_races()
    assert close(y, reference.grouped_matmul(x, w, sizes), 4e-3)
    return
  dx = grouped_matmul(dy, w, sizes, transpose_w=True, **run)
  assert_no_races()
  assert close(dx, reference.grouped_matmul(dy, w, sizes, transpose_w=True), 4e-3)
  dw = grouped_matmul_dw(x, dy, sizes, out_dtype=jnp.float32, **run)
  assert_no_races()
  assert close(dw, reference.grouped_matmul_dw(x, dy, sizes), 1e-6)


def test_products_are_added():
  """Four pairs, with a contraction that the steps do not divide; empty groups stay zero.

  A float32 tile of 128 columns is stored in four parts: in turn by two warpgroups, that takes just
  the eight steps of a tile.
  """
  m, k, n, sizes = 280, 128, 192, GROUPS["ragged"]
  gradients = [operand(i, m, n, rows=sum(sizes)) for i in range(4)]
  weights = [operand(4 + i, len(sizes), k, n) for i in range(4)]
  first, *more = zip(gradients, weights, strict=True)
  run = dict(transpose_w=True, more=more, out_dtype=jnp.float32)
  tiling = Tiling(**SMALL | dict(block_k=128))
  dx = grouped_matmul(*first, jnp.array(sizes), **run, tiling=tiling, interpret=SIMULATOR)
  assert_no_races()
  parts = [reference.grouped_matmul(*p, sizes, transpose_w=True) for p in (first, *more)]
  assert close(dx, sum(parts), 1e-6)  # rounded once, not three times


def test_tall_tiles_are_stored_in_turn():
  """Four parts of 64 rows and columns; eight steps a tile, several tiles to a thread block."""
  sizes = GROUPS["ragged"]
  x, w = operand(0, 280, 512, rows=sum(sizes)), operand(1, len(sizes), 512, 192)
  run = dict(tiling=Tiling(**SMALL | dict(block_m=256)), interpret=SIMULATOR)
  y = grouped_matmul(x, w, jnp.array(sizes), **run)
  assert_no_races()
  assert close(y, reference.grouped_matmul(x, w, sizes), 4e-3)


def test_weight_gradients_are_stored_in_turn_or_first():
  """Tiles of four steps (enough for that), of one and of none follow each other."""
  sizes, m = [200, 0, 17, 0, 55], 280
  x, dy = operand(0, m, 256, rows=sum(sizes)), operand(1, m, 192, rows=sum(sizes))
  dw = grouped_matmul_dw(x, dy, jnp.array(sizes), tiling=Tiling(**SMALL), interpret=SIMULATOR)
  assert_no_races()
  assert close(dw, reference.grouped_matmul_dw(x, dy, sizes), 4e-3)


def test_eight_bits_forward_and_input_gradient():
  sizes, k, n = GROUPS["ragged"], 256, 128
  used, m = sum(sizes), 264
  scale = jnp.asarray(np.random.default_rng(5).uniform(0.5, 2, len(sizes)), jnp.float32)
  of_row = np.pad(np.repeat(scale, sizes), (0, m - used))[:, None]
  x, dy = operand(0, m, k, rows=used, dtype=E4M3), operand(1, m, n, rows=used, dtype=E5M2)
  w = operand(2, len(sizes), k, n, dtype=E4M3)
  run = dict(tiling=Tiling(**SMALL | dict(block_k=128)), interpret=SIMULATOR)
  run = dict(run, transpose_w=True, out_dtype=jnp.float32)
  y = grouped_matmul(x, w.swapaxes(1, 2), jnp.array(sizes), scale=scale, **run)
  assert_no_races()
  assert close(y, of_row * reference.grouped_matmul(x, w, sizes), 1e-6)
  dx = grouped_matmul(dy, w, jnp.array(sizes), scale=scale[:1], **run)
  assert_no_races()
  assert close(dx, scale[0] * reference.grouped_matmul(dy, w, sizes, transpose_w=True), 1e-6)


def test_eight_bits_weight_gradient():
  sizes, m = [5, 0, 130, 128, 1], 272
  x, dy = operand(0, m, 64, rows=264, dtype=E4M3), operand(1, m, 128, rows=264, dtype=E5M2)
  run = dict(tiling=Tiling(**SMALL | dict(block_k=128)), interpret=SIMULATOR)
  copies = [align_rows(a, jnp.array(sizes)).T for a in (x, dy)]
  scale = jnp.array([0.25], jnp.float32)
  run = dict(run, scale=scale, out_dtype=jnp.float32)
  dw = grouped_matmul_dw(*copies, jnp.array(sizes), **run)
  assert_no_races()
  assert close(dw, 0.25 * reference.grouped_matmul_dw(x, dy, sizes), 1e-6)


def test_eight_bits_come_out_as_bfloat16():
  x, w = operand(0, 128, 128, dtype=E4M3), operand(1, 1, 128, 128, dtype=E4M3)
  make = functools.partial(grouped_matmul, transpose_w=True)
  assert jax.eval_shape(make, x, w, jnp.array([128])).dtype == jnp.bfloat16
  assert jax.eval_shape(grouped_matmul_dw, x, x, jnp.array([1])).dtype == jnp.bfloat16


def test_aligned_rows():
  x = jnp.arange(1, 15, dtype=jnp.float32)[:, None]
  got = align_rows(x, jnp.array([3, 0, 4, 5]), 4)[:, 0]
  want = [1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 10, 11, 12]
  np.testing.assert_array_equal(got, want + [0] * (got.size - len(want)))
  assert got.size == (14 // 4 + 4) * 4


@pytest.mark.parametrize("keep", [False, True])
def test_swiglu(keep):
  sizes, m, k, f = GROUPS["ragged"], 264, 384, 128
  x = operand(0, m, k, rows=sum(sizes))
  gate, up = (operand(s, len(sizes), k, f) / 8 for s in (1, 2))
  w = interleave(gate, up, 64)
  run = dict(tiling=Tiling(**SMALL), interpret=SIMULATOR)
  got = grouped_swiglu(x, w, jnp.array(sizes), keep=keep, **run)
  assert_no_races()
  g, u = (reference.grouped_matmul(x, a, sizes) for a in (gate, up))
  h, *kept = got if keep else (got,)
  assert close(h, g / (1 + np.exp(-g)) * u, 4e-3)
  if keep:
    assert close(kept[0], reference.grouped_matmul(x, w, sizes), 4e-3)


PRODUCTION = {
  "default": {},
  "tall": dict(block_m=256, block_n=128),
}


@pytest.mark.parametrize("changes", PRODUCTION.values(), ids=PRODUCTION.keys())
def test_lowers_for_cuda(changes):
  """The layouts, the tile sizes and the shared memory fit an H200 at production shapes."""
  tiling = Tiling(**changes)
  m, k, n, num_groups = 65536, 2048, 1024, 64
  struct = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
  sizes = struct(num_groups, dtype=jnp.int32)

  def kernels(x, w, dy, sizes):
    y = grouped_matmul(x, w, sizes, tiling=tiling)
    dx = grouped_matmul(dy, w, sizes, transpose_w=True, tiling=tiling, more=[(2 * dy, w)])
    h = grouped_swiglu(x, w, sizes, keep=True, tiling=tiling)
    return y, dx, h, grouped_matmul_dw(x, dy, sizes, tiling=tiling)

  operands = struct(m, k), struct(num_groups, k, n), struct(m, n), sizes
  lowered = jax.jit(kernels).trace(*operands).lower(lowering_platforms=("cuda",))
  assert lowered.as_text().count("@mosaic_gpu") == 4


def test_eight_bits_lower_for_cuda():
  tiling = Tiling(block_k=128)
  m, k, n, num_groups = 65536, 2048, 1024, 64
  struct = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
  operands = (
    struct(E4M3, m, k),
    struct(E4M3, num_groups, n, k),
    struct(E5M2, m, n),
    struct(E4M3, num_groups, k, n),
    struct(jnp.int32, num_groups),
    struct(jnp.float32, 1),
  )

  def kernels(x, w_t, dy, w, sizes, scale):
    run = dict(tiling=tiling, scale=scale)
    y = grouped_matmul(x, w_t, sizes, transpose_w=True, **run)
    dx = grouped_matmul(dy, w, sizes, transpose_w=True, **run)
    h = grouped_swiglu(x, w_t, sizes, transpose_w=True, **run)
    return y, dx, h, grouped_matmul_dw(*(align_rows(a, sizes).T for a in (x, dy)), sizes, **run)

  lowered = jax.jit(kernels).trace(*operands).lower(lowering_platforms=("cuda",))
  assert lowered.as_text().count("@mosaic_gpu") == 4


def test_rejects():
  x8, w8 = jnp.zeros((128, 128), E4M3), jnp.zeros((2, 128, 128), E4M3)
  x, w = x8.astype(jnp.bfloat16), w8.astype(jnp.bfloat16)
  with pytest.raises(ValueError, match=r"a further pair .* of the first pair are expected"):
    grouped_matmul(x, w, jnp.array([1, 2]), more=[(x[:64], w)])
  sizes = jnp.zeros(2, jnp.int32)
  with pytest.raises(ValueError, match="along the contraction"):
    grouped_matmul(x8, w8, sizes)
  with pytest.raises(ValueError, match="float8"):
    grouped_matmul(x8.astype(jnp.bfloat16), w8, sizes, transpose_w=True)
  with pytest.raises(ValueError, match="scale"):
    grouped_matmul(x8, w8, sizes, transpose_w=True, scale=jnp.ones(3))
  with pytest.raises(ValueError, match="multiple of 128"):
    grouped_matmul(x8[:, :64], w8[:, :64], sizes)
  with pytest.raises(ValueError, match="gate and up"):
    grouped_swiglu(x8.astype(jnp.bfloat16), w8.astype(jnp.bfloat16), sizes)
  for bad in (dict(stages=1), dict(strip=0), dict(block_m=256)):
    with pytest.raises(ValueError, match="Tiling"):
      Tiling(**bad)
