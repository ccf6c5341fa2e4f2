"""What devices and the links between them do, as `ats-jax check_env --measure` found it."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_FIELDS = ("device_kind", "devices", "matmul_flops", "memory_bytes_per_sec", "collectives")


@dataclasses.dataclass(frozen=True)
class Hardware:
  """Rates of a machine, measured.

  Attributes:
    device_kind: as jax names it.
    devices: how many took part in the collectives.
    matmul_flops: FLOP/s of one device by the dtype of the operands.
    memory_bytes_per_sec: of one device: read and written.
    collectives: seconds by size: {"all_gather": [[bytes, seconds], ...]}, sizes rising. The bytes
      are those of the array that each device holds before (all_reduce, reduce_scatter, all_to_all)
      or after it (all_gather). Empty where there is one device.
  """

  device_kind: str
  devices: int
  matmul_flops: Mapping[str, float]
  memory_bytes_per_sec: float
  collectives: Mapping[str, list[list[float]]]

  def seconds(self, collective: str, size: float, ways: int) -> float | None:
    """How long a collective takes between `ways` devices; None = nothing was measured.

    A share (ways - 1) / ways of an array travels, so what was measured between more or fewer
    devices is scaled by that. Between sizes it is a straight line; beyond them the bandwidth of the
    largest holds.

    Args:
      collective: one of COLLECTIVES.
      size: bytes, as `collectives`.
      ways: devices that take part.
    """
    if ways == 1 or not size:
      return 0.0
    if collective not in self.collectives:
      return None
    sizes, times = np.transpose(self.collectives[collective])
    found = np.interp(size, sizes, times) * max(1.0, size / sizes[-1])
    travels = lambda devices: (devices - 1) / devices
    return float(found * travels(ways) / travels(self.devices))

  def save(self, path: Path) -> None:
    """Write it as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

  @classmethod
  def load(cls, path: Path) -> Self:
    """Read what `save` wrote.

    Raises:
      ValueError: if it is something else.
    """
    advice = "`ats-jax check_env --measure` writes such a file."
    try:
      values: dict[str, Any] = json.loads(path.read_text())
      found = cls(**{name: values[name] for name in _FIELDS})
      rates = [found.memory_bytes_per_sec, *found.matmul_flops.values()]
      points = [np.array(found.collectives[name], float) for name in found.collectives]
      if not all(rate > 0 for rate in rates) or found.collectives.keys() - set(COLLECTIVES):
        raise ValueError("rates must be positive, and collectives known")
      if any(p.ndim != 2 or p.shape[1] != 2 or not (np.diff(p[:, 0]) > 0).all() for p in points):
        raise ValueError("collectives are lists of [bytes, seconds], sizes rising")
    except FileNotFoundError as e:
      raise ValueError(f"there is no {path}. {advice}") from e
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
      raise ValueError(f"{path} holds no measured hardware: {e}. {advice}") from e
    return found
