"""How a model is computed: dtypes, implementations, the order of layers."""

import dataclasses

import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.model.layout import check_stages, segments_of
from ats_jax.model.param import Role
from ats_jax.model.stack import InOrder, Remat, Scan, Stack, Unrolled
from ats_jax.ops.attention.along_row import AlongRow, attend_whole_rows
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import num_shards

# What `precision.param_dtype` is of. All else is float32 at least: tables, routers, adapters and
# vectors are few numbers, and bfloat16 would round small updates away, as of norms near 1.
NARROW = frozenset({Role.MATRIX, Role.EXPERT, Role.HEAD})
MAX_UNROLLED_LAYERS = 32  # layers (of one round of a stage, in a pipeline); more were not measured


@dataclasses.dataclass(frozen=True)
class Numerics:
  """How the model's function is computed; none of it changes the result beyond rounding.

  Attributes:
    param_dtype: dtype of matrices; of all parameters see `stored`.
    frozen_table: the embedding does not train, so that nothing would be rounded away in it.
    compute_dtype: dtype of activations and matmul operands.
    kernels: the implementation in each slot of the ops.
    max_segments: the most segments of a row, one of padding included.
    deterministic: use only ops that add in a fixed order.
    stack: how the layers follow each other.
    along_row: how the devices along a row share its attention.
    keep_gathered: keep gathered weights from the forward to the backward pass.
  """

  param_dtype: jnp.dtype
  compute_dtype: jnp.dtype
  kernels: Kernels
  max_segments: int
  deterministic: bool
  stack: Stack
  along_row: AlongRow
  keep_gathered: bool = False
  frozen_table: bool = False

  def stored(self, role: Role) -> jnp.dtype:
    """The dtype of the parameters and buffers of a role."""
    if self.frozen_table and role is Role.EMBEDDING:
      return self.param_dtype
    return stored_dtype(role, self.param_dtype)


def stored_dtype(role: Role, param_dtype: jnp.dtype) -> jnp.dtype:
  """The dtype of what has this role in a run with that `param_dtype`; no other code decides it."""
  return param_dtype if role in NARROW else jnp.promote_types(param_dtype, jnp.float32)


def numerics(cfg: Config, kernels: Kernels = XLA, platform: str = "cpu") -> Numerics:
  """Collect how a run computes its model; call it under the mesh.

  Args:
    cfg: the resolved config.
    kernels: the implementations chosen by `ops.registry.choose`.
    platform: "cpu", "gpu" or "tpu".

  Raises:
    ValueError: if the stages of the mesh cannot share the layers.
  """
  return Numerics(
    param_dtype=jnp.dtype(cfg.precision.param_dtype),
    compute_dtype=jnp.dtype(cfg.precision.compute_dtype),
    kernels=kernels,
    max_segments=cfg.data.max_segments + 1,
    deterministic=cfg.precision.deterministic,
    stack=stack_of(cfg, unroll_of(cfg, platform)),
    along_row=along_row_of(),
    keep_gathered=cfg.mesh.keep_gathered,
    frozen_table=cfg.finetune.keeps_embedding,
  )


def stack_of(cfg: Config, unroll: int) -> Stack:
  """Choose how the layers of a run follow each other; no other code decides it.

  It is a pipeline where the current mesh has stages. A segment of at most `unroll` super-blocks is
  unrolled.

  Args:
    cfg: the resolved config.
    unroll: super-blocks per iteration of the loop over layers (`unroll_of`).

  Raises:
    ValueError: if the stages of the mesh cannot share the layers.
  """
  stages, step = num_shards("layers"), cfg.step
  check_stages(cfg, stages)
  one_barrier = stages > 1 and step.remat_stages != "full"
  decodes = bool(cfg.finetune.base_format)
  remat = Remat(step.remat, cfg.mesh.keep_gathered, decodes, one_barrier)
  loop = lambda repeats: Unrolled(remat) if 1 < unroll >= repeats else Scan(remat, unroll)
  segments = segments_of(cfg)
  if stages == 1:
    return InOrder(tuple(loop(segment.repeats) for segment in segments))
  from ats_jax.model.pipelined import Pipeline

  return Pipeline(
    loop=loop(segments[0].repeats // stages),
    num_layers=cfg.model.num_layers,
    micro_batches=step.accum_steps,
    rounds=cfg.mesh.stage_rounds,
    remat=step.remat_stages,
  )


def along_row_of() -> AlongRow:
  """Choose how the devices along a row of the current mesh share its attention."""
  if num_shards("seq") == 1:
    return attend_whole_rows
  from ats_jax.ops.attention.ulysses import attend_by_heads

  return attend_by_heads


def unroll_of(cfg: Config, platform: str) -> int:
  """Blocks per iteration of the scan over layers: `step.scan_unroll`, or what is fastest.

  In a loop XLA on a GPU copies what each layer reads and stores, or runs our kernels twice to avoid
  the copies. Unrolled, a program takes longer to compile. With deterministic kernels an unrolled
  step stops in XLA's runtime (docs/lab/log.md).

  Args:
    cfg: the resolved config.
    platform: "cpu", "gpu" or "tpu".
  """
  in_a_loop = cfg.precision.deterministic or _layers_of_round(cfg) > MAX_UNROLLED_LAYERS
  fastest = cfg.model.num_layers if platform == "gpu" and not in_a_loop else 1
  return cfg.step.scan_unroll or fastest


def is_unrolled(cfg: Config, platform: str) -> bool:
  """Whether a device runs its layers (of one round, in a pipeline) without a loop."""
  unroll = unroll_of(cfg, platform)
  return unroll >= _layers_of_round(cfg) and (unroll > 1 or cfg.mesh.stage == 1)


def _layers_of_round(cfg: Config) -> int:
  return cfg.model.num_layers // (cfg.mesh.stage * cfg.mesh.stage_rounds)
