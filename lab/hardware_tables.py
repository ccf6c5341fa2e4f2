"""The tables of docs/reference/hardware.md: what was compiled for which device, and estimates.

What was compiled is read from docs/lab/records, which `lab.compile_for_gpu` and `lab.ops_ahead`
write; the rest is planned anew.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ats_jax.config import from_config_dict
from ats_jax.config.file import load_file
from ats_jax.metrics.memory import GIB
from ats_jax.planner.describe import describe, planned_bytes
from ats_jax.planner.hardware import typical
from ats_jax.planner.memory import with_kernels

RECORDS = Path(__file__).parents[1] / "docs" / "lab" / "records"
STEPS, OPS_COMPILED = RECORDS / "compiled.csv", RECORDS / "compiled_ops.csv"
# Variants of configs/card.py: a device of that memory, as `typical` calls it, and GiB that it has.
CARDS = {
  "6gb": ("RTX3050", 6),
  "8gb": ("RTX4060", 8),
  "12gb": ("RTX3060", 12),
  "16gb": ("RTX4080", 16),
  "24gb": ("RTX3090", 24),
  "40gb": ("A100-40", 40),
  "48gb": ("A6000", 48),
  "80gb": ("A100", 80),
  "t4": ("T4", 14.7),
}


class Planned(NamedTuple):
  """What the planner says of a card's model.

  Attributes:
    parameters: their number.
    gib: memory of a step.
    tokens_per_sec: by typical rates, an estimate.
  """

  parameters: int
  gib: float
  tokens_per_sec: float


def planned_card(variant: str) -> Planned:
  """The plan of a variant of `CARDS`, from shapes alone; with the attention that was compiled."""
  cfg = from_config_dict(load_file(f"card:{variant}"))
  cfg = with_kernels(cfg, attention=compiled_card(variant)["attention"])
  plan = describe(cfg, 1, typical(CARDS[variant][0]))
  tokens = cfg.data.batch_size * cfg.data.seq_len
  speed = tokens / plan["step_seconds"]["likely"]
  return Planned(plan["parameters"]["total"], planned_bytes(plan) / GIB, speed)


def records(path: Path) -> list[dict[str, str]]:
  """The lines of a table."""
  with path.open(encoding="utf-8", newline="") as file:
    return list(csv.DictReader(file))


def compiled_card(variant: str) -> dict[str, str]:
  """What was compiled of a variant of `CARDS` for its card."""
  of = f"1 x {typical(CARDS[variant][0]).device_kind}", f"--config=configs/card.py:{variant}"
  return next(row for row in records(STEPS) if (row["device"], row["settings"]) == of)


def cards() -> Iterator[tuple[str, ...]]:
  """Heading and lines: each card's model, its memory, and its estimated speed."""
  yield "variant", "parameters", "card", "planned GiB", "compiled GiB", "of the card", "tokens/s"
  for variant, (device, gib) in CARDS.items():
    plan = planned_card(variant)
    compiled = compiled_card(variant)["GiB"]
    share = f"{float(compiled) / gib:.0%}"
    speed = f"{float(f'{plan.tokens_per_sec:.2g}'):,.0f}"  # two digits: an estimate
    numbers = f"{plan.gib:.1f}", compiled, share, speed
    yield f"`{variant}`", f"{plan.parameters / 1e9:.2f}B", f"{device}, {gib:g} GiB", *numbers


def steps() -> Iterator[tuple[str, ...]]:
  """Heading and lines: whole training steps that were compiled."""
  rows = records(STEPS)
  shown = [name for name in rows[0] if name not in ("commit", "software", "date")]
  yield tuple(shown)
  for row in rows:
    yield tuple(f"`{row[name]}`" if name == "settings" else row[name] or "-" for name in shown)


def ops() -> Iterator[tuple[str, ...]]:
  """Heading and lines: a kernel, and for each device whether it compiled and may run there."""
  rows = records(OPS_COMPILED)
  devices = list(dict.fromkeys(row["device"] for row in rows))
  yield "op", "implementation", *devices
  for op, kernel in dict.fromkeys((row["op"], row["implementation"]) for row in rows):
    cells = []
    for device in devices:
      of = [r for r in rows if (r["device"], r["op"], r["implementation"]) == (device, op, kernel)]
      is_made, may_run = ({r[key] for r in of} == {"yes"} for key in ("compiles", "registry"))
      cells.append("-" if not of else "refused" if not may_run else "yes" if is_made else "no")
    yield f"`{op}`", f"`{kernel}`", *cells
