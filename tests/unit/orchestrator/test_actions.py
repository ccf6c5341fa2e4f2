"""Each action does what it says to the state."""

import contextlib
import dataclasses
import json

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh, micro_batches, random_rows

from ats_jax.orchestrator.actions import (
  KINDS,
  FullPrecision,
  GrowBatch,
  Rollback,
  ScaleTemperature,
  SetBalance,
  SetExpertDropout,
  SetLearningRateScale,
  SetWeightDecay,
  from_json,
)
from ats_jax.orchestrator.ports import NextUpdates
from ats_jax.orchestrator.signals.interval import probe_loss
from ats_jax.orchestrator.trials.arms import Arm, Proposal
from ats_jax.orchestrator.trials.compare import Comparison, Means
from ats_jax.orchestrator.trials.snapshots import Snapshot
from ats_jax.sharding.mesh import to_global
from ats_jax.step.program import make_program

CFG = canonical.config("dense", canonical.SUPERVISED)
EXPERTS = canonical.config("experts")


@pytest.fixture
def state(mesh):
  return canonical.state(CFG)


def assert_equal(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype and a.sharding == b.sharding
    if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
      np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
  ("action", "field", "value"),
  [
    (SetLearningRateScale(0.5, 1.0), "lr_scale", 0.5),
    (SetWeightDecay(3.0, 1.0), "decay_scale", 3.0),
    (SetExpertDropout(0.25, 0.0), "expert_dropout", 0.25),
    (SetBalance(2.0, 1.0), "balance_scale", 2.0),
  ],
)
def test_scalars_are_set_and_nothing_else(state, action, field, value):
  changed = action.apply(state, EXPERTS)
  assert float(getattr(changed.control, field)) == value
  same = dataclasses.replace(changed, control=state.control)
  assert_equal(same, state)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_the_balance_of_experts_follows_its_scale(mesh, scale):
  cfg = canonical.config("experts", canonical.STEERED)
  state = SetBalance(scale).apply(canonical.state(cfg), cfg)
  after, _ = canonical.step(cfg, state, canonical.rows(cfg))
  biases = [x for x in jax.tree.leaves_with_path(after.model) if "bias_E" in str(x[0])]
  assert biases and all(bool(np.any(x)) == bool(scale) for _, x in biases)


def test_a_balance_without_a_bias_is_refused():
  cfg = canonical.config("experts", canonical.STEERED | {"moe.bias_update": "none"})
  with pytest.raises(ValueError, match=r"with moe\.bias_update=none"):
    SetBalance(0.5).check(cfg)


class Kept:
  """A host that has one earlier state."""

  wants_checkpoint = False

  def __init__(self, snapshot):
    self._snapshot = snapshot

  def earlier(self, back):
    del back
    return self._snapshot.step, self._snapshot.resume()


def rolled_back(snapshot, step, state):
  saved, came_to = Rollback().find(Kept(snapshot), step, state)
  assert came_to == {"to": snapshot.step}
  return Rollback().apply(state, CFG, saved)


def test_a_rollback_goes_on_counting_batches_and_keeps_control(state):
  snapshot = Snapshot.take(3, state)
  changed = jax.tree.map(lambda x: x + 1, state.model)
  now = dataclasses.replace(SetLearningRateScale(0.5, 1.0).apply(state, CFG), model=changed)
  now = dataclasses.replace(now, step=jnp.int32(2**20 + 7))  # a bit of its count flipped
  rolled = rolled_back(snapshot, 7, now)
  assert_equal((rolled.model, rolled.opt_state), (state.model, state.opt_state))
  assert int(rolled.step) == 7  # not what the state says: that is what may be bad
  assert_equal(rolled.key, state.key)
  assert float(rolled.control.lr_scale) == 0.5


@pytest.mark.thorough
def test_a_program_compiled_for_eight_devices_takes_what_actions_and_trials_make():
  mesh = make_test_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    program = make_program(CFG)
    state, rules = program.init(), program.training_rules(1)
    step = program.compile_train_step(state, rules)
    batch = to_global(micro_batches(random_rows(CFG, 8), 1), mesh)
    snapshot = Snapshot.take(0, state)
    state, _ = step(SetLearningRateScale(0.5, 1.0).apply(state, CFG), batch)
    state, _ = step(SetWeightDecay(2.0, 1.0).apply(state, CFG), batch)
    state, _ = step(rolled_back(snapshot, 2, state), batch)
    assert int(state.step) == 3
    assert float(state.control.lr_scale) == 0.5 and float(state.control.decay_scale) == 2.0

    # The next steps are made with another rate too.
    probe = to_global(random_rows(CFG, 8, seed=1), mesh)
    look = lambda model: {"": probe_loss(program.eval_step(model, probe, program.rules(1)))}
    arm = Arm((SetLearningRateScale(3.0, 0.5),), "plateau", -100.0, None)
    comparison = Comparison(3, state, Proposal("calm", "", (arm,)), {}, look(state.model))
    for _ in range(2):
      state, metrics = step(state, batch)
      comparison.metrics.append(metrics)
    sharding = state.model.embed.weight[...].sharding
    ahead = lambda saved: NextUpdates(step, lambda: contextlib.nullcontext(iter([batch] * 2)))
    means = Means(program, ahead, look, None, None, None, True)
    ended = comparison.end(5, state, means, most=10)
    assert ended.state.model.embed.weight[...].sharding == sharding
    assert int(ended.state.step) == 5 and float(ended.state.control.lr_scale) == 3.0
    compared = ended.compared
    assert compared.scores[0].held != compared.waiting.held and compared.made == 2


@pytest.mark.parametrize(
  ("action", "message"),
  [
    (SetLearningRateScale(0.0, 1.0), "scale is 0.0; it must be in"),
    (SetLearningRateScale(33.0, 1.0), "scale is 33"),
    (SetLearningRateScale(float("nan"), 1.0), "scale is nan"),
    (SetWeightDecay(-1.0), r"decay's scale is -1.0; it must be in \[0, 10\]"),
    (SetExpertDropout(0.6), r"dropout is 0.6; it must be in \[0, 0.5\]"),
    (SetExpertDropout(0.1), "with moe.num_experts=0"),
    (SetBalance(11.0), r"balance's scale is 11.0; it must be in \[0, 10\]"),
    (SetBalance(0.5), "with moe.num_experts=0"),
    (FullPrecision(), "with precision.fp8=False"),
    (GrowBatch(1), "1 times as large; use a whole number from 2 on"),
    (ScaleTemperature(2.5), r"multiplied with 2.5; it must be in \[0.5, 2\]"),
    (ScaleTemperature(1.25), "with moe.num_experts=0"),
  ],
)
def test_values_that_no_run_can_go_on_with_are_refused(action, message):
  with pytest.raises(ValueError, match=message):
    action.check(CFG)


@pytest.mark.parametrize("kind", KINDS.values())
def test_json_keeps_every_field(kind):
  values = {float: 0.5, int: 1, bool: True}
  pairs = (("mod.capacity", 0.5), ("num_steps", 7))
  action = kind(**{field.name: values.get(field.type, pairs) for field in dataclasses.fields(kind)})
  assert from_json(json.loads(json.dumps(action.to_json()))) == action
