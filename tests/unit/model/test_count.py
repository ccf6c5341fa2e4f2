"""Parameters and FLOPs against figures worked out by hand."""

import jax
import pytest
from helpers import make_decoder, tiny_config

from ats_jax.model.count import COUNTED_PARTS, PartCount, count, size

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
# gpt-oss-20b (arXiv:2508.10925, table 1): 20.91e9 parameters, of which 19.12e9 in feed-forwards
# with routers, 0.64e9 in attention, 1.16e9 in the table and the head.
GPT_OSS_20B = {
  "model.vocab_size": 201_088,
  "model.num_layers": 24,
  "model.d_model": 2880,
  "model.num_heads": 64,
  "model.num_kv_heads": 8,
  "model.head_dim": 64,
  "model.d_ff": 2880,
  "model.qkv_bias": True,
  "model.attn_out_bias": True,
  "model.attn_sinks": True,
  "moe.num_experts": 32,
  "moe.top_k": 4,
  "moe.d_ff": 2880,
  "moe.router_bias": True,
  "moe.expert_bias": True,
}
SEQ = 16  # of the tiny models: 4 layers, 32 wide
ATTENTION = 32 * (4 + 2 + 2 + 4) * 8  # parameters of a layer
EXPERT = 3 * 32 * 64
NORMS = 2 * 32
TABLE = 64 * 32


def abstract(cfg):
  return jax.eval_shape(lambda: make_decoder(cfg))


def counted(**settings):
  """Of a tiny model of four layers."""
  cfg = tiny_config(
    {"model.num_layers": 4} | {k.replace("__", "."): v for k, v in settings.items()}
  )
  return count(cfg, abstract(cfg), SEQ)


def test_llama_8b(mesh):
  cfg = tiny_config(LLAMA_8B)
  counts = count(cfg, abstract(cfg), seq_len=4096)
  layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14_336 + 2 * 4096
  table = 128_256 * 4096
  assert counts.parameters == 32 * layer + 2 * table + 4096 == 8_030_261_248
  # Two FLOPs a multiply-add, forward once and backward twice. Scores and weighted values:
  # 2 matmuls of [seq, head_dim] for each of 32 heads, of which causality needs half.
  attention = 3 * 2 * 2 * 32 * 128 * 4096 * 32
  assert counts.flops_causal == 6 * (32 * layer + table + 4096) + attention / 2
  assert counts.flops_full == 6 * counts.parameters + attention
  assert counts.flops_causal == pytest.approx(4.82e10, rel=0.01)
  assert counts.active == counts.parameters


def test_gpt_oss_20b(mesh):
  cfg = tiny_config(GPT_OSS_20B)
  counts = count(cfg, abstract(cfg), SEQ)
  total = {name: part.total for name, part in counts.parts.items()}
  attention = 2880 * (4096 + 512 + 512) + 5120 + 4096 * 2880 + 2880 + 64
  experts = 32 * (3 * 2880 * 2880 + 3 * 2880)
  router = 2880 * 32 + 32
  assert total["attention"] == 24 * attention
  assert total["experts"] == 24 * experts and total["routers"] == 24 * router
  table = 2 * 201_088 * 2880
  assert counts.parameters == 24 * (attention + experts + router + 2 * 2880) + table + 2880
  published = [total["experts"] + total["routers"], total["attention"], table, counts.parameters]
  assert [round(n / 1e9, 2) for n in published] == [19.12, 0.64, 1.16, 20.91]


def test_experts(mesh):
  parts = counted(moe__num_experts=8, moe__top_k=2, moe__every=2, moe__num_shared=1).parts
  assert parts == {
    "embedding": PartCount(TABLE, TABLE),
    "attention": PartCount(4 * ATTENTION, 4 * ATTENTION),
    "dense feed-forward": PartCount(4 * EXPERT, 4 * EXPERT),  # two dense layers, two shared experts
    "experts": PartCount(2 * 8 * EXPERT, 2 * 2 * EXPERT),
    "routers": PartCount(2 * 32 * 8, 2 * 32 * 8),
    "norms": PartCount(4 * NORMS + 32, 4 * NORMS + 32),
    "head": PartCount(TABLE, TABLE),
  }


def test_spare_experts_are_never_active_and_null_experts_take_their_share(mesh):
  plain = counted(moe__num_experts=4, moe__top_k=2)
  spare = counted(moe__num_experts=4, moe__top_k=2, moe__spare_experts=4)
  null = counted(moe__num_experts=4, moe__top_k=2, moe__null_experts=4)
  assert spare.parts["experts"] == PartCount(4 * 8 * EXPERT, plain.parts["experts"].active)
  # Half of the choices fall on experts that do nothing.
  assert null.parts["experts"] == PartCount(4 * 4 * EXPERT, plain.parts["experts"].active / 2)


def test_layers_that_skip_tokens(mesh):
  """Places of 16 tokens at 30 %: 5."""
  mod = {"mod__routing": "learned", "mod__capacity": 0.3}
  dense, block, ffn = counted(), counted(**mod), counted(**mod, mod__scope="ffn")
  share = 5 / 16
  skips = 2 * (ATTENTION + EXPERT + NORMS)
  assert block.parameters == ffn.parameters == dense.parameters + 2 * 32  # two routers
  assert block.active == pytest.approx(block.parameters - (1 - share) * skips)
  assert ffn.active == pytest.approx(ffn.parameters - (1 - share) * 2 * (EXPERT + 32))
  # Attention of a token: to the keys of those that go through, for those that do.
  layer = 12 * 4 * 8 * SEQ
  full = lambda counts: counts.flops_full - 6 * counts.active
  assert full(dense) == full(ffn) == 4 * layer
  assert full(block) == pytest.approx((2 + 2 * share**2) * layer)
  assert block.flops_causal == pytest.approx(6 * (block.active - TABLE) + full(block) / 2)


def test_experts_in_layers_that_skip_tokens(mesh):
  both = counted(moe__num_experts=8, mod__routing="learned", mod__capacity=0.25, mod__every=1)
  assert both.parts["experts"] == PartCount(4 * 8 * EXPERT, 4 * EXPERT * 2 / 4)
  # Only the tokens that go through see the experts' router; all see the layer's own.
  assert both.parts["routers"] == PartCount(4 * 32 * 9, 4 * 32 * (8 / 4 + 1))


@pytest.mark.parametrize(
  "settings",
  [
    {"moe.num_experts": 4, "moe.spare_experts": 4, "moe.null_experts": 2},
    {"moe.num_experts": 4, "moe.dense_first": 1, "moe.num_shared": 2, "model.num_layers": 3},
    {"mod.routing": "learned", "mod.decision": "predictor", "mod.scope": "ffn"},
    {"mod.routing": "static", "moe.num_experts": 4, "model.qk_norm": True},
  ],
)
def test_parts_add_up_and_buffers_are_no_parameters(mesh, settings):
  cfg = tiny_config(settings)
  model = abstract(cfg)
  counts = count(cfg, model, SEQ)
  assert tuple(counts.parts) == COUNTED_PARTS
  assert counts.parameters == size(model) == sum(part.total for part in counts.parts.values())
  assert counts.active == pytest.approx(sum(part.active for part in counts.parts.values()))
  buffers = sum(leaf.size for leaf in jax.tree.leaves(model)) - counts.parameters
  assert buffers > 0
  assert counts.active <= counts.parameters
