"""What is certain needs no statistics: two scores of the same weights, counts of the same steps."""

import dataclasses
import itertools

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fed import PROBE, Run
from helpers import counting_rows, tiny_config

from ats_jax.orchestrator.actions import CorrectStep, Stop
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.narrate import tell
from ats_jax.orchestrator.signals.counts import wrong_counts, wrong_position
from ats_jax.orchestrator.signals.interval import Finding, RowsRead, Steps
from ats_jax.orchestrator.signals.probe import Probe
from ats_jax.step.schedule import learning_rate

EVERY = 8
CFG = canonical.config("dense", canonical.SUPERVISED)


@pytest.fixture(scope="module")
def program():
  with jax.set_mesh(canonical.mesh()):
    yield canonical.program(CFG)


def scoring(program, errors):
  """`program` on a machine whose scores are off by the next of `errors`, nats."""

  def eval_step(model, batch, rules):
    return program.eval_step(model, batch, rules) + jnp.array([next(errors), 0.0, 0.0])

  return dataclasses.replace(program, eval_step=eval_step)


@pytest.mark.parametrize("again", [False, True])
def test_two_scores_of_the_same_weights_that_differ_are_critical(program, tmp_path, again, caplog):
  path = tmp_path / "decisions.jsonl"
  errors = [0.0] * 4 + [1e-3] * (1 + again)  # three at the start, one at the look, two at the next
  run = Run(scoring(program, itertools.chain(errors, itertools.repeat(0.0))), path)(EVERY)
  run.settle()  # once more than at the look
  run(3)
  if again:
    with pytest.raises(FloatingPointError, match=r"computes wrongly. Test this machine's memory"):
      run.settle()
    assert isinstance(run.supervisor.decisions[-1][1].action, Stop)
  else:
    run.settle()
    run(EVERY * 4)
    assert not run.supervisor.decisions
  run.supervisor.close()
  healths = [row["health"] for row in run.lines("check")]
  assert [h["level"] for h in healths].count("critical") == 1 + again
  (cause, *_) = next(h["causes"] for h in healths if h["level"] == "critical")
  assert cause.startswith("system: the same weights scored the same text at 3.")
  assert ledger.replay(path) == run.supervisor.decisions
  assert any("a device computes wrongly" in r.getMessage() for r in caplog.records)


def test_scores_may_differ_as_they_did_at_the_start_where_nothing_says_they_are_exact(program):
  noise = itertools.cycle([0.0, 1e-2, -1e-2])
  gpu = dataclasses.replace(program.device, platform="gpu")
  noisy = dataclasses.replace(scoring(program, noise), device=gpu)
  probe, model, rules = Probe(PROBE), canonical.state(CFG).model, program.rules(1)
  probe.begin(noisy, model, rules)
  assert probe.spread == pytest.approx(2e-2 / 128, rel=0.1)  # of as many tokens
  twice = lambda program: [probe.score(program, model, rules) for _ in range(2)]
  assert probe.disagreement(noisy, *twice(noisy)) == ()
  far = scoring(program, iter([0.0, 1.0]))
  (fault,) = probe.disagreement(noisy, *twice(far))
  assert fault.cause == "system" and not fault.advice
  (fault,) = probe.disagreement(program, *twice(noisy))  # on a CPU every bit counts
  assert fault.advice


def test_a_step_counter_that_flipped_is_found_and_mended(program, tmp_path):
  path = tmp_path / "decisions.jsonl"
  run = Run(program, path)(60)
  run.state = dataclasses.replace(run.state, step=run.state.step ^ 16)
  run(40)
  ((step, decision),) = run.supervisor.decisions
  assert decision.action == CorrectStep(72) and decision.cause == "count" and step == 72
  assert "the state's step says" in decision.reason
  assert int(run.state.step) == run.step == 100
  run.settle()
  run.supervisor.close()
  assert ledger.replay(path) == run.supervisor.decisions


def test_data_that_is_elsewhere_ends_the_run(program, tmp_path):
  run = Run(program, tmp_path / "decisions.jsonl")(EVERY + 1)
  run.loop.row += 8  # a batch was lost
  with pytest.raises(FloatingPointError, match=r"136 .* in place of 128. Start again"):
    run(EVERY * 2)
  run.supervisor.close()


def test_a_resumed_run_counts_on_from_its_rows(program, tmp_path):
  run = Run(program, tmp_path / "decisions.jsonl")
  run.loop.row = 8 * 1000 + 24  # earlier batches were of another size
  run.supervisor.start(0, run.state)
  run(EVERY * 3)
  run.supervisor.close()
  assert not run.supervisor.decisions


def test_the_story_has_what_was_left_out_and_what_a_rollback_cost(program, tmp_path):
  path = tmp_path / "decisions.jsonl"
  orchestrator = dataclasses.replace(CFG.orchestrator, compare_share=0.0)  # or none is lost
  program = dataclasses.replace(program, cfg=dataclasses.replace(CFG, orchestrator=orchestrator))
  run = Run(program, path, cfg=CFG)(61)
  bad = lambda step: {**counting_rows(step), "loss_mask": np.full((8, 16), np.nan, np.float32)}
  run(2, bad)(40)
  run.state = dataclasses.replace(
    run.state, model=jax.tree.map(lambda x: x * jnp.nan, run.state.model)
  )
  run(EVERY * 3)
  run.settle()
  run.supervisor.close()
  story = "\n".join(tell(path))
  assert "2 batches (steps 62-63) left out" in story and "rows 488-503" in story
  rows = [row for row in ledger.read_lines(path) if row["kind"] == "decision"]
  lost = rows[0]["step"] - rows[0]["to"]
  assert f"which costs {lost} steps, {lost * 128:,} tokens" in story


# ---- pure


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "rex", "one_cycle", "constant"])
def test_the_host_knows_the_rate_of_each_step(schedule):
  cfg = tiny_config({"num_steps": 5000, "optimizer.schedule": schedule})
  steps = np.arange(5200)
  of_steps = np.asarray(learning_rate(cfg, jnp.asarray(steps)))
  known = learning_rate(cfg, steps, np)
  assert isinstance(known, np.ndarray)
  np.testing.assert_allclose(known, of_steps, atol=1e-5 * cfg.optimizer.learning_rate)
  columns = lambda rates: rates[100:110, None]
  steps_of = lambda rates: Steps(("train/scheduled_rate",), 110, rates)
  find = lambda rates: wrong_counts(cfg, learning_rate, steps_of(rates))
  assert find(columns(of_steps)) == []
  (fault,) = find(30 * columns(of_steps))
  assert fault.cause == "count" and "update 101 " in fault.reason
  assert wrong_counts(cfg, None, steps_of(30 * columns(of_steps))) == []


def test_the_counter_itself_is_compared_where_the_step_reports_it():
  cfg = tiny_config()
  rows = np.arange(10, 15, dtype=np.float32)[:, None]
  assert wrong_counts(cfg, None, Steps(("reflex/step",), 15, rows)) == []
  rows[3] += 4
  assert wrong_counts(cfg, None, Steps(("reflex/step",), 15, rows)) == [
    Finding("count", "the state's step says 18 of update 14")
  ]


def test_rows_and_steps_go_together():
  cfg = tiny_config({"data.batch_size": 8})
  assert wrong_position(cfg, RowsRead(5, 100), RowsRead(9, 132)) == []
  (fault,) = wrong_position(cfg, RowsRead(5, 100), RowsRead(9, 124))
  assert fault.cause == "data" and fault.advice
