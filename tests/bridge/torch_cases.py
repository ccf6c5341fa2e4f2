"""Small models of every kind, in JAX and in PyTorch with the same weights."""

import functools

import jax
import numpy as np
import torch
from helpers import make_decoder, random_rows, tiny_config

from ats_jax.checkpoint import layout
from ats_jax.model.layout import stacks
from ats_jax.pytorch import weights
from ats_jax.pytorch.decoder import Decoder

# Of steps this small threads take longer than they save; on busy cores 60 times as long.
torch.set_num_threads(1)
SIZES = {
  "model.vocab_size": 272,
  "model.head_dim": 12,
  "data.seq_len": 24,
  "model.init_std": 0.3,
}
EXPERTS = {"moe.num_experts": 6, "moe.top_k": 2, "moe.d_ff": 24}
SKIPPING = {"mod.routing": "learned", "mod.capacity": 0.4}
LATENT = {
  "model.kv_latent_dim": 20,
  "model.latent_rope_dim": 8,
  "model.v_head_dim": 10,
  "model.num_kv_heads": 4,
}
CASES = {
  "dense": {},
  "dense-all-options": {
    "model.qk_norm": True,
    "model.qk_norm_scope": "all",
    "model.qkv_bias": True,
    "model.attn_out_bias": True,
    "model.post_norms": True,
    "model.norm_plus_one": True,
    "model.scale_embeddings": True,
    "model.tie_embeddings": True,
    "model.logit_soft_cap": 5.0,
    "model.attn_soft_cap": 3.0,
    "model.attn_scale": 0.4,
    "model.activation": "gelu_tanh",
    "model.rope_scaling.name": "llama3",
    "model.rope_scaling.factor": 4.0,
    "model.rope_scaling.original_len": 16,
    "model.rope_scaling.fast_turns": 4.0,
    "step.z_loss": 1e-3,
    "step.label_smoothing": 0.1,
  },
  "windows": {
    "model.window": 5,
    "model.full_every": 2,
    "model.window_rope_theta": 500.0,
    "model.qk_norm": True,
    "model.attn_sinks": True,
    "model.activation": "clamped",
    "model.rope_scaling.name": "yarn",
    "model.rope_scaling.factor": 8.0,
    "model.rope_scaling.original_len": 16,
  },
  "moe-groups": {
    **LATENT,
    **EXPERTS,
    "model.q_latent_dim": 14,
    "moe.num_experts": 8,
    "moe.num_groups": 4,
    "moe.top_groups": 2,
    "moe.score": "sigmoid",
    "moe.bias_on": "scores",
    "moe.route_scale": 1.7,
    "moe.num_shared": 1,
    "moe.dense_first": 1,
    "moe.sequence_aux_loss": 0.01,
  },
  "moe-null": {
    **EXPERTS,
    "moe.null_experts": 2,
    "moe.spare_experts": 2,
    "moe.router_bias": True,
    "moe.expert_bias": True,
    "moe.renormalize": False,
    "model.activation": "clamped",
    "moe.every": 2,
  },
  "moe-capacity": {**EXPERTS, "moe.dispatch": "capacity", "moe.capacity_factor": 0.8},
  "moe-capacity-weight": {
    **EXPERTS,
    "moe.dispatch": "capacity",
    "moe.capacity_factor": 0.6,
    "moe.drop_policy": "weight",
  },
  "mod-predictor": {
    **SKIPPING,
    "mod.every": 1,
    "mod.decision": "predictor",
    "mod.scope": "ffn",
  },
  "mod-static": {**SKIPPING, "mod.routing": "static"},
  "hybrid": {**SKIPPING, **EXPERTS, **LATENT, "moe.null_experts": 2},
}


@functools.cache
def config(name: str):
  return tiny_config(SIZES | CASES[name])


def stirred(tree, seed: int = 0):
  """A model whose vectors and buffers are no zeros or ones, so that all of it shows."""
  rng = np.random.default_rng(seed)

  def one(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
    draw = rng.standard_normal(leaf.shape).astype(np.float32)
    if name.endswith(("load_E", "active_S", "updates", "capacity")):
      return leaf
    if name.startswith(("head", "embed")):  # they begin so small that logits say little
      return 6 * leaf
    if name.endswith("side_S"):
      return jax.numpy.sign(draw)
    if name.endswith("penalty_S"):
      return jax.numpy.abs(draw)
    return leaf + 0.2 * draw if name.endswith(VECTORS) else leaf

  return jax.tree_util.tree_map_with_path(one, tree)


VECTORS = ("scale", "bias", "sinks", "offset", "bias_E", "threshold", "direction_SD")


def arrays(cfg, tree) -> dict[str, np.ndarray]:
  """A model's arrays, or gradients, by their names in a checkpoint."""
  leaves = jax.tree.leaves(tree)
  parts = layout.named_arrays(tree, stacks=stacks(cfg))
  whole = lambda part: np.asarray(leaves[part.number])
  return {n: whole(p) if p.layer is None else whole(p)[p.layer] for n, p in parts.items()}


@functools.cache
def jax_model(name: str):
  """Config, JAX's decoder, and its arrays."""
  cfg = config(name)
  model = stirred(make_decoder(cfg))
  return cfg, model, arrays(cfg, model)


def both(name: str):
  """Config, JAX's decoder, PyTorch's."""
  cfg, ours, values = jax_model(name)
  theirs = Decoder(cfg)
  weights.put(theirs, {name: torch.tensor(array) for name, array in values.items()})
  return cfg, ours, theirs


def batch(cfg, rows: int = 3, seed: int = 0):
  """Packed rows for each side."""
  found = random_rows(cfg, rows, seed)
  return found, {n: torch.tensor(a).long() if a.dtype.kind == "i" else torch.tensor(a)
                 for n, a in found.items()}  # fmt: skip
