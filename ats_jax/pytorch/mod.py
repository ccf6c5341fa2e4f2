"""Mixture of depths: some tokens of each row go through a layer, the others go past it.

Letters: B batch, T seq, D d_model, H predictor width, C places of a row.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ats_jax.pytorch.settings import RoutingRules, Settings


class MoDStats(NamedTuple):
  """Of one layer; float32 sums over tokens, padding left out, as `ats_jax.model.stats` has it.

  Attributes:
    tokens: number of tokens.
    routed: number of tokens that went through.
    overflow: number of tokens that the rule chose but for which there was no room.
    gate: weights of those that went through.
    agree: tokens for which training's choice and the causal rule agree.
    threshold: the score between the last token in and the first one out, summed over rows.
    rows: rows that had such a score.
    predictor_loss: binary cross-entropy of the predictor.
  """

  tokens: Tensor
  routed: Tensor
  overflow: Tensor
  gate: Tensor
  agree: Tensor
  threshold: Tensor
  rows: Tensor
  predictor_loss: Tensor


@dataclasses.dataclass(frozen=True)
class Chosen:
  """The tokens that go through a layer, in order of position.

  Attributes:
    index_BC: where each of them is in its row; another token in empty places.
    filled_BC: bool.
    passed_BT: bool, which tokens they are.
    gate_BT: float32 weight of the layer's output for each token.
  """

  index_BC: Tensor
  filled_BC: Tensor
  passed_BT: Tensor
  gate_BT: Tensor

  def take(self, x_BTD: Tensor) -> Tensor:
    """Their activations [batch, places, d_model], zero in empty places."""
    index_BCD = self.index_BC[..., None].expand(-1, -1, x_BTD.shape[-1])
    return x_BTD.gather(1, index_BCD) * self.filled_BC[..., None].to(x_BTD.dtype)

  def take_ids(self, ids_BT: Tensor) -> Tensor:
    """Their integers [batch, places], 0 in empty places."""
    return ids_BT.gather(1, self.index_BC) * self.filled_BC

  def put(self, y_BCD: Tensor) -> Tensor:
    """`y` times the gate at their own places [batch, seq, d_model], zero elsewhere."""
    gate_BC = self.gate_BT.gather(1, self.index_BC) * self.filled_BC
    rows_BCD = (y_BCD.float() * gate_BC[..., None]).to(y_BCD.dtype)
    batch, seq, width = *self.gate_BT.shape, y_BCD.shape[-1]
    index_BCD = self.index_BC[..., None].expand(-1, -1, width)
    return torch.zeros(
      (batch, seq, width), dtype=y_BCD.dtype, device=y_BCD.device
    ).scatter(1, index_BCD, rows_BCD)  # fmt: skip


class Depth(nn.Module):
  """Chooses the tokens that go through a layer.

  Training takes the highest scores of each row, which no token can know before the row ends.
  Evaluation and generation use a causal rule instead: score over a running quantile (`threshold`,
  a buffer with the number of its updates and the capacity that it is for), or a small predictor.
  """

  def __init__(self, cfg: Settings, layer: int):
    super().__init__()
    self.cfg, self.layer, width = cfg.mod, layer, cfg.model.d_model
    if self.cfg.routing != "learned":
      return
    self.weight = nn.Parameter(torch.zeros(width))
    for name in ("threshold", "updates", "capacity"):
      self.register_buffer(name, torch.zeros(()))
    if self.cfg.decision == "predictor":
      hidden = max(16, width // 8)
      self.predict_in = nn.Parameter(torch.zeros(hidden, width))
      self.predict_out = nn.Parameter(torch.zeros(hidden))

  def forward(
    self,
    x_BTD: Tensor,
    positions_BT: Tensor,
    valid_BT: Tensor,
    rules: RoutingRules,
    *,
    places: int,
    room_B: Tensor | None = None,
  ) -> tuple[Chosen, MoDStats]:
    """Choose up to `places` tokens of each row.

    Args:
      x_BTD: the residual stream [batch, seq, d_model].
      positions_BT: position of each token in its document.
      valid_BT: bool; padding never goes through.
      rules: how sparse layers choose.
      places: C.
      room_B: places that are left of what a row has in all (generation).
    """
    scores_BT = gate_BT = torch.ones(valid_BT.shape, device=x_BTD.device)
    predicted_BT = None
    if self.cfg.routing == "learned":
      x_BTD = unit_rms(x_BTD.float())  # or scores would grow with the residual stream
      scores_BT = x_BTD @ self.weight.float()
      gate_BT = scores_BT.sigmoid()
      if self.cfg.decision == "predictor":
        hidden_BTH = F.silu(F.linear(x_BTD.detach(), self.predict_in.float()))
        predicted_BT = hidden_BTH @ self.predict_out.float()
      causal_BT = self._causal_rule(scores_BT, predicted_BT) & valid_BT
    else:
      steps = lambda at: torch.floor((at + self.layer).float() * rules.capacity)
      causal_BT = (steps(positions_BT + 1) > steps(positions_BT)) & valid_BT
    scores_BT = scores_BT.detach()
    wanted_BT = causal_BT
    if rules.training and self.cfg.routing != "static":
      wanted_BT = _best(scores_BT, valid_BT, places)

    order_BT = wanted_BT.long().cumsum(dim=1)
    limit = places if room_B is None else room_B.clamp(max=places)[:, None]
    passed_BT = wanted_BT & (order_BT <= limit)
    count_B1 = passed_BT.sum(dim=1, keepdim=True)
    chosen = Chosen(
      index_BC=(~passed_BT).long().argsort(dim=1, stable=True)[:, :places],
      filled_BC=torch.arange(places, device=x_BTD.device) < count_B1,
      passed_BT=passed_BT,
      gate_BT=gate_BT,
    )
    total = lambda a_BT: torch.where(valid_BT, a_BT.float(), 0.0).sum()
    threshold, rows = _threshold(scores_BT, valid_BT, places)
    loss = torch.zeros((), device=x_BTD.device)
    if predicted_BT is not None:
      loss = total(F.softplus(predicted_BT) - passed_BT * predicted_BT)
    stats = MoDStats(
      tokens=total(valid_BT),
      routed=total(passed_BT),
      overflow=total(wanted_BT & ~passed_BT),
      gate=total(passed_BT * gate_BT),
      agree=total(causal_BT == wanted_BT),
      threshold=threshold,
      rows=rows,
      predictor_loss=loss,
    )
    return chosen, stats

  def _causal_rule(self, scores_BT: Tensor, predicted_BT: Tensor | None) -> Tensor:
    if predicted_BT is not None:
      return predicted_BT > 0
    # All go, as far as there are places, before the first update.
    return (scores_BT > self.threshold) | (self.updates == 0)


def unit_rms(x_BTD: Tensor) -> Tensor:
  """Each token's activations over their root mean square."""
  return x_BTD * torch.rsqrt(x_BTD.square().mean(dim=-1, keepdim=True) + 1e-6)


def _best(scores_BT: Tensor, valid_BT: Tensor, places: int) -> Tensor:
  """Mark the `places` highest scores of each row; of equal ones the first."""
  order_BT = torch.where(valid_BT, -scores_BT, torch.inf).argsort(dim=1, stable=True)
  return (order_BT.argsort(dim=1) < places) & valid_BT


def _threshold(scores_BT: Tensor, valid_BT: Tensor, places: int) -> tuple[Tensor, Tensor]:
  """Half-way between the last score in and the first one out, summed over rows that have both."""
  if places >= scores_BT.shape[1] or places == 0:
    return scores_BT.new_zeros(()), scores_BT.new_zeros(())
  sorted_BT = torch.where(valid_BT, scores_BT, -torch.inf).sort(dim=1, descending=True).values
  edge_B = 0.5 * (sorted_BT[:, places - 1] + sorted_BT[:, places])
  is_edge_B = edge_B > -torch.inf
  return torch.where(is_edge_B, edge_B, 0.0).sum(), is_edge_B.float().sum()
