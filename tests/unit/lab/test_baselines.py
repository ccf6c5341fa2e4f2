"""Each baseline against its rule, written down a second time with lists and floats."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ats_jax.model.param import Param, Role
from lab.faults.baselines import adagc, rate_rules, skip_step, zclip


def norms_with_spikes(steps=200, seed=0):
  rng = np.random.default_rng(seed)
  norms = np.exp(rng.normal(-1.0, 0.2, steps))
  norms[[40, 90, 91, 150]] *= [5.0, 30.0, 3.0, 1000.0]
  return norms.astype(np.float32)


def gradients(norm):
  """Two tensors with 3/5 and 4/5 of the norm, as a step hands them over."""
  one = lambda x, *axes: Param(jnp.array(x), axes=axes, role=Role.MATRIX)
  return {"a": one([0.6 * norm, 0.0], "embed"), "b": one([[0.8 * norm]], "embed", "mlp")}


def test_zclip_clips_spikes_reciprocally_to_their_z():
  transform, norms = zclip(), norms_with_spikes()
  update = jax.jit(transform.update)
  state = transform.init(gradients(1.0))
  seen, mean, var, clipped = [], 0.0, 0.0, 0
  for x in norms.tolist():
    got, state = update(gradients(x), state)
    want = x
    if len(seen) < 25:
      seen.append(x)
      mean, var = statistics.fmean(seen), statistics.pvariance(seen)
    else:
      std = var**0.5
      z = (x - mean) / (std + 1e-6)
      if z > 2.5:
        want, clipped = mean + 2.5 * std * 2.5 / z, clipped + 1
      mean = 0.97 * mean + 0.03 * want
      var = 0.97 * var + 0.03 * (want - mean) ** 2
    assert float(optax.tree.norm(got)) == pytest.approx(want, rel=1e-3)
  assert clipped >= 4


def test_adagc_clips_each_tensor_by_its_own_history():
  transform, norms = adagc(), norms_with_spikes()
  update = jax.jit(transform.update)
  state = transform.init(gradients(1.0))
  level, clipped = {}, 0
  for step, x in enumerate(norms.tolist()):
    got, state = update(gradients(x), state)
    for name, share in (("a", 0.6), ("b", 0.8)):
      size = share * x
      if step < 100:
        want = size * min(1.0, 1.0 / x)
        level[name] = min(level.get(name, want), want)
      else:
        want = min(size, 1.05 * level[name])
        clipped += want < size
        level[name] = 0.98 * level[name] + 0.02 * want
      assert float(jnp.linalg.norm(got[name][...])) == pytest.approx(want, rel=1e-4)
  assert clipped > 100  # after a warm-up that keeps the least, nearly all are


def test_adagc_takes_stacked_layers_apart():
  params = jax.tree_util.tree_map(jnp.asarray, Stack([np.ones((3, 4), np.float32)]))
  assert adagc().init(params).level.segments[0].shape == (3, 1)


@jax.tree_util.register_pytree_with_keys_class
class Stack:
  def __init__(self, segments):
    self.segments = segments

  def tree_flatten_with_keys(self):
    return [(jax.tree_util.GetAttrKey("segments"), self.segments)], None

  @classmethod
  def tree_unflatten(cls, _, children):
    return cls(*children)


def follow(rule, losses, norms):
  """Rate and verdict of each step."""
  memory, judge, rates, kept = rule.init(), jax.jit(rule.judge), [], []
  for loss, size in zip(losses, norms, strict=True):
    rates.append(float(rule.rate(memory)))
    memory, keep = judge(memory, jnp.float32(loss), jnp.float32(size))
    kept.append(bool(keep))
  return np.array(rates), np.array(kept)


def test_skip_step_is_six_sigmas_of_the_last_128_raw_values():
  rng = np.random.default_rng(0)
  losses = rng.normal(3.0, 0.05, 400).astype(np.float32)
  norms = norms_with_spikes(400)
  losses[[30, 80, 300, 301, 302]] = [3.5, 4.0, 5.0, 5.0, 3.3]
  _, kept = follow(skip_step(), losses, norms)
  for step in range(400):
    want = True
    if step >= 63:
      for values in (losses, norms):
        past = values[max(0, step - 128) : step].tolist()
        want &= values[step] - statistics.fmean(past) <= 6.0 * statistics.stdev(past)
    assert kept[step] == want, step
  assert not kept[80] and kept[30] and 3 <= (~kept).sum() < 12


def test_one_nan_blinds_skip_step_until_it_leaves_the_window():
  losses = np.random.default_rng(0).normal(3.0, 0.05, 400)
  losses[150] = np.nan
  _, kept = follow(skip_step(), losses, norms_with_spikes(400) * 0 + 1.0)
  assert np.flatnonzero(~kept).tolist() == list(range(150, 150 + 129))


LEVEL = np.random.default_rng(0).normal(3.0, 0.06, 60)  # restless enough for no rule


@pytest.mark.parametrize(
  ("losses", "norms", "factors"),
  [
    ([3.0], [1.0], [1.0]),
    ([3.0], [101.0], [0.1]),
    ([3.0], [10.5], [0.1]),
    ([3.8] * 2, [1.0] * 2, [1.0, 0.8]),  # the mean of ten is 0.08, then 0.16 higher
    ([9.0] * 2, [1.0] * 2, [0.8, 0.5 * 0.8]),  # 0.6, then 1.2 higher
    ([np.nan], [1.0], [1.0]),
  ],
  ids=["calm", "norm above 100", "norm ten times the mean", "rise", "steep rise", "NaN"],
)
def test_rate_rules_multiply_the_rate(losses, norms, factors):
  rule = rate_rules(1e-4)
  every = np.concatenate([LEVEL, losses, [3.0]])
  rates, kept = follow(rule, every, np.concatenate([np.ones(60), norms, [1.0]]))
  np.testing.assert_allclose(rates[61:], factors, rtol=1e-6)
  assert (rates[:61] == 1.0).all() and kept.all()


def test_rate_rules_speed_up_on_a_plateau_then_rest():
  rates, _ = follow(rate_rules(1e-4), [3.0] * 140, [1.0] * 140)
  up = np.flatnonzero(rates != 1.0)
  # From the fiftieth sample on, for 15 steps; again when 50 steps have passed.
  assert up.tolist() == [*range(50, 65), *range(101, 116)]
  assert set(rates[up]) == {1.5}


def test_rate_rules_leave_out_what_is_not_finite():
  _, kept = follow(rate_rules(1e-4), [3.0, 3.0, 3.0], [1.0, np.nan, 1.0])
  assert kept.tolist() == [True, False, True]
