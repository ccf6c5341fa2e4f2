"""Twenty steps of a tiny model on fixed rows, with dropout and with nothing random in the step.

A change of how random keys are derived moves the first curve alone. Run it to write one anew:

JAX_PLATFORMS=cpu PYTHONPATH=tests:. python tests/golden/golden_run.py NAME
"""

import json
import sys
from pathlib import Path

import jax
from helpers import make_test_mesh, micro_batches, random_rows, tiny_config

from ats_jax.config import Config
from ats_jax.step.program import make_program

FOLDER = Path(__file__).parent
DROPOUT = {"dropout": 0.1, "plain": 0.0}  # of each curve
STEPS = 20
STORED = ("train/loss", "train/grad_norm", "train/param_norm")


def file_of(name: str) -> Path:
  """Where a curve is kept."""
  return FOLDER / f"curve_{name}.json"


def golden_config(name: str) -> Config:
  """Everything that shapes a trajectory is on."""
  return tiny_config(
    {
      "num_steps": STEPS,
      "step.accum_steps": 2,
      "step.z_loss": 1e-3,
      "step.label_smoothing": 0.05,
      "model.dropout": DROPOUT[name],
      "model.qk_norm": True,
      "optimizer.warmup_steps": 4,
    }
  )


def curve(name: str) -> dict[str, list[float]]:
  """The stored metrics of each step; four batches come round again and again."""
  cfg = golden_config(name)
  found = {metric: [] for metric in STORED}
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program = make_program(cfg)
    state = program.init()
    for step in range(STEPS):
      rows = random_rows(cfg, cfg.data.batch_size, seed=step % 4)
      state, metrics = program.train_step(state, micro_batches(rows, 2), program.training_rules(1))
      for metric in STORED:
        found[metric].append(float(metrics[metric]))
  return found


if __name__ == "__main__":
  for name in sys.argv[1:]:
    written = json.dumps({"jax": jax.__version__, **curve(name)}, indent=1)
    file_of(name).write_text(written + "\n")
