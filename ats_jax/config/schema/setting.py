"""One setting: its default, and what the tools need to know of it."""

import dataclasses
from typing import Any

from ats_jax.extensions import Registry


def setting(
  default: Any,
  doc: str,
  *,
  unit: str = "",
  low: float | None = None,
  high: float | None = None,
  choices: tuple[str, ...] | Registry = (),
  resume: str = "fixed",
) -> Any:
  """Declare one setting.

  Args:
    default: its value when nothing is said.
    doc: what it means, one sentence.
    unit: what it counts.
    low: smallest legal value.
    high: largest legal value.
    choices: the legal words; of a registry, those that are registered when it is looked at.
    resume: "fixed" if a workdir must be resumed with the same value, "free" if it may change.
  """
  metadata = dict(doc=doc, unit=unit, low=low, high=high, choices=choices, resume=resume)
  return dataclasses.field(default=default, metadata=metadata)
