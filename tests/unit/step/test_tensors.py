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
    yield trainable(make_decoder(canonical.config("dense")))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_both_sums_in_one_reduction_are_those_of_two(params, platform):
  directions = jax.tree.map(lambda x: 3.0 * x + 0.1, params)
  both = jax.jit(lambda x, y: tensors.squares_and_checksums(x, y, platform))
  squares_T, sums_T = both(directions, params)
  assert squares_T.shape == sums_T.shape == (tensors.num_tensors(params),)
  np.testing.assert_allclose(squares_T, tensors.squares(directions), rtol=1e-5)
  np.testing.assert_array_equal(sums_T, tensors.checksums(params))  # whole numbers


def test_a_factor_reaches_its_tensor_alone(params):
  factor_T = np.ones(tensors.num_tensors(params), np.float32)
  factor_T[2] = 0.5
  want = np.array(tensors.squares(params))
  want[2] *= 0.25
  np.testing.assert_allclose(tensors.squares(tensors.scaled(params, factor_T)), want, rtol=1e-6)
