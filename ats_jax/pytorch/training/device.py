"""Where PyTorch runs a model, and in which number format."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from absl import logging
from torch import Tensor

from ats_jax.config import Config
from ats_jax.metrics.memory import GIB

MPS_SEQ_LEN = 512  # of a row on a Mac where the user names no length: memory is shared there
DTYPES = {
  "float32": torch.float32,
  "bfloat16": torch.bfloat16,
  "float16": torch.float16,
}
FIRST_SCALE = 2.0**15  # of the loss in float16
GOOD_STEPS = 1000  # without an overflow, after which the scale is doubled


def find_device(name: str) -> torch.device:
  """The device of that name.

  Raises:
    ValueError: if it is unknown, or not there.
  """
  there = {
    "cpu": True,
    "cuda": torch.cuda.is_available(),
    "mps": torch.backends.mps.is_available(),
  }
  if name not in there:
    raise ValueError(f"--device={name} is unknown. Choose one of: {', '.join(there)}.")
  if not there[name]:
    built = "this PyTorch finds no such device"
    raise ValueError(f"--device={name}: {built}. There is --device=cpu.")
  return torch.device(name)


def format_of(cfg: Config, device: torch.device, asked: str) -> torch.dtype:
  """The format of activations and of what they are multiplied with; weights stay in float32.

  On MPS bfloat16 becomes float16, which all of Apple's GPUs multiply in.

  Raises:
    ValueError: for an unknown one.
  """
  if asked and asked not in DTYPES:
    raise ValueError(f"--dtype={asked} is unknown. Choose one of: {', '.join(DTYPES)}.")
  name = asked or cfg.precision.compute_dtype
  if device.type == "mps" and name == "bfloat16":
    logging.info("on mps bfloat16 becomes float16, with a scale on the loss")
    name = "float16"
  return DTYPES[name]


def fit_device(cfg: Config, device: torch.device, given: frozenset[str]) -> Config:
  """`cfg` as this device takes it.

  Args:
    cfg: the run.
    device: the device of the run.
    given: settings that the user named, which stay.
  """
  data = dataclasses.replace(cfg.data, num_workers=0)
  if device.type == "mps" and "data.seq_len" not in given and data.seq_len > MPS_SEQ_LEN:
    logging.info("on mps rows have %d tokens; --config.data.seq_len sets others", MPS_SEQ_LEN)
    data = dataclasses.replace(data, seq_len=MPS_SEQ_LEN)
  if cfg.data.num_workers:
    logging.info("data.num_workers=%d: PyTorch runs read in threads", cfg.data.num_workers)
  return dataclasses.replace(cfg, data=data)


def synchronize(device: torch.device) -> None:
  """Wait until the device has done what it was given."""
  if device.type == "cuda":
    torch.cuda.synchronize(device)
  elif device.type == "mps":
    torch.mps.synchronize()


def memory(device: torch.device) -> dict[str, float]:
  """Device memory in GiB, by the names of `metrics.memory`; nothing on a CPU."""
  if device.type == "cuda":
    _, limit = torch.cuda.mem_get_info(device)
    return {
      "memory/device_in_use_gib": torch.cuda.memory_allocated(device) / GIB,
      "memory/device_peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
      "memory/device_reserved_gib": torch.cuda.memory_reserved(device) / GIB,
      "memory/device_limit_gib": limit / GIB,
    }
  if device.type == "mps":
    return {
      "memory/device_in_use_gib": torch.mps.current_allocated_memory() / GIB,
      "memory/device_limit_gib": torch.mps.recommended_max_memory() / GIB,
    }
  return {}


def kind(device: torch.device) -> str:
  """What the device is called."""
  return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextlib.contextmanager
def as_asked(cfg: Config) -> Iterator[None]:
  """Within it, PyTorch is deterministic if the run is to be."""
  before = torch.are_deterministic_algorithms_enabled()
  torch.use_deterministic_algorithms(before or cfg.precision.deterministic)
  try:
    yield
  finally:
    torch.use_deterministic_algorithms(before)


@dataclasses.dataclass
class LossScale:
  """Keeps gradients in the range of float16 (Micikevicius et al. 2018, arXiv:1710.03740).

  Attributes:
    value: what the loss is multiplied with; 1 and constant in other formats.
    good: updates since it changed.
    moves: whether it does.
  """

  value: float = 1.0
  good: int = 0
  moves: bool = False

  @classmethod
  def of(cls, dtype: torch.dtype, saved: dict[str, Any]) -> "LossScale":
    """That of a format, as a checkpoint has it."""
    if dtype != torch.float16:
      return cls()
    return cls(saved.get("value", FIRST_SCALE), saved.get("good", 0), moves=True)

  def took(self, grad_norm: Tensor) -> bool:
    """Whether an update with gradients of this norm is to be made; the scale of the next one."""
    if not self.moves:
      return True
    if not math.isfinite(float(grad_norm)):
      self.value, self.good = max(1.0, self.value / 2), 0
      return False
    self.good += 1
    if self.good == GOOD_STEPS:
      self.value, self.good = 2 * self.value, 0
    return True

  def saved(self) -> dict[str, Any]:
    """What a checkpoint keeps."""
    return {"value": self.value, "good": self.good} if self.moves else {}
