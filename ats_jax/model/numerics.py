"""How a model is computed: dtypes, and what runs."""

import dataclasses

import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.ops.registry import XLA, Kernels

UNROLLED = 32  # layers, of a pipeline those of a turn of a stage; more were not tried


@dataclasses.dataclass(frozen=True)
class Numerics:
  """How the function is computed; none of it changes what is computed, beyond rounding."""

  param_dtype: jnp.dtype
  compute_dtype: jnp.dtype
  kernels: Kernels  # what runs in the slots of the ops
  max_segments: int  # runs of one segment id in a row at most, padding's included
  deterministic: bool
  remat: str
  scan_unroll: int
  remat_stages: str = "full"
  micro_batches: int = 1  # that a batch of training is cut into
  keep_gathered: bool = False  # weights, from the forward to the backward pass


def numerics(cfg: Config, kernels: Kernels = XLA, scan_unroll: int = 1) -> Numerics:
  """Collect the settings that the model needs beside its shape.

  Args:
    cfg: the resolved config.
    kernels: what runs, by `ops.registry.choose`.
    scan_unroll: where no setting says so.
  """
  return Numerics(
    param_dtype=jnp.dtype(cfg.precision.param_dtype),
    compute_dtype=jnp.dtype(cfg.precision.compute_dtype),
    kernels=kernels,
    max_segments=cfg.data.max_segments + 1,
    deterministic=cfg.precision.deterministic,
    remat=cfg.step.remat,
    scan_unroll=cfg.step.scan_unroll or scan_unroll,
    remat_stages=cfg.step.remat_stages,
    micro_batches=cfg.step.accum_steps,
    keep_gathered=cfg.mesh.keep_gathered,
  )


def usual_unroll(cfg: Config, platform: str) -> int:
  """Blocks per iteration of the scan over layers that are fastest on a "cpu", "gpu" or "tpu".

  In a loop XLA on a GPU copies what each layer reads and stores, or runs our kernels twice to avoid
  the copies. Unrolled, a program takes longer to compile (docs/lab/performance.md). With
  deterministic kernels an unrolled step stops in XLA's runtime (docs/lab/log.md).
  """
  in_a_loop = cfg.precision.deterministic or _layers_of_turn(cfg) > UNROLLED
  return cfg.model.num_layers if platform == "gpu" and not in_a_loop else 1


def is_unrolled(cfg: Config, platform: str) -> bool:
  """Whether such a device runs its layers without a loop; of a pipeline, those of one turn."""
  unroll = cfg.step.scan_unroll or usual_unroll(cfg, platform)
  return unroll >= _layers_of_turn(cfg) and (unroll > 1 or cfg.mesh.stage == 1)


def _layers_of_turn(cfg: Config) -> int:
  return cfg.model.num_layers // (cfg.mesh.stage * cfg.mesh.stage_rounds)
