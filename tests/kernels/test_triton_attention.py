"""Attention in Triton, in its interpreter, and compiled for GPUs that are not here."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_interpreter
from helpers import kernels_of, make_test_mesh

from ats_jax.ops.attention import triton as in_triton
from ats_jax.ops.attention.causal import attention
from kernels_cuda import library
from kernels_triton import plan
from kernels_triton.compile import SHARED, compiled

pytestmark = pytest.mark.hf
pytest.importorskip("triton")

SEQ = 77  # of no block a multiple
CUTS = {"one document": [], "documents": [1, 5, 33, 34, 70], "two": [40]}


def ids_of(kind):
  ids = np.ones((2, SEQ), np.int32)
  for cut in CUTS[kind]:
    ids[1, cut:] += 1  # the first row stays whole
  return ids


def arrays(heads, kv_heads, width, v_width, dtype):
  rng = np.random.default_rng(0)
  shapes = ((heads, width), (kv_heads, width), (kv_heads, v_width), (heads, v_width))
  return [rng.normal(size=(2, SEQ, *s)).astype(dtype) for s in shapes]


def results(implementation, q, k, v, dy, sinks, ids, window, soft_cap):
  def f(q, k, v, sinks_N):
    how = dict(segment_ids_BT=ids, max_segments=6, window=window, soft_cap=soft_cap)
    return attention(
      q, k, v, sinks_N=sinks_N, kernels=kernels_of("attention", implementation), **how
    )

  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    y, pull = jax.vjp(jax.jit(f), q, k, v, sinks)
    return jax.tree.map(np.asarray, (y, *pull(dy.astype(y.dtype))))


@pytest.fixture(scope="module")
def interpreter():
  with triton_interpreter.interpreter() as with_blocks:
    yield with_blocks


@pytest.fixture
def interpreted(interpreter, monkeypatch):
  def install(block_m, block_n):
    monkeypatch.setattr(in_triton, "call", interpreter(block_m=block_m, block_n=block_n))

  return install


@pytest.mark.parametrize(
  ("heads", "widths", "kind", "options", "blocks"),
  [
    ((4, 2), (64, 64), "documents", {}, (32, 16)),
    ((4, 1), (16, 16), "one document", {}, (16, 32)),
    ((2, 2), (96, 96), "two", {"soft_cap": 0.7}, (32, 32)),
    ((2, 1), (80, 80), "documents", {"window": 7, "sinks": True}, (16, 16)),
    ((2, 2), (192, 128), "two", {}, (32, 16)),
    ((2, 1), (32, 32), "one document", {"window": 20, "sinks": True, "soft_cap": 2.0}, (64, 16)),
  ],
  ids=str,
)
def test_value_and_gradients_equal_those_of_float64(
  interpreted, heads, widths, kind, options, blocks
):
  interpreted(*blocks)
  inputs = arrays(*heads, *widths, np.float32)
  options = {"window": None, "soft_cap": None, "sinks": False} | options
  sinks = np.linspace(-1, 2, heads[0]) if options.pop("sinks") else None
  how = {"ids": ids_of(kind), **options}
  in_float32 = None if sinks is None else sinks.astype(np.float32)
  found = results("triton", *inputs, in_float32, **how)
  with jax.enable_x64(True):
    want = results("xla", *(a.astype(np.float64) for a in inputs), sinks, **how)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_float16(interpreted):
  interpreted(32, 32)
  inputs = arrays(2, 1, 64, 64, np.float16)
  how = {"sinks": None, "ids": ids_of("documents"), "window": None, "soft_cap": None}
  found = results("triton", *inputs, **how)
  want = results("xla", *(a.astype(np.float32) for a in inputs), **how)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
    assert a.dtype == np.float16
    assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(b)


def test_a_neighbouring_document_changes_no_bit(interpreted):
  interpreted(32, 16)
  ids = ids_of("documents")
  q, k, v, dy = arrays(2, 1, 32, 32, np.float32)
  run = functools.partial(results, "triton", sinks=None, ids=ids, window=None, soft_cap=None)
  before = run(q, k, v, dy)
  rng, own = np.random.default_rng(1), ids == 5
  other = [np.where(own[..., None, None], a, rng.normal(size=a.shape) * 9) for a in (q, k, v, dy)]
  after = run(*(a.astype(np.float32) for a in other))
  assert own.sum() == 36
  for a, b in zip(before[:4], after[:4], strict=True):
    np.testing.assert_array_equal(a[own], b[own])
    assert (a[~own] != b[~own]).mean() > 0.9


def launches(width=128, v_width=128, soft_cap=None):
  return plan.attention(
    (4, 4096, 32, width), (4, 4096, 8, width), v_width, soft_cap, True, in_parts=False
  )


ARRAYS = (
  {"q": "", "k": "", "v": "", "first": "i32", "sinks": "fp32", "y": "", "lse": "fp32"},
  {"q": "", "k": "", "v": "", "last": "i32", "dy": "", "lse": "fp32", "delta": "fp32", "dk": "",
   "dv": ""},
  {"q": "", "k": "", "v": "", "first": "i32", "dy": "", "lse": "fp32", "delta": "fp32", "dq": ""},
)  # fmt: skip


@pytest.mark.parametrize(
  "capability",
  ["8.6", *(pytest.param(c, marks=pytest.mark.thorough) for c in ("8.0", "9.0", "10.0", "12.0"))],
)
def test_compiled_for_a_gpu_some_tile_fits(monkeypatch, tmp_path, capability):
  monkeypatch.setenv("CUDA_TARGET_SM", capability)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  for launch, types in zip(launches(192, 128), ARRAYS, strict=True):
    made = compiled(launch, {name: kind or "bf16" for name, kind in types.items()})
    assert made.shared <= SHARED[capability]
    assert made.name == launch.kernel and made.parameters >= len(types)
    assert f".target sm_{capability.replace('.', '')}" in made.ptx


def test_a_program_that_was_made_once_needs_no_triton(monkeypatch, tmp_path):
  monkeypatch.setenv("CUDA_TARGET_SM", "8.0")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  q = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
  k = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((1, 256), jnp.int32)

  def lowered():
    how = dict(max_segments=2, window=None, soft_cap=None)
    f = lambda q, k, v, ids: in_triton.flash_attention(q, k, v, ids, None, **how).sum()
    gradients = jax.jit(jax.grad(f, (0, 1, 2)))
    return gradients.trace(q, k, k, ids).lower(lowering_platforms=("cuda",)).as_text()

  text = lowered()
  assert text.count("__gpu$xla.gpu.ptx") == 3

  def missing(name, *args):
    if name.startswith("triton"):
      raise ModuleNotFoundError(name)
    return real(name, *args)

  real = importlib.import_module
  monkeypatch.setattr(importlib, "import_module", missing)
  jax.clear_caches()
  assert lowered() == text
  monkeypatch.setenv("CUDA_TARGET_SM", "8.6")
  with pytest.raises(library.KernelsUnavailableError, match="Triton is not installed: pip install"):
    lowered()


def test_what_triton_refuses_is_one_line(monkeypatch, tmp_path):
  monkeypatch.setenv("CUDA_TARGET_SM", "8.0")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  tile = plan.Tile({"block_m": 48, "block_n": 32}, num_warps=4, num_stages=1)  # no power of two
  launch = launches(64, 64)[0]._replace(tiles=(tile,))
  with pytest.raises(ValueError, match="power of 2") as error:
    compiled(launch, {name: kind or "bf16" for name, kind in ARRAYS[0].items()})
  said = str(error.value)
  assert said.startswith("attention_forward in Triton (seq=4096, heads=32, kv_heads=8, width_0=64")
  assert "for compute capability 8.0: Triton" in said and "\n" not in said
  assert not list(tmp_path.rglob("*.json"))
