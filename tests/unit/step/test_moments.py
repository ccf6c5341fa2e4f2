"""What holds of Adam's moments whatever the gradients were."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ats_jax.step.optimizers.adamw import UNDERFLOW, most_ratio, scale_by_adam

BETAS = [(0.9, 0.95), (0.9, 0.999), (0.8, 0.9), (0.5, 0.99)]
DTYPES = itertools.product(("float32", "bfloat16"), repeat=2)


@pytest.mark.parametrize(
  ("b1", "b2", "mu_dtype", "nu_dtype"), [(*b, *t) for b, t in zip(BETAS, DTYPES, strict=True)]
)
def test_a_first_moment_is_within_its_bound(b1, b2, mu_dtype, nu_dtype):
  """Gradients of any size and sign, in any order; those that come nearest to the bound too."""
  tx = scale_by_adam(b1, b2, 1e-8, jnp.dtype(mu_dtype), jnp.dtype(nu_dtype))
  most = most_ratio(b1, b2, jnp.dtype(mu_dtype), jnp.dtype(nu_dtype))
  update = jax.jit(tx.update)
  exponent = st.floats(-12.0, 8.0)
  drawn = st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 1.0]), exponent), min_size=1, max_size=40)

  def check(gradients):
    state = tx.init(jnp.zeros(()))
    for gradient in gradients:
      _, state = update(jnp.float32(gradient), state)
      m, v = float(state.mu), float(state.nu)
      assert v >= 0.0 and abs(m) <= most * np.sqrt(v) + UNDERFLOW

  @hypothesis.settings(max_examples=25)
  @hypothesis.given(drawn)
  def any_gradients(signed):
    check([sign * 10.0**e for sign, e in signed])

  any_gradients()
  check((b2 / b1) ** np.arange(60))  # where Cauchy and Schwarz are equal


def test_the_bound_is_tight():
  b1, b2 = 0.9, 0.95
  tx = scale_by_adam(b1, b2, 1e-8, jnp.dtype("float32"), jnp.dtype("float32"))
  state, update = tx.init(jnp.zeros(())), jax.jit(tx.update)
  for gradient in (b2 / b1) ** np.arange(200):
    _, state = update(jnp.float32(gradient), state)
  ratio = float(state.mu) / np.sqrt(float(state.nu))
  assert ratio > 0.99 * most_ratio(b1, b2, jnp.dtype("float32"), jnp.dtype("float32"))


def test_without_a_bound_updates_grow_where_gradients_vanish():
  """Why settings may not have b1^2 >= b2; eps is the default."""
  tx = scale_by_adam(0.9, 0.3, 1e-8, jnp.dtype("float32"), jnp.dtype("float32"))
  state, update = tx.init(jnp.zeros(())), jax.jit(tx.update)
  largest = 0.0
  for gradient in [1.0] * 5 + [0.0] * 40:
    direction, state = update(jnp.float32(gradient), state)
    largest = max(largest, float(direction))
  assert largest > 1e6
