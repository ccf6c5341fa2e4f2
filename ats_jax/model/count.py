"""Parameters and FLOPs from shapes alone."""

import dataclasses
import math
from typing import Any

import jax

from ats_jax.config.schema import Config
from ats_jax.model.init import trainable
from ats_jax.model.layout import LayerKind


@dataclasses.dataclass(frozen=True)
class Counts:
  """Sizes of a model.

  Attributes:
    parameters: all of them.
    active: those that a token is multiplied with, on average: top_k of the experts (fewer where
      null experts take choices), and the capacity's share of a layer that skips tokens.
    flops_causal: training FLOPs per token: 6 x (active parameters without the input embedding)
      plus causal attention (each query sees half of the keys). The convention of our MFU.
    flops_full: 6 x active parameters + 12 x layers x heads x head_dim x seq, as in PaLM
      (arXiv:2204.02311, appendix B); higher for the same speed.
  """

  parameters: int
  active: float
  flops_causal: float
  flops_full: float


def count(cfg: Config, model: Any, seq_len: int) -> Counts:
  """Count a (possibly abstract) model's parameters and its training FLOPs per token.

  Recomputation is not counted: FLOPs are those the mathematics needs. Experts are taken as
  balanced, and layers that skip tokens at their final capacity.
  """
  skipped = attention_layers = 0.0
  for segment, blocks in zip(model.layout, model.segments, strict=True):
    for kind, layer in zip(segment.kinds, blocks.layers, strict=True):
      unused, share = _unused(cfg, kind, layer)
      skipped += unused
      attention_layers += segment.repeats * share**2  # fewer queries, and fewer keys for each
  parameters = size(model)
  active = parameters - skipped
  table = 0 if cfg.model.tie_embeddings else size(model.embed)
  attention = 12 * attention_layers * cfg.model.num_heads * cfg.model.head_dim * seq_len
  return Counts(
    parameters=parameters,
    active=active,
    flops_causal=6.0 * (active - table) + attention / 2,
    flops_full=6.0 * active + attention,
  )


def size(tree: Any) -> int:
  """Parameters in a (possibly abstract) part of a model; buffers are none."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trainable(tree)))


def _unused(cfg: Config, kind: LayerKind, layer: Any) -> tuple[float, float]:
  """Parameters of a (stacked) layer that a token passes by, and its attention's share of tokens."""
  moe, unused = cfg.moe, 0.0
  if kind.moe:
    experts = sum(size(w) for w in (layer.mlp.gate, layer.mlp.up, layer.mlp.down))
    drawn = moe.top_k * moe.num_experts / (moe.num_experts + moe.null_experts)
    unused = experts * (1.0 - drawn / layer.mlp.router.num_slots)
  if not kind.mod:
    return unused, 1.0
  whole = cfg.mod.scope == "block"
  parts = (layer.attn_norm, layer.attn, layer.mlp_norm, layer.mlp) if whole else (layer.mlp,)
  passed = (1.0 - cfg.mod.capacity) * (sum(map(size, parts)) - unused)
  return unused + passed, cfg.mod.capacity if whole else 1.0
