"""What was left out or shrunk, and when: as a ledger keeps it, and in words."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ats_jax.config.schema import Config
from ats_jax.orchestrator.signals.interval import SCALES, Steps

SHOWN_RANGES = 4  # ranges of steps or rows in a line


def bounded_steps(interval: Steps) -> dict[str, Any] | None:
  """Return the steps of an interval whose updates the reflex left out or shrunk; None = none.

  Returns:
    left_out and shrunk: their steps; tokens: that counted in the loss of those left out; of: the
    same of the whole interval.
  """
  column, steps = interval.columns, interval.numbers
  left_out = column["reflex/skipped"] > 0
  scales = [column[name] < 1.0 for name in SCALES if name in column]
  shrunk = np.any([np.zeros_like(left_out), *scales], axis=0) & ~left_out
  if not (left_out | shrunk).any():
    return None
  tokens = column["train/tokens"]
  return {
    "left_out": steps[left_out].tolist(),
    "shrunk": steps[shrunk].tolist(),
    "tokens": float(np.nansum(tokens[left_out])),
    "of": float(np.nansum(tokens)),
  }


def scale_changes(interval: Steps) -> dict[str, Any] | None:
  """Return what became of the scale of the loss in an interval; None = nothing, or there is none.

  Returns:
    left_out: steps whose gradients overflowed; doubled: steps after which it was; scale: of the
      next step.
  """
  column, steps = interval.columns, interval.numbers
  if "train/loss_scale" not in column:
    return None
  left_out, changes = column["train/skipped"] > 0, column["train/loss_scale_change"]
  if not (left_out | (changes != 1.0)).any():
    return None
  return {
    "left_out": steps[left_out].tolist(),
    "doubled": steps[changes > 1.0].tolist(),
    "scale": float(column["train/loss_scale"][-1] * changes[-1]),
  }


def tell_scale(line: Mapping[str, Any]) -> str:
  """What a line of the ledger says of the scale of the loss."""
  parts = [f"{line['scale']:.9g}"]
  if line["left_out"]:
    parts.append(f"gradients overflowed in {_batches(line['left_out'])}, which are left out")
  if line["doubled"]:
    parts.append(f"doubled after steps {_ranges(line['doubled'])}")
  return f"loss scale: {'; '.join(parts)}"


def cost_of_lost_steps(
  cfg: Config, steps: int, laps: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
  """Return what the lost `steps` cost in time, by the `laps` of the last looks (`Clock.lap`)."""
  took = [lap["host/step_secs"] for lap in laps if lap]
  secs = steps * statistics.median(took) if took else None
  return {"steps": steps, "tokens": steps * cfg.data.batch_size * cfg.data.seq_len, "secs": secs}


def tell_bounded(line: Mapping[str, Any]) -> str:
  """What a line of the ledger says of an interval."""
  parts = []
  if line["left_out"]:
    share = line["tokens"] / max(line["of"], 1.0)
    parts.append(
      f"{_batches(line['left_out'])} left out, {line['tokens']:,.0f} tokens ({share:.1%} of these "
      f"steps'){_rows(line, line['left_out'])}"
    )
  if line["shrunk"]:
    parts.append(f"{_batches(line['shrunk'])} shrunk{_rows(line, line['shrunk'])}")
  return "; ".join(parts)


def _batches(steps: Sequence[int]) -> str:
  return f"{len(steps)} {'batch' if len(steps) == 1 else 'batches'} (steps {_ranges(steps)})"


def _rows(line: Mapping[str, Any], steps: Sequence[int]) -> str:
  """Training rows of the batches of `steps`, if the loop said where it was."""
  if line["row"] is None:
    return ""
  size, last = line["batch_size"], line["step_of_row"]
  end = lambda step: line["row"] - (last - step) * size
  return f", rows {_ranges([row for step in steps for row in range(end(step) - size, end(step))])}"


def _ranges(numbers: Sequence[int]) -> str:
  """[1, 2, 3, 7] -> "1-3, 7"; the first few."""
  cuts = [i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
  runs = [numbers[a:b] for a, b in pairwise([0, *cuts, len(numbers)])]
  ranges = [
    f"{run[0]:,}" if len(run) == 1 else f"{run[0]:,}-{run[-1]:,}" for run in runs[:SHOWN_RANGES]
  ]
  return ", ".join(ranges) + (
    f" and {len(runs) - SHOWN_RANGES} more" if len(runs) > SHOWN_RANGES else ""
  )
