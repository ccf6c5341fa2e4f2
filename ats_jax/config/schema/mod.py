"""The section `mod`."""

import dataclasses
from typing import Any, ClassVar

from ats_jax.config.schema.setting import setting, when


@dataclasses.dataclass(frozen=True)
class MoDConfig:
  """Mixture of depths: layers that only some tokens of a row go through."""

  NEEDS: ClassVar = when("mod.routing", no="none")

  routing: str = setting(
    "none",
    "who chooses the tokens: nobody (no mixture of depths), a trained router, an even pattern of "
    "positions, or chance",
    choices=("none", "learned", "static", "random"),
  )
  scope: str = setting(
    "block", "what is skipped: the whole block or its feed-forward", choices=("block", "ffn")
  )
  capacity: float = setting(0.125, "share of a row's tokens that go through", low=0.001, high=1.0)
  every: int = setting(2, "every n-th layer of the range skips tokens, the n-th first", low=1)
  start_layer: int = setting(0, "first layer of the range", low=0)
  end_layer: int = setting(0, "end of the range, exclusive; 0 = num_layers", low=0)
  start_capacity: float = setting(
    1.0,
    "capacity at the start of the annealing",
    low=0.001,
    high=1.0,
    needs=when("mod.anneal_fraction"),
    training=True,
  )
  anneal_fraction: float = setting(
    0.0,
    "share of the run over which capacity falls to its final value; 0 = at once",
    high=1.0,
    low=0.0,
    training=True,
  )
  rungs: int = setting(
    4,
    "steps of the annealing, each compiled once; capacities in geometric progression",
    low=1,
    needs=when("mod.anneal_fraction"),
    training=True,
  )
  decision: str = setting(
    "threshold",
    "causal rule of evaluation and generation: score above a running quantile, or a predictor "
    "trained beside the router",
    choices=("threshold", "predictor"),
    needs=when("mod.routing", "learned"),
  )
  threshold_decay: float = setting(
    0.99,
    "decay of the running quantile",
    low=0.0,
    high=0.9999,
    needs=when("mod.decision", "threshold"),
    training=True,
  )

  def check(self, cfg: Any) -> None:
    """Refuse a range without a layer that skips tokens, and an annealing that does not fall."""
    if self.routing == "none":
      return
    layers = cfg.model.num_layers
    end = self.end_layer or layers
    if not self.start_layer < end <= layers:
      raise ValueError(
        f"mod.start_layer={self.start_layer} and mod.end_layer={end} are no range within "
        f"model.num_layers={layers}: 0 <= start < end <= {layers} (end_layer=0 means {layers})."
      )
    if self.start_layer + self.every > end:
      raise ValueError(
        f"mod.every={self.every} finds no layer between mod.start_layer={self.start_layer} and "
        f"mod.end_layer={end}. Lower it, widen the range, or set mod.routing=none."
      )
    if self.anneal_fraction and self.start_capacity < self.capacity:
      raise ValueError(
        f"mod.start_capacity={self.start_capacity} is below mod.capacity={self.capacity}: capacity "
        "falls over the annealing. Swap them, or set mod.anneal_fraction=0."
      )
