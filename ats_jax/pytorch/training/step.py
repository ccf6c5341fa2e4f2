"""One update in PyTorch, as `ats_jax.step` makes it, and its metrics.

Letters: L layers, E expert slots with the null experts behind.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ats_jax.config import Config
from ats_jax.config.schema.optimizer import AdamW
from ats_jax.model.forward_pass import rules_at
from ats_jax.pytorch import objective
from ats_jax.pytorch.decoder import Decoder
from ats_jax.pytorch.moe import MoE
from ats_jax.pytorch.objective import ForwardResult, Totals
from ats_jax.pytorch.settings import RoutingRules
from ats_jax.pytorch.training.device import LossScale
from ats_jax.step.schedule import learning_rate

Batch = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Update:
  """The facts about an update that metrics are made of.

  Attributes:
    result: losses and routing statistics, summed over the micro-batches.
    totals: counts of tokens and rows of the whole batch.
    grad_norm: norm of the gradient before clipping.
    rate: the learning rate.
    made: whether the update was made; false if gradients in float16 overflowed.
  """

  result: ForwardResult
  totals: Totals
  grad_norm: Tensor
  rate: float
  made: bool


@dataclasses.dataclass
class Trainer:
  """Makes updates.

  Attributes:
    cfg: the resolved config.
    model: the model that is trained.
    optimizer: moves it.
    scale: scale of the loss, for gradients in float16.
    sets_buffers: move selection biases and thresholds; not where the model is frozen.
  """

  cfg: Config
  model: Decoder
  optimizer: torch.optim.AdamW
  scale: LossScale
  sets_buffers: bool = True

  def update(self, step: int, batch: Batch) -> Update:
    """Make update `step` (0-based) of arrays [accum, batch, seq]."""
    torch.manual_seed(np.random.SeedSequence([self.cfg.seed, step]).generate_state(1).item())
    rules = their_rules(self.cfg, step, training=True)
    totals, result = objective.totals(batch, rules), None
    self.model.train()
    for number in range(batch["tokens"].shape[0]):
      micro = {name: array[number] for name, array in batch.items()}
      part = objective.forward(self.model, micro, rules)
      (self.scale.value * objective.loss_of(self.cfg, part, totals)).backward()
      part = objective.detached(part)
      result = part if result is None else objective.add(result, part)
    assert result is not None
    grads = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
    grads = [grad for grad in grads if grad is not None]
    if self.scale.value != 1.0:
      torch._foreach_mul_(grads, 1 / self.scale.value)
    norm = torch.nn.utils.get_total_norm(grads)
    rate = float(learning_rate(self.cfg, np.int32(step), np))
    made = self.scale.took(norm)
    if made:
      if most := self.cfg.optimizer.grad_clip:
        torch._foreach_mul_(grads, (most / norm).clamp(max=1.0))
      for group in self.optimizer.param_groups:
        group["lr"] = rate
      self.optimizer.step()
      if self.sets_buffers:
        objective.set_buffers(self.model, result.stats, step, rules)
    self.optimizer.zero_grad()
    return Update(result, totals, norm, rate, made)

  @torch.no_grad()
  def score(self, batch: Batch, step: int) -> np.ndarray:
    """Sums over a batch [batch, seq] by the weights that update `step` (1-based) left.

    They are cross-entropy in nats, correct predictions, counted tokens.
    """
    self.model.eval()
    rules = their_rules(self.cfg, max(0, step - 1), training=False)
    sums = objective.forward(self.model, batch, rules).sums
    return np.array([float(sums.cross_entropy), float(sums.correct), batch["loss_mask"].sum()])

  @torch.no_grad()
  def metrics(self, update: Update) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The metrics of a step of `ats_jax.step`, and its arrays by layer."""
    result, counted = update.result, float(update.totals.counted)
    layers = {}
    metrics = {
      "train/loss": float(result.sums.cross_entropy) / counted,
      "train/accuracy": float(result.sums.correct) / counted,
      "train/z": float(result.sums.z) / counted,
      "train/grad_norm": float(update.grad_norm),
      "train/update_norm": self._update_norm(update.rate) if update.made else 0.0,
      "train/param_norm": math.sqrt(sum(float(p.square().sum()) for p in self._parameters())),
      "train/learning_rate": update.rate,
      "train/scheduled_rate": update.rate,
      "train/tokens": counted,
    }
    for more, arrays in (self._of_experts(result), self._of_depth(result)):
      metrics, layers = metrics | more, layers | arrays
    return metrics, layers

  def _parameters(self) -> list[Tensor]:
    return [p for group in self.optimizer.param_groups for p in group["params"]]

  def _update_norm(self, rate: float) -> float:
    """The norm of what was added to the parameters, from the moments that were added with."""
    total, o = 0.0, self.cfg.optimizer
    assert isinstance(o, AdamW)
    for group in self.optimizer.param_groups:
      decay = group["weight_decay"]
      for parameter in group["params"]:
        moments = self.optimizer.state[parameter]
        updates = float(moments["step"])
        mean = moments["exp_avg"] / (1 - o.b1**updates)
        root = (moments["exp_avg_sq"] / (1 - o.b2**updates)).sqrt()
        adam = mean / (root + o.eps)
        before = (parameter + rate * adam) / (1 - rate * decay)
        total += float((adam + decay * before).square().sum())
    return rate * math.sqrt(total)

  def _of_experts(self, result: ForwardResult) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    moe = [layer.moe for layer in result.stats if layer.moe is not None]
    if not self.cfg.moe.num_experts:
      return {}, {}
    routers = [layer.mlp.router for layer in self.model.layers if isinstance(layer.mlp, MoE)]
    stack = lambda name: torch.stack([getattr(layer, name) for layer in moe]).cpu().numpy()
    tokens_L = np.maximum(stack("tokens"), 1.0)
    choices_L = self.cfg.moe.top_k * tokens_L
    load_LE = stack("load_E") / choices_L[:, None]
    is_open_LE = torch.stack([router.is_open() for router in routers]).cpu().numpy()
    over_mean_LE = load_LE * is_open_LE.sum(axis=1, keepdims=True)
    null_E = np.arange(load_LE.shape[1]) >= routers[0].num_slots
    dropped_L, entropy_L = stack("dropped") / choices_L, stack("entropy") / tokens_L
    metrics = {
      "moe/max_violation": over_mean_LE.max() - 1.0,
      "moe/min_load": np.where(is_open_LE > 0, over_mean_LE, np.inf).min(),
      "moe/entropy": entropy_L.mean(),
      "moe/confidence": (stack("confidence") / tokens_L).mean(),
      "moe/dropped": dropped_L.mean(),
      "moe/overflow": 0.0,  # no tokens are exchanged
      "moe/null": (load_LE * null_E).sum(axis=1).mean(),
      "moe/balance_loss": (stack("balance") / tokens_L).mean(),
      "moe/z": (stack("z") / tokens_L).mean(),
      "moe/max_bias": max(float(router.bias_E.abs().max()) for router in routers),
    }
    return {name: float(value) for name, value in metrics.items()}, {
      "moe/load": load_LE,
      "moe/layer_entropy": entropy_L,
      "moe/layer_dropped": dropped_L,
      "moe/layer_tokens": stack("tokens"),
    }

  def _of_depth(self, result: ForwardResult) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    mod = [layer.mod for layer in result.stats if layer.mod is not None]
    if result.depth_L is None:
      return {}, {}
    stack = lambda name: torch.stack([getattr(layer, name) for layer in mod]).cpu().numpy()
    tokens_L = np.maximum(stack("tokens"), 1.0)
    depths = result.depth_L.cpu().numpy()
    depths = depths / max(depths.sum(), 1.0)
    always = self.cfg.model.num_layers - len(mod)
    metrics = {
      "mod/routed": (stack("routed") / tokens_L).mean(),
      "mod/depth": always + (depths * np.arange(depths.size)).sum(),
      "mod/overflow": (stack("overflow") / tokens_L).mean(),
      "mod/agreement": (stack("agree") / tokens_L).mean(),
      "mod/gate": (stack("gate") / np.maximum(stack("routed"), 1.0)).mean(),
    }
    return {name: float(value) for name, value in metrics.items()}, {
      "mod/layer_routed": stack("routed") / tokens_L,
      "mod/layer_overflow": stack("overflow") / tokens_L,
      "mod/depths": depths,
    }


def their_rules(cfg: Config, step: int, *, training: bool) -> RoutingRules:
  """`model.forward_pass.rules_at`, for PyTorch."""
  rules = rules_at(cfg, step, training=training)
  return RoutingRules(training, rules.capacity, rules.horizon)


def batch_on(device: torch.device, batch: Mapping[str, Any]) -> dict[str, Tensor]:
  """Copy a batch of the loader to a device; integers become int64, which PyTorch indexes with."""
  tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
  to = lambda a: a if a.is_floating_point() else a.long()
  return {name: to(a).to(device, non_blocking=True) for name, a in tensors.items()}
