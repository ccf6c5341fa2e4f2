"""Chooses the parts of a training step; the module of a part is imported when it is used."""

from typing import TYPE_CHECKING

from ats_jax.config.schema import Config
from ats_jax.config.schema.mixture import freezes
from ats_jax.sharding.apply import has_own_sharding
from ats_jax.step.optimizers.base import Optimizer

if TYPE_CHECKING:
  from ats_jax.step.core import Part


def parts_of(cfg: Config, optimizer: Optimizer) -> "tuple[Part, ...]":
  """The parts of a run, in the order in which a step calls them (`step.core.Part`).

  Call it under the mesh and its plan, which decide on shards and replicas.
  """
  parts: list[Part] = []
  with_reflex = cfg.orchestrator.mode != "off"
  if cfg.optimizer.phase_moments != "keep":
    from ats_jax.step.parts.phases import Phases

    parts.append(Phases(cfg, optimizer))
  if freezes(cfg.data):
    from ats_jax.step.parts.freezing import Freezing

    parts.append(Freezing(cfg, optimizer))
  if cfg.moe.num_experts and with_reflex:  # which has the rate
    from ats_jax.step.parts.sparse import ExpertDropout

    parts.append(ExpertDropout(cfg))
  if cfg.mesh.compress_gradients != "none":
    from ats_jax.step.parts.replicas import Replicas, compresses

    if compresses(cfg):
      parts.append(Replicas())
  if has_own_sharding("moments"):
    from ats_jax.step.parts.shards import Shards

    parts.append(Shards())
  if cfg.moe.num_experts or cfg.mod.routing != "none":
    from ats_jax.step.parts.sparse import Sparse

    parts.append(Sparse(cfg))
  if cfg.optimizer.ema_decay:
    from ats_jax.step.parts.ema import Ema

    parts.append(Ema(cfg.optimizer.ema_decay))
  elif optimizer.average is not None:
    from ats_jax.step.parts.ema import Averaged

    parts.append(Averaged(optimizer))
  if (scaling := cfg.precision.scaling) is not None:  # behind all that it takes back
    from ats_jax.step.parts.scaled import Scaled

    parts.append(Scaled(scaling))
  if with_reflex:  # behind all that it takes back
    from ats_jax.step.parts.guard import Guard

    parts.append(Guard(cfg, optimizer, is_armed=cfg.orchestrator.mode == "act"))
  return tuple(parts)
