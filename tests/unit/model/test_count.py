"""Parameters and FLOPs against figures worked out by hand."""

import jax
import pytest
from helpers import make_decoder, tiny_config

from ats_jax.model.count import count

# Llama 3 8B (arXiv:2407.21783): its published count is 8.03e9 parameters.
LLAMA_8B = {
  "model.vocab_size": 128_256,
  "model.num_layers": 32,
  "model.d_model": 4096,
  "model.num_heads": 32,
  "model.num_kv_heads": 8,
  "model.d_ff": 14_336,
  "data.seq_len": 4096,
}


def abstract(cfg):
  return jax.eval_shape(lambda: make_decoder(cfg))


def test_llama_8b(mesh):
  cfg = tiny_config(LLAMA_8B)
  counts = count(cfg.model, abstract(cfg), seq_len=4096)
  layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14_336 + 2 * 4096
  table = 128_256 * 4096
  assert counts.parameters == 32 * layer + 2 * table + 4096 == 8_030_261_248
  # Two FLOPs a multiply-add, forward once and backward twice. Scores and weighted values:
  # 2 matmuls of [seq, head_dim] for each of 32 heads, of which causality needs half.
  attention = 3 * 2 * 2 * 32 * 128 * 4096 * 32
  assert counts.flops_causal == 6 * (32 * layer + table + 4096) + attention / 2
  assert counts.flops_full == 6 * counts.parameters + attention
  assert counts.flops_causal == pytest.approx(4.82e10, rel=0.01)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_tree(mesh, tied):
  cfg = tiny_config({"model.tie_embeddings": tied, "model.qk_norm": True})
  model = make_decoder(cfg)
  counts = count(cfg.model, model, seq_len=16)
  assert counts.parameters == sum(leaf.size for leaf in jax.tree.leaves(model))
  assert counts == count(cfg.model, abstract(cfg), seq_len=16)
  # The input embedding costs no FLOPs, but a tied table is the head as well.
  head = cfg.model.vocab_size * cfg.model.d_model
  without_head = counts.parameters - head * (1 if tied else 2)
  attention = 6 * cfg.model.num_layers * cfg.model.num_heads * cfg.model.head_dim * 16
  assert counts.flops_causal == 6 * (without_head + head) + attention
