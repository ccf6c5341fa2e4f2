r"""Experts with far too few places: what the orchestrator makes of it (F10 of docs/faults.md).

Trains a tiny mixture of experts on bytes with `ats_jax train`: with a quarter of the places that
experts need, left alone and under the orchestrator, and with enough of them.
Command: python experiments/capacity.py --folder=FOLDER [--seeds=100,101,102]
"""

from pathlib import Path

from absl import app, flags
from runs import Changes, markdown

from ats_jax import runtime, workdir
from ats_jax.config import base_config, from_config_dict
from ats_jax.metrics.rows import read_jsonl
from ats_jax.orchestrator.actions import ChangeSettings
from ats_jax.orchestrator.record import ledger
from ats_jax.train import train

WAYS: dict[str, Changes] = {
  "0.25": {"moe.capacity_factor": 0.25},
  "0.25, acting": {"moe.capacity_factor": 0.25, "orchestrator.mode": "act"},
  "1.25": {"moe.capacity_factor": 1.25},
  "1.25, acting": {"moe.capacity_factor": 1.25, "orchestrator.mode": "act"},
}
_FOLDER = flags.DEFINE_string("folder", None, "Where runs are kept.", required=True)
_SEEDS = flags.DEFINE_list("seeds", ["100", "101", "102", "103", "104"], "Of the runs.")


def tiny_config():
  """Two layers of eight experts of which a token uses two, on Python's standard library."""
  config = base_config()
  config.num_steps = 500
  config.model.num_layers = 2
  config.model.d_model = 48
  config.model.num_heads = 4
  config.model.num_kv_heads = 4
  config.model.d_ff = 128
  config.moe.num_experts = 8
  config.moe.d_ff = 64
  config.moe.dispatch = "capacity"
  config.data.tokenizer = "bytes"
  config.data.seq_len = 32
  config.data.batch_size = 16
  config.data.validation_fraction = 0.002
  config.optimizer.learning_rate = 4e-3
  config.optimizer.warmup_steps = 50
  config.optimizer.schedule = "wsd"
  config.optimizer.decay_fraction = 0.3
  config.precision.compute_dtype = "float32"
  config.orchestrator.check_interval = 5
  config.checkpoint.every_steps = 50
  config.eval.num_batches = 64
  config.log.every_steps = 1
  config.log.writers = "jsonl"
  config.log.progress = False
  config.sample.max_tokens = 0
  return config


def outcome(way: str, seed: int) -> list[str]:
  """Final loss, share dropped in the last ten steps, steps to balance, and what was done when."""
  folder, config = Path(_FOLDER.value) / f"{way}-{seed}", tiny_config()
  config.update_from_flattened_dict(WAYS[way] | {"seed": seed})
  if not (folder / workdir.CHECKPOINTS / str(config.num_steps)).exists():
    cfg = from_config_dict(config)
    runtime.configure(cfg)
    train(cfg, folder)
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
