"""Twenty steps of a tiny model on fixed rows. Run it to write `curve.json` anew:

JAX_PLATFORMS=cpu PYTHONPATH=tests:. python tests/golden/golden_run.py
"""

import json
from pathlib import Path

import jax
from helpers import make_test_mesh, micro_batches, random_rows, tiny_config

from ats_jax.config import Config
from ats_jax.step.metrics import METRICS
from ats_jax.step.program import make_program

CURVE = Path(__file__).with_name("curve.json")
STEPS = 20
STORED = ("train/loss", "train/grad_norm", "train/param_norm")


def golden_config() -> Config:
  """Everything that shapes a trajectory is on."""
  return tiny_config(
    {
      "num_steps": STEPS,
      "step.accum_steps": 2,
      "step.z_loss": 1e-3,
      "step.label_smoothing": 0.05,
      "model.dropout": 0.1,
      "model.qk_norm": True,
      "optimizer.warmup_steps": 4,
    }
  )


def curve() -> dict[str, list[float]]:
  """The stored metrics of each step; four batches come round again and again."""
  cfg = golden_config()
  found = {name: [] for name in STORED}
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program = make_program(cfg)
    state = program.init()
    for step in range(STEPS):
      rows = random_rows(cfg, cfg.data.batch_size, seed=step % 4)
      state, metrics = program.train_step(state, micro_batches(rows, 2), program.training_rules(1))
      for name in STORED:
        found[name].append(float(metrics.values[METRICS.index(name)]))
  return found


if __name__ == "__main__":
  CURVE.write_text(json.dumps({"jax": jax.__version__, **curve()}, indent=1) + "\n")
