"""`python -m ats_jax forecast` on workdirs whose curves follow a known law."""

import dataclasses
import json

import numpy as np
import pytest
from commands import called
from helpers import tiny_config

from ats_jax.checkpoint import workdir
from ats_jax.config.build import with_settings
from ats_jax.verbs.forecast import (
  advise,
  decay_from,
  planned_rates,
  read_curve,
  render,
  report,
  with_num_steps,
)

WSD = {
  "num_steps": 1000,
  "optimizer.schedule": "wsd",
  "optimizer.learning_rate": 3e-3,
  "optimizer.warmup_steps": 50,
  "optimizer.schedule.decay_fraction": 0.3,
}
METRIC = "eval/loss"


def law(rates: np.ndarray, memory: float = 100) -> np.ndarray:
  """Tissue et al. 2024, eq. 1."""
  momentum = won = 0.0
  losses = np.zeros(len(rates))
  for i, summed in enumerate(np.cumsum(rates)):
    if i > rates.argmax():
      momentum = (1 - 1 / memory) * momentum + rates[i - 1] - rates[i]
    won += momentum
    losses[i] = 1.2 + 0.9 * summed**-0.4 - 1.5 * won
  return losses


def make_run(folder, changes=None, until=None, offset=0.0):
  """A workdir as a run leaves it, with rows every 10 steps; evaluations every 20."""
  cfg = with_settings(tiny_config(WSD), changes or {})
  rates = planned_rates(cfg)
  losses = law(rates) + offset
  folder.mkdir()
  workdir.write_config(folder, cfg)
  rows = []
  for step in range(10, (until or len(rates)) + 1, 10):
    rate, loss = float(rates[step - 1]), float(losses[step - 1])
    rows.append({"step": step, "train/loss": loss - 0.1, "train/learning_rate": rate})
    if step % 20 == 0:
      rows.append({"step": step, METRIC: loss})
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return folder


def halve_rates(run, steps, more=()):
  """Change the rows of a run as if its learning rate had been half of the schedule's there."""
  path = run / "metrics.jsonl"
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  for row in rows:
    if row["step"] in steps and "train/learning_rate" in row:
      row["train/learning_rate"] *= 0.5
  path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *more]))


@pytest.mark.thorough
def test_from_half_of_a_run_with_a_reference(tmp_path):
  run = make_run(tmp_path / "run")
  reference = make_run(tmp_path / "short", {"num_steps": 500, "seed": 3}, offset=0.1)
  flags = (f"--workdir={run}", f"--reference={reference}", "--at=500")
  known = json.loads(called("forecast", *flags, "--json", "--coverage=0.8").out)
  end = known["forecast"]
  assert end["loss"] == pytest.approx(end["found"], abs=0.02)
  assert end["low"] < end["found"] < end["high"]
  assert known["run"]["phase"] == "stable"
  assert known["run"]["reference_differs"] == {}
  wider = report(run, reference, METRIC, 500, coverage=0.99)["forecast"]
  assert wider["high"] - wider["low"] > 1.5 * (end["high"] - end["low"])
  # Plans: to decay now costs, to go on for longer wins, and each as the law has it.
  now, plan, *longer = known["plans"]
  assert (now["num_steps"], plan["num_steps"]) == (716, 1000)
  assert plan["change"] == {"loss": 0, "low": 0, "high": 0}
  for other in (now, *longer):
    rates = planned_rates(tiny_config(WSD | {"num_steps": other["num_steps"]}))
    true = law(rates)[-len(rates) // 50 :].mean()
    assert other["loss"] == pytest.approx(true, abs=0.04)
  text = called("forecast", *flags, "--worth=0.5").out
  assert "Decay now: --config.num_steps=716" in text
  assert "found at the end" in text
  assert "Go on: to decay now" in advise(known, 0.0, worth=0.001)[0]


def test_the_advised_steps_decay_at_once_and_without_a_jump():
  cfg = tiny_config(WSD)
  for step in (200, 333, 500, 699):
    rates = planned_rates(dataclasses.replace(cfg, num_steps=decay_from(cfg, step)))
    assert rates[step - 1] == pytest.approx(3e-3)
    assert 0.98 * 3e-3 < rates[step + 2] < 3e-3


def test_a_run_in_progress_and_rates_that_were_not_the_schedules(tmp_path):
  run = make_run(tmp_path / "run", until=600)
  halve_rates(run, range(301, 401))
  rates = read_curve(run, METRIC).rates
  assert (rates[200], rates[349], rates[500], len(rates)) == pytest.approx(
    (3e-3, 1.5e-3, 3e-3, 1000)
  )
  assert rates[-1] == pytest.approx(3e-4, rel=1e-4)
  known = report(run, None, METRIC)
  assert known["run"]["step"] == 600
  assert known["forecast"]["found"] is None


def test_what_the_orchestrator_set_holds_for_the_rates_to_come(tmp_path):
  """A rate that was cut and stays so is no decay, and what is planned goes on from it."""
  run = make_run(tmp_path / "run", until=600)
  scales = [{"step": at, "orchestrator/lr_scale": scale} for at, scale in ((390, 1.0), (600, 0.5))]
  halve_rates(run, range(401, 601), scales)
  curve, scheduled = read_curve(run, METRIC), planned_rates(tiny_config(WSD))
  np.testing.assert_allclose(curve.rates[60:400], scheduled[60:400], rtol=1e-6)
  np.testing.assert_allclose(curve.rates[410:], 0.5 * scheduled[410:], rtol=1e-6)
  longer = with_num_steps(tiny_config(WSD), curve, 2000)
  np.testing.assert_allclose(longer[600:1300], 1.5e-3, rtol=1e-6)
  known = report(run, make_run(tmp_path / "other", {"num_steps": 500}), METRIC)
  assert known["run"]["phase"] == "stable" and known["plans"]


def test_without_a_reference_there_is_no_low_end_and_one_of_another_recipe_is_named(tmp_path):
  run = make_run(tmp_path / "run", until=600)
  known = report(run, None, METRIC)
  assert known["forecast"]["low"] is None
  assert not known["plans"]
  assert "A --reference run" in advise(known, 0.0, 0.01)[0]
  assert "within ? to" in render(known, [])
  known = report(run, make_run(tmp_path / "wide", {"model.d_model": 64}), METRIC)
  assert known["run"]["reference_differs"]["model.d_model"] == (64, 32)
  assert "\n  model.d_model: 64 -> 32\n" in render(known, [])


def test_a_target(tmp_path):
  known = report(make_run(tmp_path / "run", until=800), None, METRIC)
  for target, said in (
    (1.0, "will miss 1.000"),
    (3.0, "will reach 3.000"),
    (known["forecast"]["loss"], "may reach"),
  ):
    advice = advise(known, target, 0.01)
    assert said in advice[0]
    assert advice[1] == "Let the decay end: a run is worth most after it."
  assert len(advise(known, 0.0, 0.01)) == 1


def test_what_is_wrong_is_said(tmp_path):
  run = make_run(tmp_path / "run", until=600)
  constant = make_run(tmp_path / "constant", {"optimizer.schedule": "constant"})
  bare = make_run(tmp_path / "bare")
  (bare / "metrics.jsonl").unlink()
  cut = make_run(tmp_path / "cut", {"num_steps": 500})
  config = json.loads((cut / workdir.CONFIG).read_text())
  workdir.write_json(cut / workdir.CONFIG, config | {"num_steps": 400})
  for folder, reference, metric, until, message in (
    (tmp_path, None, METRIC, 0, "holds no run"),
    (bare, None, METRIC, 0, r"metrics.jsonl is missing: .* log.writers"),
    (run, None, "eval/los", 0, r"no eval/los up to step 1000, but \['eval/loss'"),
    (run, None, METRIC, 100, r"0 points after step 100, .* 8 are needed"),
    (run, constant, METRIC, 0, "never lowered its learning rate"),
    (cut, None, METRIC, 0, "a row of step 500, after num_steps=400"),
  ):
    with pytest.raises(ValueError, match=message):
      report(folder, reference, metric, until)
  assert "--workdir is missing" in called("forecast").error()
  assert "coverage" in called("forecast", f"--workdir={run}", "--coverage=2").error()


def test_a_finished_run_has_nothing_to_forecast(tmp_path):
  run = make_run(tmp_path / "run")
  (line,) = called("forecast", f"--workdir={run}").out.splitlines()
  rates = planned_rates(workdir.load_config(run))
  assert line.startswith(
    f"{run}: finished at step 1,000 with {METRIC} {law(rates)[-1]:.3f}; --at=STEP"
  )


def test_a_report_has_the_forecast_of_a_run_that_has_not_ended(tmp_path):
  for until, fact in ((600, "at the end"), (200, "no forecast")):
    run = make_run(tmp_path / str(until), until=until)
    result = called("report", str(run), f"--json={run}.json")
    assert result.code == 0, result.err
    (found,) = json.loads((tmp_path / f"{until}.json").read_text())["runs"]
    (table,) = (figure for figure in found["figures"] if figure["title"] == "Forecast")
    assert fact in dict(table["rows"]), table
