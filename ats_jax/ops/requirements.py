"""Why a kernel cannot run on a device or for a config: sentences for logs and errors."""

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence

import jax
from absl import logging

from ats_jax.config.schema import Config
from kernels_cuda import cross_entropy, library, rms_norm, routing, rows
from kernels_triton import compile as programs
from kernels_triton import plan


@dataclasses.dataclass(frozen=True)
class Device:
  """The properties of a device that decide which kernels can run.

  Attributes:
    platform: "cpu", "gpu" or "tpu".
    capability: the compute capability of a GPU, e.g. "9.0".
    kind: the model, e.g. "NVIDIA H200"; names the tuning table.
  """

  platform: str
  capability: str = "0.0"
  kind: str = ""


def this_device() -> Device:
  """The devices of this process, which are all of one kind."""
  device = jax.devices()[0]
  capability = str(getattr(device, "compute_capability", "0.0"))
  return Device(device.platform, capability, device.device_kind)


def nvidia(device: Device, what: str, capabilities: Sequence[str] | str) -> str:
  """Obstacle of a kernel for NVIDIA GPUs.

  Args:
    device: where it would run.
    what: names the kernel in the sentence.
    capabilities: those it is compiled for, or the least one.
  """
  if device.platform != "gpu":
    return f"{what} runs on NVIDIA GPUs, this is {device.platform}"
  if not re.fullmatch(r"\d+\.\d", device.capability):  # AMD: gfx942
    return f"{what} runs on NVIDIA GPUs, this one calls itself {device.capability}"
  if isinstance(capabilities, str):
    fits = float(device.capability) >= float(capabilities)
  else:
    fits = device.capability in capabilities
  if not fits:
    needed = capabilities if isinstance(capabilities, str) else " or ".join(capabilities)
    return f"{what} needs compute capability {needed}, this GPU has {device.capability}"
  return ""


def lacks_bfloat16(device: Device) -> str:
  """Why a device does not multiply in bfloat16; "" = it does. NVIDIA GPUs do from sm_80 on."""
  is_nvidia = device.platform == "gpu" and re.fullmatch(r"\d+\.\d", device.capability)
  if not is_nvidia or float(device.capability) >= 8.0:
    return ""
  return f"compute capability {device.capability} has no bfloat16, which came with 8.0"


def with_compute_dtype(cfg: Config, device: Device, before: str = "") -> Config:
  """`cfg` with the format that `precision.compute_dtype=auto` stands for on a device; logs why.

  Args:
    cfg: the run.
    device: where it runs.
    before: the format in which the run was begun; "" = it begins now.
  """
  if cfg.precision.compute_dtype != "auto":
    return cfg
  lacks = lacks_bfloat16(device)
  dtype = before or ("float16" if lacks else "bfloat16")
  why = "as the run was begun" if before else lacks or "the device multiplies in it"
  logging.info("precision.compute_dtype=auto: %s (%s)", dtype, why)
  precision = dataclasses.replace(cfg.precision, compute_dtype=dtype)
  return dataclasses.replace(cfg, precision=precision)


def bfloat16(cfg: Config, what: str) -> str:
  """Obstacle of a kernel that computes in bfloat16."""
  dtype = cfg.precision.compute_dtype
  return "" if dtype == "bfloat16" else f"{what} needs bfloat16, precision.compute_dtype is {dtype}"


def cudnn_attention(cfg: Config, device: Device) -> str:
  """Obstacle of cuDNN's flash attention over packed rows, which older GPUs do not have."""
  if obstacle := nvidia(device, "cuDNN", "9.0"):
    return obstacle
  if (dtype := cfg.precision.compute_dtype) not in ("bfloat16", "float16"):
    return f"cuDNN needs bfloat16 or float16, precision.compute_dtype is {dtype}"
  if cfg.model.head_dim % 8 or cfg.model.head_dim > 256:
    return f"cuDNN needs head_dim % 8 == 0 and <= 256, model.head_dim is {cfg.model.head_dim}"
  if cfg.model.v_head_dim > cfg.model.head_dim:
    return f"cuDNN needs values no wider than keys, model.v_head_dim is {cfg.model.v_head_dim}"
  if cfg.model.attn_soft_cap:
    return f"cuDNN caps no scores, model.attn_soft_cap is {cfg.model.attn_soft_cap}"
  return ""


def triton_attention(cfg: Config, device: Device) -> str:
  """Obstacle of `kernels_triton.attention`."""
  if obstacle := triton(cfg, device):
    return obstacle
  for name in ("head_dim", "v_head_dim"):
    width = getattr(cfg.model, name)
    if width and (width > 256 or plan.split(width) is None):  # 0: as wide as keys
      return f"the kernel takes widths such as 64, 80, 96, 128, 192, 256, model.{name} is {width}"
  return ""


def splash_attention(cfg: Config, device: Device) -> str:
  """Obstacle of JAX's splash attention."""
  del cfg
  return "" if device.platform == "tpu" else f"splash runs on TPUs, this is {device.platform}"


def megablox(cfg: Config, device: Device) -> str:
  """Obstacle of JAX's grouped matmul for TPUs."""
  if device.platform != "tpu":
    return f"megablox runs on TPUs, this is {device.platform}"
  if (dtype := cfg.precision.compute_dtype) not in ("bfloat16", "float32"):
    return f"megablox needs bfloat16 or float32, precision.compute_dtype is {dtype}"
  return ""


def triton_paged_attention(cfg: Config, device: Device) -> str:
  """Obstacle of `kernels_triton.decode.paged_attention`."""
  if obstacle := triton(cfg, device):
    return obstacle
  if (width := cfg.model.head_dim) & (width - 1) or not 16 <= width <= 256:
    return f"the kernel takes widths of 16, 32, 64, 128, 256, model.head_dim is {width}"
  return ""


def triton(cfg: Config, device: Device) -> str:
  """Obstacle of all of `kernels_triton`: Triton has no tensor cores of GPUs before sm_80.

  Without Triton, programs that were made before will do; which ones a run needs is known only when
  it is traced.
  """
  if obstacle := nvidia(device, "the kernel", "8.0"):
    return obstacle
  if (dtype := cfg.precision.compute_dtype) not in ("bfloat16", "float16"):
    return f"the kernel needs bfloat16 or float16, precision.compute_dtype is {dtype}"
  if importlib.util.find_spec("triton") is None and not programs.are_kept(device.capability):
    return (
      "the kernel needs Triton, which is not installed, and no program for compute capability "
      f"{device.capability} is in {library.cache_folder()}: pip install triton"
    )
  return ""


def mosaic_grouped_matmul(cfg: Config, device: Device) -> str:
  """Obstacle of the grouped matmul in Pallas Mosaic GPU."""
  if obstacle := nvidia(device, "the kernel", ("9.0",)) or bfloat16(cfg, "the kernel"):
    return obstacle
  widths = {"model.d_model": cfg.model.d_model, "moe.d_ff": cfg.moe.d_ff // cfg.mesh.tensor}
  return multiples(64, widths)


def multiples(of: int, widths: Mapping[str, int]) -> str:
  """Obstacle of a kernel that takes a multiple of `of` columns; `widths` by setting."""
  for setting, width in widths.items():
    if width % of:
      return f"the kernel needs widths divisible by {of}, {setting} is {width} on a device"
  return ""


def cuda(device: Device, of_config: str = "", capability: Sequence[str] | str = "7.5") -> str:
  """Obstacle of one of `kernels_cuda`: the device, then `of_config`, then the library.

  That is built, at most once, if the other two are no obstacle.
  """
  return nvidia(device, "the kernel", capability) or of_config or _no_library()


@functools.cache
def _no_library() -> str:
  try:
    library.load()
  except library.KernelsUnavailableError as e:
    return str(e)
  return ""


def cuda_grouped_matmul(cfg: Config, device: Device) -> str:
  """Obstacle of `kernels_cuda.grouped_matmul`, whose instructions came with sm_80."""
  widths = {"model.d_model": cfg.model.d_model, "moe.d_ff": cfg.moe.d_ff // cfg.mesh.tensor}
  return cuda(device, bfloat16(cfg, "the kernel") or multiples(8, widths), "8.0")


def cuda_swiglu(cfg: Config, device: Device) -> str:
  """Obstacle of `kernels_cuda.swiglu`, which reads 16 bytes at a time."""
  tensor = cfg.mesh.tensor
  widths = {"model.d_ff": cfg.model.d_ff // tensor, "moe.d_ff": cfg.moe.d_ff // tensor}
  of_config = bfloat16(cfg, "the kernel") or multiples(8, widths)
  if cfg.model.activation != "silu":
    of_config = f"the kernel computes silu, model.activation is {cfg.model.activation}"
  return cuda(device, of_config)


def cuda_quantise(cfg: Config, device: Device) -> str:
  """Obstacle of `kernels_cuda.quantise`: 8-bit floats came with sm_89."""
  return cuda(device, bfloat16(cfg, "the kernel"), "8.9")


def cuda_rms_norm(cfg: Config, device: Device) -> str:
  """Obstacle of `kernels_cuda.rms_norm`."""
  names = ("d_model", "head_dim", "kv_latent_dim", "q_latent_dim")
  widths = {f"model.{name}": getattr(cfg.model, name) for name in names}
  of_config = bfloat16(cfg, "the kernel") or multiples(8, widths)
  for name, width in widths.items():
    if width > rms_norm.MAX_WIDTH:
      of_config = f"the kernel takes rows of up to {rms_norm.MAX_WIDTH}, {name} is wider"
  return cuda(device, of_config)


def cuda_rope(cfg: Config, device: Device) -> str:
  """Obstacle of `kernels_cuda.rope`, which reads 16 bytes of each half of a head."""
  name = "latent_rope_dim" if cfg.model.kv_latent_dim else "head_dim"
  widths = {f"model.{name}": getattr(cfg.model, name)}
  return cuda(device, bfloat16(cfg, "the kernel") or multiples(16, widths))


def cuda_routing(cfg: Config, device: Device) -> str:
  """Obstacle of `kernels_cuda.routing`."""
  moe = cfg.moe
  outputs = moe.num_experts + moe.spare_experts + moe.null_experts
  of_config = _choices(cfg)
  if outputs > routing.MAX_EXPERTS:
    of_config = f"the kernel takes up to {routing.MAX_EXPERTS} experts, there are {outputs}"
  return cuda(device, of_config)


def cuda_rows(cfg: Config, device: Device) -> str:
  """Obstacle of `kernels_cuda.rows`."""
  of_config = bfloat16(cfg, "the kernel") or multiples(8, {"model.d_model": cfg.model.d_model})
  return cuda(device, of_config or _choices(cfg))


def cuda_cross_entropy(cfg: Config, device: Device) -> str:
  """Obstacle of `kernels_cuda.cross_entropy`, which needs clusters of eight thread blocks.

  On some GPUs newer than these a block has too little shared memory for it.
  """
  of_config = bfloat16(cfg, "the kernel") or rows_of_logits(cfg) or _compiled_below("9.0")
  return cuda(device, of_config, ("9.0", "10.0", "10.3"))


def rows_of_logits(cfg: Config) -> str:
  """Why `kernels_cuda.cross_entropy` does not take this config's logits."""
  vocab = cfg.model.vocab_size
  if cfg.model.logit_soft_cap:
    return f"the kernel caps no logits, model.logit_soft_cap is {cfg.model.logit_soft_cap}"
  if cfg.mesh.tensor > 1:
    return f"the kernel needs whole rows of logits, mesh.tensor is {cfg.mesh.tensor}"
  if vocab > cross_entropy.MAX_VOCAB:
    return f"the kernel takes up to {cross_entropy.MAX_VOCAB} logits, there are {vocab}"
  return multiples(4, {"model.vocab_size": vocab})


def _compiled_below(capability: str) -> str:
  newest = library.newest_target()
  if float(newest) >= float(capability):
    return ""
  return (
    f"the kernel needs a library that is compiled for {capability}, it is for {newest} at most: "
    "see CUDA_TARGET_SM and TORCH_CUDA_ARCH_LIST"
  )


def cuda_adamw(cfg: Config, device: Device) -> str:
  """Obstacle of `kernels_cuda.adamw`, which takes every format that can be set."""
  if (mode := cfg.orchestrator.mode) != "off":
    return f"the kernel moves weights before an update can be held, orchestrator.mode is {mode}"
  return cuda(device)


def _choices(cfg):
  if cfg.moe.top_k > rows.MAX_CHOICES:
    return f"the kernel takes up to {rows.MAX_CHOICES} choices, moe.top_k is {cfg.moe.top_k}"
  return ""
