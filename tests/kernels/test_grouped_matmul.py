"""Grouped matmul kernels: values and races in the simulator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import thorough_but
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul import reference
from kernels_pallas.grouped_matmul.forward import grouped_matmul
from kernels_pallas.grouped_matmul.wgrad import grouped_matmul_dw
from kernels_pallas.grouped_matmul.worklist import Tiling, groups_by_size, row_tiles

pytestmark = pytest.mark.compat

SIMULATOR = plgpu.InterpretGPUParams(detect_races=True)
M, K, N = 272, 128, 192  # two row tiles and a bit; N fills one and a half tiles of 128
TILING = Tiling(block_n=128, stages=2, strip=2, num_blocks=2)
GROUPS = {
  "tile - 1, tile, tile + 1 rows in all": [127, 1, 129],
  "no rows": [0, 0, 0],
  "fewer rows than M, ends on a tile": [64, 64, 0],
  "eight": [17, 0, 64, 1, 63, 0, 65, 31],
}


@pytest.fixture(autouse=True)
def _simulator_state():
  yield
  gpu_callbacks.reset_gpu_interpret_mode_state()  # Or a failure disturbs the next test.


def operand(seed, *shape, rows=None, dtype=jnp.bfloat16):
  """Random values; NaN from row `rows` on."""
  x = np.random.default_rng(seed).standard_normal(shape, np.float32)
  x[rows if rows is not None else len(x) :] = np.nan
  return jnp.asarray(x, dtype)


def relative_errors(got, want):
  """Relative Frobenius error of each slice along the first axis; 0 / 0 counts as 0."""
  got = np.asarray(got, np.float64)
  axes = tuple(range(1, got.ndim))
  norm = lambda a: np.sqrt(np.sum(a * a, axis=axes))
  return norm(got - want) / np.maximum(norm(want), 1e-30)


def assert_no_races():
  assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize("name", thorough_but(list(GROUPS), 0, 1))
def test_forward(name):
  sizes = GROUPS[name]
  x, w = operand(0, M, K, rows=sum(sizes)), operand(1, len(sizes), K, N)
  y = grouped_matmul(x, w, jnp.array(sizes), tiling=TILING, interpret=SIMULATOR)
  assert_no_races()
  want = reference.grouped_matmul(x, w, sizes)
  assert np.all(want[sum(sizes) :] == 0)
  assert relative_errors(y, want).max() < 4e-3  # a row at a time; bf16 rounds to 2e-3


def test_input_gradient():
  sizes = GROUPS["eight"]
  dy, w = operand(0, M, N, rows=sum(sizes)), operand(1, len(sizes), K, N)
  run = functools.partial(grouped_matmul, transpose_w=True, tiling=TILING, interpret=SIMULATOR)
  dx = run(dy, w, jnp.array(sizes))
  assert_no_races()
  assert relative_errors(dx, reference.grouped_matmul(dy, w, sizes, transpose_w=True)).max() < 4e-3


@pytest.mark.parametrize("name", thorough_but(["no rows", "eight"], 0))
def test_weight_gradient(name):
  sizes = GROUPS[name]
  x, dy = operand(0, M, K, rows=sum(sizes)), operand(1, M, N, rows=sum(sizes))
  run = functools.partial(grouped_matmul_dw, tiling=TILING, interpret=SIMULATOR)
  dw = run(x, dy, jnp.array(sizes), out_dtype=jnp.float32)
  assert_no_races()
  want = reference.grouped_matmul_dw(x, dy, sizes)
  assert np.all(want[np.array(sizes) == 0] == 0)
  assert relative_errors(dw, want).max() < 1e-6  # bf16 products are exact in fp32


@pytest.mark.parametrize("m", [5, 131])
@pytest.mark.thorough
def test_rows_that_are_no_multiple_of_eight(m):
  sizes = [2, 0, m - 2]
  x, w, dy = operand(0, m, 64), operand(1, 3, 64, 64), operand(2, m, 64)
  run = dict(tiling=TILING, interpret=SIMULATOR)
  y = grouped_matmul(x, w, jnp.array(sizes), **run)
  assert y.shape == (m, 64)
  assert relative_errors(y, reference.grouped_matmul(x, w, sizes)).max() < 4e-3
  dw = grouped_matmul_dw(x, dy, jnp.array(sizes), **run)
  assert relative_errors(dw, reference.grouped_matmul_dw(x, dy, sizes)).max() < 4e-3


@pytest.mark.parametrize("block_m", [128, 256])
@pytest.mark.parametrize("seed", range(3))
def test_tiles_own_each_row_once(seed, block_m):
  rng = np.random.default_rng(seed)
  m, num_groups = 4096, (1, 7, 128)[seed]
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


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(x=(128, 192)), "expected x"),
    (dict(x=(128, 100), w=(2, 100, 128)), "multiple of 64"),
    (dict(sizes=(3,)), "group_sizes"),
    (dict(dtype=jnp.float32), "bfloat16"),
  ],
)
def test_rejects(changes, message):
  given = dict(x=(128, 128), w=(2, 128, 128), sizes=(2,), dtype=jnp.bfloat16) | changes
  x, w = (jnp.zeros(given[name], given["dtype"]) for name in ("x", "w"))
  with pytest.raises(ValueError, match=message):
    grouped_matmul(x, w, jnp.zeros(given["sizes"], jnp.int32))
  with pytest.raises(ValueError, match="rows"):
    grouped_matmul_dw(operand(0, 64, 64), operand(0, 72, 64), jnp.zeros(1, jnp.int32))


@pytest.mark.parametrize(
  "bad", [dict(block_m=64), dict(block_n=192), dict(block_m=256), dict(stages=1)]
)
def test_rejects_tilings(bad):
  with pytest.raises(ValueError, match="Tiling"):
    Tiling(**bad)
