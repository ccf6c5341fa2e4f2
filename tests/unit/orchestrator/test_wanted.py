"""What is wanted is not taken for a fault: rates and moments after what an action did."""

import dataclasses
from types import SimpleNamespace

import canonical
import jax.numpy as jnp
import numpy as np
import pytest

from ats_jax.orchestrator.actions import ChangeSettings, Rollback, SetLearningRateScale
from ats_jax.orchestrator.actions.base import carry_out
from ats_jax.orchestrator.trials.snapshots import Snapshot, Snapshots
from ats_jax.step.optimizers.adamw import AdamState, check_moments, most_ratio, within_bound

CFG = canonical.config("dense", canonical.SUPERVISED)
PEAK = CFG.optimizer.learning_rate


@pytest.fixture(scope="module")
def state():
  """Past the warm-up, at the highest rate so far."""
  new = canonical.state(CFG)
  reflex = new.reflex._replace(rate=jnp.float32(PEAK))
  return dataclasses.replace(new, step=jnp.int32(CFG.num_steps // 2), reflex=reflex)


def scaled(state, scale):
  return carry_out(SetLearningRateScale(scale), state, CFG)


def test_what_is_given_back_after_a_cut_widens_no_limit(state):
  for _ in range(3):
    for scale in np.geomspace(1 / 30, 1.0, 36):
      state = scaled(state, float(scale))
  assert float(state.reflex.rate) == pytest.approx(PEAK)


def test_a_rate_that_is_wanted_is_within_the_limit(state):
  assert float(scaled(state, 3.0).reflex.rate) == pytest.approx(3.0 * PEAK)
  settings = (("optimizer.learning_rate", 4.0 * PEAK),)
  changed = carry_out(ChangeSettings(settings), state, CFG)
  assert float(changed.reflex.rate) == pytest.approx(4.0 * PEAK)


@pytest.mark.parametrize(("now", "after"), [(3.0, 3.0), (0.5, 1.0), (np.nan, 1.0)])
def test_a_rollback_keeps_the_rate_that_was_reached(state, now, after):
  bad = dataclasses.replace(state, reflex=state.reflex._replace(rate=jnp.float32(now * PEAK)))
  host = SimpleNamespace(earlier=lambda back: (10, state))
  found, _ = Rollback().find(host, 20, bad)
  assert float(found.reflex.rate) == pytest.approx(after * PEAK) and int(found.step) == 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_by_another_b2_are_no_damage(dtype):
  """A run of gradients of one sign after quiet: legal by 0.95, beyond the bound by 0.9025."""
  m = jnp.asarray([1.06, 0.5, 0.0, -1.1], dtype)
  v = jnp.asarray([1.0, 1.0, 1.0, 1.0], dtype)
  before = AdamState(jnp.int32(20), [m], [v])
  find = lambda opt_state: check_moments(
    opt_state, [m], opt_state, jnp.asarray(True), b1=0.9, b2=0.95**2
  )
  assert most_ratio(0.9, 0.95**2, jnp.dtype("float32"), jnp.dtype("float32")) < 1.06
  if dtype == "float32":  # in the other, rounding widens the bound by more than that
    assert np.isnan(find(before).marked[0]).tolist() == [True, False, False, True]
  fitted = within_bound(before, 0.9, 0.95**2)
  assert not np.isnan(np.asarray(find(fitted).marked[0], np.float32)).any()
  np.testing.assert_array_equal(fitted.nu[0][1:3], v[1:3])
  np.testing.assert_array_equal(fitted.mu[0], m)


def test_a_first_state_that_is_kept_for_a_trial_is_no_snapshot_further_back(state):
  ring = Snapshots(1, 2**40)
  first, newest = (Snapshot(step, state, None, "{}") for step in (0, 50))
  ring.good, ring.keeps_first = (first, newest), True
  assert ring.back(0).step == ring.back(1).step == 50 and ring.first.step == 0
  ring.keeps_first = False
  assert ring.back(1).step == 0
  ring.good = (newest,)
  assert ring.first is None
