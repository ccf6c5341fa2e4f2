r"""Experts with far too few places: what the orchestrator makes of it (F10 of docs/lab/faults.md).

Trains a tiny mixture of experts on bytes with `ats_jax train`: with a quarter of the places that
experts need, left alone and under the orchestrator, and with enough of them.
Command: python -m lab.capacity --folder=FOLDER [--seeds=100,101,102]
"""

from pathlib import Path

from absl import app, flags

from ats_jax.checkpoint import workdir
from ats_jax.metrics.rows import read_jsonl
from ats_jax.orchestrator.actions import ChangeSettings
from ats_jax.orchestrator.record import ledger
from lab.runs import Changes, finished, markdown, tiny_config

WAYS: dict[str, Changes] = {
  "0.25": {"moe.capacity_factor": 0.25},
  "0.25, acting": {"moe.capacity_factor": 0.25, "orchestrator.mode": "act"},
  "1.25": {"moe.capacity_factor": 1.25},
  "1.25, acting": {"moe.capacity_factor": 1.25, "orchestrator.mode": "act"},
}
TINY: Changes = {  # eight experts of which a token uses two
  "num_steps": 500,
  "model.d_model": 48,
  "model.num_heads": 4,
  "model.num_kv_heads": 4,
  "model.d_ff": 128,
  "moe.num_experts": 8,
  "moe.d_ff": 64,
  "moe.dispatch": "capacity",
  "data.seq_len": 32,
  "data.batch_size": 16,
  "data.validation_fraction": 0.002,
  "optimizer.learning_rate": 4e-3,
  "orchestrator.check_interval": 5,
  "checkpoint.every_steps": 50,
  "eval.num_batches": 64,
  "log.every_steps": 1,
}
_FOLDER = flags.DEFINE_string("folder", None, "Where runs are kept.", required=True)
_SEEDS = flags.DEFINE_list("seeds", ["100", "101", "102", "103", "104"], "Of the runs.")


def outcome(way: str, seed: int) -> list[str]:
  """Final loss, share dropped in the last ten steps, steps to balance, and what was done when."""
  config = tiny_config(TINY | WAYS[way] | {"seed": seed})
  folder = finished(Path(_FOLDER.value) / f"{way}-{seed}", config)
  rows = read_jsonl(folder / "metrics.jsonl")
  steps = {row["step"]: row for row in rows if "moe/dropped" in row}
  loss = [row["eval/loss"] for row in rows if "eval/loss" in row][-1]
  last = [steps[step]["moe/dropped"] for step in sorted(steps)[-10:]]
  path = folder / workdir.DECISIONS
  made = ledger.decisions(path) if path.exists() else []
  deeds = [
    f"{step}: {dict(decision.action.settings)['moe.capacity_factor']:g}"
    for step, decision in made
    if isinstance(decision.action, ChangeSettings)
  ]
  return [f"{loss:.3f}", f"{sum(last) / len(last):.3f}", ", ".join(deeds) or "-"]


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  lines = []
  for way in WAYS:
    for seed in map(int, _SEEDS.value):
      lines.append([way, str(seed), *outcome(way, seed)])
      print(lines[-1], flush=True)
  print(markdown(["moe.capacity_factor", "seed", "loss", "dropped at the end", "changed"], lines))


if __name__ == "__main__":
  app.run(main)
