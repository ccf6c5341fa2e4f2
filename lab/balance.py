r"""How routers find balance: from a fresh start, and from one that sends everything to two experts.

Trains a tiny model of bytes with each way of balancing; prints a table for docs/guides/experts.md.
Command: python -m lab.balance [--seeds=3] [--steps=300]
"""

import statistics

import numpy as np
from absl import app, flags

from ats_jax.config import base_config
from ats_jax.step.state import TrainState
from lab.runs import Result, markdown, run

NO_BALANCE = {"moe.aux_loss": 0.0, "moe.z_loss": 0.0, "moe.bias_update": "none"}
SIGN = NO_BALANCE | {"moe.bias_update": "sign"}
PROPORTIONAL = NO_BALANCE | {"moe.bias_update": "proportional"}
WAYS = {
  "none": NO_BALANCE,
  "aux 0.01": NO_BALANCE | {"moe.aux_loss": 0.01},
  "aux 0.1": NO_BALANCE | {"moe.aux_loss": 0.1},
  "sign, rate 0.01": SIGN | {"moe.bias_rate": 0.01},
  "sign, rate 0.1": SIGN | {"moe.bias_rate": 0.1},
  "proportional, rate 0.1": PROPORTIONAL | {"moe.bias_rate": 0.1},
  "default: proportional, aux, z": {},
}
COLLAPSE = 6.0  # added to the logits of two of the eight experts
WINDOW = 10  # steps over which max_violation is averaged
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each kind.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 300, "Updates of a run.", lower_bound=20)


def tiny_config():
  """Two layers of eight experts, 0.2M parameters, on the bytes of Python's standard library."""
  config = base_config()
  config.num_steps = _STEPS.value
  config.model.num_layers = 2
  config.model.d_model = 64
  config.model.d_ff = 128
  config.moe.num_experts = 8
  config.moe.d_ff = 64
  config.moe.router_bias = True
  config.data.tokenizer = "bytes"
  config.data.seq_len = 64
  config.data.validation_fraction = 0.002
  config.optimizer.learning_rate = 3e-3
  config.optimizer.warmup_steps = 20
  config.precision.compute_dtype = "float32"
  return config


def collapse(state: TrainState) -> TrainState:
  """Push every router towards its first two experts."""
  for blocks in state.model.segments:
    for layer in blocks.layers:
      offset = layer.mlp.router.offset
      offset[...] = offset[...].at[:, :2].add(COLLAPSE)
  return state


def steps_to_balance(result: Result) -> float:
  """Steps until max_violation, averaged over a window, is below 1; inf = never."""
  violation = result.series["moe/max_violation"]
  below = np.flatnonzero(np.convolve(violation, np.ones(WINDOW) / WINDOW, "valid") < 1.0)
  return float(below[0] + WINDOW) if below.size else float("inf")


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  rows = []
  for way, changes in WAYS.items():
    cells = [way]
    for edit in (None, collapse):
      results = [run(tiny_config(), changes | {"seed": s}, edit) for s in range(_SEEDS.value)]
      median = lambda values: statistics.median(values)
      balanced = [steps_to_balance(r) for r in results]
      cells += [
        f"{median(r.scores['eval/loss'] for r in results):.3f}",
        f"{median(r.series['moe/max_violation'][-50:].mean() for r in results):.2f}",
        " ".join("never" if np.isinf(b) else f"{b:.0f}" for b in balanced),
      ]
    rows.append(cells)
    print(cells, flush=True)
  kinds = ("fresh", "collapsed")
  header = [f"{k}: {what}" for k in kinds for what in ("loss", "max violation", "steps")]
  print(markdown(["balance", *header], rows))


if __name__ == "__main__":
  app.run(main)
