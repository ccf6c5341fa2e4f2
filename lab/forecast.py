r"""How well the final loss is known from a part of the run: errors, and coverage of the intervals.

Trains tiny models of bytes and forecasts each from its first steps with a reference run, as
`python -m ats_jax forecast` does; prints tables for docs/guides/planning.md. Finished runs are
kept.
Command: python -m lab.forecast --folder=FOLDER [--seeds=101,102,103]
"""

from pathlib import Path

from absl import app, flags

from ats_jax.checkpoint import workdir
from ats_jax.verbs.forecast import decay_from, report
from lab.runs import Changes, finished, markdown, tiny_config

RUNS: dict[str, Changes] = {
  "base": {},
  "short": {"num_steps": 500},
  "narrow": {"model.d_model": 32, "model.d_ff": 96},
  "moe": {"moe.num_experts": 4, "moe.d_ff": 96},
  "cosine": {"optimizer.schedule": "cosine"},
}
TINY: Changes = {  # 0.2M parameters
  "num_steps": 1000,
  "model.d_model": 64,
  "model.d_ff": 192,
  "data.seq_len": 64,
  "optimizer.learning_rate": 3e-3,
  "eval.every_steps": 20,
  "eval.num_batches": 8,
  "checkpoint.every_steps": 1000,
}
# What is forecast, with which reference.
PAIRS = (
  ("base", "base"),
  ("base", "short"),
  ("moe", "moe"),
  ("cosine", "cosine"),
  ("base", "narrow"),
  ("moe", "base"),
  ("cosine", "base"),
)
FRACTIONS = (0.3, 0.5, 0.7, 0.9)
METRIC = "eval/loss"
REFERENCE_SEED = 0
_FOLDER = flags.DEFINE_string("folder", None, "Where runs are kept.", required=True)
_SEEDS = flags.DEFINE_list("seeds", ["101", "102", "103"], "Of the runs that are forecast.")


def trained(name: str, seed: int, changes: Changes | None = None) -> Path:
  """The workdir of a run; trained if it is not there."""
  parts = [name, str(seed), *(f"{k}={v}" for k, v in (changes or {}).items())]
  config = tiny_config(TINY | RUNS[name] | {"seed": seed} | (changes or {}))
  return finished(Path(_FOLDER.value) / "-".join(parts), config)


def errors_of(name: str, reference: str, fraction: float) -> tuple[str, int, int]:
  """Errors of the runs of each seed; how many intervals hold the loss, and of how many."""
  cells, inside, end = [], 0, {}
  for seed in _SEEDS.value:
    folder = trained(name, int(seed))
    steps = round(fraction * workdir.load_config(folder).num_steps)
    end = report(folder, trained(reference, REFERENCE_SEED), METRIC, steps)["forecast"]
    holds = end["low"] < end["found"] < end["high"]
    inside += holds
    cells.append(f"{end['loss'] - end['found']:+.3f}{'' if holds else '*'}")
  half = (end["high"] - end["low"]) / 2
  return f"{' '.join(cells)} (±{half:.3f})", inside, len(cells)


def final(folder: Path) -> float:
  """The mean loss over the last 50th, as `report` finds it."""
  found = report(folder, None, METRIC, round(0.9 * workdir.load_config(folder).num_steps))
  return found["forecast"]["found"]


def plans_of(seed: int, fraction: float) -> list[list[str]]:
  """What other numbers of steps were said to change from a half of the run, and what they did."""
  folder, rows = trained("base", seed), []
  steps = round(fraction * TINY["num_steps"])
  known = report(folder, trained("base", REFERENCE_SEED), METRIC, steps)
  assert known["plans"][0]["num_steps"] == decay_from(workdir.load_config(folder), steps)
  for plan in known["plans"]:
    if plan["num_steps"] not in (TINY["num_steps"], 2 * TINY["num_steps"]):
      other = trained("base", seed, {"num_steps": plan["num_steps"]})
      change = plan["change"]
      said = f"{change['loss']:+.3f} ({change['low']:+.3f} to {change['high']:+.3f})"
      was = final(other) - final(folder)
      rows.append([str(seed), str(plan["num_steps"]), said, f"{was:+.3f}"])
  return rows


def main(argv: list[str]) -> None:
  """Print the tables."""
  del argv
  rows, inside, of = [], 0, 0
  for name, reference in PAIRS:
    cells = [name, reference]
    for fraction in FRACTIONS:
      cell, held, runs = errors_of(name, reference, fraction)
      cells.append(cell)
      if name == reference or reference == "short":
        inside, of = inside + held, of + runs
    rows.append(cells)
    print(cells, flush=True)
  print(markdown(["run", "reference", *(f"from {f:.0%}" for f in FRACTIONS)], rows))
  print(f"of one recipe, 90 % intervals hold the loss: {inside} of {of}")
  plans = [row for seed in map(int, _SEEDS.value) for row in plans_of(seed, 0.5)]
  print(markdown(["seed", "num_steps", "said to change", "changed"], plans))


if __name__ == "__main__":
  app.run(main)
