"""Metrics as lines on the screen."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, override

from ats_jax.metrics.writer import MetricWriter, as_numbers

# What the console shows of training, and how it calls it.
CONSOLE_LABELS = {
  "train/loss": "loss",
  "train/accuracy": "acc",
  "train/grad_norm": "grad",
  "train/learning_rate": "lr",
  "train/tokens_per_sec": "tok/s",
  "train/mfu": "mfu",
}


# Python holds back what goes into a file or a pipe.
_print_now = functools.partial(print, flush=True)


class ConsoleWriter(MetricWriter):
  """A short aligned line of the metrics in `CONSOLE_LABELS`, and one of all in `eval/`,
  with the losses of named sets.

  What would not fit a line is left to the files. Other kinds are ignored: texts are in the log.
  """

  guarded = False

  def __init__(self, print_line: Callable[[str], None] = _print_now):
    self._print = print_line

  @override
  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    groups: dict[str, list[str]] = {}
    for name, value in as_numbers(scalars).items():
      group, _, short = name.rpartition("/")
      if group.startswith("eval/") and short == "loss":  # of a named set
        group, short = "eval", name.removeprefix("eval/")
      if name in CONSOLE_LABELS or group == "eval":
        label = CONSOLE_LABELS.get(name, short)
        groups.setdefault(group, []).append(f"{label} {_short(value):<9}")
    for group, cells in groups.items():
      self._print(f"step {step:>7}  {group:<5}  {' '.join(cells)}".rstrip())

  @override
  def flush(self) -> None:
    """Nothing is held back."""

  @override
  def close(self) -> None:
    """Nothing to close."""


def _short(value: int | float) -> str:
  return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
