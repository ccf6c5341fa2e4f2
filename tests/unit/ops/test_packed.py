"""Weights as codes and scales: how exact they are, and what a product keeps of them."""

from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ats_jax.ops.packed import FORMATS, NF4, Packed, decode, encode

DIM = -2


def columns(x):
  return jnp.max(x, DIM, keepdims=True)


def both(name, w):
  arrays = encode(name, jnp.asarray(w), DIM, columns)
  return arrays, np.asarray(decode(name, arrays, DIM))


def drawn(*shape, seed=0):
  w = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
  w[..., :3] = 0  # columns without a scale
  return w


# The largest distance of neighbouring codes in parts of the scale, halved; and how far the scales
# of nf4 are from those of the groups: one of 255 steps of the largest of the column.
@pytest.mark.parametrize(("name", "step"), [("int8", 1 / 254), ("int4", 1 / 14), ("nf4", 0.152)])
@pytest.mark.parametrize("rows", [128, 96, 6])
def test_an_entry_is_off_by_half_a_step(name, step, rows):
  w = drawn(2, rows, 8)
  arrays, got = both(name, w)
  size = rows if name == "int8" else FORMATS[name].group_of(rows)
  grouped = np.abs(w).reshape(2, -1, size, 8)
  of_group = grouped.max(2, keepdims=True)
  scales = of_group + (of_group.max(1, keepdims=True) / 255 if name == "nf4" else 0)
  bound = np.broadcast_to(scales * step, grouped.shape).reshape(w.shape)
  assert np.all(np.abs(got - w) <= bound * (1 + 1e-5))
  assert arrays[0].dtype.itemsize == 1 and arrays[0].size * FORMATS[name].packed == w.size


@pytest.mark.parametrize("name", FORMATS)
def test_what_was_decoded_is_coded_as_it_is(name):
  arrays, got = both(name, drawn(64, 8))
  again, same = both(name, got)
  np.testing.assert_array_equal(again[0], arrays[0])
  np.testing.assert_allclose(same, got, rtol=1e-6)


def test_nf4_has_the_quantiles_of_bitsandbytes():
  # `create_normal_map` of bitsandbytes 0.50.2: eight values above 0, seven below.
  offset, of = (1 - 1 / 32 + 1 - 1 / 30) / 2, NormalDist().inv_cdf
  above = [of(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
  below = [-of(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
  want = sorted([*above, 0.0, *below])
  np.testing.assert_allclose(NF4, np.array(want) / max(want), atol=1e-6)


def test_codes_of_nf4_are_the_entries_of_its_table():
  _, got = both("nf4", np.tile(np.array(NF4, np.float32), 4)[:, None])
  np.testing.assert_allclose(got[:16, 0], NF4, rtol=1e-6)


@pytest.mark.parametrize("keeps_args", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_keeps_codes_and_has_the_gradient_of_a_plain_one(name, keeps_args):
  arrays, wide = both(name, drawn(64, 8))
  packed, x = Packed(arrays, name, DIM, jnp.float32), jnp.asarray(drawn(5, 64, seed=1))
  f = lambda weights, x: jnp.tanh(x @ weights[0])
  got, pullback = jax.vjp(lambda x: Packed.of(f, keeps_args=keeps_args)((packed,), x), x)
  want, plain = jax.vjp(lambda x: f((wide,), x), x)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  np.testing.assert_allclose(pullback(got)[0], plain(got)[0], rtol=1e-5, atol=1e-6)
  kept = [x for x in jax.tree.leaves(pullback) if x.shape == wide.shape]
  assert all(x.dtype == jnp.int8 for x in kept)


@pytest.mark.parametrize("name", FORMATS)
def test_a_loop_over_layers_reads_codes_alone(name):
  arrays, wide = both(name, drawn(3, 64, 64))

  def layer(x, arrays):
    packed = Packed(arrays, name, DIM, x.dtype)
    return Packed.of(lambda weights, x: jnp.tanh(x @ weights[0]))((packed,), x), None

  loss = lambda x: jnp.sum(jax.lax.scan(layer, x, arrays)[0])
  eqns = jax.make_jaxpr(jax.grad(loss))(jnp.asarray(drawn(5, 64, seed=1))).jaxpr.eqns
  read = [v.aval for eqn in eqns if eqn.primitive.name == "scan" for v in eqn.invars]
  assert {x.dtype.itemsize for x in read if x.shape[-2:] == wide.shape[-2:]} <= {1}
  assert len(read) > 4  # a loop forward, and one back
