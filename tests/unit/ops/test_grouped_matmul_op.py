"""The XLA grouped matmul against numpy, and which implementation is chosen when."""

import functools
import importlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import kernels_of, tiny_config

from ats_jax.ops import requirements
from ats_jax.ops.grouped_matmul import add_by_group, grouped_matmul, grouped_matmuls
from ats_jax.ops.registry import FallbackError, Kernels, choose_op
from ats_jax.ops.requirements import Device
from kernels_triton.plan import FEW_ROWS

# Rows, groups, widths; each compiles anew. Tiles have 8 rows, but 512 in the last.
SHAPES = [(65, 4, 3, 6), (4099, 1, 1, 2)]


@jax.jit
def value_and_gradients(x, w, sizes, dy):
  y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
  return y, *pull(dy)


def in_numpy(x, w, sizes, dy):
  """The same three by a loop over the groups."""
  y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
  end = 0
  for e, size in enumerate(sizes):
    rows = slice(end, end := end + size)
    y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
  return y, dx, dw


def operands(shape, seed, used):
  """x, w and dy; NaN in rows that are in no group: nothing of them may show."""
  rows, groups, d_in, d_out = shape
  rng = np.random.default_rng(seed)
  x, w, dy = (rng.standard_normal(s) for s in ((rows, d_in), (groups, d_in, d_out), (rows, d_out)))
  x[used:] = dy[used:] = np.nan
  return x, w, dy


@st.composite
def cases(draw):
  rows, groups, *_ = shape = draw(st.sampled_from(SHAPES))
  cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=groups, max_size=groups)))
  sizes = np.diff([0, *cuts])  # equal cuts make empty groups, the last one is seldom `rows`
  return shape, sizes, draw(st.integers(0, 100))


@hypothesis.settings(max_examples=15)
@hypothesis.given(cases())
@hypothesis.example(((65, 4, 3, 6), np.array([0, 0, 0, 0]), 0))
@hypothesis.example(((65, 4, 3, 6), np.array([0, 65, 0, 0]), 0))
@hypothesis.example(((65, 4, 3, 6), np.array([8, 16, 9, 32]), 0))  # about whole tiles; all rows
def test_values_and_gradients(case):
  shape, sizes, seed = case
  x, w, dy = operands(shape, seed, sizes.sum())
  with jax.enable_x64(True):
    got = value_and_gradients(x, w, jnp.array(sizes, jnp.int32), dy)
  for name, a, b in zip(("y", "dx", "dw"), got, in_numpy(x, w, sizes, dy), strict=True):
    assert a.dtype == jnp.float64
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=name)


@jax.jit
def add_and_pull(y, bias, sizes, dy):
  out, pull = jax.vjp(lambda y, bias: add_by_group(y, bias, sizes), y, bias)
  return out, *pull(dy)


def test_a_bias_for_each_group():
  """Rows past the last group stay, an empty group gets no gradient."""
  rng, sizes = np.random.default_rng(0), np.array([3, 0, 2])
  with jax.enable_x64(True):
    y, bias, dy = (rng.standard_normal(shape) for shape in ((7, 4), (3, 4), (7, 4)))
    out, d_y, d_bias = add_and_pull(y, bias, sizes, dy)
  np.testing.assert_array_equal(
    out, y + np.concatenate([np.repeat(bias, sizes, 0), np.zeros((2, 4))])
  )
  np.testing.assert_array_equal(d_y, dy)
  np.testing.assert_allclose(d_bias, [dy[:3].sum(0), np.zeros(4), dy[3:5].sum(0)], 1e-12, 1e-12)


def test_a_bias_for_each_group_is_exact_in_bfloat16():
  ones, bias = jnp.ones((302, 1), jnp.bfloat16), jnp.array([[1.0], [2.0**-7]], jnp.bfloat16)
  out, _, gradient = add_and_pull(ones, bias, np.array([300, 2]), ones)
  assert out.dtype == jnp.bfloat16 and out[0, 0] == 2 and out[-1, 0] == 1 + 2.0**-7
  # In bfloat16 a sum of ones stops at 256.
  assert gradient.dtype == jnp.bfloat16 and gradient.ravel().tolist() == [300, 2]


def test_bfloat16_is_accumulated_in_float32():
  shape, sizes = (1100, 4, 40, 24), [600, 0, 1, 450]
  rounded = [jnp.array(a, jnp.bfloat16) for a in operands(shape, 0, sum(sizes))]
  exact = [np.asarray(a, np.float64) for a in rounded]
  x, w, dy = rounded
  got = value_and_gradients(x, w, jnp.array(sizes), dy)
  for name, a, b in zip(("y", "dx", "dw"), got, in_numpy(*exact[:2], sizes, exact[2]), strict=True):
    assert a.dtype == jnp.bfloat16
    # One rounding of the result, half a unit in the last of 8 bits; sums of 600 terms in bfloat16
    # would be off by far more.
    bound = 2.0**-8 * np.abs(b) + 1e-4
    assert np.all(np.abs(np.asarray(a, np.float64) - b) <= bound), name


def test_several_weights_of_the_same_rows():
  """Values and gradients are those of one after the other; the rows' gradient is their sum."""
  sizes = jnp.array([9, 0, 40], jnp.int32)
  x, gate, dy = (jnp.asarray(a) for a in operands((60, 3, 5, 2), 0, 49))
  up, du = -2 * gate[::-1], 3 * dy

  def apart(x, gate, up):
    return tuple(grouped_matmul(x, w, sizes) for w in (gate, up))

  def together(x, gate, up):
    return grouped_matmuls(x, (gate, up), sizes)

  @functools.partial(jax.jit, static_argnums=0)
  def everything(run):
    y, pull = jax.vjp(run, x, gate, up)
    return *y, *pull((dy, du))

  got, want = everything(together), everything(apart)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a[:49], b[:49], rtol=1e-6, atol=1e-6)


# Widths and rows that tiles do not divide, and an empty group; NaN in the last 70 rows.
TPU_SHAPES = [((600, 4, 600, 1100), (300, 0, 130, 100)), ((5, 3, 24, 8), (0, 0, 0))]


@pytest.mark.compat
@pytest.mark.parametrize(("shape", "sizes"), TPU_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_tpu(monkeypatch, shape, sizes, dtype):
  """In Pallas' interpreter: the sum of two products, and their gradients."""
  of_jax = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
  for name in ("gmm", "tgmm"):
    interpreted = functools.partial(getattr(of_jax, name), interpret=True)
    monkeypatch.setattr(of_jax, name, interpreted)
  kernels = kernels_of("grouped_matmul", "megablox")
  x, w, dy = (jnp.asarray(a, dtype) for a in operands(shape, 0, sum(sizes)))

  @jax.jit
  def found(x, w, dy):
    pair = lambda x, w: grouped_matmuls(x, (w, -2 * w), jnp.array(sizes), kernels)
    (y, _), pull = jax.vjp(pair, x, w)
    dx, dw = pull((dy, dy))
    return y, dx, dw

  got = found(x, w, dy)
  y, dx, dw = in_numpy(*(np.asarray(a, np.float64) for a in (x, w)), sizes, np.float64(dy))
  for name, a, b in zip(("y", "dx", "dw"), got, (y, -dx, -dw), strict=True):
    assert a.dtype == dtype
    bound = 2.0**-6 if dtype == "bfloat16" else 1e-5
    error = np.linalg.norm(np.asarray(a, np.float64) - b)
    assert error <= bound * np.linalg.norm(b), name


def on(**changes):
  """A config whose experts the Hopper kernel takes, with some of that changed."""
  cfg = tiny_config(
    {"moe.num_experts": 4, "model.d_model": 128, "moe.d_ff": 128}
    | {"precision.compute_dtype": "bfloat16"}
    | {k.replace("__", "."): v for k, v in changes.items()}
  )
  return cfg


def choose(cfg, *device):
  """The one choice for all slots but that of few rows."""
  of_slots = choose_op(cfg, Device(*device), "grouped_matmul")
  del of_slots["few_rows"]
  (choice,) = set(of_slots.values())
  return choice


def test_the_kernel_is_chosen_on_hopper_and_the_reference_elsewhere():
  assert choose(on(), "gpu", "9.0").implementation == "mosaic"
  for platform, capability, reason in [
    ("cpu", "0.0", "this is cpu"),
    ("gpu", "8.0", "this GPU has 8.0"),
  ]:
    choice = choose(on(), platform, capability)
    assert choice.implementation == "xla" and reason in choice.reason
  assert choose(on(ops__kernels={"grouped_matmul": "xla"}), "gpu", "9.0").implementation == "xla"


@pytest.mark.parametrize("has_triton", [True, False])
def test_few_rows_run_triton_where_it_is_installed(monkeypatch, tmp_path, has_triton):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no programs are kept there
  monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: has_triton or None)
  of_slots = choose_op(on(), Device("gpu", "9.0"), "grouped_matmul")
  names = {slot: choice.implementation for slot, choice in of_slots.items()}
  few = "triton" if has_triton else "mosaic"
  assert names == dict.fromkeys(names, "mosaic") | {"few_rows": few}
  asked = on(ops__kernels={"grouped_matmul": "mosaic"})
  of_slots = choose_op(asked, Device("gpu", "9.0"), "grouped_matmul")
  assert {choice.implementation for choice in of_slots.values()} == {"mosaic"}


def test_few_rows_have_a_slot_of_their_own():
  kernels = Kernels((("grouped_matmul.few_rows", "cuda"),))
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

  def runs(rows):
    run = functools.partial(grouped_matmul, kernels=kernels)
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    return "ffi_call" in str(jax.make_jaxpr(run)(array(rows, 64), array(2, 64, 128), sizes))

  assert runs(1) and runs(FEW_ROWS) and not runs(FEW_ROWS + 1)


def test_the_kernel_for_tpus_is_chosen_there():
  for dtype, name in (("bfloat16", "megablox"), ("float32", "megablox"), ("float16", "xla")):
    assert choose(on(precision__compute_dtype=dtype), "tpu").implementation == name
  named = on(precision__compute_dtype="float16", ops__kernels={"grouped_matmul": "megablox"})
  for device, obstacle in (("tpu", "compute_dtype is float16"), ("cpu", "this is cpu")):
    with pytest.raises(ValueError, match=f"grouped_matmul=megablox: .*{obstacle}. Use"):
      choose(named, device)


@pytest.mark.parametrize(
  ("changes", "obstacle"),
  [
    ({"precision__compute_dtype": "float32"}, "precision.compute_dtype is float32"),
    ({"model__d_model": 96}, "model.d_model is 96 on a device"),
    ({"moe__d_ff": 64, "mesh__tensor": 2}, "moe.d_ff is 32 on a device"),
  ],
)
def test_what_the_kernel_cannot_do(changes, obstacle):
  assert obstacle in choose(on(**changes), "gpu", "9.0").reason
  message = f"grouped_matmul=mosaic: .*{obstacle}. Use grouped_matmul=xla, or leave it out"
  with pytest.raises(ValueError, match=message):
    choose(on(**changes, ops__kernels={"grouped_matmul": "mosaic"}), "gpu", "9.0")
  with pytest.raises(FallbackError, match=f"ops.strict: .*{obstacle}.*set ops.strict=false"):
    choose(on(**changes, ops__strict=True), "gpu", "9.0")
  # There is nothing faster to miss on a CPU.
  assert choose(on(**changes, ops__strict=True), "cpu").implementation == "xla"
