"""The dense decoder of ats_jax in plain PyTorch, for comparisons of speed."""

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # noqa: N812  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]


class Block(nn.Module):
  """`x + attention(norm(x))`, then `x + feed_forward(norm(x))`; shape `m` is a ModelConfig."""

  def __init__(self, m):
    super().__init__()
    self.heads, self.kv_heads, self.head_dim = m.num_heads, m.num_kv_heads, m.head_dim
    linear = lambda a, b: nn.Linear(a, b, bias=False)
    self.attn_norm = nn.RMSNorm(m.d_model, m.norm_eps)
    self.q = linear(m.d_model, m.num_heads * m.head_dim)
    self.k = linear(m.d_model, m.num_kv_heads * m.head_dim)
    self.v = linear(m.d_model, m.num_kv_heads * m.head_dim)
    self.out = linear(m.num_heads * m.head_dim, m.d_model)
    self.mlp_norm = nn.RMSNorm(m.d_model, m.norm_eps)
    self.gate, self.up = linear(m.d_model, m.d_ff), linear(m.d_model, m.d_ff)
    self.down = linear(m.d_ff, m.d_model)

  def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[batch, seq, d_model] to the same."""
    y = self.attn_norm(x)
    split = lambda a, heads: a.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)
    q, k = rotate(split(self.q(y), self.heads), cos, sin), split(self.k(y), self.kv_heads)
    k, v = rotate(k, cos, sin), split(self.v(y), self.kv_heads)
    k, v = (a.repeat_interleave(self.heads // self.kv_heads, dim=1) for a in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + self.out(y.transpose(1, 2).flatten(2))
    y = self.mlp_norm(x)
    return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
  """RoPE on pairs (i, i + head_dim / 2) of [batch, heads, seq, head_dim]."""
  a, b = x.chunk(2, dim=-1)
  return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Decoder(nn.Module):
  """Tokens to the mean cross-entropy; one document a row."""

  def __init__(self, m, seq_len: int):
    super().__init__()
    self.embed = nn.Embedding(m.vocab_size, m.d_model)
    self.blocks = nn.ModuleList(Block(m) for _ in range(m.num_layers))
    self.norm = nn.RMSNorm(m.d_model, m.norm_eps)
    self.head = nn.Linear(m.d_model, m.vocab_size, bias=False)
    frequencies = m.rope_theta ** (
      -torch.arange(0, m.head_dim, 2, dtype=torch.float64) / m.head_dim
    )
    angles = (torch.arange(seq_len)[:, None] * frequencies).float()
    self.register_buffer("cos", angles.cos())
    self.register_buffer("sin", angles.sin())

  def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
    """[batch, seq] each."""
    x = self.embed(tokens)
    for block in self.blocks:
      x = block(x, self.cos, self.sin)
    return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def load(model: Decoder, weights: dict[str, np.ndarray]) -> None:
  """Take the weights of an `ats_jax` decoder, by the names that end their paths; layers stacked."""
  with torch.no_grad():
    put = lambda p, a: p.copy_(torch.from_numpy(np.array(a)).reshape(p.shape))
    put(model.embed.weight, weights["embed"])
    put(model.head.weight, weights["head"])
    put(model.norm.weight, weights["final_norm.scale"])
    for i, block in enumerate(model.blocks):
      for name in ("q", "k", "v"):
        weight = weights[f"attn.{name}"][i]
        put(getattr(block, name).weight, weight.reshape(len(weight), -1).T)
      put(block.out.weight, weights["attn.out"][i].reshape(-1, weights["embed"].shape[1]).T)
      for name in ("gate", "up", "down"):
        put(getattr(block, name).weight, weights[f"mlp.{name}"][i].T)
      put(block.attn_norm.weight, weights["attn_norm.scale"][i])
      put(block.mlp_norm.weight, weights["mlp_norm.scale"][i])


def optimizer(model: Decoder, o) -> torch.optim.Optimizer:
  """AdamW, fused; only matrices of the blocks and the head are decayed. `o`: OptimizerConfig."""
  decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n]
  rest = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
  groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
  options = dict(lr=o.learning_rate, betas=(o.b1, o.b2), eps=o.eps, weight_decay=o.weight_decay)
  return torch.optim.AdamW(groups, fused=True, **options)
