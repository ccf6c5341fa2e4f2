"""The state of training, and the metrics of a step."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ats_jax.model.decoder import Decoder

if TYPE_CHECKING:  # a run without them does not load them
  from ats_jax.step.loss_scale import LossScale
  from ats_jax.step.reflex import Control, Reflex


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """The state of training; a step maps it to the next.

  Attributes:
    step: int32 scalar, the number of updates done.
    model: the model with its weights.
    opt_state: the state of the optax chain.
    ema: averaged weights, or None (`optimizer.ema_decay`).
    key: the root key of all randomness; it is never split, only folded (`model.random`).
    control: scalars set by the supervisor; None with `orchestrator.mode=off`.
    reflex: statistics of earlier steps; None with `orchestrator.mode=off`.
    unsent: the rounding errors of each replica's gradients in 8 bits, added to the next gradients
      (`step.parts.replicas`); None if nothing is compressed.
    loss_scale: that of gradients in float16; None with any other `precision.compute_dtype`.
  """

  step: jax.Array
  model: Decoder
  opt_state: optax.OptState
  ema: Decoder | None
  key: jax.Array
  control: "Control | None" = None
  reflex: "Reflex | None" = None
  unsent: Any = None
  loss_scale: "LossScale | None" = None

  @property
  def weights(self) -> Decoder:
    """The weights for evaluation and generation: the average if there is one."""
    return self.model if self.ema is None else self.ema


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
  """The metrics of a step; `metrics["train/loss"]` is one of the values.

  Attributes:
    values: float32 vector: one transfer to the host for all of them.
    layers: arrays of the sparse layers, in order of depth: moe/load [layers, experts] (share of the
      layer's choices), moe/layer_entropy, moe/layer_dropped, moe/layer_tokens, mod/layer_routed,
      mod/layer_overflow [layers], mod/depths [layers + 1] (share of tokens by how many of the
      skipping layers they went through).
    names: the names of the entries of `values`; static, so that they come with each compiled step.
      docs/reference/metrics.md says what they mean.
  """

  values: jax.Array
  layers: dict[str, jax.Array]
  names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

  @classmethod
  def of(cls, metrics: Mapping[str, jax.Array]) -> "StepMetrics":
    """Put scalars into the vector, and leave other arrays as they are."""
    scalars = {name: x for name, x in metrics.items() if x.ndim == 0}
    values = jnp.stack([x.astype(jnp.float32) for x in scalars.values()])
    layers = {name: x for name, x in metrics.items() if x.ndim > 0}
    return cls(values, layers, tuple(scalars))

  def __getitem__(self, name: str) -> jax.Array:
    """The value of the metric `name`."""
    return self.values[self.names.index(name)]

  def on_host(self) -> dict[str, float]:
    """Copy all values to the host, by name; waits for the step."""
    return dict(zip(self.names, np.asarray(self.values).tolist(), strict=True))


def check_finite(step: int, metrics: StepMetrics) -> None:
  """Check before a checkpoint that `step` left finite weights.

  Raises:
    FloatingPointError: if it did not. Its loss, from the weights before the step, may be finite.
  """
  weights = metrics.on_host()["train/param_norm"]
  if not math.isfinite(weights):
    raise FloatingPointError(
      f"the norm of the weights is {weights} after step {step}, which was not saved. Lower "
      "optimizer.learning_rate, or look at the data (python -m ats_jax data stats)."
    )
