"""Transforms: what one direction does, the other undoes; nothing is computed."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ats_jax.bridge.transforms import (
  FLAT,
  SAME,
  TRANSPOSED,
  TRANSPOSED_2,
  Interleaved,
  RopeHalves,
  in_order,
)

TRANSFORMS = [SAME, FLAT, TRANSPOSED, TRANSPOSED_2]
SHAPES = st.lists(st.integers(1, 5), min_size=3, max_size=3).map(tuple)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
@given(shape=SHAPES)
def test_both_directions_are_inverse(transform, shape):
  ours = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
  theirs = transform.to_theirs(ours)
  assert theirs.shape == transform.their_shape(shape)
  np.testing.assert_array_equal(transform.to_ours(theirs, shape), ours)
  assert sorted(theirs.reshape(-1)) == sorted(ours.reshape(-1))


@given(shape=SHAPES, of=st.integers(2, 4))
def test_interleaved_arrays_come_apart_and_together(shape, of):
  rng = np.random.default_rng(0)
  ours = [rng.normal(size=shape) for _ in range(of)]
  transforms = [Interleaved(first, of) for first in range(of)]
  theirs = np.full(transforms[0].their_shape(shape), np.nan)
  for transform, array in zip(transforms, ours, strict=True):
    transform.put(array, theirs)
  for transform, array in zip(transforms, ours, strict=True):
    np.testing.assert_array_equal(transform.to_ours(theirs, shape), array)
  np.testing.assert_array_equal(theirs[..., :of], np.stack([a[..., 0] for a in ours], axis=-1))


@given(shape=st.tuples(*[st.integers(1, 5)] * 2), fixed=st.integers(0, 4), half=st.integers(1, 4))
def test_halves_and_pairs_are_inverse(shape, fixed, half):
  """Theirs, rows of heads: the pair i of a head is two neighbours; ours are half a part apart."""
  transform, ours_shape = RopeHalves(2 * half), (*shape, fixed + 2 * half)
  theirs = np.arange(np.prod(ours_shape)).reshape(transform.their_shape(ours_shape))
  ours = transform.to_ours(theirs, ours_shape)
  np.testing.assert_array_equal(transform.to_theirs(ours), theirs)
  plain = TRANSPOSED.to_ours(theirs, ours_shape)
  np.testing.assert_array_equal(ours[..., :fixed], plain[..., :fixed])
  for pair in range(half):
    for of_pair in range(2):
      got, want = ours[..., fixed + pair + of_pair * half], plain[..., fixed + 2 * pair + of_pair]
      np.testing.assert_array_equal(got, want)


def test_projections_to_and_from_heads():
  """[d_model, heads, head_dim] is the transpose of rows of heads, as torch's Linear has them."""
  rng = np.random.default_rng(0)
  to_heads, from_heads = rng.normal(size=(6, 3, 4)), rng.normal(size=(3, 4, 6))
  x, y = rng.normal(size=6), rng.normal(size=(3, 4))
  want = np.einsum("d,dnh->nh", x, to_heads).reshape(-1)
  np.testing.assert_allclose(TRANSPOSED.to_theirs(to_heads) @ x, want)
  want = np.einsum("nh,nhd->d", y, from_heads)
  np.testing.assert_allclose(TRANSPOSED_2.to_theirs(from_heads) @ y.reshape(-1), want)


@given(
  st.lists(st.sampled_from([1, 2, 3, 17, 70, 600]), min_size=1, max_size=3).flatmap(
    lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))
  ),
  st.sampled_from([np.uint8, ml_dtypes.bfloat16, np.float32, np.float64]),
)
@settings(max_examples=30, deadline=None)
def test_in_order_is_a_contiguous_copy(case, dtype):
  shape, order = case
  whole = np.random.default_rng(0).integers(0, 120, shape).astype(dtype)
  turned = whole.transpose(order)
  ordered = in_order(turned)
  assert ordered.flags.c_contiguous and ordered.dtype == turned.dtype
  np.testing.assert_array_equal(ordered, turned)
  every_second = turned[..., ::2]
  np.testing.assert_array_equal(in_order(every_second), every_second)
