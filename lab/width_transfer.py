r"""At which learning rate are models of several widths best, with and without the settings of muP?

Each width trains at each rate of a grid, on the same text. An arm is OPTIMIZER (one rate for all
roles and widths: the null hypothesis) or OPTIMIZER+mup (`ats_jax.config.width`, tuned at the first
width). Rows are written as runs end, and a second call goes on from them.

Command: python -m lab.width_transfer --out=FILE.jsonl [--widths=64,128,256] \
  [--arms=adamw,adamw+mup] [--rates=1e-3,2e-3,4e-3] [--steps=400] [--experts=0] [--seeds=1]
"""

import json
import math
from pathlib import Path

from absl import app, flags
from ml_collections import ConfigDict

from ats_jax.config import from_config_dict
from ats_jax.config.build import resolve
from ats_jax.config.tree import edited
from ats_jax.config.width import settings_of_width, widened
from lab.runs import markdown, run, tiny_config

_OUT = flags.DEFINE_string("out", None, "File of rows, e.g. runs/widths.jsonl.", required=True)
_WIDTHS = flags.DEFINE_list("widths", ["64", "128", "256"], "Of model.d_model; the first is tuned.")
_ARMS = flags.DEFINE_list("arms", ["adamw", "adamw+mup"], "OPTIMIZER or OPTIMIZER+mup.")
_RATES = flags.DEFINE_list("rates", None, "Learning rates; the default is a grid of factor 2.")
_STEPS = flags.DEFINE_integer("steps", 400, "Of each run.", lower_bound=20)
_EXPERTS = flags.DEFINE_integer("experts", 0, "Experts of each layer; 0 = dense.", lower_bound=0)
_SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of each width and rate.", lower_bound=1)

GRID = [2.0**exponent for exponent in range(-11, -4)]


def narrow(optimizer: str) -> ConfigDict:
  """The config of the first width, of about 100,000 parameters."""
  width = int(_WIDTHS.value[0])
  changes = {
    "num_steps": _STEPS.value,
    "model.d_model": width,
    "model.num_heads": width // 16,
    "model.num_kv_heads": width // 16,
    "model.d_ff": 2 * width,
    "model.tie_embeddings": False,
    "data.seq_len": 64,
    "data.batch_size": 16,
    "optimizer.name": optimizer,
    "optimizer.warmup_steps": 0,
    "optimizer.warmup_fraction": 0.1,
    "eval.num_batches": 40,
  }
  if _EXPERTS.value:
    changes |= {"moe.num_experts": _EXPERTS.value, "moe.d_ff": width, "moe.top_k": 2}
  return tiny_config(changes)


def settings(arm: str, width: int) -> ConfigDict:
  """The config of an arm at a width, at any rate."""
  optimizer, _, rule = arm.partition("+")
  config = narrow(optimizer)
  base = resolve(from_config_dict(config), 259)
  wide = widened(base, width)
  changes = {
    name: getattr(wide.model, name) for name in ("d_model", "num_heads", "num_kv_heads", "d_ff")
  }
  flat = {f"model.{name}": value for name, value in changes.items()}
  if _EXPERTS.value:
    flat["moe.d_ff"] = wide.moe.d_ff
  if rule == "mup" and width != base.model.d_model:
    flat |= settings_of_width(wide, base.model.d_model)
  elif rule not in ("", "mup"):
    raise ValueError(f"--arms={arm}: an arm is OPTIMIZER or OPTIMIZER+mup.")
  config = edited(config.to_dict())
  config.update_from_flattened_dict(flat)
  return config


def best(rows: list[dict], arm: str, width: int) -> tuple[float, float, dict[float, float]]:
  """The best rate, its loss, and the losses of all, as means over seeds."""
  losses: dict[float, list[float]] = {}
  for row in rows:
    if (row["arm"], row["width"]) == (arm, width):
      losses.setdefault(row["rate"], []).append(row["loss"])
  means = {rate: sum(of) / len(of) for rate, of in sorted(losses.items())}
  rate = min(means, key=lambda r: means[r] if math.isfinite(means[r]) else math.inf)
  return rate, means[rate], means


def table(rows: list[dict]) -> str:
  """The best rate of each arm by width, and by how many steps of the grid it moves."""
  lines = []
  for arm in dict.fromkeys(row["arm"] for row in rows):
    widths = sorted({row["width"] for row in rows if row["arm"] == arm})
    found = [best(rows, arm, width) for width in widths]
    moves = max(abs(math.log2(rate / found[0][0])) for rate, _, _ in found)
    cells = [f"{rate:.3g} ({loss:.4f})" for rate, loss, _ in found]
    at_first = [means.get(found[0][0], math.nan) - loss for _, loss, means in found]
    lines.append([arm, *cells, f"{moves:.0f}", f"{max(at_first):.4f}"])
  header = ["arm", *[f"width {w}" for w in sorted({row["width"] for row in rows})]]
  return markdown([*header, "factors of 2", "loss at the first width's rate, above"], lines)


def main(argv: list[str]) -> None:
  """Train what is missing, and print the table."""
  del argv
  path = Path(_OUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = path.read_text().splitlines() if path.exists() else []
  rows = [json.loads(line) for line in lines]
  done = {(row["arm"], row["width"], row["rate"], row["seed"]) for row in rows}
  rates = [float(rate) for rate in _RATES.value or GRID]
  with path.open("a") as file:
    for arm in _ARMS.value:
      for width in map(int, _WIDTHS.value):
        config = settings(arm, width)
        for rate in rates:
          for seed in range(_SEEDS.value):
            if (arm, width, rate, seed) in done:
              continue
            result = run(config, {"optimizer.learning_rate": rate, "seed": seed})
            loss = float(result.scores["eval/loss"])
            rows.append({"arm": arm, "width": width, "rate": rate, "seed": seed, "loss": loss})
            print(json.dumps(rows[-1]), file=file, flush=True)
  print(table(rows))


if __name__ == "__main__":
  app.run(main)
