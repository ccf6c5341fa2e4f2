"""Which experts get next to no tokens: from the loads that steps report, over whole intervals."""

from collections.abc import Sequence

import numpy as np

from ats_jax.config.schema import Config
from ats_jax.model.layer_kinds import layer_kinds
from ats_jax.orchestrator.actions.expert_view import view_experts
from ats_jax.step.state import TrainState

STARVED = 0.05  # of the mean share of a layer's open experts


class OpenExperts:
  """The slots of each layer that hold an expert in use, as the host knows them.

  It needs `moe.spare_experts` >= 1.

  Attributes:
    layers: indices of the layers with experts, from the bottom up.
    is_open: bool [layers, slots].
  """

  def __init__(self, cfg: Config, state: TrainState):
    """Read which slots are open. Waits for the step that makes `state`."""
    self.layers = tuple(index for index, kind in enumerate(layer_kinds(cfg)) if kind.moe)
    self.is_open = np.stack([view_experts(cfg, state, layer).is_open for layer in self.layers])

  def starved(self, loads: Sequence[np.ndarray]) -> tuple[tuple[int, int], ...]:
    """Open experts with too small a share, as (layer, slot), the idlest first.

    Args:
      loads: moe/load of consecutive steps, each [layers, slots and null experts].
    """
    share = np.mean(loads, axis=0)[:, : self.is_open.shape[1]]
    mean = np.mean(share, axis=1, keepdims=True, where=self.is_open)
    starved = np.argwhere(self.is_open & (share < STARVED * mean))
    order = np.argsort([share[row, slot] for row, slot in starved], kind="stable")
    return tuple((self.layers[row], int(slot)) for row, slot in starved[order])
