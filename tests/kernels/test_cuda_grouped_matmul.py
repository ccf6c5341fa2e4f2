"""The grouped matmul in CUDA, run on the CPU through a C++ shim, against numpy in float64.

The shim has a function over a warp's lanes for each tensor-core instruction, so this proves the
indices, and the pipeline of copies in four orders of threads; not the speed.
"""

import re
import subprocess

import cuda_host
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_cuda import library
from kernels_cuda.grouped_matmul import grouped_matmul, grouped_matmul_dw
from kernels_cuda.library import KernelsUnavailableError

pytestmark = pytest.mark.compat

BF16 = ml_dtypes.bfloat16
ROUNDING = {BF16: 3e-3, np.float16: 4e-4}  # of a result, on average over many
# block_n, dtype, and rows, d_in, d_out, sizes: a tile is 128 rows, 32 deep, block_n columns.
CASES = {
  "one tile": (128, BF16, (128, 32, 128, [128])),
  "less than a tile": (256, np.float16, (5, 8, 8, [2, 3])),
  "uneven, empty, a rest": (256, BF16, (300, 72, 136, [0, 130, 0, 1, 100, 0])),
  "no group has rows": (256, np.float16, (140, 40, 16, [0, 0, 0])),
  "one has all": (256, np.float16, (140, 72, 264, [0, 140, 0])),
  "many groups": (128, BF16, (90, 24, 40, [3] * 30)),
  "strips of tiles": (128, BF16, (2100, 8, 136, [700, 0, 1390])),
}


@pytest.fixture(autouse=True, scope="module")
def _host_library():
  cuda_host.host_library()


def wide(x):
  return np.asarray(x).astype(np.float64)


def make(rows, d_in, d_out, sizes, dtype=BF16):
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


@pytest.mark.parametrize(("block_n", "dtype", "case"), CASES.values(), ids=CASES)
def test_values(block_n, dtype, case):
  x, w, dy, sizes, of_group = make(*case, dtype=dtype)
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
def test_the_pipeline_in_every_order():
  """More steps than stages, both ways in depth; the same bits whichever thread is ahead."""
  block_n, (x, w, dy, sizes, _) = 256, make(170, 200, 136, [150, 0, 20])
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


def test_one_row_is_nobody_elses():
  """A NaN in one row reaches that row of the result, and the gradient of its group, only."""
  x, w, dy, sizes, _ = make(100, 40, 24, [33, 40, 27])
  x[50] = np.nan
  y = np.asarray(grouped_matmul(x, w, sizes)).astype(np.float32)
  assert np.isnan(y[50]).all() and np.isfinite(np.delete(y, 50, axis=0)).all()
  dw = np.asarray(grouped_matmul_dw(x, dy, sizes)).astype(np.float32)
  assert np.isnan(dw[1]).all() and np.isfinite(dw[[0, 2]]).all()


def test_sizes_that_promise_too_much_stay_inside():
  """Nothing past the last row is read or written: the shim's arrays end there."""
  x, w, dy, _, _ = make(40, 16, 8, [40, 0])
  sizes = np.array([30, 1000], np.int32)
  want = [wide(x[:30]) @ wide(w[0]), wide(x[30:]) @ wide(w[1])]
  y = grouped_matmul(x, w, sizes)
  assert_each_close([y[:30], y[30:]], want, ROUNDING[BF16])
  want = [wide(x[:30]).T @ wide(dy[:30]), wide(x[30:]).T @ wide(dy[30:])]
  assert_each_close(grouped_matmul_dw(x, dy, sizes), want, ROUNDING[BF16])


def test_no_rows_and_no_groups():
  empty = jnp.zeros((0, 16), jnp.bfloat16)
  w, sizes = jnp.ones((2, 16, 8), jnp.bfloat16), jnp.zeros(2, jnp.int32)
  assert grouped_matmul(empty, w, sizes).shape == (0, 8)
  assert not grouped_matmul_dw(empty, empty, sizes).any()
  x = jnp.ones((3, 16), jnp.bfloat16)
  assert not grouped_matmul(x, w[:0], sizes[:0]).any()


def test_what_it_does_not_take():
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
  x, w, _, sizes, _ = make(8, 8, 8, [8])
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
