"""No request of `hooks.at` is lost in silence: it is done, or waits, or is refused, and said so."""

import dataclasses
import json

import canonical
import jax
import pytest
from fed import Run

from ats_jax.config.build import with_settings
from ats_jax.metrics.writer import MultiWriter
from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions import (
  FullPrecision,
  GrowBatch,
  SetExpertDropout,
  SetWeightDecay,
)
from ats_jax.orchestrator.no_supervisor import NoSupervisor
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.narrate import tell
from ats_jax.orchestrator.supervisor import EVALUATED, SAVED, WAITING, Supervisor

EVERY = 8
CFG = canonical.config("dense", canonical.SUPERVISED | {"optimizer.warmup_steps": 8})
DECAY = SetWeightDecay(0.5)


@pytest.fixture(scope="module")
def program():
  with jax.set_mesh(canonical.mesh()):
    yield canonical.program(CFG)


@pytest.fixture
def at():
  """`hooks.at`, forgotten after the test."""
  made = []
  yield lambda *given: made.append(hooks.at(*given))
  for hook in made:
    hooks.unregister(hook)


@pytest.fixture
def path(tmp_path):
  return tmp_path / "decisions.jsonl"


def changed(program, **settings):
  """The program with other settings that its steps do not depend on."""
  names = {name.replace("__", "."): value for name, value in settings.items()}
  return dataclasses.replace(program, cfg=with_settings(CFG, names))


def test_a_step_between_two_looks_is_asked_for_once_also_after_a_resume(program, path, at):
  at(EVERY + 3, DECAY)
  run = Run(program, path)(EVERY * 5)
  ((_, decision),) = run.end()
  assert decision.action == DECAY and ledger.replay(path) == ledger.decisions(path)
  again = Supervisor(program, None)
  again.start(run.step, run.state, json.loads(json.dumps(run.supervisor.saved())))
  assert not again.saved()[WAITING] and again.policy.control["decay_scale"] == 0.5


@pytest.mark.parametrize(
  ("wanted", "why"),
  [
    (SetExpertDropout(0.1), r"moe\.num_experts=0"),
    (hooks.Try(FullPrecision()), r"precision\.fp8=False"),
    (hooks.Try(GrowBatch(2)), "cannot be compared"),
  ],
)
def test_what_a_run_can_never_do_ends_it_at_its_start(program, at, wanted, why):
  at(EVERY * 4, wanted)
  with pytest.raises(ValueError, match=why):
    Run(program)


def test_there_is_no_look_before_the_first_update():
  with pytest.raises(ValueError, match=r"hooks\.at\(step=0\): looks are after an update"):
    hooks.at(0, DECAY)


def test_what_comes_too_late_is_refused_at_the_end(program, path, at):
  at(EVERY * 3, hooks.Try(DECAY))  # of the last look
  at(EVERY * 9, SetWeightDecay(2.0))
  short = changed(program, num_steps=EVERY * 3, orchestrator__compare_share=1.0)
  run = Run(short, path, cfg=CFG)(EVERY * 3)
  assert not run.end()
  reasons = [row["reason"] for row in run.lines("refused")]
  assert len(reasons) == 2 and all("comes after the run's end" in reason for reason in reasons)
  assert "does not do what a hook asked for" in "\n".join(tell(path))


def test_a_run_that_goes_on_after_an_early_end_goes_on_with_its_requests(program, path, at):
  at(EVERY * 2, DECAY)
  run = Run(program)
  run.path, run.supervisor = path, Supervisor(program, None, path)
  run.supervisor.start(0, run.state, {"settings": {"num_steps": [100, EVERY]}})  # of before
  run(EVERY).settle()
  assert not run.lines("refused")
  run(EVERY * 4).end()
  assert [d.action for _, d in run.supervisor.decisions] == [DECAY]


def test_what_must_wait_for_a_comparison_says_so_once_and_is_done(program, path, at):
  at(EVERY * 2, hooks.Try(DECAY))
  at(EVERY * 3, SetWeightDecay(2.0))
  run = Run(program, path)(EVERY * 4)
  (asked,) = run.supervisor.saved()[WAITING][:1]  # a run that is killed here asks for it again
  assert (asked["cause"], asked["action"]["scale"]) == ("comparison", 0.5)
  run(EVERY * 8).end()
  (row,) = run.lines("waits")
  assert row["reason"] == "a comparison is going on" and row["fields"]["scale"] == 2.0
  assert len(run.lines("comparison")) == 1 and not run.supervisor.saved()[WAITING]
  assert run.supervisor.decisions[-1][1].action.scale == 2.0
  assert "does not yet do what a hook asked for" in "\n".join(tell(path))
  assert ledger.replay(path) == ledger.decisions(path)


def test_observing_says_what_it_would_do_and_compares_nothing(program, path, at):
  at(EVERY, DECAY)
  at(EVERY * 2, hooks.Try(SetWeightDecay(2.0)))
  at(EVERY * 3, GrowBatch(2))
  run = Run(changed(program, orchestrator__mode="observe"), path, cfg=CFG)(EVERY * 8)
  run.end()
  made = run.lines("decision")
  assert [(row["action"], row["applied"]) for row in made] == [
    ("SetWeightDecay", False), ("GrowBatch", False)
  ]  # fmt: skip
  assert "only observes" in run.lines("refused")[0]["reason"]
  assert float(run.state.control.decay_scale) == 1.0 and not run.supervisor.wants_restart


def test_without_an_orchestrator_it_is_said_that_no_hook_is_called(at, caplog):
  NoSupervisor().start(0, None)
  assert not caplog.records
  at(EVERY, DECAY)
  NoSupervisor().start(0, None)
  assert "orchestrator.mode=off: none of 1 hooks is called" in caplog.text


def test_patience_ends_a_run_and_survives_a_checkpoint(program, path):
  cfg = dict(checkpoint__keep_best=True, checkpoint__every_steps=8, eval__every_steps=8)
  patient = changed(
    program, data__validation_fraction=0.1, orchestrator__patience=2, num_steps=200, **cfg
  )
  run = Run(patient, path, cfg=CFG)(EVERY * 3)
  for loss in (2.0, 2.5):
    MultiWriter([run.supervisor]).write_scalars(run.step, {"eval/loss": loss, "eval/accuracy": 0.5})
    run(EVERY)
  run.supervisor.write_scalars(run.step, {"eval/loss": 2.1})
  saved = json.loads(json.dumps(run.supervisor.saved()))
  assert saved[EVALUATED] == [2.1] and saved[SAVED]["worse_evals"] == 1
  again = Supervisor(patient, None)
  again.start(run.step, run.state, saved)
  assert again.saved() == run.supervisor.saved()
  run(EVERY)
  assert run.supervisor.wants_restart and run.supervisor.wants_checkpoint
  run.end()
  assert run.supervisor.saved()["settings"] == {"num_steps": (200, run.step)}
  (row,) = run.lines("decision")
  assert (row["cause"], row["action"], row["applied"]) == ("patience", "EndRun", True)
  assert ledger.replay(path) == ledger.decisions(path)
