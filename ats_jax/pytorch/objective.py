"""What training minimises, and what it sets beside gradients: the losses of `ats_jax.step`.

Letters: B batch, T seq, D d_model, V vocab, E expert slots with the null experts behind.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ats_jax.pytorch.decoder import Decoder, LayerStats, soft_capped
from ats_jax.pytorch.mod import Depth, MoDStats
from ats_jax.pytorch.moe import MoE, MoEStats
from ats_jax.pytorch.settings import RoutingRules, Settings

PREDICTOR_WEIGHT = 0.01  # of the loss of predictors (`ats_jax.step.objective`)
RESCUE_RATE = 0.15  # of the selection bias, where a router has collapsed

Batch = Mapping[str, Tensor]


class LossSums(NamedTuple):
  """Sums over tokens, weighted by the mask; float32 scalars.

  Attributes:
    objective: smoothed cross-entropy + z_loss * logsumexp^2.
    cross_entropy: plain, in nats.
    z: squared logsumexp.
    correct: tokens whose target has the highest score.
  """

  objective: Tensor
  cross_entropy: Tensor
  z: Tensor
  correct: Tensor


class Totals(NamedTuple):
  """Of a whole batch, over its micro-batches.

  Attributes:
    counted: tokens in the loss.
    real: tokens that are no padding.
    places: tokens that training lets through a layer which skips some.
    rows: with a token that is no padding.
  """

  counted: Tensor
  real: Tensor
  places: Tensor
  rows: Tensor


class ForwardResult(NamedTuple):
  """The results of a forward pass over a batch.

  Attributes:
    sums: the losses, summed over the tokens of the batch.
    stats: routing statistics of each layer, from the bottom up.
    depth_L: [skipping layers + 1] numbers of tokens, by how many of those layers they went through;
      None if no layer skips tokens.
  """

  sums: LossSums
  stats: list[LayerStats]
  depth_L: Tensor | None


def totals(batch: Batch, rules: RoutingRules) -> Totals:
  """Count a batch of arrays [..., seq]."""
  lengths = (batch["segment_ids"] > 0).sum(dim=-1).float()
  places = rules.places(batch["segment_ids"].shape[-1])
  return Totals(
    counted=batch["loss_mask"].sum(),
    real=lengths.sum(),
    places=lengths.clamp(max=places).sum(),
    rows=(lengths > 0).sum().float(),
  )


def forward(model: Decoder, batch: Batch, rules: RoutingRules) -> ForwardResult:
  """Run a model over packed rows [batch, seq] and score its targets."""
  step = model.cfg.step
  x_BTD, stats, depth_BT = model(
    batch["tokens"],
    positions_BT=batch["positions"],
    segment_ids_BT=batch["segment_ids"],
    rules=rules,
  )
  head_VD, chunks = model.head_weights(), []
  parts = (x_BTD.flatten(0, 1), batch["targets"].flatten(), batch["loss_mask"].flatten())
  loss_settings = model.cfg.model.logit_soft_cap, step.z_loss, step.label_smoothing
  for part in zip(*(a.split(step.loss_chunk_tokens) for a in parts), strict=True):
    # Made again in the backward pass: only one chunk's logits are in memory.
    chunks.append(checkpoint(_chunk, head_VD, *part, *loss_settings, use_reentrant=False))
  sums = LossSums(*(torch.stack(each).sum() for each in zip(*chunks, strict=True)))
  return ForwardResult(sums, stats, _depth_counts(depth_BT, batch["segment_ids"] > 0, stats))


def _chunk(
  head_VD: Tensor,
  x_CD: Tensor,
  targets_C: Tensor,
  mask_C: Tensor,
  soft_cap: float,
  z_loss: float,
  smoothing: float,
) -> LossSums:
  logits_CV = soft_capped(F.linear(x_CD, head_VD).float(), soft_cap)
  lse_C = logits_CV.logsumexp(dim=-1)
  label_C = logits_CV.gather(-1, targets_C[:, None].long())[:, 0]
  cross_entropy_C = lse_C - label_C
  objective_C = cross_entropy_C + z_loss * lse_C.square()
  if smoothing:
    objective_C = objective_C + smoothing * (label_C - logits_CV.mean(dim=-1))
  return LossSums(
    objective=(objective_C * mask_C).sum(),
    cross_entropy=(cross_entropy_C * mask_C).sum().detach(),
    z=(lse_C.square() * mask_C).sum().detach(),
    correct=((label_C >= logits_CV.amax(dim=-1)) * mask_C).sum().detach(),
  )


def _depth_counts(
  depth_BT: Tensor | None, valid_BT: Tensor, stats: Sequence[LayerStats]
) -> Tensor | None:
  if depth_BT is None:
    return None
  skipping = sum(layer.mod is not None for layer in stats)
  return F.one_hot(depth_BT[valid_BT], skipping + 1).sum(dim=0).float()


def loss_of(cfg: Settings, result: ForwardResult, totals: Totals) -> Tensor:
  """What is minimised; over the micro-batches of a batch it adds up."""
  return result.sums.objective / totals.counted + routing_loss(cfg, result.stats, totals)


def routing_loss(cfg: Settings, stats: Sequence[LayerStats], totals: Totals) -> Tensor:
  """What sparse layers add: means over tokens, then over layers."""
  moe, mod = cfg.moe, cfg.mod
  num_moe = sum(layer.moe is not None for layer in stats)
  num_mod = sum(layer.mod is not None for layer in stats)
  loss = torch.zeros((), device=totals.real.device)
  for layer in stats:
    if layer.moe is not None:
      tokens = num_moe * (totals.real if layer.mod is None else totals.places)
      loss = loss + moe.aux_loss * layer.moe.balance / tokens
      loss = loss + moe.z_loss * layer.moe.z / tokens
      rows = num_moe * totals.rows
      loss = loss + moe.sequence_aux_loss * layer.moe.sequence_balance / rows
    if layer.mod is not None and mod.decision == "predictor":
      loss = loss + PREDICTOR_WEIGHT / (num_mod * totals.real) * layer.mod.predictor_loss
  return loss


def add(a: ForwardResult, b: ForwardResult) -> ForwardResult:
  """What two micro-batches give together."""
  join = lambda x, y: None if x is None else type(x)(*(p + q for p, q in zip(x, y, strict=True)))
  stats = [
    LayerStats(join(x.moe, y.moe), join(x.mod, y.mod))
    for x, y in zip(a.stats, b.stats, strict=True)
  ]
  depth_L = None if a.depth_L is None or b.depth_L is None else a.depth_L + b.depth_L
  return ForwardResult(
    LossSums(*(p + q for p, q in zip(a.sums, b.sums, strict=True))), stats, depth_L
  )


def detached(result: ForwardResult) -> ForwardResult:
  """Without the graph of the forward pass, so that its memory can go."""
  cut = lambda x: None if x is None else type(x)(*(p.detach() for p in x))
  stats = [LayerStats(cut(layer.moe), cut(layer.mod)) for layer in result.stats]
  return ForwardResult(LossSums(*(p.detach() for p in result.sums)), stats, result.depth_L)


@torch.no_grad()
def set_buffers(
  model: Decoder, stats: Sequence[LayerStats], step: int, rules: RoutingRules
) -> None:
  """Move the routers' biases against the load, and thresholds after the scores.

  Args:
    model: the model whose buffers are set.
    stats: routing statistics of the whole batch.
    step: updates before this one.
    rules: the rules that the update followed.
  """
  for layer, of_layer in zip(model.layers, stats, strict=True):
    if isinstance(layer.mlp, MoE) and of_layer.moe is not None:
      _set_router(model.cfg, layer.mlp, of_layer.moe, step)
    if of_layer.mod is not None and model.cfg.mod.routing == "learned":
      _set_threshold(layer.depth, of_layer.mod, rules.capacity)


def _set_router(cfg: Settings, mlp: MoE, stats: MoEStats, step: int) -> None:
  """Loss-free balance by the error's sign (arXiv:2408.15664), or by the error (2509.01322)."""
  router, moe = mlp.router, cfg.moe
  load_E = stats.load_E / stats.load_E.sum().clamp(min=1.0)
  is_open_E = router.is_open()
  error_E = (1.0 - load_E * is_open_E.sum()) * is_open_E
  more = max(RESCUE_RATE - moe.bias_rate, 0.0) if moe.bias_on == "logits" else 0.0
  rate = moe.bias_rate + more * (4.0 * (-error_E.min() - 1.0)).clamp(0.0, 1.0)
  left = (cfg.num_steps - 1 - step) / max(1.0, moe.bias_freeze * cfg.num_steps)
  kinds = {"none": torch.zeros_like, "sign": torch.sign, "proportional": lambda e: e.clamp(-1, 1)}
  router.bias_E += rate * min(max(left, 0.0), 1.0) * kinds[moe.bias_update](error_E)
  router.load_E.copy_(load_E)


def _set_threshold(depth: Depth, stats: MoDStats, capacity: float) -> None:
  same = depth.capacity == torch.tensor(capacity, device=depth.capacity.device)
  seen = torch.where(same, depth.updates, 0.0)
  # A mean over the newest tenth of a young history: early scores move fast.
  decay = (seen / (seen + 9.0)).clamp(max=depth.cfg.threshold_decay)
  moved = decay * depth.threshold + (1.0 - decay) * stats.threshold / stats.rows.clamp(min=1.0)
  is_new = stats.rows > 0
  depth.threshold.copy_(torch.where(is_new, moved, depth.threshold))
  depth.updates.copy_(torch.where(is_new, seen + 1.0, seen))
  depth.capacity.fill_(capacity)
