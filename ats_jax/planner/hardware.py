"""Rates of devices and of the links between them: measured by `check_env --measure`, or typical.

Typical rates tell which of several plans is faster, and the time of a step roughly.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from ats_jax.config.schema import Config
from ats_jax.metrics.peaks import peak_flops
from ats_jax.ops.attention import chunked
from ats_jax.ops.registry import asked_for
from ats_jax.planner.memory import with_kernels

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_HOPPER = re.compile("NVIDIA (H100|H200|H800|H20|GH200)")
_FIELDS = ("device_kind", "devices", "matmul_flops", "memory_bytes_per_sec", "collectives")


@dataclasses.dataclass(frozen=True)
class Hardware:
  """Rates of a machine.

  Attributes:
    device_kind: the kind of device, as jax names it.
    devices: the number of devices in the measured collectives.
    matmul_flops: FLOP/s of one device, by the dtype of the operands.
    memory_bytes_per_sec: bytes per second that one device reads and writes.
    collectives: seconds by size: {"all_gather": [[bytes, seconds], ...]}, sizes rising. The bytes
      are those of the array that each device holds before (all_reduce, reduce_scatter, all_to_all)
      or after it (all_gather). Empty where there is one device.
    is_typical: whether the rates are those of `TYPICAL`; else they were measured.
  """

  device_kind: str
  devices: int
  matmul_flops: Mapping[str, float]
  memory_bytes_per_sec: float
  collectives: Mapping[str, list[list[float]]]
  is_typical: bool = False

  def seconds(self, collective: str, size: float, ways: int) -> float | None:
    """The seconds of a collective between `ways` devices; None = it was not measured.

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
    measured = np.interp(size, sizes, times) * max(1.0, size / sizes[-1])
    travels = lambda devices: (devices - 1) / devices
    return float(measured * travels(ways) / travels(self.devices))

  def save(self, path: Path) -> None:
    """Write the rates as JSON."""
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


class Typical(NamedTuple):
  """A device among eight of one host.

  Attributes:
    kind: as jax names it.
    matmul: TFLOP/s of large matmuls in 16 bits. H200: measured (docs/reference/performance.md);
      others: that share, 0.75, of the data sheet's.
    memory: GB/s read and written, measured (H200), or that share, 0.87, of the data sheet's.
    link: GB/s that leave a device in a collective: 0.8 of the data sheet's NVLink, or of PCIe where
      there is none, one direction.
    gib: GiB of memory that a run can have: 93 % of it, as XLA gave on an H200.
    bfloat16: whether it has matmuls in bfloat16; `matmul` is in float16 where it has none.
    float32: TFLOP/s of large matmuls in float32; 0 = in TF32, half of those in bfloat16.
  """

  kind: str
  matmul: float
  memory: float
  link: float
  gib: float
  bfloat16: bool = True
  float32: float = 0


# The data sheets are named in `metrics.peaks`. Of the RTX 3050, 3060, 4060 and 4080 they give cores
# and clocks: 128 FLOPs of a tensor core in a cycle, as of the RTX 3090 and 4090.
TYPICAL = {
  "A100-40": Typical("NVIDIA A100-SXM4-40GB", 234, 1350, 240, 36),
  "A100": Typical("NVIDIA A100-SXM4-80GB", 234, 1770, 240, 74),
  "H100": Typical("NVIDIA H100 80GB HBM3", 740, 2900, 360, 74),
  "H200": Typical("NVIDIA H200", 740, 4200, 360, 131),
  "B200": Typical("NVIDIA B200", 1690, 7000, 720, 166),
  # 65 TFLOP/s in float16, 8.1 in float32. Error correction leaves 14.7 GiB.
  "T4": Typical("Tesla T4", 49, 278, 13, 13.7, bfloat16=False, float32=6.1),
  "L4": Typical("NVIDIA L4", 91, 261, 26, 20.9),
  "L40S": Typical("NVIDIA L40S", 271, 752, 26, 41.8),
  "A10G": Typical("NVIDIA A10G", 52, 522, 26, 20.9),
  "A6000": Typical("NVIDIA RTX A6000", 116, 668, 26, 44),
  "RTX6000Ada": Typical("NVIDIA RTX 6000 Ada Generation", 273, 835, 26, 44),
  "RTX3050": Typical("NVIDIA GeForce RTX 3050", 10, 146, 6.4, 5.5),
  "RTX3060": Typical("NVIDIA GeForce RTX 3060", 19, 313, 26, 11.1),
  "RTX3090": Typical("NVIDIA GeForce RTX 3090", 53, 814, 26, 22.3),
  "RTX4060": Typical("NVIDIA GeForce RTX 4060", 23, 237, 13, 7.4),
  "RTX4080": Typical("NVIDIA GeForce RTX 4080", 73, 624, 26, 14.8),
  "RTX4090": Typical("NVIDIA GeForce RTX 4090", 124, 877, 26, 22.3),
  "RTX5090": Typical("NVIDIA GeForce RTX 5090", 157, 1559, 51, 29.7),
}
LATENCY = 3e-5  # seconds that a collective takes at least
_POINTS = (2**10, 2**30)


def typical(name: str) -> Hardware:
  """The typical rates of a device in TYPICAL.

  Raises:
    ValueError: if TYPICAL has no such device.
  """
  if name not in TYPICAL:
    raise ValueError(
      f"--device={name}: typical rates are known of {', '.join(TYPICAL)}. Of another device, "
      "measure them (`ats-jax check_env --measure`) and give the file as --hardware."
    )
  row, devices = TYPICAL[name], 8
  travels = (devices - 1) / devices / (row.link * 1e9)
  # A sum is a scatter and a gather.
  points = lambda times: [[size, LATENCY + times * size * travels] for size in _POINTS]
  rounds = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
  matmul = {"float16": row.matmul, "float32": row.float32 or row.matmul / 2}
  if row.bfloat16:
    matmul["bfloat16"] = row.matmul
  return Hardware(
    row.kind,
    devices,
    {dtype: rate * 1e12 for dtype, rate in matmul.items()},
    row.memory * 1e9,
    {name: points(times) for name, times in rounds.items()},
    is_typical=True,
  )


def with_format_of(cfg: Config, kind: str) -> Config:
  """`cfg` with what `precision.compute_dtype=auto` is on a kind of device, by its data sheet.

  It is float16 if that has a rate in float16 and none in bfloat16, as of GPUs before sm_80.
  """
  if cfg.precision.compute_dtype != "auto":
    return cfg
  dtype = "float16" if _is_older(kind) else "bfloat16"
  precision = dataclasses.replace(cfg.precision, compute_dtype=dtype)
  return dataclasses.replace(cfg, precision=precision)


def with_kernels_of(cfg: Config, kind: str) -> Config:
  """`cfg` that names what a GPU of the kind runs, if it needs other memory than cuDNN and Mosaic.

  That is attention in chunks before sm_80, and Triton's grouped matmul from sm_80 on, except on
  Hopper.
  """
  asked, is_nvidia = asked_for(cfg), kind.startswith("NVIDIA ")
  if _is_older(kind):
    is_free = "attention.forward" not in asked and not chunked.reserve(cfg)
    return with_kernels(cfg, attention="chunked") if is_free else cfg
  is_free = cfg.moe.num_experts and "grouped_matmul.forward" not in asked
  if is_free and is_nvidia and not _HOPPER.match(kind):
    return with_kernels(cfg, grouped_matmul="triton")
  return cfg


def _is_older(kind: str) -> bool:
  return bool(peak_flops(kind, "float16")) and not peak_flops(kind, "bfloat16")
