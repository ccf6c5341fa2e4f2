"""Optimizers: optax transformations that say what they keep of each parameter."""

import optax

from ats_jax.config.schema import Config
from ats_jax.extensions import optimizers
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.step.optimizers.adamw import adamw
from ats_jax.step.optimizers.base import Optimizer, add_decayed_weights, clip_by_norm

# An optimizer is registered as (cfg, platform, kernels) -> `Optimizer`, or an optax transformation.
optimizers.register("adamw")(adamw)


def build_optimizer(cfg: Config, platform: str, kernels: Kernels = XLA) -> Optimizer:
  """The optimizer of a run on a "cpu", "gpu" or "tpu"; `kernels` say what runs.

  One that is a mere optax transformation of gradients to directions gets the clipping in front and
  the decoupled decay behind that the settings ask for.

  Another one for some roles is an `optax.partition` here, by `model.param.roles`.

  Raises:
    ValueError: if `optimizer.name` is none, or what it makes is none.
  """
  made = optimizers.find(cfg.optimizer.name)(cfg, platform, kernels)
  if isinstance(made, Optimizer):
    return made
  if not isinstance(made, optax.GradientTransformation):
    raise ValueError(
      f"optimizer.name={cfg.optimizer.name!r} made {made!r:.80}: expected an optax transformation, "
      "or an ats_jax.step.optimizers.base.Optimizer."
    )
  o, chain = cfg.optimizer, [made]
  if o.grad_clip:
    chain.insert(0, clip_by_norm(o.grad_clip, platform))
  if o.weight_decay:
    chain.append(add_decayed_weights(o.weight_decay, embeddings=o.decay_embeddings))
  return Optimizer(optax.chain(*chain), platform)
