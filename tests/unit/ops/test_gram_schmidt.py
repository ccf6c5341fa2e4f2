"""Orthonormal bases, also of columns that depend on each other."""

import jax
import numpy as np
import pytest

from ats_jax.ops.gram_schmidt import PANEL, orthonormal


def columns(number: int, decades: int) -> np.ndarray:
  """A square matrix whose singular values fall over so many powers of ten."""
  rng = np.random.default_rng(number)
  left, right = (np.linalg.qr(rng.normal(size=(number, number)))[0] for _ in range(2))
  return (left * np.geomspace(1.0, 10.0**-decades, number) @ right).astype(np.float32)


@pytest.mark.parametrize(("number", "decades"), [(3, 0), (PANEL, 1), (2 * PANEL + 2, 2)])
def test_it_is_q_of_the_qr_decomposition(number, decades):
  x = columns(number, decades)
  q, r = np.linalg.qr(x.astype(np.float64))
  np.testing.assert_allclose(orthonormal(x), q * np.sign(np.diag(r)), atol=3e-5)


@pytest.mark.parametrize("kind", ["steep", "equal columns", "tiny"])
def test_dependent_columns_become_orthonormal(kind):
  x = columns(3 * PANEL - 1, 12 if kind == "steep" else 0)
  if kind == "equal columns":
    x[:, PANEL:] = x[:, :-PANEL]
  if kind == "tiny":
    x *= 1e-30
  q = np.asarray(jax.jit(orthonormal)(x), np.float64)
  np.testing.assert_allclose(q.T @ q, np.eye(x.shape[1]), atol=2e-6)
  assert np.abs(np.tril(q.T @ x, -1)).max() < 2e-6 * np.abs(x).max()  # R is triangular
