"""Numbers for each tensor of a tree of parameters."""

import canonical
import jax
import numpy as np
import pytest
from helpers import make_decoder, make_test_mesh

from ats_jax.model.param import trainable
from ats_jax.step import tensors


@pytest.fixture(scope="module")
def params():
  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    yield trainable(jax.jit(lambda: make_decoder(canonical.config("dense")))())


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_both_sums_in_one_reduction_are_those_of_two(params, platform):

  @jax.jit
  def run(params):
    directions = jax.tree.map(lambda x: 3.0 * x + 0.1, params)
    both = tensors.squares_and_checksums(directions, params, platform)
    return both, (tensors.squares(directions), tensors.checksums(params))

  (squares_T, sums_T), (want_squares_T, want_sums_T) = run(params)
  assert squares_T.shape == sums_T.shape == (tensors.num_tensors(params),)
  np.testing.assert_allclose(squares_T, want_squares_T, rtol=1e-5)
  np.testing.assert_array_equal(sums_T, want_sums_T)  # whole numbers


def test_a_factor_reaches_its_tensor_alone(params):
  factor_T = np.ones(tensors.num_tensors(params), np.float32)
  factor_T[2] = 0.5
  run = jax.jit(lambda p, f: (tensors.squares(p), tensors.squares(tensors.scaled(p, f))))
  before, after = run(params, factor_T)
  np.testing.assert_allclose(after, np.asarray(before) * factor_T**2, rtol=1e-6)


def test_random_sums_tell_how_far_a_tensor_moved(params):
  sums = jax.jit(lambda p: tensors.projections(p, 64))
  further = jax.tree.map(lambda x: 1.01 * x + 1e-4, params)
  found = np.sqrt(np.mean(np.square(sums(further) - sums(params)), axis=0))
  moved = jax.tree.map(lambda a, b: a - b, further, params)
  want = np.sqrt(jax.jit(tensors.squares)(moved))
  assert np.all((found > 0.6 * want) & (found < 1.7 * want))
