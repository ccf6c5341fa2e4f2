r"""Does the fast step learn what the plain one learns: losses of both, side by side, over seeds.

The fast step is the config's; the plain one runs every op as XLA writes it, recomputes nothing and
uses no 8 bits. Both see the same rows; a seed chooses the weights alone. So the gap between the two
is that of rounding, and seed noise (between the plain runs of two seeds) is what a change that does
not matter may cost. Losses are means of ten steps. Prints a table; --out keeps every loss.
Command: python -m lab.parity --config=configs/debug.py --config.step.remat=names \
  [--steps=200] [--seeds=3] [--plain_accum_steps=8] [--out=FILE]
"""

import itertools
import json
from pathlib import Path

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from ats_jax.cluster import runtime
from ats_jax.config import from_config_dict
from ats_jax.config.tree import edited
from ats_jax.ops.implementations import OPS
from ats_jax.verbs import cli
from lab.runs import Changes, markdown, run

WINDOW = 10
_CONFIG = cli.ConfigFlag()
_STEPS = flags.DEFINE_integer("steps", 200, "Updates of a run.", lower_bound=2 * WINDOW)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Pairs of runs.", lower_bound=2)
_REMAT = flags.DEFINE_string("plain_remat", "none", "step.remat of the plain step.")
_ACCUM = flags.DEFINE_integer(
  "plain_accum_steps",
  0,
  "step.accum_steps of the plain step, whose attention holds seq x seq scores; 0 = the config's.",
  lower_bound=0,
)
_OUT = flags.DEFINE_string("out", "", "Where to write the losses of all runs, as JSON.")


def plain(config: ConfigDict, remat: str, accum_steps: int) -> Changes:
  """Settings of the plain step. Accumulation changes nothing but the order of sums."""
  return {
    "ops.kernels": {op: "xla" for op, entry in OPS.items() if entry.kernels},
    "step.remat": remat,
    "step.scan_unroll": 1,
    "step.accum_steps": accum_steps or config.step.accum_steps,
  }


def smooth(losses: np.ndarray) -> np.ndarray:
  """Means of successive windows: [steps] -> [steps // WINDOW]."""
  return losses[: losses.size // WINDOW * WINDOW].reshape(-1, WINDOW).mean(axis=1)


def gap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Largest distance of two smoothed curves anywhere, and over their last quarter: [2]."""
  distance = np.abs(smooth(a) - smooth(b))
  return np.array([distance.max(), distance[-max(1, distance.size // 4) :].max()])


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  config = edited(_CONFIG.nested())
  runtime.configure(from_config_dict(config))
  common: Changes = {
    "num_steps": _STEPS.value,
    "eval.num_batches": 1,
    "optimizer.warmup_steps": min(config.optimizer.warmup_steps, _STEPS.value),
  }
  kinds = {"fast": {}, "plain": plain(config, _REMAT.value, _ACCUM.value)}
  losses: dict[str, list[np.ndarray]] = {kind: [] for kind in kinds}
  rows = []
  for seed in range(_SEEDS.value):
    for kind, changes in kinds.items():
      settings = common | changes | {"seed": seed}
      result = run(config, settings, data_seed=config.seed, fp8=kind == "fast")
      losses[kind].append(result.series["train/loss"])
    fast, reference = losses["fast"][-1], losses["plain"][-1]
    largest, late = gap(fast, reference)
    rows.append(
      [
        str(seed),
        f"{np.abs(fast - reference).max():.1e}",
        f"{largest:.1e}",
        f"{late:.1e}",
        f"{smooth(fast)[-1]:.4f}",
        f"{smooth(reference)[-1]:.4f}",
      ]
    )
    print(rows[-1], flush=True)
  header = ["seed", "largest gap of a step", f"of {WINDOW} steps", "in the last quarter"]
  print(markdown([*header, "fast at the end", "plain at the end"], rows))
  gaps = np.max([gap(*pair) for pair in zip(*losses.values(), strict=True)], axis=0)
  noise = np.mean([gap(*pair) for pair in itertools.combinations(losses["plain"], 2)], axis=0)
  verdict = "within" if (gaps <= noise).all() else "NOT within"
  print(
    f"{verdict} seed noise: the largest gap is {gaps[0]:.1e} nats, {gaps[1]:.1e} in the last "
    f"quarter; between two seeds it is {noise[0]:.1e} and {noise[1]:.1e} on average."
  )
  if _OUT.value:
    curves = {kind: [run.tolist() for run in runs] for kind, runs in losses.items()}
    Path(_OUT.value).write_text(json.dumps(curves), encoding="utf-8")


if __name__ == "__main__":
  cli.run(main)
