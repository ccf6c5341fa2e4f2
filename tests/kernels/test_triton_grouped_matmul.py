"""The grouped matmul in Triton, in its interpreter, against float64."""

import jax
import numpy as np
import pytest
import triton_interpreter

from kernels_pallas.grouped_matmul import reference
from kernels_triton import plan, slots
from kernels_triton.compile import compiled

pytestmark = pytest.mark.hf
pytest.importorskip("triton")

D_IN, D_OUT = 40, 24
SIZES = [(90, [17, 0, 32, 1, 30]), (90, [90]), (90, [0, 0, 0]), (90, [16] * 5)]
SIZES += [(1, [0, 1, 0]), (2, [1, 0, 0, 1]), (2, [0, 0]), (3, [1, 0, 1]), (5, [0, 5])]


@pytest.fixture(scope="module")
def interpreter():
  with triton_interpreter.interpreter() as with_blocks:
    yield with_blocks


@pytest.fixture(autouse=True)
def _interpreted(interpreter, monkeypatch):
  monkeypatch.setattr(slots, "call", interpreter(block_m=16, block_n=16, block_k=16))


def operand(seed, *shape, rows=None):
  x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
  x[len(x) if rows is None else rows :] = np.nan
  return x


@pytest.mark.parametrize(("rows", "sizes"), SIZES, ids=str)
def test_values_and_gradients(rows, sizes):
  of = np.array(sizes, np.int32)
  x, w = operand(0, rows, D_IN, rows=of.sum()), operand(1, len(sizes), D_IN, D_OUT)
  more, dy = operand(2, *w.shape), operand(3, rows, D_OUT, rows=of.sum())
  other = operand(4, rows, D_OUT, rows=of.sum())
  close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  close(jax.jit(slots.forward)(x, w, of), reference.grouped_matmul(x, w, sizes))
  of_input = lambda dy, w: reference.grouped_matmul(dy, w, sizes, transpose_w=True)
  run = jax.jit(slots.input_gradient)
  close(run((dy,), (w,), of), of_input(dy, w))
  close(run((dy, other), (w, more), of), of_input(dy, w) + of_input(other, more))
  three = of_input(dy, w) + of_input(other, more) + of_input(dy, more)
  close(run((dy, other, dy), (w, more, more), of), three)
  found = jax.jit(slots.weight_gradient)(x, dy, of)
  close(found, reference.grouped_matmul_dw(x, dy, sizes))


@pytest.mark.parametrize("capability", ["8.6", pytest.param("9.0", marks=pytest.mark.thorough)])
def test_compiled_for_a_gpu_some_tile_fits(monkeypatch, tmp_path, capability):
  monkeypatch.setenv("CUDA_TARGET_SM", capability)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  names = ("x", "w", "x_more", "w_more", "y")
  forward = dict.fromkeys(names, "bf16") | {"starts": "i32"}
  kinds = [(8192, 1, False, 128), (8192, 2, True, 128), (2, 1, False, 16), (32, 1, False, 16)]
  for rows, pairs, transposed, height in kinds:
    launch = plan.grouped_matmul(rows, (8, 2048, 1408), transposed=transposed, pairs=pairs)
    made = compiled(launch, forward)
    assert made.name == "grouped_matmul"
    assert made.tile.blocks["block_m"] == height
  of_weights = {"x": "bf16", "dy": "bf16", "starts": "i32", "dw": "bf16"}
  made = compiled(plan.grouped_weight_gradient(8, 2048, 1408), of_weights)
  assert made.name == "weight_gradient"
