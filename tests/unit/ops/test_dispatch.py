"""Rows to experts and back against numpy loops; backward, too, gathers and never scatters."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.ops.dispatch import place_in_bins, slot_window, sort_by_expert, sum_rows, take_rows

SHAPE = 7, 3, 5  # tokens, choices, bins; the contents are what varies
FEW = hypothesis.settings(max_examples=15)
SORT = jax.jit(sort_by_expert, static_argnums=1)
PLACE = jax.jit(place_in_bins, static_argnums=(1, 2))
WINDOW = jax.jit(slot_window, static_argnums=(1, 3))


@st.composite
def choices(draw):
  """Bins [N, K] with `num_bins` for nowhere, and priorities with many ties."""
  tokens, per_token, bins = SHAPE
  rng = np.random.default_rng(draw(st.integers(0, 10_000)))
  used = rng.integers(0, bins + 1, rng.integers(1, bins + 2))  # a few bins: the others are empty
  return rng.choice(used, (tokens, per_token)), bins, rng.integers(0, 3, (tokens, per_token))


def check_places(places, want_slots, tokens, per_token):
  """Compare with a list that has the choice (n, k) in each slot, or None."""
  none = tokens * per_token
  want_choice = [none if c is None else c[0] * per_token + c[1] for c in want_slots]
  want_source = [tokens if c is None else c[0] for c in want_slots]
  slot_of = {c: m for m, c in enumerate(want_slots) if c is not None}
  want_slot = [
    [slot_of.get((n, k), len(want_slots)) for k in range(per_token)] for n in range(tokens)
  ]
  np.testing.assert_array_equal(places.choice_M, want_choice)
  np.testing.assert_array_equal(places.source_M, want_source)
  np.testing.assert_array_equal(places.slot_NK, want_slot)
  assert all(a.dtype == jnp.int32 for a in places)


@FEW
@hypothesis.given(choices())
def test_sort_by_expert(case):
  expert, num_experts, _ = case
  places, sizes = SORT(jnp.array(expert), num_experts)
  groups = [
    [(n, k) for n, k in np.ndindex(*expert.shape) if expert[n, k] == e] for e in range(num_experts)
  ]
  used = [c for group in groups for c in group]
  check_places(places, used + [None] * (expert.size - len(used)), *expert.shape)
  np.testing.assert_array_equal(sizes, [len(g) for g in groups])


@FEW
@hypothesis.given(choices(), st.booleans())
def test_place_in_bins(case, with_priority):
  capacity = 3
  bins, num_bins, priority = case
  rank = (lambda c: -priority[c]) if with_priority else (lambda c: 0)
  slots = []
  for b in range(num_bins):
    wanted = [c for c in np.ndindex(*bins.shape) if bins[c] == b]
    kept = sorted(wanted, key=rank)[:capacity]  # stable: of equal ones the first token's
    slots += kept + [None] * (capacity - len(kept))
  extra = (jnp.array(priority, jnp.float32),) if with_priority else ()
  check_places(PLACE(jnp.array(bins), num_bins, capacity, *extra), slots, *bins.shape)


@FEW
@hypothesis.given(choices(), st.sampled_from([1, 3]), st.sampled_from(["sort", "bins"]))
def test_windows(case, rows, how):
  """The slots of each bin from one on; the last window reaches past the end."""
  bins, num_bins, _ = case
  if how == "sort":
    places, num_bins = SORT(jnp.array(bins), num_bins)[0], 1
  else:
    places = PLACE(jnp.array(bins), num_bins, 4)
  capacity = places.source_M.size // num_bins
  choice_BC = np.asarray(places.choice_M).reshape(num_bins, capacity)
  for start in range(0, capacity, rows):
    found = np.full((num_bins, rows), bins.size)
    cut = choice_BC[:, start : start + rows]
    found[:, : cut.shape[1]] = cut
    choice = lambda c: None if c == bins.size else divmod(int(c), bins.shape[1])
    slots = [choice(c) for c in found.reshape(-1)]
    check_places(WINDOW(places, num_bins, start, rows), slots, *bins.shape)


@jax.jit
def crafted():
  """3 tokens with 2 choices in 2 bins of 2 slots: (0,0) (1,1) | (0,1) -; (2,*) have none."""
  return place_in_bins(jnp.array([[0, 1], [2, 0], [0, 2]]), 2, 2)


def numpy_take(x, places):
  return np.stack([x[s] if s < len(x) else np.zeros_like(x[0]) for s in np.asarray(places[0])])


def numpy_sum(y, weight, places):
  out = np.zeros((weight.shape[0], y.shape[1]))
  for n, k in np.ndindex(*weight.shape):
    slot = int(places.slot_NK[n, k])
    if slot < len(y):
      out[n] += weight[n, k] * y[slot]
  return out


@FEW
@hypothesis.given(choices(), st.sampled_from(["sort", "bins"]))
def test_values_and_gradients(case, how):
  """Both maps are bilinear, so their gradients are exact from values at unit vectors."""
  bins, num_bins, _ = case
  rng = np.random.default_rng(bins.sum())
  with jax.enable_x64(True):
    places = SORT(jnp.array(bins), num_bins)[0] if how == "sort" else PLACE(bins, num_bins, 2)
    slots = places.source_M.size
    x, y = rng.standard_normal((len(bins), 2)), rng.standard_normal((slots, 2))
    weight = rng.standard_normal(bins.shape)
    taken, dx = TAKE(x, y, places)
    # What is in slots that nobody has must not show.
    with_nan = np.where(np.asarray(places.source_M)[:, None] < len(bins), y, np.nan)
    summed, (dy, dweight) = SUM(with_nan, weight, x, places)
  np.testing.assert_allclose(taken, numpy_take(x, places), rtol=0, atol=0)
  np.testing.assert_allclose(summed, numpy_sum(y, weight, places), rtol=1e-13, atol=1e-14)
  unit = lambda shape: np.eye(np.prod(shape)).reshape(-1, *shape)
  slope = lambda f, shape, cotangent: np.reshape(
    [np.sum(f(u) * cotangent) for u in unit(shape)], shape
  )
  exact = functools.partial(np.testing.assert_allclose, rtol=1e-13, atol=1e-14)
  exact(dx, slope(lambda u: numpy_take(u, places), x.shape, y))
  exact(dy, slope(lambda u: numpy_sum(u, weight, places), y.shape, x))
  exact(dweight, slope(lambda u: numpy_sum(y, u, places), weight.shape, x))


@jax.jit
def TAKE(x, cotangent, places):  # noqa: N802
  out, pull = jax.vjp(lambda x: take_rows(x, places), x)
  return out, pull(cotangent)[0]


@jax.jit
def SUM(y, weight, cotangent, places):  # noqa: N802
  out, pull = jax.vjp(lambda y, w: sum_rows(y, w, places), y, weight)
  return out, pull(cotangent)


def test_bfloat16_rows_are_summed_in_float32():
  places, _ = SORT(np.zeros((1, 8), np.int32), 1)
  # In bfloat16 256 + 1 = 256: seven ones would be lost, in either direction.
  y = jnp.array([[256.0]] + [[1.0]] * 7, jnp.bfloat16)
  weight = jnp.ones((1, 8), jnp.float32)
  out, (_, dweight) = SUM(y, weight, jnp.full((1, 1), 1.5, jnp.bfloat16), places)
  _, dx = TAKE(jnp.ones((1, 1), jnp.bfloat16), y, places)
  assert out.dtype == dx.dtype == jnp.bfloat16
  assert out.item() == dx.item() == 264.0  # 263 rounds to even
  assert dweight.dtype == jnp.float32 and dweight[0, 0] == 384.0


def primitives(jaxpr):
  """Names of all primitives, inner programs included."""
  for eqn in jaxpr.eqns:
    yield eqn.primitive.name
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from primitives(inner)


def test_nothing_is_scattered_forward_or_backward():
  places = crafted()

  def round_trip(x, weight):
    return jnp.sum(sum_rows(jnp.sin(take_rows(x, places)), weight, places) ** 2)

  program = jax.make_jaxpr(jax.value_and_grad(round_trip, argnums=(0, 1)))
  names = set(primitives(program(jnp.ones((3, 2)), jnp.ones((3, 2))).jaxpr))
  assert "gather" in names
  assert not {name for name in names if "scatter" in name}, names
  # The check does see one: indexing without a rule of its own scatters backward.
  plain = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(x[places.source_M] ** 2)))(jnp.ones((3, 2)))
  assert any("scatter" in name for name in primitives(plain.jaxpr))
