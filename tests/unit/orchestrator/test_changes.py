"""Which settings can change in the middle of a run, to what, and what goes with them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config

from ats_jax.config.build import with_changes, with_settings
from ats_jax.config.names import flatten
from ats_jax.config.schema.optimizer import OptimizerConfig
from ats_jax.orchestrator.actions.base import Now
from ats_jax.orchestrator.actions.settings import (
  CHANGEABLE,
  ChangeSettings,
  DecayNow,
  EndRun,
  GrowBatch,
  with_new_settings,
)
from ats_jax.orchestrator.policy.state import PolicyState
from ats_jax.step.program import make_program
from ats_jax.step.schedule import learning_rate

WSD = tiny_config(
  {"num_steps": 100, "optimizer.schedule": "wsd", "optimizer.schedule.decay_fraction": 0.2}
)
SPARSE = tiny_config(
  {
    "moe.num_experts": 4,
    "moe.d_ff": 32,
    "moe.dispatch": "capacity",
    "mod.routing": "learned",
    "mod.capacity": 0.25,
  }
)


def test_values_change_and_change_back(mesh):
  action = ChangeSettings((("mod.capacity", 0.5), ("moe.capacity_factor", 2.0)))
  new = with_new_settings(SPARSE, action, 5)
  assert (new.mod.capacity, new.moe.capacity_factor) == (0.5, 2.0)
  now = Now(SPARSE, 5, PolicyState(), make_program(SPARSE).init(abstract=True))
  before = (("mod.capacity", 0.25), ("moe.capacity_factor", 1.25))
  assert action.fill(now).before == before
  assert with_new_settings(new, ChangeSettings(before), 5) == SPARSE


def test_all_that_can_change_are_settings():
  assert flatten(WSD).keys() >= CHANGEABLE


@pytest.mark.parametrize(
  ("cfg", "settings", "message"),
  [
    (WSD, {"model.d_model": 64}, "model.d_model cannot change in the middle of a run"),
    (WSD, {"num_steps": 40}, "num_steps=40 is over at step 50"),
    (WSD, {"num_steps": 90.5}, "num_steps must be int"),
    (WSD, {"data.batch_size": 16}, "micro-batches of 16 rows, until now of 8"),
    (WSD, {"moe.capacity_factor": 2.0}, "does nothing with moe.dispatch=dropless"),
    (WSD, {"mod.capacity": 0.5}, "does nothing with mod.routing=none"),
    (dataclasses.replace(SPARSE, num_steps=90), {"mod.capacity": 1.5}, "capacity=1.5 is too large"),
    (WSD, {"precision.compute_dtype": "float16"}, "cannot change from float32 to float16"),
    (WSD, {"precision.compute_dtype": "bfloat16"}, None),
    (WSD, {"data.batch_size": 8 * 3, "step.accum_steps": 3}, None),
  ],
)
def test_what_cannot_be_is_refused(cfg, settings, message):
  action = ChangeSettings(tuple(settings.items()))
  if message is None:
    with_new_settings(cfg, action, 50)
    return
  with pytest.raises(ValueError, match=message):
    with_new_settings(cfg, action, 50)


@pytest.mark.parametrize("step", [17, 50, 77])
def test_decay_begins_now_and_the_run_ends_early(step):
  (setting,) = DecayNow().wanted(WSD, step)
  new = with_settings(WSD, dict([setting]))
  assert step < new.num_steps < WSD.num_steps
  rates = np.array([learning_rate(new, jnp.int32(t)) for t in range(new.num_steps)])
  peak = WSD.optimizer.learning_rate
  assert rates[step - 1] == pytest.approx(peak)
  assert rates[step + 3] < peak and (np.diff(rates[step:]) <= 1e-12).all()
  assert rates[-1] == pytest.approx(WSD.optimizer.schedule.final_fraction * peak)


@pytest.mark.parametrize("step", [80, 99])
@pytest.mark.parametrize("kind", [DecayNow, GrowBatch])
def test_what_has_begun_to_decay_is_left_alone(step, kind):
  with pytest.raises(ValueError, match=f"wsd.*step {step}"):
    kind().wanted(WSD, step)
  with pytest.raises(ValueError, match="schedule=cosine"):
    kind().wanted(with_settings(WSD, {"optimizer.schedule": "cosine"}), 10)


def test_a_batch_grows_with_what_belongs_to_it():
  step = 40
  new = with_new_settings(WSD, GrowBatch(), step)
  old_tokens = WSD.num_steps * WSD.data.batch_size
  assert step * WSD.data.batch_size + (new.num_steps - step) * new.data.batch_size == old_tokens
  assert new.data.batch_size / new.step.accum_steps == WSD.data.batch_size
  o, n = WSD.optimizer, new.optimizer
  assert n.learning_rate == pytest.approx(2**0.5 * o.learning_rate)
  tokens_of = lambda o, c: c.data.batch_size / (o.learning_rate * o.weight_decay)
  assert tokens_of(n, new) == pytest.approx(tokens_of(o, WSD))  # the decay's time scale
  half_life = lambda o, c: c.data.batch_size / np.log(o.b2)
  assert half_life(n, new) == pytest.approx(half_life(o, WSD))


def test_a_second_moment_is_not_forgotten_before_the_first():
  assert with_new_settings(WSD, GrowBatch(8), 40).optimizer.b2 == WSD.optimizer.b1
  with pytest.raises(ValueError, match=r"optimizer\.b1=0\.9 with optimizer\.b2=0\.8: "):
    ChangeSettings((("optimizer.b2", 0.8),)).check(WSD)


def filled(action, cfg, step):
  """As it is done after `step`."""
  action.check(cfg, step)
  done = action.fill(Now(cfg, step, PolicyState(), None))
  done.check(cfg)
  return with_settings(cfg, dict(done.settings)), done


def test_what_an_action_changes_follows_from_the_step_at_which_it_is_done():
  for step in (30, 40):
    new, _ = filled(GrowBatch(2), WSD, step)
    assert new == with_new_settings(WSD, GrowBatch(), step)
    new, done = filled(DecayNow(), WSD, step)
    assert new == with_new_settings(WSD, DecayNow(), step)
    assert done.before == (("num_steps", 100),)
    assert filled(EndRun(), WSD, step)[0].num_steps == step


def test_a_run_ends_no_sooner_than_it_may():
  with pytest.raises(ValueError, match=r"optimizer\.warmup_steps=20 exceeds num_steps=10"):
    EndRun().check(with_settings(WSD, {"optimizer.warmup_steps": 20}), 10)


def test_weights_of_balance_losses_can_change():
  new = with_new_settings(SPARSE, ChangeSettings((("moe.aux_loss", 0.01),)), 5)
  assert new.moe.aux_loss == 0.01
  with pytest.raises(ValueError, match=r"moe\.aux_loss"):
    with_new_settings(WSD, ChangeSettings((("moe.aux_loss", 0.01),)), 5)


def test_a_batch_does_not_grow_with_an_optimizer_that_has_no_rule_for_it():
  optimizer = OptimizerConfig(name="other", schedule=WSD.optimizer.schedule)
  with pytest.raises(ValueError, match=r"optimizer\.name=other does not say how .*Leave data"):
    GrowBatch().wanted(dataclasses.replace(WSD, optimizer=optimizer), 40)


def test_who_sets_a_changed_setting_anew_has_the_last_word():
  changes = {"num_steps": [100, 60]}
  assert with_changes(WSD, changes).num_steps == 60
  assert with_changes(dataclasses.replace(WSD, num_steps=200), changes).num_steps == 200
  assert with_changes(WSD, {}) == WSD
