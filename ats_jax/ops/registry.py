"""A choice of implementation: made once, with its reason, before anything is traced."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Choice:
  """Which implementation of an op runs, and why. Logged at the start and kept in the workdir."""

  op: str
  implementation: str
  reason: str

  def __str__(self) -> str:
    return f"{self.op}: {self.implementation} ({self.reason})"


class FallbackError(ValueError):
  """`ops.strict` is set and the fast implementation cannot run."""
