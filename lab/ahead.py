"""Training steps compiled for GPUs and TPUs that are not there.

For a GPU jax needs its CUDA plugin (`pip install "jax[cuda13]"`), for a TPU libtpu
(`pip install "jax[tpu]"`). The compiler cannot time anything, so on a GPU matmuls go to the library
untuned: their scratch memory and layouts are not those of a real run.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax._src.cudnn.fused_attention_stablehlo as cudnn
import jax.numpy as jnp
from jax.experimental import topologies

from ats_jax.config import Config
from ats_jax.ops.requirements import Device
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.step import compiler
from ats_jax.step import program as programs
from kernels_triton.compile import SHARED

NOTHING_IS_TIMED = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared}
  shared_memory_per_core: {core_shared}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {cores} fpus_per_core: {lanes} clock_rate_ghz: {clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} device_memory_size: {memory} l2_cache_size: {cache}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 20 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


class Gpu(NamedTuple):
  """What the compiler is told.

  Attributes:
    name: as the driver has it.
    capability: the compute capability.
    gb_per_s: of its memory, in units of 10^9.
    gb: of memory, in the same unit.
    cores: streaming multiprocessors.
    lanes: float32 units of each.
    threads: of each, at most.
    clock: GHz.
    cache: MiB of the second level.
  """

  name: str
  capability: str
  gb_per_s: int
  gb: int
  cores: int = 132
  lanes: int = 128
  threads: int = 2048
  clock: float = 1.98
  cache: int = 60

  def description(self) -> str:
    """As text of XLA's `GpuTargetConfigProto`."""
    major, minor = self.capability.split(".")
    of = self._asdict() | {"major": major, "minor": minor, "cache": self.cache * 2**20}
    of |= {"bandwidth": self.gb_per_s * 10**9, "memory": self.gb * 10**9}
    if (shared := SHARED.get(self.capability)) is None:  # Turing, which keeps nothing for itself
      return DESCRIPTION.format(shared=65536, core_shared=65536, **of)
    return DESCRIPTION.format(shared=shared, core_shared=shared + 1024, **of)


class Tpu(NamedTuple):
  """What libtpu is told.

  Attributes:
    name: as jax has it.
    topology: the smallest slice.
  """

  name: str
  topology: str


# Memory and clocks are of NVIDIA's data sheets, limits of the CUDA programming guide.
GPUS = {
  "T4": Gpu("Tesla T4", "7.5", 320, 16, 40, 64, 1024, 1.59, 4),
  "A100-40": Gpu("NVIDIA A100-SXM4-40GB", "8.0", 1555, 42, 108, 64, 2048, 1.41, 40),
  "A100": Gpu("NVIDIA A100-SXM4-80GB", "8.0", 2039, 85, 108, 64, 2048, 1.41, 40),
  "RTX3050": Gpu("NVIDIA GeForce RTX 3050", "8.6", 168, 6, 18, 128, 1536, 1.47, 2),
  "RTX3060": Gpu("NVIDIA GeForce RTX 3060", "8.6", 360, 12, 28, 128, 1536, 1.78, 3),
  "RTX3090": Gpu("NVIDIA GeForce RTX 3090", "8.6", 936, 25, 82, 128, 1536, 1.7, 6),
  "A6000": Gpu("NVIDIA RTX A6000", "8.6", 768, 51, 84, 128, 1536, 1.8, 6),
  "RTX4060": Gpu("NVIDIA GeForce RTX 4060", "8.9", 272, 8, 24, 128, 1536, 2.46, 24),
  "RTX4080": Gpu("NVIDIA GeForce RTX 4080", "8.9", 717, 17, 76, 128, 1536, 2.51, 64),
  "RTX4090": Gpu("NVIDIA GeForce RTX 4090", "8.9", 1008, 25, 128, 128, 1536, 2.52, 72),
  "H100": Gpu("NVIDIA H100 80GB HBM3", "9.0", 3352, 85),
  "H200": Gpu("NVIDIA H200", "9.0", 4800, 150),
  "B200": Gpu("NVIDIA B200", "10.0", 8000, 192, 148, 128, 2048, 1.97, 126),
  "RTX5090": Gpu("NVIDIA GeForce RTX 5090", "12.0", 1792, 34, 170, 128, 1536, 2.41, 96),
}
TPUS = {"v5e": Tpu("TPU v5 lite", "v5e:2x2"), "v6e": Tpu("TPU v6 lite", "v6e:2x2")}
DEVICES = {**GPUS, **TPUS}


def device_of(name: str) -> Device:
  """A device of `DEVICES` as the registry knows it."""
  of = DEVICES[name]
  return (
    Device("gpu", of.capability, of.name) if isinstance(of, Gpu) else Device("tpu", kind=of.name)
  )


@contextlib.contextmanager
def pretending(name: str) -> Iterator[None]:
  """Everything that asks for the device at hand is told that it is this one."""
  with (
    mock.patch.object(programs, "this_device", lambda: device_of(name)),
    mock.patch.object(compiler, "_refusal", lambda name, value: ""),
    mock.patch.object(cudnn, "check_cudnn_version", lambda: 92000),
    mock.patch.object(cudnn, "check_is_flash_attention", lambda *args, **kwargs: None),
    mock.patch.object(cudnn, "check_compute_capability", lambda capability: True),
  ):
    yield


def topology(name: str, devices: int = 1) -> list[Any]:
  """So many devices of a kind, of one host.

  Call before anything runs: jax reads its environment once.

  Raises:
    ValueError: what compiles for them is not installed.
  """
  of = DEVICES[name]
  try:
    if isinstance(of, Tpu):
      os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no server that knows of a TPU
      found = topologies.get_topology_desc(platform="tpu", topology_name=of.topology)
    else:
      jax.config.update("jax_platforms", None)  # the plugin too, whatever there is to run on
      os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
      # For kernels_cuda, which would look for a GPU.
      os.environ.setdefault("CUDA_TARGET_SM", of.capability)
      os.environ["XLA_FLAGS"] = f"{NOTHING_IS_TIMED} {os.environ.get('XLA_FLAGS', '')}"
      found = topologies.get_topology_desc(
        platform="cuda", target_config=of.description(), topology=f"1x1x{devices}"
      )
  except (NotImplementedError, RuntimeError) as e:
    extra = "tpu" if isinstance(of, Tpu) else "cuda13"
    raise ValueError(
      f"jax cannot compile for {of.name} here: {e}. If its plugin is missing: "
      f"pip install 'jax[{extra}]'."
    ) from e
  if len(found.devices) < devices:
    raise ValueError(f"--devices={devices}: {of.topology} has {len(found.devices)}")
  return list(found.devices)[:devices]


def compiled(
  cfg: Config, name: str, devices: int = 1
) -> tuple[jax.stages.Compiled, programs.Program]:
  """The training step of a resolved config for so many devices of one host; see `topology`."""
  on, made = topology(name, devices), []

  def trace():  # keys are arrays, and there is no device to have them
    made.append(programs.make_program(cfg))
    made.append(made[0].init(abstract=True))
    return jnp.zeros(())

  with pretending(name), on_mesh(cfg, make_mesh(cfg, on)):
    jax.eval_shape(trace)
    return made[0].compile_train_step(made[1], made[0].training_rules(cfg.num_steps)), made[0]
