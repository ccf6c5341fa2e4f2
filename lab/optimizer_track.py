r"""Which optimizer reaches a validation loss in how many steps: one model, text and batch for all.

Every optimizer trains at each of its learning rates. The target is the lowest loss that the first
optimizer ends with, at its best rate. A row says when a run first is there: steps, seconds of steps
(without compilation and evaluation), and the peak of device memory. A second table has differences
of last losses to the first optimizer's, of equal seeds, thus of equal data and initialisation.

With --tune_steps, runs of that length choose the rate among those given, and beyond their ends
while the best is one of them, and the long runs are at that rate. Each run writes its row as it
ends; a second call goes on from rows and checkpoints. Several calls at once share the runs of a
folder.

Command: python -m lab.optimizer_track --out=FOLDER [--config=configs/debug.py] [--steps=400] \
  [--every=20] [--seeds=1] [--once=lion] [--rates=adamw=1e-3,adamw=3e-3,muon=3e-3] \
  [--tune_steps=80] [--set=data.batch_size=64]
"""

import fcntl
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from ats_jax.checkpoint import workdir
from ats_jax.config.file import load_file
from ats_jax.config.text import parse
from ats_jax.config.tree import edited
from ats_jax.metrics.rows import read_jsonl
from lab.runs import finished, markdown, named_values

EXTENSIONS = 2  # rates beyond those given, each a factor of two further
_OUT = flags.DEFINE_string("out", None, "Folder of runs, each with its row.", required=True)
_CONFIG = flags.DEFINE_string("config", "debug", "Of all runs.")
_STEPS = flags.DEFINE_integer("steps", 400, "Of each run.", lower_bound=1)
_EVERY = flags.DEFINE_integer("every", 20, "Steps between evaluations.", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of each optimizer and rate.", lower_bound=1)
_ONCE = flags.DEFINE_list("once", [], "Optimizers of which there is one run, for --seeds.")
_TUNE = flags.DEFINE_integer("tune_steps", 0, "Of runs that choose rates; 0 = none.", lower_bound=0)
_TABLE = flags.DEFINE_bool("table", False, "Train nothing: print the table of what is there.")
_RATES = flags.DEFINE_list(
  "rates", ["adamw=1e-3", "adamw=3e-3", "muon=1e-3", "muon=3e-3"], "OPTIMIZER=RATE of each run."
)
_SET = flags.DEFINE_multi_string("set", [], "NAME=VALUE,... of all runs.")


class Run(NamedTuple):
  """What is to be trained."""

  optimizer: str
  rate: float
  seed: int
  steps: int

  @property
  def folder(self) -> Path:
    """Its workdir."""
    return Path(_OUT.value) / f"{self.optimizer}-{self.rate:g}-{self.seed}-{self.steps}"


class Row(NamedTuple):
  """A run: its validation losses by step, and what it took."""

  optimizer: str
  rate: float
  seed: int
  losses: dict[int, float]
  step_secs: float
  peak_gib: float
  wait_share: float

  @property
  def last(self) -> float:
    """The loss at the end."""
    return self.losses[max(self.losses)]

  def steps_to(self, target: float) -> int:
    """Steps until the loss is at most `target`; 0 = never."""
    return next((step for step, loss in sorted(self.losses.items()) if loss <= target), 0)


def config_of(run: Run) -> dict[str, str]:
  """Settings of one run, as flags would have them."""
  changes = {
    "seed": str(run.seed),
    "num_steps": str(run.steps),
    "optimizer.name": run.optimizer,
    "optimizer.learning_rate": str(run.rate),
    "eval.every_steps": str(_EVERY.value),
    "log.every_steps": str(_EVERY.value),
    "log.writers": "jsonl",
    "log.progress": "false",
    "sample.max_tokens": "0",
    "checkpoint.every_steps": str(run.steps),
  }
  if run.optimizer == "schedule_free":
    changes["optimizer.schedule"] = "constant"
  return changes | named_values(_SET.value)


def train_one(run: Run) -> None:
  """Train, and write the row."""
  values = edited(load_file(_CONFIG.value).to_dict())
  for name, text in config_of(run).items():
    values.assign({name: parse(name, text, values.to_dict())})
  folder = finished(run.folder, values)
  if not (folder / workdir.CHECKPOINTS / str(run.steps)).exists():
    raise SystemExit(f"{folder}: stopped by a signal; the same command goes on.")
  rows = read_jsonl(folder / "metrics.jsonl")
  of = lambda name: {row["step"]: row[name] for row in rows if row.get(name) is not None}
  # An interval that compiles does not count.
  secs = [1.0 / speed for speed in of("train/steps_per_sec").values()]
  waits, peaks = of("goodput/data_wait_share"), of("memory/device_peak_gib")
  row = Row(
    *run[:3],
    {row["step"]: _number(row["eval/loss"]) for row in rows if "eval/loss" in row},
    statistics.median(secs) if secs else float("nan"),
    max(peaks.values(), default=0.0),
    waits[max(waits)],
  )
  part = run.folder / "row.part"
  part.write_text(json.dumps(row._asdict()))
  part.rename(run.folder / "row.json")


def _number(loss: float | None) -> float:
  return float("nan") if loss is None else loss  # as the log has it where training diverged


def row_of(run: Run) -> Row | None:
  """What the run has written; None = it has not ended."""
  path = run.folder / "row.json"
  if not path.exists():
    return None
  row = Row(**json.loads(path.read_text()))
  return row._replace(losses={int(step): loss for step, loss in row.losses.items()})


def tuning(optimizer: str, rates: list[float]) -> list[Run]:
  """The runs that choose a rate, as far as they are known."""
  of_rate = lambda rate: Run(optimizer, rate, 0, _TUNE.value)
  for _ in range(EXTENSIONS):
    found = best(list(map(of_rate, rates)))
    if found == min(rates):
      rates = [found / 2, *rates]
    elif found == max(rates):
      rates = [*rates, 2 * found]
  return list(map(of_rate, rates))


def best(runs: list[Run]) -> float:
  """The rate of the lowest last loss; 0 = not all have ended."""
  rows = [row for run in runs if (row := row_of(run))]
  if len(rows) < len(runs):
    return 0.0
  return min(rows, key=lambda row: row.last if row.last == row.last else float("inf")).rate


def all_runs() -> list[Run]:
  """Those known so far: the long ones of an optimizer come when its rate is chosen."""
  rates: dict[str, list[float]] = defaultdict(list)
  for text in _RATES.value:
    optimizer, _, rate = text.partition("=")
    rates[optimizer].append(float(rate))
  short, long = [], []
  for optimizer, of_it in rates.items():
    if _TUNE.value:
      runs = tuning(optimizer, sorted(of_it))
      short += runs
      of_it = [best(runs)]
    for seed in range(1 if optimizer in _ONCE.value else _SEEDS.value):
      long += [Run(optimizer, rate, seed, _STEPS.value) for rate in of_it]
  return short + sorted(long, key=lambda run: run.seed)


def to_do() -> Iterator[Run]:
  """Runs that no other process has, each until the next one is asked for; ends when all ended."""
  while left := [run for run in all_runs() if not row_of(run)]:
    for run in left:
      if not run.rate:
        continue
      run.folder.mkdir(parents=True, exist_ok=True)
      with (run.folder.parent / f"{run.folder.name}.lock").open("w") as file:
        try:
          fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, at most
        except BlockingIOError:
          continue
        if not row_of(run):
          yield run
          break
    else:
      time.sleep(2.0)


def paired(rows: list[Row]) -> str:
  """Differences of last losses to those of the first optimizer, of equal seeds."""
  lasts: dict[str, dict[int, float]] = defaultdict(dict)
  for row in rows:
    lasts[row.optimizer][row.seed] = row.last
  first, *others = lasts
  lines = []
  for name in others:
    seeds = sorted(lasts[name].keys() & lasts[first].keys())
    shares = [100 * (lasts[name][seed] / lasts[first][seed] - 1) for seed in seeds]
    if len(seeds) > 1:
      error = statistics.stdev(shares) / len(seeds) ** 0.5
      lines.append([name, f"{statistics.mean(shares):+.3f}", f"{error:.3f}", str(len(seeds))])
  header = ["optimizer", f"last loss over that of {first}, %", "standard error", "seeds"]
  return markdown(header, lines)


def table(rows: list[Row]) -> str:
  """The best rate of each optimizer, by the mean of its last losses."""
  runs: dict[str, dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
  for row in rows:
    runs[row.optimizer][row.rate].append(row)
  mean = lambda of: sum(of) / len(of)
  best_of = {
    name: min(by_rate.values(), key=lambda group: mean([row.last for row in group]))
    for name, by_rate in runs.items()
  }
  target = mean([row.last for row in next(iter(best_of.values()))])
  lines, chosen = [], [row for group in best_of.values() for row in group]
  for name, group in best_of.items():
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
  return f"target {target:.4f}\n{markdown(header, lines)}\n\n{paired(chosen)}"


def main(argv: list[str]) -> None:
  """Train what no other process trains, and print the tables."""
  del argv
  for run in to_do() if not _TABLE.value else ():
    train_one(run)
  runs = all_runs()
  short = [row for run in runs if run.steps == _TUNE.value and (row := row_of(run))]
  for row in short:
    print(f"{row.optimizer} at {row.rate:g}: {row.last:.4f} after {_TUNE.value} steps")
  if rows := [row for run in runs if run.steps == _STEPS.value and (row := row_of(run))]:
    print(table(rows))


if __name__ == "__main__":
  app.run(main)
