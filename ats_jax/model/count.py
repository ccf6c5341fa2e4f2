"""Parameters and FLOPs from shapes alone."""

import dataclasses
import math

import jax

from ats_jax.config.schema import ModelConfig


@dataclasses.dataclass(frozen=True)
class Counts:
  """Sizes of a model.

  Attributes:
    parameters: all of them.
    flops_causal: training FLOPs per token: 6 x (parameters without the input embedding) plus
      causal attention (each query sees half of the keys). The convention of our MFU.
    flops_full: 6 x parameters + 12 x layers x heads x head_dim x seq, as in PaLM
      (arXiv:2204.02311, appendix B); higher for the same speed.
  """

  parameters: int
  flops_causal: float
  flops_full: float


def count(cfg: ModelConfig, model: object, seq_len: int) -> Counts:
  """Count a (possibly abstract) model's parameters and its training FLOPs per token.

  Recomputation is not counted: FLOPs are those the mathematics needs.
  """
  parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))
  table = 0 if cfg.tie_embeddings else cfg.vocab_size * cfg.d_model
  attention = 12 * cfg.num_layers * cfg.num_heads * cfg.head_dim * seq_len
  return Counts(
    parameters=parameters,
    flops_causal=6.0 * (parameters - table) + attention / 2,
    flops_full=6.0 * parameters + attention,
  )
