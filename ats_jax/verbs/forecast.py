"""The final loss of a run from its rows so far, with an interval; and whether to decay now.

  ats-jax forecast --workdir=runs/long --reference=runs/short
  ats-jax forecast --workdir=runs/long --reference=runs/short --target=2.9 --json

Nothing is changed, and no GPU is used: it may run beside the run that it reads.
"""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from ats_jax.checkpoint import workdir
from ats_jax.config import Config
from ats_jax.config.names import differences, flatten
from ats_jax.metrics.rows import read_jsonl
from ats_jax.planner.curve import BINS, Curve, Forecast, fit_curve, forecast, schedule_phase
from ats_jax.step.schedule import decay_from, learning_rate
from ats_jax.store import paths
from ats_jax.store.paths import Path
from ats_jax.verbs import cli

FLAGS = flags.FlagValues()
_WORKDIR = cli.define_workdir_flag(FLAGS)
_REFERENCE = flags.DEFINE_string(
  "reference",
  None,
  "Workdir of a finished run of the same recipe: other seed, or fewer steps.",
  flag_values=FLAGS,
)
_METRIC = flags.DEFINE_string(
  "metric", "eval/loss", "Which loss: eval/loss or train/loss.", flag_values=FLAGS
)
_AT = flags.DEFINE_integer(
  "at", 0, "Use rows up to this step; 0 = all.", lower_bound=0, flag_values=FLAGS
)
_COVERAGE = flags.DEFINE_float("coverage", 0.9, "Of the intervals.", 0.01, 0.99, flag_values=FLAGS)
_TARGET = flags.DEFINE_float(
  "target", 0.0, "A loss to reach; 0 = none.", lower_bound=0.0, flag_values=FLAGS
)
WORTH = 0.01
_WORTH = flags.DEFINE_float(
  "worth",
  WORTH,
  "Nats that the rest of the stable phase must win to be worth it.",
  lower_bound=0.0,
  flag_values=FLAGS,
)
_JSON = flags.DEFINE_bool("json", False, "Print JSON.", flag_values=FLAGS)
LATER = (1.0, 1.5, 2.0)  # plans to compare with, as multiples of num_steps
# What makes two runs of one family, or not.
RECIPE = ("model.", "moe.", "mod.", "data.", "optimizer.")


def read_curve(folder: Path, metric: str, until: int = 0) -> Curve:
  """The curve of the run in a workdir.

  Learning rates are those that its updates were made with, as logged, and from its last row on
  those of its schedule, times what the orchestrator had set by then.

  Args:
    folder: its workdir.
    metric: a loss in its metrics.jsonl.
    until: the last step to know of; 0 = all.

  Raises:
    ValueError: if there is no such run or no such row.
  """
  cfg, path = workdir.load_config(folder), folder / "metrics.jsonl"
  if not path.exists():
    raise ValueError(f"{path} is missing: forecasts read it. Train with jsonl in log.writers.")
  rows = [row for row in read_jsonl(path) if row["step"] <= (until or math.inf)]
  for row in rows:
    for name in (metric, "train/learning_rate", "orchestrator/lr_scale"):
      if not isinstance(row.get(name, 0.0), int | float):
        raise ValueError(f"{path}: {name} of step {row['step']} is no number: {row[name]!r:.40}.")
  column = lambda name: np.array([(r["step"], r[name]) for r in rows if name in r]).reshape(-1, 2).T
  (steps, losses), (logged, past) = column(metric), column("train/learning_rate")
  if not (len(steps) and len(logged)):
    names = sorted({name for row in rows for name in row if name.endswith("/loss")})
    raise ValueError(
      f"{path} holds no {metric} up to step {until or cfg.num_steps}, but {names}. Choose another "
      "--metric, a later --at, or train with eval.every_steps."
    )
  scale = float(column("orchestrator/lr_scale")[1][-1:].prod())  # 1 where there is none
  rates = scale * planned_rates(cfg)
  if steps[-1] > len(rates):
    raise ValueError(
      f"{path} has a row of step {steps[-1]:.0f}, after num_steps={len(rates)} of its config."
    )
  done = np.arange(int(logged[-1]))
  rates[: len(done)] = np.interp(done + 1, logged, past)
  return Curve(steps.astype(int), losses, rates, scale)


def planned_rates(cfg: Config) -> np.ndarray:
  """The schedule of a config: [num_steps]."""
  return np.array(learning_rate(cfg, jnp.arange(cfg.num_steps)), np.float64)


def with_num_steps(cfg: Config, curve: Curve, num_steps: int) -> np.ndarray:
  """Rates of the run if it goes on from its last point with another `num_steps`."""
  step = curve.steps[-1]
  rates = curve.scale * planned_rates(dataclasses.replace(cfg, num_steps=num_steps))
  return np.concatenate([curve.rates[:step], rates[step:]])


def report(
  folder: Path, reference: Path | None, metric: str, until: int = 0, coverage: float = 0.9
) -> dict[str, Any]:
  """What is known of the end of a run.

  Args:
    folder: its workdir.
    reference: that of a finished run of its family.
    metric: the loss.
    until: the last step to use; 0 = all.
    coverage: of the intervals.

  Returns:
    `run`, `forecast` and `plans` (other `num_steps`, while WSD is stable), as numbers. Losses are
    means over the last 50th of a run; one whose decay is not known has the low end None.

  Raises:
    ValueError: as `read_curve` and `fit_curve`.
  """
  cfg, curve = workdir.load_config(folder), read_curve(folder, metric, until)
  family, differs = None, {}
  if reference:
    family = fit_curve(read_curve(reference, metric))
    if not family.is_annealed:
      raise ValueError(
        f"{reference} never lowered its learning rate, so it cannot tell what that wins. Take a "
        "reference run that has decayed."
      )
    of_reference = flatten(workdir.load_config(reference))
    found = differences(of_reference, flatten(cfg))
    differs = {n: (a, b) for n, (a, b, _) in found.items() if n.startswith(RECIPE)}
  fitted, step = fit_curve(curve, family), int(curve.steps[-1])
  here = forecast(curve, fitted)

  def numbers(of: Forecast) -> dict[str, float | None]:
    low, high = of.interval(coverage)
    return {"loss": of.loss, "low": low if math.isfinite(low) else None, "high": high}

  now = schedule_phase(planned_rates(cfg), step)
  whole = read_curve(folder, metric)
  last = whole.losses[whole.steps > len(whole.rates) * (BINS - 1) // BINS]
  plans = []
  if now == "stable" and cfg.optimizer.schedule.name == "wsd" and here.is_annealed:
    for steps in (decay_from(cfg, step), *(round(m * cfg.num_steps) for m in LATER)):
      other = forecast(curve, fitted, with_num_steps(cfg, curve, steps))
      change = Forecast(other.samples - here.samples, here.is_annealed)
      plans.append({"num_steps": steps, **numbers(other), "change": numbers(change)})
  return {
    "run": {
      "workdir": str(folder),
      "step": step,
      "num_steps": cfg.num_steps,
      "phase": now,
      "metric": metric,
      "points": len(curve.steps),
      "last": float(curve.losses[-1]),
      "scatter": fitted.scatter,
      "reference": str(reference) if reference else None,
      "reference_differs": differs,
    },
    "forecast": {
      **numbers(here),
      "coverage": coverage,
      "found": float(last.mean()) if step < cfg.num_steps and len(last) else None,
    },
    "plans": plans,
  }


def advise(known: dict[str, Any], target: float, worth: float) -> list[str]:
  """What to do, in sentences.

  Args:
    known: of `report`.
    target: a loss to reach; 0 = none.
    worth: nats that the rest of the stable phase must win.
  """
  end, advice = known["forecast"], []
  if target and end["low"] is not None and end["low"] > target:
    advice.append(f"It will miss {target:.3f}, even at the low end. Stop, or train for longer.")
  elif target and end["high"] <= target:
    advice.append(f"It will reach {target:.3f}, even at the high end.")
  elif target:
    advice.append(f"It may reach {target:.3f}: that lies within the interval.")
  if known["plans"]:
    soonest = known["plans"][0]
    lost = soonest["change"]
    costs = f"{lost['loss']:+.4f} ({lost['low']:+.4f} to {lost['high']:+.4f})"
    if lost["high"] < worth:
      advice.append(
        f"Decay now: --config.num_steps={soonest['num_steps']} changes the final loss by {costs}, "
        f"less than --worth={worth}."
      )
    else:
      advice.append(f"Go on: to decay now changes the final loss by {costs}.")
  elif end["low"] is None:
    advice.append(
      "What the decay of the learning rate will win is not in this number: it is a bound from "
      "above. A --reference run of the same recipe, of half the steps, tells."
    )
  elif known["run"]["phase"] == "decay":
    advice.append("Let the decay end: a run is worth most after it.")
  return advice


def render(known: dict[str, Any], advice: list[str]) -> str:
  """The numbers of `report` and the advice as text."""
  run, end = known["run"], known["forecast"]
  if run["step"] >= run["num_steps"]:
    return (
      f"{run['workdir']}: finished at step {run['step']:,} with {run['metric']} {run['last']:.3f}; "
      "--at=STEP forecasts that from its rows up to a step"
    )
  interval = lambda x: f"{'?' if x['low'] is None else format(x['low'], '.3f')} to {x['high']:.3f}"
  lines = [
    f"{run['workdir']}: step {run['step']:,} of {run['num_steps']:,}, {run['phase']}; "
    f"{run['metric']} {run['last']:.3f}, {run['points']} points, scatter {run['scatter']:.3f}",
    f"at the end: {end['loss']:.3f}, {end['coverage']:.0%} within {interval(end)}",
  ]
  if end["found"] is not None:
    lines.append(f"found at the end: {end['found']:.3f}, {end['loss'] - end['found']:+.3f} off")
  if run["reference_differs"]:
    lines.append("the reference differs from the run, which the interval does not know:")
    lines += [f"  {n}: {was!r} -> {now!r}" for n, (was, now) in run["reference_differs"].items()]
  if known["plans"]:
    lines += ["", f"{'num_steps':>12}{'at the end':>12}{'interval':>20}{'against the plan':>18}"]
    lines += [
      f"{plan['num_steps']:>12,}{plan['loss']:>12.3f}{interval(plan):>20}"
      f"{plan['change']['loss']:>+18.4f}"
      for plan in known["plans"]
    ]
  return "\n".join([*lines, "", *advice]).rstrip()


def main(argv: list[str]) -> None:
  """Print the forecast of a run."""
  del argv
  jax.config.update("jax_platforms", "cpu")  # leave a GPU to the run
  folder = paths.parse(cli.require(_WORKDIR.value, "workdir", "runs/debug"))
  reference = paths.parse(_REFERENCE.value) if _REFERENCE.value else None
  known = report(folder, reference, _METRIC.value, _AT.value, _COVERAGE.value)
  advice = advise(known, _TARGET.value, _WORTH.value)
  print(json.dumps(known | {"advice": advice}) if _JSON.value else render(known, advice))


COMMANDS = {"": cli.Command(main, FLAGS, __doc__)}
