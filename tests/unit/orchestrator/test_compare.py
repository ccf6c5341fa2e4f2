"""Comparisons on the real step: what wins goes on, what loses leaves no trace."""

import dataclasses

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from copies import most_copies
from fed import Run, computed_wrongly, scaled
from helpers import counting_rows, tiny_config

from ats_jax.config.build import with_settings
from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions import (
  ChangeSettings,
  EndRun,
  FullPrecision,
  GrowBatch,
  Repeat,
  Rollback,
  SaveCheckpoint,
  SetLearningRateScale,
  SetWeightDecay,
)
from ats_jax.orchestrator.constants import LEAST_MARGIN, SPAN_LOOKS
from ats_jax.orchestrator.policy import triggers
from ats_jax.orchestrator.policy.requests import Requests
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.narrate import tell
from ats_jax.orchestrator.record.teller import Teller
from ats_jax.orchestrator.signals.probe import is_exact
from ats_jax.orchestrator.trials.snapshots import COPIES, COPIES_OF_COMPARISON, local_bytes

EVERY = 8
SETTINGS = canonical.SUPERVISED | {"optimizer.warmup_steps": 8}
CFG = canonical.config("dense", SETTINGS)
SPAN = SPAN_LOOKS * EVERY
EIGHT_BITS = {
  "precision.fp8": True, "precision.fp8_keep_first": 0, "precision.fp8_keep_last": 0
}  # fmt: skip
FAULT = 16 * EVERY  # after which the margin is known
WRONG = lambda state: computed_wrongly(state, "weight", 1.3)  # of each step in which it happens


@pytest.fixture(scope="module")
def program():
  with jax.set_mesh(canonical.mesh()):
    yield canonical.program(CFG)


@pytest.fixture(scope="module")
def clean(program):
  """Of a run without a fault, its model and its held-out loss after each number of steps."""
  run, seen = Run(program), {}
  for _ in range(32):
    run(EVERY)
    seen[run.step] = jax.tree.map(np.asarray, run.state.model), run.probe_loss()
  assert not run.end()
  return seen


def equal(model, kept):
  pairs = zip(jax.tree.leaves(model), jax.tree.leaves(kept), strict=True)
  return all(np.array_equal(np.asarray(a), b) for a, b in pairs)


def replays(run):
  return ledger.replay(run.path) == ledger.decisions(run.path) == run.supervisor.decisions


@pytest.mark.thorough
def test_what_a_machine_computed_wrongly_is_made_again(program, clean, tmp_path):
  """No checksum shows it: the same steps again lead elsewhere, and that is the repair."""
  path = tmp_path / "decisions.jsonl"
  run = Run(program, path)(FAULT)
  run(4, happen=WRONG)
  run(EVERY * 8 - 4)
  ((step, decision),) = run.end()
  assert (decision.action, decision.cause) == (Repeat(), "machine")
  assert equal(run.state.model, clean[run.step][0])  # as if nothing had happened
  (row,) = run.lines("decision")
  assert row["applied"] and row["to"] <= FAULT < step
  (compared,) = run.lines("comparison")
  assert compared["made"] == step - row["to"] == run.supervisor.policy.made_again
  assert replays(run)
  story = "\n".join(tell(path))
  assert f"makes the steps from {row['to']} on again because of the machine" in story
  assert f"compared since step {compared['first']}" in story and "going on: 2." in story
  assert "so a device computed wrongly once" in story


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpu_that_computed_wrongly_is_found(tmp_path, deterministic):
  """By the bits of the same steps, or by their loss where bits may differ."""
  cfg = canonical.config("dense", SETTINGS | {"precision.deterministic": deterministic})
  with jax.set_mesh(canonical.mesh()):
    program = canonical.program(cfg)
    assert is_exact(program) == deterministic
    well, run = Run(program), Run(program, tmp_path / "decisions.jsonl")
    well(FAULT + EVERY * 8)
    assert not well.end()
    run(FAULT)
    run(4, happen=WRONG)
    run(EVERY * 8 - 4)
    ((_, decision),) = run.end()
    assert (decision.action, decision.cause) == (Repeat(), "machine")
    assert abs(run.probe_loss() - well.probe_loss()) < LEAST_MARGIN


@pytest.mark.thorough
@pytest.mark.parametrize(("factor", "steps"), [(jnp.nan, 8), (jnp.nan, 1), (30.0, 8)])
def test_damage_between_two_steps_leaves_no_trace(program, clean, tmp_path, factor, steps):
  run = Run(program, tmp_path / "decisions.jsonl")(FAULT)
  run.state = scaled(run.state, "head", factor)
  run(EVERY * steps)  # one: it is found before a checkpoint only
  ((_, decision),) = run.end()
  assert (decision.action, decision.cause) == (Repeat(), "state") and replays(run)
  assert equal(run.state.model, clean[run.step][0])


@pytest.mark.thorough
def test_damage_by_the_step_itself_is_left_behind(program, clean, tmp_path):
  """The same steps again do the same damage; the steps after it, from before it, do not."""
  run, step = Run(program, tmp_path / "decisions.jsonl"), program.train_step

  def damaging(state, batch):
    number = int(state.step)
    state, metrics = step(state, batch, program.training_rules(1))
    is_hit = FAULT <= number < FAULT + EVERY
    return (WRONG(state) if is_hit else state), metrics

  run.loop.train_step = damaging
  run(EVERY * 26)
  decisions = run.end()
  assert decisions[0][1].action == Rollback()
  assert run.lines("comparison")[0]["scores"][0] == "the same steps led here again"
  assert run.probe_loss() < clean[EVERY * 26][1] + 0.1
  assert replays(run)


@pytest.mark.thorough
def test_other_data_is_trained_on_and_a_lost_comparison_leaves_no_trace(program, tmp_path):
  other = lambda step: {
    **counting_rows(step), "targets": 63 - counting_rows(step)["targets"]
  }  # fmt: skip
  run = Run(program, tmp_path / "decisions.jsonl")(FAULT)(EVERY * 8, rows=other)
  assert not run.end() and run.lines("comparison")
  assert run.supervisor.policy.made_again > 0 and replays(run)
  alone = Run(program, loop=None)(FAULT)(EVERY * 8, rows=other)
  alone.end()
  for a, b in zip(jax.tree.leaves(run.state), jax.tree.leaves(alone.state), strict=True):
    if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
      np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.thorough
@pytest.mark.parametrize("harmful", [True, False])
def test_8_bits_that_do_harm_are_switched_off_and_others_stay(program, tmp_path, harmful):
  cfg = with_settings(CFG, EIGHT_BITS)
  run = Run(dataclasses.replace(program, cfg=cfg), tmp_path / "decisions.jsonl", cfg=CFG)
  wide = lambda state, batch: program.train_step(state, batch, program.training_rules(1))

  def eight_bits(state, batch):
    number = int(state.step)
    state, metrics = wide(state, batch)
    is_hit = harmful and number >= FAULT
    return (computed_wrongly(state, "weight", 1.05) if is_hit else state), metrics

  ahead = run.loop.ahead
  run.loop.train_step = eight_bits
  run.loop.ahead = lambda saved=None: ahead(saved)._replace(wide_step=wide)
  other = lambda step: {
    **counting_rows(step), "targets": 63 - counting_rows(step)["targets"]
  }  # fmt: skip
  run(FAULT)
  while not run.lines("comparison"):
    run(EVERY, **{} if harmful else {"rows": other})
  made = [decision.action for _, decision in run.end()]
  assert made == ([Rollback(), FullPrecision()] if harmful else [])
  assert run.supervisor.wants_restart == harmful and replays(run)
  changed = {"precision.fp8": (True, False)} if harmful else {}
  assert run.supervisor.saved()["settings"] == changed


@pytest.mark.thorough
def test_a_certain_fault_comes_before_a_comparison(program, tmp_path):
  run = Run(program, tmp_path / "decisions.jsonl")(FAULT)
  run(4, happen=WRONG)(EVERY * 2 - 4)
  run.state = scaled(run.state, "head", jnp.nan)
  run(EVERY * 4)
  assert [d.action for _, d in run.end()] == [Rollback()]
  (row,) = run.lines("given_up")
  assert "Rollback" in row["reason"] and not run.lines("comparison")
  assert "drops the comparison since step" in "\n".join(tell(run.path)) and replays(run)


@pytest.mark.thorough
@pytest.mark.parametrize(("copies", "compares"), [(4, False), (5, True)])
def test_it_compares_only_where_there_is_memory_for_it(program, monkeypatch, copies, compares):
  allowed = copies * local_bytes(canonical.state(CFG)) / 2**30
  orchestrator = dataclasses.replace(CFG.orchestrator, snapshot_gb=allowed)
  cfg = dataclasses.replace(CFG, orchestrator=orchestrator)
  most = most_copies(monkeypatch)
  run = Run(dataclasses.replace(program, cfg=cfg), cfg=CFG)(FAULT)
  run(4, happen=WRONG)(EVERY * 6)
  assert (run.supervisor.policy.made_again > 0) == compares
  assert most() <= (COPIES + COPIES_OF_COMPARISON if compares else COPIES)


@pytest.mark.thorough
@pytest.mark.parametrize("fits", [Repeat, Rollback, None])
def test_arms_that_do_not_fit_in_the_share_are_not_made(program, tmp_path, fits):
  age = 4 * EVERY  # at most, of the steps that are made again
  updates = {Repeat: SPAN + age, Rollback: SPAN, None: SPAN - 1}[fits]
  share = (updates + 0.5) / CFG.num_steps
  cfg = dataclasses.replace(
    CFG, orchestrator=dataclasses.replace(CFG.orchestrator, compare_share=share)
  )
  run = Run(dataclasses.replace(program, cfg=cfg), tmp_path / "decisions.jsonl", cfg=CFG)(FAULT)
  run(4, happen=WRONG)
  run(EVERY * 12 - 4)
  made = [decision.action for _, decision in run.end()]
  rows = run.lines("comparison")
  assert run.supervisor.policy.made_again == sum(row["made"] for row in rows) <= updates
  assert bool(rows) == (fits is not None) and replays(run)
  if fits is Repeat:
    assert made == [Repeat()]
  elif fits is Rollback:
    assert "orchestrator.compare_share leaves 16 of its" in rows[0]["scores"][0]
    assert rows[0]["made"] == SPAN and made == [Rollback()]


@pytest.mark.thorough
def test_first_steps_that_turn_the_weights_over_are_made_again_more_slowly(
  program, monkeypatch, tmp_path
):
  monkeypatch.setattr(triggers, "FAST_TURNOVER", 1e-4)
  monkeypatch.setattr(triggers, "BEHIND", 1e9)  # so that it wins
  run = Run(program, tmp_path / "decisions.jsonl")(EVERY * 2)
  control = run.state.control._replace(decay_scale=jnp.float32(2.0))  # as a hook would
  run.state = dataclasses.replace(run.state, control=control)
  while not run.supervisor.decisions:
    run(EVERY)
  ring = [kept.step for kept in run.supervisor._snapshots.good]
  run(EVERY * 8)
  run.supervisor.close()
  (_, again), (step, slower) = run.supervisor.decisions
  assert again.action == Repeat(from_start=True)
  (row,) = run.lines("comparison")
  assert row["made"] == row["first"] == step  # nothing is waited for
  assert run.state.control.lr_scale == np.float32(slower.action.scale) < 1.0
  assert float(run.state.control.decay_scale) == 2.0 and replays(run)
  # No state of the steps that lost is gone back to.
  assert [kept for kept in ring if 0 < kept < step] == [] and ring[0] == 0


# ---- what a hook wants tried


@pytest.mark.thorough
@pytest.mark.parametrize(
  ("kind", "odd", "wins"),
  [
    (SetLearningRateScale, 0.02, True),  # far too low
    (SetLearningRateScale, 30.0, False),  # and too high
    (SetWeightDecay, 1000.0, True),
    (SetWeightDecay, 0.0, False),  # not felt within two looks
  ],
)
def test_what_a_hook_wants_tried_is_done_only_if_it_wins(program, asked, kind, odd, wins, tmp_path):
  asked |= {EVERY * 12: hooks.Try(kind(1.0 if wins else odd))}
  start = kind(odd if wins else 1.0)
  run = Run(program, tmp_path / "decisions.jsonl")
  run.state = start.apply(run.state, CFG)
  run(EVERY * 20)
  decisions = run.end()
  assert [d.cause for _, d in decisions] == (["comparison"] if wins else [])
  assert float(getattr(run.state.control, kind.scalar)) == 1.0 and replays(run)
  (row,) = run.lines("comparison")
  assert row["made"] == SPAN and not run.supervisor._requests.waiting


@pytest.mark.parametrize(
  "action",
  [
    Rollback(),
    SaveCheckpoint(),
    ChangeSettings((("num_steps", 9),)),
    GrowBatch(2),
    EndRun(),
  ],
)
def test_what_can_never_be_tried_is_an_error(action):
  cfg = tiny_config({"orchestrator.mode": "act", "orchestrator.check_interval": 5})
  with pytest.raises(ValueError, match="cannot be compared"):
    Requests(cfg, Teller(None, None)).add(hooks.Try(action), step=0)


@pytest.mark.thorough
def test_what_there_is_no_time_to_try_is_refused(program, asked, tmp_path, caplog):
  caplog.set_level("INFO")
  asked |= {EVERY * 4: hooks.Try(SetWeightDecay(0.5))}
  orchestrator = dataclasses.replace(CFG.orchestrator, compare_share=0.0)
  cfg = dataclasses.replace(CFG, orchestrator=orchestrator)
  run = Run(dataclasses.replace(program, cfg=cfg), tmp_path / "decisions.jsonl", cfg=CFG)
  run(EVERY * 8).end()
  (row,) = run.lines("refused")
  assert "orchestrator.compare_share" in row["reason"] and not run.supervisor._requests.waiting
  assert (
    "compares nothing: an arm makes 16 updates, and orchestrator.compare_share=0" in caplog.text
  )


# ---- rules that change

RULES = canonical.SUPERVISED | {
  "num_steps": 400, "optimizer.learning_rate": 3e-3, "mod.routing": "learned", "mod.every": 1,
  "mod.capacity": 0.25, "mod.anneal_fraction": 0.5, "mod.rungs": 1,
}  # fmt: skip


@pytest.mark.thorough
def test_a_comparison_across_a_change_of_the_rules_is_given_up(mesh, tmp_path, asked):
  cfg = canonical.config("dense", RULES)
  program, rung = canonical.program(cfg), 200
  asked |= {rung - EVERY: hooks.Try(SetWeightDecay(0.5))}  # of two looks, one by other rules
  run = Run(program, tmp_path / "decisions.jsonl", cfg=cfg)
  run.loop.train_step = lambda state, batch: program.train_step(
    state, batch, program.training_rules(min(int(state.step) + 1, 400))
  )
  run(rung)
  run.supervisor.follow(program, rung + 1, run.state)
  run(EVERY * 4)
  run.end()
  (row,) = run.lines("given_up")
  assert "other rules" in row["reason"] and row["first"] < rung
  assert all(row["first"] >= rung for row in run.lines("comparison"))
  capacities = [row["reading"]["rules"][1] for row in run.lines("check")]
  assert capacities == [1.0] * (rung // EVERY) + [0.25] * 4
  assert replays(run)
