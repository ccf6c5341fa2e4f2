"""Which kernels run on an NVIDIA GPU: those in Triton that JAX has too, or PyTorch's operations."""

import functools
import importlib
import importlib.util
import logging
import os

import torch
from torch import Tensor

from ats_jax.pytorch.settings import Settings

TRITON_SWITCH = "ATS_TRITON"  # "off" = PyTorch's own operations, where `ops.kernels` names none
TRITON_OPS = ("attention", "grouped_matmul")
DEFAULTS = ("attention",)  # of these; the other was not measured beside PyTorch's own
ASKED = ("triton", "xla")  # what `ops.kernels` may say of them; "xla" = PyTorch's own operations
WIDEST_HEAD = 256


def asked_kernel(cfg: Settings, op: str) -> str:
  """What `ops.kernels` says of an op; "" = nothing, as in an export, which has no such section."""
  return cfg.ops.kernels.get(op, "") if hasattr(cfg, "ops") else ""


def chosen_kernels(cfg: Settings, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
  """The implementation of each op of a model that has a choice, as `kernel_for` has it; logged."""
  model = cfg.model
  widths: dict[str, tuple[int, ...]]
  widths = {"attention": (model.head_dim, model.v_head_dim or model.head_dim)}
  if cfg.moe.num_experts:
    widths["grouped_matmul"] = ()
  x = torch.empty(0, dtype=dtype, device=device)
  found = {op: kernel_for(op, asked_kernel(cfg, op), x, *of_op) for op, of_op in widths.items()}
  return {op: name for op, name in found.items() if name}


def kernel_for(op: str, asked: str, x: Tensor, *widths: int) -> str:
  """The implementation of an op: "triton", "torch", or "" where there is nothing to choose.

  Args:
    op: of `TRITON_OPS`.
    asked: what `ops.kernels` says of it.
    x: operand, on the device and in the dtype of all.
    widths: of queries and keys, and of values; none for other ops.

  Raises:
    ValueError: Triton was asked for and cannot run.
  """
  if torch.compiler.is_exporting() or (not has_triton(x.device) and asked != "triton"):
    return ""
  return _logged_choice(op, asked, x.device, x.dtype, widths)


def has_triton(device: torch.device) -> bool:
  """Whether a device is of a kind that Triton's kernels are for."""
  return device.type == "cuda" and torch.version.hip is None


# `torch.compile` takes the answer as a constant, and leaves the log out of the program.
@torch.compiler.assume_constant_result
def _logged_choice(
  op: str, asked: str, device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]
) -> str:
  return chosen_kernel(op, asked, device, dtype, widths)


@functools.cache
def chosen_kernel(
  op: str, asked: str, device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]
) -> str:
  """`kernel_for` of a device and a dtype; logged, once each."""
  setting = f"ops.kernels={op}={asked}"
  obstacle = _obstacle(device, dtype, widths)
  if asked == "triton" and obstacle:
    raise ValueError(f"{setting}: {obstacle}. Use ops.kernels={op}=xla, or leave it out.")
  if asked == "triton":
    name, why = "triton", setting
  elif asked == "xla":
    name, why = "torch", f"{setting}: PyTorch's own"
  elif os.environ.get(TRITON_SWITCH) == "off":
    name, why = "torch", f"{TRITON_SWITCH}=off"
  elif op not in DEFAULTS:
    name, why = "torch", f"PyTorch's own; ops.kernels={op}=triton for JAX's kernel"
  elif obstacle:
    name, why = "torch", obstacle
  else:
    name, why = "triton", f"JAX's kernel; ops.kernels={op}=xla for PyTorch's own"
  if asked not in ("", *ASKED):
    why += f"; PyTorch has no {asked}, which {setting} names for JAX"
  logging.getLogger(__name__).info("%s: %s (%s)", op, name, why)
  if name == "triton":  # No import statement, as in `shaders`.
    importlib.import_module("kernels_triton.torch_ops")
  return name


def _obstacle(device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> str:
  """Why Triton's kernels cannot run, "" if they can; `ops.requirements` says the same for JAX."""
  if not has_triton(device):
    return f"the kernel runs on NVIDIA GPUs, this is {device.type}"
  if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
    return f"the kernel needs compute capability 8.0, this GPU has {'.'.join(map(str, capability))}"
  return _obstacle_of_arrays(dtype, widths) or _missing_package()


def _obstacle_of_arrays(dtype: torch.dtype, widths: tuple[int, ...]) -> str:
  """Why Triton's kernels do not take operands of a dtype, and heads of these widths."""
  if dtype not in (torch.bfloat16, torch.float16):
    return f"the kernel needs bfloat16 or float16, these are {str(dtype).removeprefix('torch.')}"
  for width in widths:
    rest = width - (1 << (width.bit_length() - 1))
    if not 16 <= width <= WIDEST_HEAD or (rest and (rest < 16 or rest & (rest - 1))):
      return f"the kernel takes heads of 64, 80, 96, 128, 192, 256 and such, these are {width} wide"
  return ""


def _missing_package() -> str:
  for package, source in (("triton", "pip install triton"), ("kernels_triton", "ats_jax has it")):
    if importlib.util.find_spec(package) is None:
      return f"{package} is not installed: {source}"
  return ""
