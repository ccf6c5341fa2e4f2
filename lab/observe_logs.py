"""When the orchestrator would have spoken: its rules for training losses, on logs.

A log is a metrics.jsonl, or a CSV file with the columns step and loss (or train/loss). The log is
one source of which nothing is held out. Prints alarms per 100,000 steps; with `--spikes`, the steps
at which a loss is known to leave its course, also how many steps later each is seen.

python -m lab.observe_logs runs/mine/metrics.jsonl loss.csv [--interval=100] [--spikes=12000,41500]
"""

import csv
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import app, flags

from ats_jax.config.schema import OrchestratorConfig
from ats_jax.metrics.rows import read_jsonl
from ats_jax.orchestrator.policy.decide import Interval, Terms, decide
from ats_jax.orchestrator.policy.state import PolicyState
from ats_jax.orchestrator.signals.interval import Reading, SourceLoss
from lab.runs import markdown

BELONGS = 10  # looks behind a spike whose alarm is taken to be of it
NAMES, RATE = ("train/loss", "loss"), "train/learning_rate"
_INTERVAL = flags.DEFINE_integer(
  "interval", OrchestratorConfig.check_interval, "Steps between two looks.", lower_bound=1
)
_SPIKES = flags.DEFINE_list("spikes", [], "Steps at which the loss leaves its course; of one file.")


class Alarm(NamedTuple):
  """What a look says; `step` is that of the look, an interval behind what it reads."""

  step: int
  reason: str


class Course(NamedTuple):
  """Losses by step, in order."""

  steps: np.ndarray
  losses: np.ndarray
  rates: np.ndarray  # 0 where the log has none


def read(path: Path) -> Course:
  """The losses of a log; of a step that is there twice, the last.

  Raises:
    ValueError: if there are none, or one is no number.
  """
  if path.suffix == ".csv":
    with path.open(newline="", encoding="utf-8") as file:
      rows = list(csv.DictReader(file))
  else:
    rows = read_jsonl(path)
  found = dict[int, tuple[float, float]]()
  for number, row in enumerate(rows, 1):
    values = [row[name] for name in NAMES if row.get(name) not in (None, "")]
    if values:
      try:
        found[int(row["step"])] = float(values[0]), float(row.get(RATE) or 0.0)
      except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{path}: row {number} has no step and loss ({e!r}).") from e
  if not found:
    raise ValueError(f"{path} has no losses. Give a metrics.jsonl, or columns step and loss.")
  steps = sorted(found)
  return Course(np.array(steps), *np.array([found[step] for step in steps]).T)


def readings(course: Course, interval: int) -> Iterator[Reading]:
  """What looks would read, `interval` steps each; those without a row are left out."""
  looks = (course.steps - 1) // interval
  for look in np.unique(looks):
    here = looks == look
    losses, rate = course.losses[here], float(course.rates[here][-1])
    finite = losses[np.isfinite(losses)]
    sources = {}
    if len(finite) > 1:
      error = float(np.std(finite, ddof=1) / math.sqrt(len(finite)))
      sources["log"] = SourceLoss(float(np.mean(finite)), error, 1.0)
    sound = np.flatnonzero(np.isfinite(losses))
    yield Reading(
      first=int(look) * interval + 1,
      step=int(look + 1) * interval,
      loss=float(np.median(finite)) if len(finite) else math.nan,
      held={},
      sound=True,  # the weights, of which a log says nothing
      nonfinite=len(losses) - len(finite),
      broken=len(losses) - 1 - int(sound[-1]) if len(sound) else len(losses),
      held_steps=0,
      learning_rate=rate,
      applied=rate,
      means={},
      sources=sources,
    )


def alarms(course: Course, interval: int) -> list[Alarm]:
  """Of a log: the looks at which something begins to be wrong."""
  terms, policy = Terms(OrchestratorConfig(mode="observe", check_interval=interval)), PolicyState()
  found, lasts = list[Alarm](), False
  for reading in readings(course, interval):
    at = reading.step + interval
    policy, judgement = decide(terms, policy, Interval(reading), at)
    reasons = [rise.says for rise in judgement.rises]
    reasons += [judgement.finding.reason] if judgement.finding is not None else []
    if reasons and not lasts:
      found.append(Alarm(at, reasons[0]))
    lasts = bool(reasons)
  return found


def delays(
  found: Sequence[Alarm], spikes: Sequence[int], interval: int
) -> tuple[list[int | None], int]:
  """For each spike how many steps later it is seen, None = it is not; and the alarms elsewhere."""
  own = [
    [x for x in found if spike < x.step <= min(end, spike + BELONGS * interval)]
    for spike, end in itertools.pairwise([*spikes, math.inf])
  ]
  after = [some[0].step - spike if some else None for some, spike in zip(own, spikes, strict=True)]
  return after, len(found) - sum(map(len, own))


def main(argv: list[str]) -> None:
  """Print the alarms of each log, and a table."""
  paths, interval, spikes = argv[1:], _INTERVAL.value, sorted(map(int, _SPIKES.value))
  if not paths or (spikes and len(paths) > 1):
    raise app.UsageError("give one or more logs; with --spikes, one")
  rows = []
  for name in paths:
    course = read(Path(name))
    found, length = alarms(course, interval), int(course.steps[-1] - course.steps[0]) + 1
    for alarm in found:
      print(f"{name}: step {alarm.step:,}: {alarm.reason}")
    after, elsewhere = delays(found, spikes, interval)
    seen = ", ".join("not seen" if delay is None else f"{delay:,}" for delay in after)
    rows.append([name, f"{length:,}", str(len(found)), f"{elsewhere / length * 1e5:.1f}", seen])
  head = ["log", "steps", "alarms", "elsewhere, per 100,000 steps", "steps from each spike"]
  print(markdown(head, rows))


if __name__ == "__main__":
  app.run(main)
