"""The 8-bit matmul: within what the rounding of its operands explains, and really 8 bits."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ats_jax.ops.fp8_matmul import fp8_matmuls
from ats_jax.ops.quantise import E4M3, E5M2, cast, scale_of
from ats_jax.ops.remat import FP8_MAXIMA

# Half a unit in the last place, relative, and half the distance of the smallest numbers.
ROUNDING = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def cast_error(x, dtype, amax):
  """An upper bound of |quantised x - x| for each element, in float64."""
  scale = 2.0 ** np.ceil(np.log2(amax / LARGEST[dtype]) + 1e-9) if amax else 1.0
  relative, absolute = ROUNDING[dtype]
  return np.maximum(relative * np.abs(x), absolute * scale)


def product_bound(a, da, b, db, result_bits):
  """An upper bound of the error of a @ b whose operands are off by da and db."""
  a, b = np.abs(a), np.abs(b)
  operands = da @ b + a @ db + da @ db
  sums = a.shape[1] * 2.0**-24 * ((a + da) @ (b + db))
  return (operands + sums) * (1 + 2.0**-result_bits) + 2.0**-result_bits * (a @ b)


@functools.partial(jax.jit, static_argnums=1)
def quantise(x, dtype, amax):
  scale = scale_of(dtype, amax)
  return cast(x, scale, dtype), scale


def random(seed, *shape, scale=1.0):
  x = np.random.default_rng(seed).standard_normal(shape) * scale
  return jnp.asarray(x, jnp.float32)


def fp8_matmul(x, w):
  return fp8_matmuls(x, (w,))[0]


@jax.jit
def value_and_gradients(x, w, dy):
  y, pull = jax.vjp(fp8_matmul, x, w)
  return y, *pull(dy)


@hypothesis.settings(max_examples=10)
@hypothesis.given(
  st.integers(0, 100), *[st.sampled_from([1e-9, 1e-4, 0.02, 1.0, 300.0, 1e8]) for _ in range(3)]
)
def test_errors_are_those_of_the_casts(seed, size_x, size_w, size_dy):
  x, w = random(seed, 32, 48, scale=size_x), random(seed + 1, 48, 16, scale=size_w)
  dy = random(seed + 2, 32, 16, scale=size_dy)
  y, dx, dw = value_and_gradients(x, w, dy)
  x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
  ex, ew = (cast_error(a, E4M3, np.abs(a).max()) for a in (x, w))
  edy = cast_error(dy, E5M2, np.abs(dy).max())
  for got, want, bound in (
    (y, x @ w, product_bound(x, ex, w, ew, 24)),
    (dx, dy @ w.T, product_bound(dy, edy, w.T, ew.T, 24)),
    (dw, x.T @ dy, product_bound(x.T, ex.T, dy, edy, 24)),
  ):
    assert np.all(np.abs(np.asarray(got, np.float64) - want) <= bound)


def test_typical_error_is_that_of_three_bits():
  """Neither of a scale that is off nor of 16-bit operands: about 2.6 % an operand."""
  x, w, dy = random(0, 256, 512), random(1, 512, 64, scale=0.02), random(2, 256, 64, scale=1e-5)
  x, w, dy = (a.astype(jnp.bfloat16) for a in (x, w, dy))
  y, dx, dw = value_and_gradients(x, w, dy)
  assert y.dtype == dx.dtype == dw.dtype == jnp.bfloat16
  x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
  for got, want, low, high in (
    (y, x @ w, 0.03, 0.045),
    (dx, dy @ w.T, 0.045, 0.07),
    (dw, x.T @ dy, 0.045, 0.07),
  ):
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert low < error < high


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantise_at_the_edges(dtype):
  for amax in (448.0, 57344.0, 1.0, 3e-5, 449.0):
    x = np.float32([amax, -amax, 2 * amax * 57344, 0.0])
    q, scale = quantise(x, dtype, np.float32(amax))
    values = np.asarray(q, np.float64) * float(scale)
    assert np.log2(scale) % 1 == 0
    assert abs(values[0] - amax) <= cast_error(amax, dtype, amax)
    assert values[1] == -values[0]
    assert values[2] == LARGEST[dtype] * scale  # saturates
    assert values[3] == 0
  q, scale = quantise(np.float32([1.0, np.inf, np.nan, 0.0]), dtype, np.float32(0))
  assert scale == 1
  assert np.isnan(np.asarray(q, np.float32)).tolist() == [False, True, True, False]


def test_an_overflow_is_not_hidden():
  x = np.array(random(0, 16, 16))
  x[3, 2] = np.inf
  y = np.asarray(jax.jit(fp8_matmul)(x, random(1, 16, 16)))
  assert np.isnan(y[3]).all()


def factors(f, args, of):
  """The arrays of 8 bits that the operands of each matmul of a gradient are scaled from."""
  jaxpr = jax.make_jaxpr(jax.grad(f, of))(*args).jaxpr
  makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

  def origin(var):
    eqn = makers[var]
    assert eqn.primitive.name in ("mul", "convert_element_type")
    source = eqn.invars[0]
    return source if source.aval.dtype.itemsize == 1 else origin(source)

  dots = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
  return [tuple(map(origin, eqn.invars)) for eqn in dots]


def test_xla_sees_scaled_operands_that_no_other_matmul_has():
  args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 128), (128, 32), (128, 16))]
  loss = lambda x, *w: sum(y.astype(jnp.float32).sum() for y in fp8_matmuls(x, w))
  kinds = lambda found: [tuple(var.aval.dtype for var in pair) for pair in found]
  found = factors(loss, args, (0, 1, 2))
  assert kinds(found) == [(E4M3, E4M3)] * 2 + [(E5M2, E4M3), (E4M3, E5M2)] * 2
  operands = [var for pair in found for var in pair]
  assert len({*operands}) == len(operands)
  # Frozen weights have no gradient, and nothing is made for it.
  assert kinds(factors(loss, args, 0)) == [(E4M3, E4M3)] * 2 + [(E5M2, E4M3)] * 2


def test_rejects_odd_sizes():
  for x, w in (((15, 16), (16, 16)), ((16, 24), (24, 16)), ((16, 16), (16, 8))):
    with pytest.raises(ValueError, match="multiple of 16"):
      fp8_matmul(jnp.zeros(x), jnp.zeros(w))


@pytest.mark.parametrize(("saved", "maxima"), [((), 5), ((FP8_MAXIMA,), 3)])
def test_a_policy_keeps_the_largest_values(saved, maxima):
  """Of x, weights and gradient, each once; without, those of x and weights in both passes."""
  policy = jax.checkpoint_policies.save_only_these_names(*saved)
  x, w = random(0, 32, 48), random(1, 48, 16)
  f = jax.checkpoint(lambda x, w: jnp.sin(fp8_matmul(x, w)).sum(), policy=policy)
  assert str(jax.make_jaxpr(jax.grad(f, (0, 1)))(x, w)).count("reduce_max") == maxima
