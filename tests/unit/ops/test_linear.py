"""The linear layer in both formats, on one device and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh

from ats_jax.config.schema.precision import EIGHT_BIT_MULTIPLE
from ats_jax.ops.fp8_matmul import MULTIPLE
from ats_jax.ops.linear import linears
from ats_jax.sharding.apply import reshard

SHAPES = {  # weight, its logical axes, those that x and the result have
  "columns": ((32, 4, 16), ("embed", "heads", "head_dim"), ("act_embed",), ("heads", "head_dim")),
  "rows": ((4, 16, 32), ("heads", "head_dim", "embed"), ("heads", "head_dim"), ("act_embed",)),
}


def draw(seed: int, *shape: int) -> np.ndarray:
  """Small integers, which 8 bits hold exactly: scales are powers of two."""
  values = np.random.default_rng(seed).integers(-4, 5, shape)
  values.flat[0] = 4  # every block that a test cuts has its largest value somewhere
  return values.astype(np.float32)


def linear(x, weight, outputs, **kwargs):
  return linears(x, (weight,), outputs=(outputs,), **kwargs)[0]


@functools.cache
def run(kind, fp8, shape):
  """The result and both gradients."""
  size, weight_axes, inputs, outputs = SHAPES[kind]

  @jax.jit
  def f(x, w, dy):
    y, pull = jax.vjp(functools.partial(linear, inputs=inputs, outputs=outputs, fp8=fp8), x, w)
    return y, *pull(dy)

  with jax.set_mesh(make_test_mesh(*shape)):
    w = reshard(draw(0, *size), *weight_axes)
    x = reshard(draw(1, 8, 32, *size[: len(inputs)]), "batch", "seq", *inputs)
    dy = reshard(draw(2, 8, 32, *size[len(inputs) :]), "batch", "seq", *outputs)
    return [np.asarray(a) for a in f(x, w, dy)], f.lower(x, w, dy).as_text()


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 2)])
def test_eight_bits_are_exact_where_the_operands_are(kind, shape):
  want, text = run(kind, False, (1, 1, 1))
  assert "f8E4M3" not in text
  found, text = run(kind, True, shape)
  assert "f8E4M3FN" in text and "f8E5M2" in text
  for a, b in zip(found, want, strict=True):
    np.testing.assert_array_equal(a, b)


def test_the_settings_know_what_the_matmul_takes():
  assert EIGHT_BIT_MULTIPLE == MULTIPLE


@pytest.mark.parametrize("fp8", [False, True])
def test_several_weights_are_multiplied_as_each_alone(fp8):
  widths = {"heads": 4, "kv_heads": 2, "ff": 32}
  axes = [(name, "head_dim") if name != "ff" else (name,) for name in widths]

  def loss(f):
    return lambda x, weights: sum(jnp.sum(jnp.sin(y)) for y in f(x, weights))

  def together(x, weights):
    return linears(x, weights, inputs=("act_embed",), outputs=axes, fp8=fp8)

  def apart(x, weights):
    each = functools.partial(linear, x, inputs=("act_embed",), fp8=fp8)
    return [each(w, outputs=a) for w, a in zip(weights, axes, strict=True)]

  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    x = reshard(draw(0, 8, 32, 32) / 3, "batch", "seq", "act_embed")
    sizes = [(32, n, 16) if name != "ff" else (32, n) for name, n in widths.items()]
    weights = [
      reshard(draw(i, *size) / 3, "embed", *a)
      for i, (size, a) in enumerate(zip(sizes, axes, strict=True))
    ]
    run = lambda f: jax.jit(jax.value_and_grad(loss(f), argnums=(0, 1)))(x, weights)
    got, want = run(together), run(apart)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)
