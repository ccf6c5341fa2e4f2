"""The section `optimizer`."""

import dataclasses

from ats_jax.config.schema.setting import setting
from ats_jax.extensions import optimizers, schedules


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """The optimizer and its schedule."""

  name: str = setting("adamw", "what makes directions of gradients", choices=optimizers)
  learning_rate: float = setting(3e-4, "peak learning rate", low=0.0)
  schedule: str = setting("cosine", "shape after warm-up", choices=schedules)
  warmup_steps: int = setting(0, "linear warm-up; the first step uses lr/warmup_steps", low=0)
  warmup_fraction: float = setting(
    0.0, "warm-up as a share of num_steps; warmup_steps, if set, goes before it", low=0.0, high=1.0
  )
  phases: str = setting(
    "",
    "of each phase of data.mixture its peak learning rate and steps of warm-up, as rate/steps with "
    "semicolons, in place of the settings above: each has a schedule of its own over its length; "
    "empty = one over the run",
    resume="free",
  )
  phase_moments: str = setting(
    "keep",
    "the optimizer's moments and count of updates where a phase of data.mixture begins: 'keep' "
    "them, or 'reset' them to those of a new run",
    choices=("keep", "reset"),
    resume="free",
  )
  final_lr_fraction: float = setting(
    0.1, "learning rate at the end as a share of the peak", low=0.0, high=1.0
  )
  decay_fraction: float = setting(
    0.2, "share of num_steps spent in the decay phase of 'wsd'", low=0.0, high=1.0
  )
  b1: float = setting(0.9, "decay of Adam's first moment", low=0.0, high=1.0)
  b2: float = setting(0.95, "decay of Adam's second moment", low=0.0, high=1.0)
  eps: float = setting(1e-8, "added to the root of the second moment", low=0.0)
  weight_decay: float = setting(
    0.1, "decoupled decay of matrices; norms, biases and scalars are never decayed", low=0.0
  )
  decay_embeddings: bool = setting(False, "decay the embedding table too")
  grad_clip: float = setting(1.0, "global-norm clip; 0 = off", low=0.0)
  ema_decay: float = setting(
    0.0,
    "decay of an average of the weights, used by evaluation and generation; 0 = none",
    low=0.0,
    high=1.0,
  )
