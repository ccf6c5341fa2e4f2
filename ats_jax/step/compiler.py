"""XLA options of the train step: defaults of a device, and those set by the run."""

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from absl import logging

from ats_jax.config.schema import Config
from ats_jax.model.numerics import is_unrolled
from ats_jax.ops.requirements import Device

Options = dict[str, str | bool]

# Experts in a loop over layers, on Hopper: XLA would run their forward kernels twice to write into
# the loop's arrays (docs/reference/performance.md). Command buffers (CUDA graphs) are XLA's own
# default.
EXPERTS_IN_A_LOOP = {"xla_gpu_enable_dynamic_slice_fusion": "false"}
# XLA times Triton's many ways to multiply beside cuBLASLt's; without, nothing but cuBLASLt's is
# timed. One H200, jax 0.11.2, empty caches, steps not waited for, with -> without (tok/s):
#   8.03B dense, d_model 4096, unrolled   compiled in 119 -> 17.5 s   12,213 -> 12,281
#   9.24B, 64 experts                               110.3 -> 47.7 s   48,216 -> 48,185
#   9.23B, 8 experts                                 81.1 -> 48.4 s   28,830 -> 28,546
#   1.5B dense, d_model 2048                         17.0 ->  8.4 s   63,097 -> 62,479
#   1.5B, an eighth of the tokens in each other layer  29 -> 15.9 s   96,358 -> 95,030
# So they go where they win nothing: the first two, and in 8 bits, where they take minutes.
NO_TRITON_MATMULS = {"xla_gpu_enable_triton_gemm": "false"}
WIDE_MODEL, MANY_EXPERTS = 4096, 64  # the first two
# How many collectives XLA may have on their way at a time; its own default is one. A matmul has all
# of the GPU, so that a collective which begins beside one waits for its end: to hide it takes two
# matmuls. Where gathered weights are kept, more of them take no more memory. Two H200s, jax 0.11.2,
# of twice one GPU: 8.03B with `mesh.keep_gathered`, two -> three: 95.4 -> 96.3 %; 9.23B in 8
# experts, one -> two: 93.6 -> 95.2 %. Without it, 1.5B and the experts lost 0.6 and 1.2 % by two.
SEVERAL_COLLECTIVES = {"xla_gpu_experimental_parallel_collective_overlap_limit": "4"}
# Permutations are copies by the copy engines, which take no SM of a GPU, inside one process.
COPY_ENGINES = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
NVIDIA, HOPPER = r"\bNVIDIA\b", r"\bH[12]00\b"  # in the device's `kind`


def compiler_options(cfg: Config, device: Device) -> Options:
  """The compiler options of the train step, each tried on a trivial program first.

  Args:
    cfg: the resolved config; its `step.compiler_options` override `default_options`.
    device: the device of the run.

  Returns:
    The options. Default options that this XLA refuses are left out and logged.

  Raises:
    ValueError: if this XLA refuses an option of `step.compiler_options`.
  """
  asked, options = cfg.step.compiler_options, Options()
  for name, text in {**default_options(cfg, device), **asked}.items():
    value = {"true": True, "false": False}.get(text.lower(), text)
    refusal = _refusal(name, value)
    if not refusal:
      options[name] = value
    elif name in asked:
      raise ValueError(f"step.compiler_options: {name}={text}: {refusal}. Change or remove it.")
    else:
      logging.warning("%s=%s, a default of %s, is left out: %s", name, text, device.kind, refusal)
  return options


def default_options(cfg: Config, device: Device) -> Mapping[str, str]:
  """The default compiler options of a config on a device."""
  in_a_loop, options = not is_unrolled(cfg, device.platform), {}
  if cfg.moe.num_experts and in_a_loop and re.search(HOPPER, device.kind):
    options |= EXPERTS_IN_A_LOOP
  experts, wide = cfg.moe.num_experts, cfg.model.d_model >= WIDE_MODEL
  gain_nothing = experts >= MANY_EXPERTS if experts else wide and not in_a_loop
  if (cfg.precision.fp8 or gain_nothing) and re.search(NVIDIA, device.kind):
    options |= NO_TRITON_MATMULS
  if cfg.mesh.keep_gathered and re.search(NVIDIA, device.kind):
    options |= SEVERAL_COLLECTIVES
  if cfg.mesh.copy_engines and re.search(NVIDIA, device.kind):
    options |= COPY_ENGINES
  return options


def evaluation_options(options: Options) -> Options:
  """Select the options of the train step that evaluation needs too."""
  needed = {*NO_TRITON_MATMULS, *COPY_ENGINES}
  return {name: value for name, value in options.items() if name in needed}


def _refusal(name: str, value: str | bool) -> str:
  """Why XLA does not take an option; "" if it does. Unknown names in XLA_FLAGS end the process."""
  try:
    jax.jit(lambda: jnp.zeros(()), compiler_options={name: value}).lower().compile()
  except jax.errors.JaxRuntimeError as error:
    return str(error)
  return ""
