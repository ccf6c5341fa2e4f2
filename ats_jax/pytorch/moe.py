"""Mixture of experts: a router, and feed-forwards of which each token uses a few.

Letters: B batch, T seq, N tokens, D d_model, F expert width, E columns of the router (expert slots,
then null experts), K choices, G groups.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ats_jax.pytorch.kernels import asked_kernel, kernel_for
from ats_jax.pytorch.layers import MLP, gated
from ats_jax.pytorch.metal import shaders_for
from ats_jax.pytorch.settings import Settings

CLOSED = -1e30  # the logit of an expert that a token cannot go to
TINY = 1e-20  # no division by 0 where all scores vanish


class MoEStats(NamedTuple):
  """Of one layer; float32 sums over its tokens, padding left out, as `ats_jax.model.stats` has it.

  Attributes:
    tokens: number of tokens.
    load_E: choices that fell on each expert.
    balance: E * sum_e load_share_e * probability_e, with the shares of the step before.
    sequence_balance: the same with each row's own shares, its mean over the row, summed over rows.
    z: squared logsumexp of the router's logits.
    entropy: entropy of a token's probabilities in nats, summed over tokens.
    confidence: the highest probability of each token.
    dropped: choices without a place (capacity mode).
  """

  tokens: Tensor
  load_E: Tensor
  balance: Tensor
  sequence_balance: Tensor
  z: Tensor
  entropy: Tensor
  confidence: Tensor
  dropped: Tensor


class Router(nn.Module):
  """Top-k router in float32, balanced by a bias on the selection alone.

  Buffers are those of `ats_jax.model.router`: training sets them from the load.
  """

  def __init__(self, cfg: Settings):
    super().__init__()
    moe = self.cfg = cfg.moe
    self.num_slots = moe.num_experts + moe.spare_experts
    outputs, width = self.num_slots + moe.null_experts, cfg.model.d_model
    self.weight = nn.Parameter(torch.zeros(outputs, width))
    self.offset = nn.Parameter(torch.zeros(outputs)) if moe.router_bias else None
    self.register_buffer("bias_E", torch.zeros(outputs))
    self.register_buffer("load_E", torch.full((outputs,), 1 / outputs))
    if moe.spare_experts:
      self.register_buffer("active_S", torch.ones(self.num_slots))
      self.register_buffer("side_S", torch.zeros(self.num_slots))
      self.register_buffer("penalty_S", torch.zeros(self.num_slots))
      self.register_buffer("direction_SD", torch.zeros(self.num_slots, width))

  def is_open(self) -> Tensor:
    """1 for each expert that tokens can go to, 0 for an idle slot: like `bias_E`."""
    if not self.cfg.spare_experts:
      return torch.ones_like(self.bias_E)
    null = torch.ones_like(self.bias_E[self.num_slots :])
    return torch.cat([self.active_S, null])

  def forward(
    self, x_BTD: Tensor, valid_BT: Tensor, *, training: bool
  ) -> tuple[Tensor, Tensor, MoEStats]:
    """Route each valid token to `top_k` experts.

    Args:
      x_BTD: normalised activations [batch, seq, d_model].
      valid_BT: bool; the others are padding and go nowhere.
      training: add noise, if the model has any.

    Returns:
      Experts [batch, seq, top_k], of which the number of slots means nowhere; their weights in
      float32; statistics.
    """
    moe = self.cfg
    x_BTD = x_BTD.float()
    logits_BTE = F.linear(x_BTD, self.weight.float())
    if self.offset is not None:
      logits_BTE = logits_BTE + self.offset.float()
    logits_BTE = self._close(x_BTD, logits_BTE / moe.temperature)
    noisy_BTE = logits_BTE.detach()
    if moe.noise and training:
      noisy_BTE = noisy_BTE + moe.noise * torch.randn_like(noisy_BTE)
    column_BTK, weight_BTK = self._choose(logits_BTE, self._selection(noisy_BTE))
    chosen_BTE = F.one_hot(column_BTK, logits_BTE.shape[-1]).sum(dim=2).float()
    load_BE = (chosen_BTE * valid_BT[..., None]).sum(dim=1)
    goes_BTK = valid_BT[..., None] & (column_BTK < self.num_slots)
    expert_BTK = torch.where(goes_BTK, column_BTK, self.num_slots)
    stats = self._stats(logits_BTE, load_BE, valid_BT)
    return expert_BTK, weight_BTK, stats

  def _choose(self, logits_BTE: Tensor, selection_BTE: Tensor) -> tuple[Tensor, Tensor]:
    """The columns [batch, seq, top_k] that are selected, and their weights."""
    moe = self.cfg
    renormalize = moe.renormalize and moe.top_k > 1
    metal = shaders_for(logits_BTE)
    if metal and moe.top_k <= metal.MAX_CHOICES:
      rule = (moe.top_k, moe.score, renormalize, moe.route_scale)
      return metal.route(logits_BTE, selection_BTE, *rule)
    column_BTK = highest(selection_BTE, moe.top_k)
    weight_BTK = self._scores(logits_BTE).gather(-1, column_BTK)
    if renormalize:
      weight_BTK = weight_BTK / (weight_BTK.sum(dim=-1, keepdim=True) + TINY)
    return column_BTK, moe.route_scale * weight_BTK

  def _scores(self, logits_BTE: Tensor) -> Tensor:
    is_softmax = self.cfg.score == "softmax"
    return logits_BTE.softmax(dim=-1) if is_softmax else logits_BTE.sigmoid()

  def _selection(self, logits_BTE: Tensor) -> Tensor:
    """What the highest are chosen of: biased logits or scores, -inf outside the best groups."""
    on_scores, groups = self.cfg.bias_on == "scores", self.cfg.num_groups
    to_bias_BTE = self._scores(logits_BTE) if on_scores else logits_BTE
    biased_BTE = to_bias_BTE + self.bias_E.float()
    biased_BTE = biased_BTE.masked_fill(logits_BTE <= CLOSED / 2, -torch.inf)
    if groups == 1:
      return biased_BTE
    scores_BTE = biased_BTE if on_scores else self._scores(biased_BTE)
    scores_BTE = scores_BTE.masked_fill(biased_BTE <= CLOSED / 2, 0.0)
    scores_BTGE = scores_BTE.unflatten(-1, (groups, -1))
    counted = 1 if self.cfg.group_score == "max" else min(2, scores_BTGE.shape[-1])
    best_BTG = scores_BTGE.topk(counted, dim=-1).values.sum(dim=-1)
    group_BTK = highest(best_BTG, self.cfg.top_groups)
    allowed_BTG = F.one_hot(group_BTK, groups).sum(dim=2) > 0
    biased_BTGE = biased_BTE.unflatten(-1, (groups, -1))
    return biased_BTGE.masked_fill(~allowed_BTG[..., None], -torch.inf).flatten(-2)

  def _close(self, x_BTD: Tensor, logits_BTE: Tensor) -> Tensor:
    """Close idle slots; of a split expert, close to each token the half on the other side."""
    if not self.cfg.spare_experts:
      return logits_BTE
    slots_BTS, null_BTE = logits_BTE.tensor_split([self.num_slots], dim=-1)
    away_BTS = self.side_S * F.linear(x_BTD.detach(), self.direction_SD.float())
    is_away_BTS = (away_BTS < 0) | ((away_BTS == 0) & (self.side_S < 0))
    slots_BTS = slots_BTS - torch.where(is_away_BTS, self.penalty_S, 0.0)
    slots_BTS = torch.where(self.active_S > 0, slots_BTS, CLOSED).clamp(min=CLOSED)
    return torch.cat([slots_BTS, null_BTE], dim=-1)

  def _stats(self, logits_BTE: Tensor, load_BE: Tensor, valid_BT: Tensor) -> MoEStats:
    valid_BT = valid_BT.float()
    probs_BTE = self._scores(logits_BTE)
    if self.cfg.score == "sigmoid":
      probs_BTE = probs_BTE / (probs_BTE.sum(dim=-1, keepdim=True) + TINY)
    num_open = self.is_open().sum()
    prob_BE = (probs_BTE * valid_BT[..., None]).sum(dim=1)
    tokens_B1 = valid_BT.sum(dim=1, keepdim=True).clamp(min=1.0)
    share_BE = load_BE / (tokens_B1 * self.cfg.top_k)
    total = lambda a_BT: (a_BT * valid_BT).sum()
    return MoEStats(
      tokens=valid_BT.sum(),
      load_E=load_BE.sum(dim=0),
      balance=num_open * (self.load_E * prob_BE.sum(dim=0)).sum(),
      sequence_balance=num_open * (share_BE * prob_BE / tokens_B1).sum(),
      z=total(logits_BTE.logsumexp(dim=-1).square()),
      entropy=total(-(probs_BTE * probs_BTE.clamp(min=1e-30).log()).sum(dim=-1)),
      confidence=total(probs_BTE.amax(dim=-1)),
      dropped=torch.zeros((), device=valid_BT.device),
    )


class MoE(nn.Module):
  """`sum_k weight_k * expert_k(x)`, plus the experts that every token shares."""

  def __init__(self, cfg: Settings):
    super().__init__()
    moe, d_model = cfg.moe, cfg.model.d_model
    self.cfg, self.model = moe, cfg.model
    self.router = Router(cfg)
    slots, kernel = self.router.num_slots, asked_kernel(cfg, "grouped_matmul")
    experts = lambda *widths: ExpertLinear(slots, *widths, bias=moe.expert_bias, kernel=kernel)
    self.gate, self.up = experts(d_model, moe.d_ff), experts(d_model, moe.d_ff)
    self.down = experts(moe.d_ff, d_model)
    self.shared = MLP(cfg, moe.num_shared * moe.d_ff) if moe.num_shared else None

  def forward(self, x_BTD: Tensor, valid_BT: Tensor, *, training: bool) -> tuple[Tensor, MoEStats]:
    """Map [batch, seq, d_model] to the same shape; padding goes to no expert and gets 0."""
    expert_BTK, weight_BTK, stats = self.router(x_BTD, valid_BT, training=training)
    if training and self.cfg.dispatch == "capacity":
      kept_BTK = self._has_place(expert_BTK, weight_BTK.detach())
      dropped_BTK = (expert_BTK < self.router.num_slots) & ~kept_BTK
      stats = stats._replace(dropped=dropped_BTK.float().sum())
      expert_BTK = torch.where(kept_BTK, expert_BTK, self.router.num_slots)
    y_BTD = self._routed(x_BTD.flatten(0, 1), expert_BTK.flatten(0, 1), weight_BTK.flatten(0, 1))
    y_BTD = y_BTD.view_as(x_BTD)
    if self.shared is not None:
      y_BTD = y_BTD + torch.where(valid_BT[..., None], self.shared(x_BTD), 0.0)
    return y_BTD, stats

  def _routed(self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """Sort the choices by expert, multiply group by group, sum each token's rows."""
    slots, choices = self.router.num_slots, expert_NK.shape[1]
    weight_NK = torch.where(expert_NK < slots, weight_NK, 0.0)
    if torch.compiler.is_exporting():
      return self._by_all(x_ND, expert_NK, weight_NK)
    # What goes nowhere goes to the last expert, with weight 0.
    expert_M = expert_NK.clamp(max=slots - 1).flatten()
    order_M = expert_M.argsort(stable=True)
    sizes_E = F.one_hot(expert_M, slots).sum(dim=0)
    group_M, x_MD = expert_M[order_M], x_ND[order_M // choices]
    gate_MF, up_MF = self.gate(x_MD, sizes_E, group_M), self.up(x_MD, sizes_E, group_M)
    y_MD = self.down(gated(gate_MF, up_MF, self.model), sizes_E, group_M)
    y_NKD = y_MD[order_M.argsort()].unflatten(0, (-1, choices))
    return torch.einsum("NKD,NK->ND", y_NKD.float(), weight_NK.float()).to(x_ND.dtype)

  def _by_all(self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """Every expert computes every token: a graph has no groups whose sizes follow from data."""
    slots = self.router.num_slots
    chosen_NKE = expert_NK[..., None] == torch.arange(slots, device=x_ND.device)
    weight_NE = (chosen_NKE * weight_NK[..., None]).sum(dim=1)
    gate_EMF, up_EMF = self.gate.all(x_ND[None]), self.up.all(x_ND[None])
    y_EMD = self.down.all(gated(gate_EMF, up_EMF, self.model))
    return torch.einsum("END,NE->ND", y_EMD.float(), weight_NE.float()).to(x_ND.dtype)

  def _has_place(self, expert_BTK: Tensor, weight_BTK: Tensor) -> Tensor:
    """Which choices the experts have room for, each so many in a row, the first or the heaviest."""
    seq = expert_BTK.shape[1]
    share = self.cfg.capacity_factor * self.cfg.top_k * seq / self.cfg.num_experts
    places = min(seq, math.ceil(round(share, 6)))
    expert_BM, weight_BM = expert_BTK.flatten(1), weight_BTK.flatten(1)
    comes_BM = torch.arange(expert_BM.shape[1], device=expert_BM.device).expand_as(expert_BM)
    if self.cfg.drop_policy == "weight":
      comes_BM = (-weight_BM).argsort(dim=1, stable=True)
    sorted_BME = F.one_hot(expert_BM.gather(1, comes_BM), self.router.num_slots + 1)
    rank_BM = (sorted_BME.cumsum(dim=1) * sorted_BME).sum(dim=-1) - 1
    kept_BM = torch.zeros_like(rank_BM).scatter(1, comes_BM, rank_BM) < places
    return kept_BM.view_as(expert_BTK) & (expert_BTK < self.router.num_slots)


class ExpertLinear(nn.Module):
  """The weights of all experts' layers of one kind: a stack [experts, in, out]."""

  def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool, kernel: str):
    super().__init__()
    self.kernel = kernel  # what `ops.kernels` says
    self.weight = nn.Parameter(torch.zeros(experts, inputs, outputs))
    self.bias = nn.Parameter(torch.zeros(experts, outputs)) if bias else None

  def forward(self, x_MD: Tensor, sizes_E: Tensor, group_M: Tensor) -> Tensor:
    """Multiply rows by the matrices of their experts.

    Args:
      x_MD: rows, sorted by expert.
      sizes_E: number of rows of each expert.
      group_M: the expert of each row.
    """
    y_MF = grouped_matmul(x_MD, self.weight.to(x_MD.dtype), sizes_E, self.kernel)
    return y_MF if self.bias is None else y_MF + self.bias.to(x_MD.dtype)[group_M]

  def all(self, x_EMD: Tensor) -> Tensor:
    """Multiply rows [experts or 1, rows, in] by every expert's matrix."""
    y_EMF = x_EMD @ self.weight.to(x_EMD.dtype)
    return y_EMF if self.bias is None else y_EMF + self.bias.to(x_EMD.dtype)[:, None]


def grouped_matmul(x_MD: Tensor, weight_EDF: Tensor, sizes_E: Tensor, asked: str = "") -> Tensor:
  """`x @ weight[e]` for consecutive groups of rows.

  In one kernel on an NVIDIA GPU: JAX's in Triton, or PyTorch's in bfloat16 alone.

  Args:
    x_MD: rows, sorted by group.
    weight_EDF: one matrix a group, in the same dtype.
    sizes_E: number of rows of each group; their sum is M.
    asked: what `ops.kernels` says of this op.
  """
  ends_E = sizes_E.cumsum(0)
  if kernel_for("grouped_matmul", asked, x_MD) == "triton":
    edges = ends_E.new_zeros(1), ends_E, ends_E.new_full((1,), len(x_MD))
    return torch.ops.ats_jax.grouped_matmul(x_MD, weight_EDF, torch.cat(edges).int(), False)
  if x_MD.is_cuda and x_MD.dtype == torch.bfloat16:
    return F.grouped_mm(x_MD, weight_EDF, offs=ends_E.int())
  rows = x_MD.split(sizes_E.tolist())
  return torch.cat([x @ weight for x, weight in zip(rows, weight_EDF.unbind(), strict=True)])


def highest(scores: Tensor, count: int) -> Tensor:
  """Places of the `count` highest along the last axis, of equal ones the first, as in jax."""
  if torch.compiler.is_exporting():  # ONNX has no stable sort; its TopK takes the first
    return scores.topk(count, dim=-1).indices
  return scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
