"""What a hook asks for is kept, done, written down and replayed."""

import dataclasses
import json

import canonical
import jax
import numpy as np
import pytest
from helpers import micro_batches, random_rows, tiny_config

from ats_jax.orchestrator.actions import (
  AddExpert,
  ChangeSettings,
  PruneExpert,
  ScaleTemperature,
  SetExpertDropout,
  SetLearningRateScale,
  SetPenalty,
  SetWeightDecay,
  Stop,
)
from ats_jax.orchestrator.actions.expert_view import view_experts
from ats_jax.orchestrator.policy.decide import Terms
from ats_jax.orchestrator.policy.requests import Requests
from ats_jax.orchestrator.policy.state import PolicyState, Request
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.narrate import tell
from ats_jax.orchestrator.record.teller import Teller
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.step.program import make_program


def test_the_queue_survives_a_checkpoint():
  cfg = tiny_config({"orchestrator.mode": "act", "orchestrator.check_interval": 10})
  queue = Requests(cfg, Teller(None, None))
  for action in (SetWeightDecay(2.0), ChangeSettings((("num_steps", 30),))):
    queue.add(action, 5)
    queue.add(action, 5)  # two looks at one step
  assert len(queue.waiting) == 2
  again = Requests(cfg, Teller(None, None), json.loads(json.dumps(queue.to_json())))
  assert again.waiting == queue.waiting


@pytest.mark.parametrize(
  ("action", "message"),
  [
    (Stop(), "not for hooks"),
    (SetLearningRateScale(0.0), "scale is 0.0"),
    (ChangeSettings((("num_steps", 3),)), "is over at step 5"),
  ],
)
def test_what_can_never_be_done_ends_the_run_at_once(action, message):
  with pytest.raises(ValueError, match=message):
    Requests(tiny_config(), Teller(None, None)).add(action, 5)


# ---- on the real step

CFG = canonical.config(
  "experts",
  canonical.STEERED
  | {
    "num_steps": 400,
    "moe.spare_experts": 1,
    "moe.dense_first": 1,
    "moe.router_bias": True,
    "moe.bias_update": "none",
    "moe.aux_loss": 0.0,
    "orchestrator.check_interval": 4,
  },
)
LAYER = 1


class Run:
  """A few steps of a small model with experts, under the supervisor."""

  def __init__(self, path, saves=()):
    self.program, self.path, self.saves, self.rows = canonical.program(CFG), path, saves, []
    self.state, self.step = canonical.state(CFG), 0
    self.probe = random_rows(CFG, 8, seed=99)
    self.supervisor = Supervisor(self.program, self.probe, path)
    self.supervisor.start(0, self.state)

  def __call__(self, steps):
    for _ in range(steps):
      self.step += 1
      batch = micro_batches(random_rows(CFG, 8, seed=self.step), 1)
      self.state, metrics = self.program.train_step(
        self.state, batch, self.program.training_rules(1)
      )
      self.rows.append(np.asarray(metrics.layers["moe/load"]))
      self.state = self.supervisor.after(self.step, self.state, metrics)
      if self.step in self.saves:
        self.state = self.supervisor.settle(self.step, self.state, metrics)
    return self

  def probe_loss(self):
    cross_entropy, _, tokens = np.asarray(
      self.program.eval_step(self.state.model, self.probe, self.program.rules(1))
    )
    return cross_entropy / tokens

  def kinds(self, kind):
    return [row for row in ledger.read_lines(self.path) if row["kind"] == kind]


@pytest.mark.thorough
def test_hooks_steer_a_run_without_a_new_program(mesh, tmp_path, asked):
  asked |= {8: SetExpertDropout(0.5), 28: SetExpertDropout(0.0), 48: ScaleTemperature(2.0)}
  run = Run(tmp_path / "decisions.jsonl")(16)
  programs = run.program.train_step._cache_size()
  run(54)
  run.supervisor.close()
  assert run.program.train_step._cache_size() == programs
  made = run.kinds("decision")
  assert [(row["action"], row["step"]) for row in made] == [
    ("SetExpertDropout", 12), ("SetExpertDropout", 32), ("ScaleTemperature", 52)
  ]  # fmt: skip
  assert made[1]["fields"] == {"rate": 0.0, "before": 0.5}
  idle = np.array([(load > 0).sum() for load in run.rows]) < 4
  assert idle[12:32].sum() > 4 and not idle[:12].any() and not idle[32:].any()
  assert ledger.replay(run.path) == ledger.decisions(run.path) == run.supervisor.decisions
  story = "\n".join(tell(run.path))
  assert "experts sit out 0.5 of the steps (0 before) because of request: a hook" in story


@pytest.mark.thorough
def test_an_expert_is_added_at_a_checkpoint_released_and_taken_back(mesh, tmp_path, asked):
  asked |= {8: AddExpert(LAYER), 12: AddExpert(LAYER)}
  run = Run(tmp_path / "decisions.jsonl", saves=(40, 60))(39)
  programs = run.program.train_step._cache_size()
  before = run.probe_loss()
  assert not run.kinds("decision")  # experts are edited while the loop waits anyway
  run(1)
  ((_, decision),) = run.supervisor.decisions
  view = view_experts(CFG, run.state, LAYER)
  assert view.is_open.sum() == 5 and view.twin[decision.action.slot] == decision.action.expert
  run(21)
  run.supervisor.close()
  assert run.program.train_step._cache_size() == programs
  assert len(run.supervisor.decisions) == 1
  (refused,) = run.kinds("refused")  # no slot is left for the second
  assert "no idle slot" in refused["reason"] or "all experts are halves" in refused["reason"]
  assert "does not do what a hook asked for" in "\n".join(tell(run.path))

  penalty = SetPenalty(LAYER, decision.action.slot, 5.0)
  state = penalty.apply(run.state, CFG)
  assert view_experts(CFG, state, LAYER).penalty[decision.action.slot] == 5.0
  close = PruneExpert(LAYER, decision.action.slot)
  view = view_experts(CFG, close.apply(state, CFG), LAYER)
  assert view.is_open.sum() == 4 and (view.twin < 0).all()
  assert before > 0


@pytest.mark.thorough
def test_adding_an_expert_is_exact(mesh):
  run = Run(None)(2)
  before = run.probe_loss()
  request = Requests(CFG, Teller(None, None), [Request(AddExpert(LAYER)).to_json()]).ready(
    Terms.of(CFG), PolicyState(), run.state, 2, pause=True
  )
  run.state = request.action.apply(run.state, CFG)
  assert abs(run.probe_loss() - before) < 1e-5


@pytest.mark.thorough
def test_temperature_is_that_of_the_setting(mesh):
  warm = dataclasses.replace(CFG, moe=dataclasses.replace(CFG.moe, temperature=2.0))
  program, rows, state = canonical.program(CFG), random_rows(CFG, 8, seed=3), canonical.state(CFG)
  other = make_program(warm)
  same = jax.tree.unflatten(jax.tree.structure(other.init(abstract=True).model),
                            jax.tree.leaves(state.model))  # fmt: skip
  want = np.asarray(other.eval_step(same, rows, other.rules(1)))
  kept = jax.tree.map(np.asarray, state.model)
  changed = ScaleTemperature(2.0).apply(state, CFG)
  np.testing.assert_allclose(
    program.eval_step(changed.model, rows, program.rules(1)), want, rtol=1e-6
  )
  back = ScaleTemperature(0.5).apply(changed, CFG)
  for a, b in zip(jax.tree.leaves(back.model), jax.tree.leaves(kept), strict=True):
    np.testing.assert_array_equal(np.asarray(a), b)
