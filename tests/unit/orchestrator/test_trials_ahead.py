"""A paired branch: what wins is done, what loses leaves no trace, and the run is as it was."""

import contextlib
import itertools

import canonical
import jax
import numpy as np
import pytest
from helpers import Lent, counting_rows, micro_batches, tiny_config

from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions import (
  ChangeSettings,
  Rollback,
  SaveCheckpoint,
  SetLearningRateScale,
  SetWeightDecay,
)
from ats_jax.orchestrator.policy.growth import helps
from ats_jax.orchestrator.policy.requests import Requests
from ats_jax.orchestrator.policy.state import Request
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.narrate import tell
from ats_jax.orchestrator.signals.interval import probe_loss
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.orchestrator.trials.paired import Effect, NextUpdates, look_ahead

SETTINGS = {
  "num_steps": 400,
  "model.num_layers": 1,
  "optimizer.schedule": "constant",
  "orchestrator.mode": "act",
  "orchestrator.check_interval": 10,
  "orchestrator.snapshot_interval": 10,
  "orchestrator.branch_steps": 12,
}


class Run:
  """A run of a tiny model that saves, or could, every 40 steps."""

  def __init__(self, rate, path=None):
    self.cfg = tiny_config(SETTINGS | {"optimizer.learning_rate": rate})
    self.program, self.path, self.step = canonical.program(self.cfg), path, 0
    self.state = canonical.state(self.cfg)
    lent = Lent(ahead=NextUpdates(self.step_ahead, self.batches))
    self.supervisor = Supervisor(self.program, counting_rows(10**6), path, loop=lent)
    self.supervisor.start(0, self.state)
    self.opened = []

  def step_ahead(self, state, batch):
    return self.program.train_step(state, batch, self.program.training_rules(1))

  @contextlib.contextmanager
  def batches(self):
    self.opened.append(self.step)
    yield (micro_batches(counting_rows(step), 1) for step in itertools.count(self.step + 1))

  def __call__(self, steps, *, tries=True):
    self.supervisor._loop = self.supervisor._loop if tries else None
    for _ in range(steps):
      self.step += 1
      batch = micro_batches(counting_rows(self.step), 1)
      self.state, metrics = self.program.train_step(
        self.state, batch, self.program.training_rules(1)
      )
      self.state = self.supervisor.after(self.step, self.state, metrics)
      if self.step % 40 == 0:
        self.state = self.supervisor.settle(self.step, self.state, metrics)
    return self

  def loss(self, model=None):
    model = self.state.model if model is None else model
    return probe_loss(
      np.asarray(self.program.eval_step(model, counting_rows(10**6), self.program.rules(1)))
    )

  def compare(self, action):
    ahead = NextUpdates(self.step_ahead, self.batches)
    probe = lambda model: self.program.eval_step(model, counting_rows(10**6), self.program.rules(1))
    self.state, effect = look_ahead(self.cfg, self.state, action, ahead, probe)
    return effect


def arrays(state):
  return [
    np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    for x in jax.tree.leaves(state)
  ]


@pytest.mark.thorough
def test_an_arm_that_is_better_wins_and_the_state_comes_back(mesh):
  run = Run(1e-4)(40, tries=False)
  before, programs = arrays(run.state), run.program.train_step._cache_size()
  higher = run.compare(SetLearningRateScale(8.0))
  assert helps(higher) and higher.gain > 0.01
  for a, b in zip(arrays(run.state), before, strict=True):
    np.testing.assert_array_equal(a, b)
  assert not helps(run.compare(SetLearningRateScale(0.1)))  # though the rate falls in both arms
  none = run.compare(SetWeightDecay(1.0))
  assert none.gain == none.error == 0.0 and not helps(none)  # the arms differ in nothing else
  assert run.program.train_step._cache_size() == programs
  run(1)


@pytest.mark.parametrize(
  ("gain", "error", "wins"),
  [(0.01, 0.001, True), (0.01, 0.004, False), (0.002, 1e-5, False), (-0.01, 0.001, False)],
)
def test_what_wins(gain, error, wins):
  assert helps(Effect(3.0, 2.0, 2.0 - gain, gain, error)) is wins


@pytest.mark.thorough
def test_what_a_hook_wants_tried_is_done_only_if_it_wins(mesh, tmp_path):
  asked = {60: hooks.Try(SetWeightDecay(0.0)), 140: hooks.Try(SetLearningRateScale(6.0))}
  hook = hooks.register(lambda look: asked.get(look.step))
  try:
    run = Run(1e-4, tmp_path / "decisions.jsonl")(200)
  finally:
    hooks.unregister(hook)
  run.supervisor.close()
  assert run.opened == [80, 160]
  assert [d.action for _, d in run.supervisor.decisions] == [SetLearningRateScale(6.0, 1.0)]
  tried = [row for row in ledger.read_lines(run.path) if row["kind"] == "trial"]
  assert len(tried) == 2 and tried[1]["gain"] > 0
  assert ledger.replay(run.path) == ledger.decisions(run.path)
  assert "on a branch: held-out loss -" in "\n".join(tell(run.path))


@pytest.mark.parametrize(
  ("changes", "action", "message"),
  [
    ({"orchestrator.branch_steps": 0}, SetWeightDecay(0.5), "branch_steps=0"),
    ({}, Rollback(), "cannot be tried"),
    ({}, SaveCheckpoint(), "cannot be tried"),
    ({}, ChangeSettings((("num_steps", 300),)), "cannot be tried"),
  ],
)
def test_what_cannot_be_tried_is_refused(changes, action, message):
  with pytest.raises(ValueError, match=message):
    Requests(tiny_config(SETTINGS | changes)).add(Request(action, "trial"), 5)
