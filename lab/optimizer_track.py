r"""Which optimizer reaches a validation loss in how many steps: one model, text and batch for all.

Every optimizer trains at each of its learning rates. The target is the lowest loss that the first
optimizer ends with, at its best rate. A row says when a run first is there: steps, seconds of steps
(without compilation and evaluation), and the peak of device memory. Rows are written as runs end,
and a second call goes on from them.

Command: python -m lab.optimizer_track --out=FOLDER [--config=configs/debug.py] [--steps=400] \
  [--every=20] [--seeds=1] [--rates=adamw=1e-3,adamw=3e-3,muon=3e-3] [--set=data.batch_size=64]
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from ats_jax.config.file import load_file
from ats_jax.config.text import parse
from ats_jax.config.tree import edited
from ats_jax.metrics.rows import read_jsonl
from lab.runs import finished, markdown

_OUT = flags.DEFINE_string("out", None, "Folder of runs and rows.jsonl.", required=True)
_CONFIG = flags.DEFINE_string("config", "debug", "Of all runs.")
_STEPS = flags.DEFINE_integer("steps", 400, "Of each run.", lower_bound=1)
_EVERY = flags.DEFINE_integer("every", 20, "Steps between evaluations.", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of each optimizer and rate.", lower_bound=1)
_RATES = flags.DEFINE_list(
  "rates", ["adamw=1e-3", "adamw=3e-3", "muon=1e-3", "muon=3e-3"], "OPTIMIZER=RATE of each run."
)
_SET = flags.DEFINE_list("set", [], "NAME=VALUE of settings of all runs.")


class Row(NamedTuple):
  """A run: its validation losses by step, and what it took."""

  optimizer: str
  rate: float
  seed: int
  losses: dict[int, float]
  step_secs: float
  peak_gib: float

  @property
  def last(self) -> float:
    """The loss at the end."""
    return self.losses[max(self.losses)]

  def steps_to(self, target: float) -> int:
    """Steps until the loss is at most `target`; 0 = never."""
    return next((step for step, loss in sorted(self.losses.items()) if loss <= target), 0)


def config_of(optimizer: str, rate: str, seed: int) -> dict[str, str]:
  """Settings of one run, as flags would have them."""
  changes = {
    "seed": str(seed),
    "num_steps": str(_STEPS.value),
    "optimizer.name": optimizer,
    "optimizer.learning_rate": rate,
    "eval.every_steps": str(_EVERY.value),
    "log.every_steps": str(_EVERY.value),
    "log.writers": "jsonl",
    "log.progress": "false",
    "sample.max_tokens": "0",
    "checkpoint.every_steps": str(_STEPS.value),
  }
  if optimizer == "schedule_free":
    changes["optimizer.schedule"] = "constant"
  return changes | dict(text.split("=", 1) for text in _SET.value)


def train_one(out: Path, optimizer: str, rate: str, seed: int) -> Row:
  """Train, or read what a run has logged that is done."""
  values = edited(load_file(_CONFIG.value).to_dict())
  for name, text in config_of(optimizer, rate, seed).items():
    values.assign({name: parse(name, text, values.to_dict())})
  folder = finished(out / f"{optimizer}-{rate}-{seed}", values)
  rows = read_jsonl(folder / "metrics.jsonl")
  of = lambda name: {row["step"]: row[name] for row in rows if row.get(name) is not None}
  speeds, peaks = of("train/steps_per_sec"), of("memory/device_peak_gib")
  # The first interval compiles.
  secs = [1.0 / speed for step, speed in sorted(speeds.items())][1:]
  mean = sum(secs) / len(secs) if secs else float("nan")
  return Row(optimizer, float(rate), seed, of("eval/loss"), mean, max(peaks.values(), default=0.0))


def table(rows: list[Row]) -> str:
  """The best rate of each optimizer, by the mean of its last losses."""
  runs: dict[str, dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
  for row in rows:
    runs[row.optimizer][row.rate].append(row)
  mean = lambda of: sum(of) / len(of)
  best = {
    name: min(by_rate.values(), key=lambda group: mean([row.last for row in group]))
    for name, by_rate in runs.items()
  }
  target = mean([row.last for row in next(iter(best.values()))])
  lines = []
  for name, group in best.items():
    steps = [row.steps_to(target) for row in group]
    reached = [n for n in steps if n]
    secs = mean([row.step_secs for row in group])
    lines.append(
      [
        name,
        f"{group[0].rate:g}",
        f"{mean([row.last for row in group]):.4f}",
        f"{mean(reached):.0f}" if len(reached) == len(steps) else f"{len(reached)} of {len(steps)}",
        f"{1e3 * secs:.1f}",
        f"{mean(reached) * secs:.0f}" if reached else "",
        f"{max(row.peak_gib for row in group):.2f}",
      ]
    )
  header = ["optimizer", "rate", "last loss", "steps", "ms a step", "seconds", "peak GiB"]
  return f"target {target:.4f}\n{markdown(header, lines)}"


def main(argv: list[str]) -> None:
  """Train, write rows.jsonl as runs end, and print the table."""
  del argv
  out, rows = Path(_OUT.value), []
  out.mkdir(parents=True, exist_ok=True)
  with (out / "rows.jsonl").open("w") as file:
    for text in _RATES.value:
      optimizer, _, rate = text.partition("=")
      for seed in range(_SEEDS.value):
        rows.append(train_one(out, optimizer, rate, seed))
        print(json.dumps(rows[-1]._asdict() | {"last": rows[-1].last}), file=file, flush=True)
  print(table(rows))


if __name__ == "__main__":
  app.run(main)
