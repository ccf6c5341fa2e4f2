"""Moments that are reset where a phase begins: wholly, then only, and after a rollback over it."""

import contextlib
import dataclasses

import canonical
import jax
import jax.numpy as jnp
import numpy as np
from helpers import micro_batches, random_rows

from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table
from ats_jax.model.param import trainable
from ats_jax.orchestrator.actions import Rollback
from ats_jax.orchestrator.policy.decide import Decision
from ats_jax.orchestrator.ports import NextUpdates
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.orchestrator.trials.arms import Arm, Proposal
from ats_jax.orchestrator.trials.compare import Comparison, Means
from ats_jax.orchestrator.trials.snapshots import Snapshot
from ats_jax.sharding.mesh import to_global

PHASES = {
  "data.sources": {"a": ("a.txt",), "b": ("b.txt",)},
  "data.phases": (
    Phase(Table(a=1), steps=3),
    Phase(Table(b=1), tokens=256),  # 2 steps
    Phase(Table(a=1, b=1)),
  ),
  "optimizer.phase_moments": "reset",
  "optimizer.schedule": "constant",
  "orchestrator.mode": "act",
  "orchestrator.check_interval": 10,
}
STARTS = (3, 5)


def batch(cfg, step):
  return to_global(
    micro_batches(random_rows(cfg, 8, seed=step), cfg.step.accum_steps), jax.sharding.get_mesh()
  )


def assert_equal(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


def test_an_update_at_the_start_of_a_phase_is_the_first_of_a_new_optimizer(mesh):
  cfg = canonical.config("dense", PHASES)
  program, state = canonical.program(cfg), canonical.state(cfg)
  for step in range(7):
    data, fresh = batch(cfg, step), canonical.copied(state)
    new = program.optimizer.tx.init(trainable(fresh.model))  # as a run on these weights would begin
    reflex = fresh.reflex._replace(updates=jnp.zeros_like(fresh.reflex.updates))
    fresh = dataclasses.replace(fresh, opt_state=new, reflex=reflex)
    state, _ = canonical.step(cfg, state, data)
    fresh, _ = canonical.step(cfg, fresh, data)
    is_equal = [
      np.array_equal(*pair)
      for pair in zip(*map(jax.tree.leaves, (state.opt_state, fresh.opt_state)), strict=True)
    ]
    if step in (0, *STARTS):
      assert_equal(state.model, fresh.model)
      assert all(is_equal)
    else:
      assert not any(is_equal)
    since = max(start for start in (0, *STARTS) if start <= step)
    assert int(state.reflex.updates) == step + 1 - since
  assert program.train_step._cache_size() == 1


def test_a_state_that_goes_on_behind_a_start_is_renewed(mesh):
  cfg = canonical.config("dense", PHASES)
  program = canonical.program(cfg)
  state, _ = canonical.step(cfg, canonical.state(cfg), batch(cfg, 0))

  def is_new(made_at, goes_on):
    at = dataclasses.replace(canonical.copied(state), step=jnp.int32(goes_on))
    found = program.catch_up(at, made_at)
    assert int(found.step) == goes_on
    assert_equal(found.model, state.model)
    moments = [np.any(x) for x in jax.tree.leaves(found.opt_state)]
    assert any(moments) == bool(found.reflex.updates)
    return not any(moments)

  assert [is_new(made_at, 6) for made_at in (0, 3, 4, 5, 6)] == [True] * 4 + [False]
  assert [is_new(1, goes_on) for goes_on in (2, 3, 4)] == [False, True, True]


def test_a_rollback_over_a_start_renews_too(mesh, tmp_path):
  cfg = canonical.config("dense", PHASES)
  program = canonical.program(cfg)
  state, _ = canonical.step(cfg, canonical.state(cfg), batch(cfg, 0))
  supervisor = Supervisor(program, None, tmp_path / "decisions.jsonl")
  supervisor.start(0, canonical.copied(state))
  decision = Decision(0, Rollback(), "state", "")
  for made_at, updates in ((2, 0), (5, 0), (6, 1)):
    supervisor.earlier = lambda back, made_at=made_at: (made_at, canonical.copied(state))
    after = supervisor._carry_out(7, canonical.copied(state), decision)
    assert (int(after.step), int(after.reflex.updates)) == (7, updates)
  supervisor.close()


def test_an_arm_that_passes_over_a_start_renews_too(mesh):
  """Its steps would lead elsewhere than those of a rollback."""
  cfg = canonical.config("dense", PHASES)
  program = canonical.program(cfg)
  state, _ = canonical.step(cfg, canonical.state(cfg), batch(cfg, 0))
  found = []

  def train_step(state, rows):
    found.append((int(state.step), int(state.reflex.updates)))
    return program.train_step(state, rows, program.training_rules(1))

  ahead = lambda saved: NextUpdates(
    train_step, lambda: contextlib.nullcontext(iter([batch(cfg, 8)]))
  )
  arm = Arm((Rollback(),), "state or batches", 1e9)
  for made_at, updates in ((2, 0), (5, 0), (6, 1)):
    now = dataclasses.replace(canonical.copied(state), step=jnp.int32(7))
    comparison = Comparison(7, now, Proposal("held-out loss", "", (arm,)), {}, {"": 3.0})
    held, good = lambda model: {"": 3.0}, Snapshot.take(made_at, canonical.copied(state))
    means = Means(program, ahead, held, lambda *_: (1.0, 1.0), good, None, True)
    comparison.end(8, now, means, most=1)
    assert found.pop() == (7, updates)
