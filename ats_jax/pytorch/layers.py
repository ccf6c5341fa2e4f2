"""Layers with weights: linear ones, RMSNorm, gated feed-forward; and rotary position embedding.

Matrices are [outputs, inputs], as in all of PyTorch. They are kept in any dtype and multiplied in
that of the activations. Letters: B batch, T seq, D d_model, F d_ff, N heads, H head_dim.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ats_jax.pytorch.metal import shaders_for
from ats_jax.pytorch.settings import Settings


class Linear(nn.Linear):
  """`nn.Linear` in the dtype of its input."""

  def __init__(self, inputs: int, outputs: int, *, bias: bool = False):
    super().__init__(inputs, outputs, bias=bias)

  def forward(self, x: Tensor) -> Tensor:
    """Map [..., inputs] to [..., outputs]."""
    bias = None if self.bias is None else self.bias.to(x.dtype)
    return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
  """`x / rms(x) * scale` over the last axis; with `plus_one` the weight is `scale - 1`."""

  def __init__(self, dim: int, *, eps: float, plus_one: bool = False):
    super().__init__()
    self.eps, self.plus_one = eps, plus_one
    self.scale = nn.Parameter(torch.zeros(dim) if plus_one else torch.ones(dim))

  def forward(self, x: Tensor) -> Tensor:
    """Normalise `x [..., dim]`; statistics in float32, result in the dtype of `x`."""
    scale = self.scale.float() + 1 if self.plus_one else self.scale.float()
    if metal := shaders_for(x):
      return metal.rms_norm(x, scale, self.eps)
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
    return (normal * scale).to(x.dtype)


def norm_of(cfg: Settings, dim: int) -> RMSNorm:
  """The norm that a model has throughout."""
  return RMSNorm(dim, eps=cfg.model.norm_eps, plus_one=cfg.model.norm_plus_one)


def gated(gate: Tensor, up: Tensor, model: Settings) -> Tensor:
  """`activation(gate) * up` by `model.activation`; in float32, rounded once."""
  if model.activation == "silu" and (metal := shaders_for(gate)):
    return metal.swiglu(gate, up)
  gate_wide, up_wide = gate.float(), up.float()
  if model.activation == "silu":
    joined = F.silu(gate_wide) * up_wide
  elif model.activation == "gelu_tanh":
    joined = F.gelu(gate_wide, approximate="tanh") * up_wide
  else:
    assert model.activation == "clamped", model.activation
    gate_wide = gate_wide.clamp(max=model.gate_limit)
    up_wide = up_wide.clamp(-model.gate_limit, model.gate_limit)
    joined = gate_wide * torch.sigmoid(model.gate_slope * gate_wide) * (up_wide + 1)
  return joined.to(gate.dtype)


class MLP(nn.Module):
  """`down(act(gate(x)) * up(x))`."""

  def __init__(self, cfg: Settings, d_ff: int):
    super().__init__()
    self.model = cfg.model
    self.gate = Linear(cfg.model.d_model, d_ff)
    self.up = Linear(cfg.model.d_model, d_ff)
    self.down = Linear(d_ff, cfg.model.d_model)

  def forward(self, x_BTD: Tensor) -> Tensor:
    """Map [batch, seq, d_model] to the same shape."""
    return self.down(gated(self.gate(x_BTD), self.up(x_BTD), self.model))


class Rope(nn.Module):
  """Cosines and sines of rotary angles, which it computes at the positions that are asked for."""

  def __init__(self, model: Settings, *, theta: float, scaled: bool):
    """Set the frequencies.

    Args:
      model: sizes, and how frequencies are lowered.
      theta: their base.
      scaled: lower them.
    """
    super().__init__()
    scaling = model.rope_scaling
    kind = scaling.name if scaled else "none"
    self.concentration = 1.0
    if kind == "yarn":
      self.concentration = scaling.concentration or 0.1 * math.log(scaling.factor) + 1.0
    # No buffer: `to(dtype)` would round it, and loaders that begin without memory would lose it.
    self.frequencies = frequencies(model, model.latent_rope_dim or model.head_dim, theta, kind)

  def forward(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Two float32 arrays [batch, seq, 1, head_dim / 2]."""
    per_position = torch.tensor(self.frequencies, dtype=torch.float32, device=positions_BT.device)
    angles = positions_BT[..., None, None].float() * per_position
    return self.concentration * angles.cos(), self.concentration * angles.sin()


def frequencies(model: Settings, width: int, theta: float, kind: str) -> list[float]:
  """Angles per position of each pair of `width` rotated numbers."""
  pairs = range(width // 2)
  exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
  plain = (1.0 / theta**exponents).tolist()  # in float32, as published models have it
  if kind == "none":
    return plain
  scaling = model.rope_scaling
  if kind == "linear":
    return [f / scaling.factor for f in plain]
  length, slow, fast = scaling.original_len, scaling.slow_turns, scaling.fast_turns
  if kind == "llama3":
    shares = [(length * f / (2 * math.pi) - slow) / (fast - slow) for f in plain]
  else:
    assert kind == "yarn", kind
    pair_of = lambda turns: width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
    first, last = pair_of(fast), pair_of(slow)
    if scaling.whole_pairs:
      first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    shares = [1 - (pair - first) / max(last - first, 0.001) for pair in pairs]
  shares = [min(max(k, 0.0), 1.0) for k in shares]
  return [f * (k + (1 - k) / scaling.factor) for f, k in zip(plain, shares, strict=True)]


def rotate(x_BTNH: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
  """Rotate each pair (i, i + head_dim/2) by its angle, in float32."""
  cos, sin = table
  if metal := shaders_for(x_BTNH):
    return metal.rope(x_BTNH, cos.squeeze(2), sin.squeeze(2))
  first, second = x_BTNH.float().chunk(2, dim=-1)
  rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
  return rotated.to(x_BTNH.dtype)
