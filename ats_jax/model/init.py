"""Parameters: born in their dtype and sharding, with their logical axes beside them."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.config.schema import Config, ModelConfig
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.rules import spec

UNROLLED = 32  # layers; 32 of d_model 4096 take two minutes to compile on an H200


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


class Buffer(nnx.Variable):
  """What the model reads but no gradient trains: the step sets it from what it saw."""


def trainable(model: Any) -> Any:
  """The model with None in place of its buffers; `merge` undoes it."""
  return jax.tree.map(lambda v: None if isinstance(v, Buffer) else v, model, is_leaf=_is_variable)


def merge(params: Any, model: Any) -> Any:
  """`params` (like `trainable(model)`) with the buffers of `model`."""
  copied = lambda v: jax.tree.map(lambda x: x, v)  # whoever writes to it writes to no other model
  pick = lambda v, p: copied(v) if isinstance(v, Buffer) else p
  return jax.tree.map(pick, model, params, is_leaf=_is_variable)


def _is_variable(x: Any) -> bool:
  return isinstance(x, nnx.Variable)


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
  )


def usual_unroll(cfg: Config) -> int:
  """Blocks per iteration of the scan over layers that are fastest on the devices at hand.

  In a loop XLA on a GPU copies what each layer reads and stores, or runs kernels of ours twice to
  avoid that; without one the program is longer to compile (docs/performance.md). With deterministic
  kernels an unrolled step stops in XLA's runtime (docs/log.md); under accumulation it runs, and has
  not been timed.
  """
  layers = cfg.model.num_layers
  in_a_loop = cfg.precision.deterministic or cfg.step.accum_steps > 1
  on_gpu = jax.default_backend() == "gpu"
  return layers if on_gpu and layers <= UNROLLED and not in_a_loop else 1


def normal(
  key: jax.Array, shape: tuple[int, ...], axes: tuple[str, ...], std: float, dtype: jnp.dtype
) -> nnx.Param:
  """Draw a weight from N(0, std^2) in float32, cast to `dtype`, sharded by logical `axes`."""
  value = std * jax.random.normal(key, shape, jnp.float32, out_sharding=spec(*axes))
  return nnx.Param(value.astype(dtype))


def ones(shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype) -> nnx.Param:
  """A vector of ones, e.g. the scale of a norm."""
  return nnx.Param(jnp.ones(shape, dtype, out_sharding=spec(*axes)))


def zero_vector(shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype) -> nnx.Param:
  """A vector of zeros, e.g. a bias."""
  return nnx.Param(jnp.zeros(shape, dtype, out_sharding=spec(*axes)))


def residual_std(cfg: ModelConfig) -> float:
  """Std of matrices that write to the residual stream: 2 * num_layers of them add up (GPT-2)."""
  return cfg.init_std / math.sqrt(2 * cfg.num_layers)


def head_std(cfg: ModelConfig) -> float:
  """Std of the output head: logits of a unit-RMS input stay within 0.25, so first loss = ln V.

  The excess over ln V is half the logits' variance, at most 0.03 (our choice; no source).
  """
  return min(cfg.init_std, 0.25 / math.sqrt(cfg.d_model))
