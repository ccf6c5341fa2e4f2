"""What a step takes and gives: the state of training, and its metrics."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ats_jax.model.decoder import Decoder

if TYPE_CHECKING:  # a run without a reflex does not load it
  from ats_jax.step.reflex import Control, Reflex


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """State of training; a step maps it to the next.

  Attributes:
    step: int32 scalar, updates done.
    model: the weights.
    opt_state: state of the optax chain.
    ema: averaged weights, or None (`optimizer.ema_decay`).
    key: root of all randomness; never split, only folded, see `model.random`.
    control: what the supervisor sets; None with `orchestrator.mode=off`.
    reflex: what the step remembers of earlier ones; None likewise.
    unsent: what the gradients of each replica have not got into an update yet, as they are sent in
      8 bits (`step.parts.replicas`); None if nothing is compressed.
  """

  step: jax.Array
  model: Decoder
  opt_state: optax.OptState
  ema: Decoder | None
  key: jax.Array
  control: "Control | None" = None
  reflex: "Reflex | None" = None
  unsent: Any = None

  @property
  def weights(self) -> Decoder:
    """What evaluation and generation use: the average if there is one."""
    return self.model if self.ema is None else self.ema


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
  """What a step returns beside the state; `metrics["train/loss"]` is one of its values.

  Attributes:
    values: float32 vector: one transfer to the host for all of them.
    layers: arrays of the sparse layers, in order of depth: moe/load [layers, experts] (share of the
      layer's choices), moe/layer_entropy, moe/layer_dropped, moe/layer_tokens, mod/layer_routed,
      mod/layer_overflow [layers], mod/depths [layers + 1] (share of tokens by how many of the
      skipping layers they went through).
    names: of the entries of `values`; static, so that they come with each compiled step.
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
    """The value of that name."""
    return self.values[self.names.index(name)]

  def on_host(self) -> dict[str, float]:
    """All values by name; waits for them."""
    return dict(zip(self.names, np.asarray(self.values).tolist(), strict=True))


def check_finite(step: int, metrics: StepMetrics) -> None:
  """Before a checkpoint, which would displace good weights: see that `step` left finite ones.

  Raises:
    FloatingPointError: if it did not; its own loss, from the weights before it, may have been.
  """
  weights = metrics.on_host()["train/param_norm"]
  if not math.isfinite(weights):
    raise FloatingPointError(
      f"the norm of the weights is {weights} after step {step}, which was not saved. Lower "
      "optimizer.learning_rate, or look at the data (python -m ats_jax data stats)."
    )
