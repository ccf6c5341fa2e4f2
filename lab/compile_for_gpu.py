r"""What a training step needs on a GPU that is not there: compiled for it, and not run.

Needs jax's CUDA plugin (`pip install "jax[cuda13]"`), but no GPU. The compiler cannot time
anything, so matmuls go to the library untuned: their scratch memory and layouts are not those of a
real run. Prints the memory that the step needs beside the planner's estimate, and what a device
sends through collectives outside of loops. --out keeps the optimized program, to look for what is
copied, fused or written out.
Command: python -m lab.compile_for_gpu --config=configs/dense_1_5b.py [--gpu=H200] \
  [--devices=2 --config.mesh.fsdp=2] [--out=step.txt] [--config.step.remat=names]
"""

import collections
import contextlib
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax._src.cudnn.fused_attention_stablehlo as cudnn
import jax.numpy as jnp
from absl import flags
from jax.experimental import topologies

from ats_jax.config import Config
from ats_jax.ops.requirements import Device
from ats_jax.planner.abstract import resolve_without_data
from ats_jax.planner.describe import describe, planned_bytes
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.step import compiler
from ats_jax.step import program as programs
from ats_jax.verbs import cli
from kernels_triton.compile import SHARED

GIB = 2**30
MATMUL = r"custom_call_target=\"(__(cublas|cudnn)|mosaic_gpu)|__triton"
LONGEST = 5000  # characters of a line that are read; behind them are the insides of kernels
# Bytes that a device sends for each byte it gets, in units of (devices - 1).
SENT = {
  "all-gather": lambda ways: 1 / ways,
  "reduce-scatter": lambda ways: 1,
  "all-reduce": lambda ways: 2 / ways,
  "all-to-all": lambda ways: 1 / ways,
}
KINDS = "|".join(SENT)
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


# Memory and clocks are of NVIDIA's data sheets, limits of the CUDA programming guide.
GPUS = {
  "T4": Gpu("Tesla T4", "7.5", 320, 16, 40, 64, 1024, 1.59, 4),
  "A100": Gpu("NVIDIA A100-SXM4-80GB", "8.0", 2039, 85, 108, 64, 2048, 1.41, 40),
  "RTX3090": Gpu("NVIDIA GeForce RTX 3090", "8.6", 936, 25, 82, 128, 1536, 1.7, 6),
  "RTX4090": Gpu("NVIDIA GeForce RTX 4090", "8.9", 1008, 25, 128, 128, 1536, 2.52, 72),
  "H100": Gpu("NVIDIA H100 80GB HBM3", "9.0", 3352, 85),
  "H200": Gpu("NVIDIA H200", "9.0", 4800, 150),
  "B200": Gpu("NVIDIA B200", "10.0", 8000, 192, 148, 128, 2048, 1.97, 126),
  "RTX5090": Gpu("NVIDIA GeForce RTX 5090", "12.0", 1792, 34, 170, 128, 1536, 2.41, 96),
}

_CONFIG = cli.ConfigFlag()
_GPU = flags.DEFINE_enum("gpu", "H200", list(GPUS), "Which GPU.")
_DEVICES = flags.DEFINE_integer("devices", 1, "How many of them, on one host.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "", "Where to write the optimized program.")


@contextlib.contextmanager
def pretending(gpu: Gpu) -> Iterator[None]:
  """Everything that asks for the device at hand is told that it is this GPU."""
  device = lambda: Device("gpu", gpu.capability, gpu.name)
  with (
    mock.patch.object(programs, "this_device", device),
    mock.patch.object(compiler, "_refusal", lambda name, value: ""),
    mock.patch.object(cudnn, "check_cudnn_version", lambda: 92000),
    mock.patch.object(cudnn, "check_is_flash_attention", lambda *args, **kwargs: None),
    mock.patch.object(cudnn, "check_compute_capability", lambda capability: True),
  ):
    yield


def compiled(
  cfg: Config, gpu: str, devices: int = 1
) -> tuple[jax.stages.Compiled, programs.Program]:
  """The training step of a resolved config for so many such GPUs of one host.

  Call before anything runs: jax reads its environment once.
  """
  jax.config.update("jax_platforms", None)  # the plugin too, whatever there is to run on
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
  os.environ.setdefault(
    "CUDA_TARGET_SM", GPUS[gpu].capability
  )  # for kernels_cuda, which would look for a GPU
  os.environ["XLA_FLAGS"] = f"{NOTHING_IS_TIMED} {os.environ.get('XLA_FLAGS', '')}"
  try:
    topology = topologies.get_topology_desc(
      platform="cuda", target_config=GPUS[gpu].description(), topology=f"1x1x{devices}"
    )
  except NotImplementedError as e:
    raise ValueError(
      f"jax cannot compile for CUDA here: {e}. If its plugin is missing: pip install 'jax[cuda13]'."
    ) from e
  made = []

  def trace():  # keys are arrays, and there is no device to have them
    made.append(programs.make_program(cfg))
    made.append(made[0].init(abstract=True))
    return jnp.zeros(())

  with pretending(GPUS[gpu]), on_mesh(cfg, make_mesh(cfg, list(topology.devices))):
    jax.eval_shape(trace)
    return made[0].compile_train_step(made[1], made[0].training_rules(cfg.num_steps)), made[0]


def traffic(program: str) -> collections.Counter[tuple[str, str]]:
  """Bytes that a device sends in a step through collectives outside of loops.

  Args:
    program: a compiled one as text, in the order in which it is run.

  Returns:
    By kind of collective, and by whether a matmul is between its start and its end.
  """
  lines = [line[:LONGEST] for line in program[program.index("\nENTRY") :].splitlines()]
  started, found = {}, collections.Counter()
  for number, line in enumerate(lines):
    if start := re.search(rf"%?(\S+) = (.*) ({KINDS})(-start)?\(", line):
      name, results, kind, runs_on = start.groups()
      results = results.split("), ", 1)[-1] if runs_on else results  # behind the arguments
      ways = _ways(line)
      sent = round(_bytes(results) * (ways - 1) * SENT[kind](ways))
      started[name] = number, kind, sent
      if not runs_on:
        found[kind, "beside none"] += sent
    if done := re.search(rf"({KINDS})-done\(.*?%?([\w.-]+)\)", line):
      began, kind, sent = started[done[2]]
      hidden = any(re.search(MATMUL, between) for between in lines[began:number])
      found[kind, "beside matmuls" if hidden else "beside none"] += sent
  return found


def _bytes(shapes: str) -> int:
  """Of arrays as HLO writes them."""
  arrays = re.findall(r"([a-z]+)(\d*)\[([\d,]*)\]", shapes)
  length = lambda dims: math.prod(map(int, filter(None, dims.split(","))))
  return sum(max(1, int(bits or 8) // 8) * length(dims) for _, bits, dims in arrays)


def _ways(line: str) -> int:
  """How many devices a collective is among."""
  sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", line)}
  if sizes:
    axes = re.search(r"replica_groups=mesh\[.*?\] \{(.*?)\}", line)
    return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", axes[1])) if axes else 1
  groups = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
  return int(groups[1]) if groups else 1


def main(argv: list[str]) -> None:
  """Print what was found."""
  del argv
  cfg = resolve_without_data(_CONFIG.value)
  began = time.perf_counter()
  step, made = compiled(cfg, _GPU.value, _DEVICES.value)
  secs = time.perf_counter() - began
  for choice in made.choices:
    print(choice)
  devices = f"{_DEVICES.value} x {GPUS[_GPU.value].name}"
  print(
    f"{made.counts.parameters / 1e9:.2f}B parameters on {devices}: the step "
    f"needs {programs.predicted_bytes(step) / GIB:.2f} GiB (the planner estimates "
    f"{planned_bytes(describe(cfg, _DEVICES.value)) / GIB:.2f}); compiled here in {secs:.0f} s."
  )
  for (kind, when), sent in sorted(traffic(step.as_text() or "").items()):
    print(f"a device sends {sent / 1e9:.2f} GB by {kind}, {when}")
  if _OUT.value:
    Path(_OUT.value).write_text(step.as_text() or "", encoding="utf-8")


if __name__ == "__main__":
  cli.run(main)
