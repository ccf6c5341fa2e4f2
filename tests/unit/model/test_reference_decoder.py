"""The whole loss and its gradients against a second decoder, written here on a dict of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TRAINING, make_decoder, named_leaves, random_rows, tiny_config

from ats_jax.step.objective import loss_sums

# The reference runs in float64, the decoder in float32 with activations of order one.
LOSS_RTOL = 2e-6
# Gradients of order 1e-3 to 1e-1 pass through two layers in float32.
GRAD_RTOL, GRAD_ATOL = 2e-4, 1e-6


def norm(x, scale, eps=1e-6):
  return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def rotate(x, positions, theta):
  """x [T, H]; pairs (i, i + H/2)."""
  half = x.shape[-1] // 2
  angle = positions[:, None] * theta ** (-jnp.arange(half) / half)
  a, b = x[:, :half], x[:, half:]
  return jnp.concatenate(
    [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
  )


def attend(x, p, layer, positions, visible, cfg):
  """One row, one head at a time."""
  m, out = cfg.model, 0.0
  for n in range(m.num_heads):
    group = n * m.num_kv_heads // m.num_heads
    q = x @ p[".segments[0].layers[0].attn.q"][layer][:, n]
    k = x @ p[".segments[0].layers[0].attn.k"][layer][:, group]
    v = x @ p[".segments[0].layers[0].attn.v"][layer][:, group]
    if m.qk_norm:
      q = norm(q, p[".segments[0].layers[0].attn.q_norm.scale"][layer])
      k = norm(k, p[".segments[0].layers[0].attn.k_norm.scale"][layer])
    q, k = rotate(q, positions, m.rope_theta), rotate(k, positions, m.rope_theta)
    scores = jnp.where(visible, q @ k.T / jnp.sqrt(q.shape[-1]), -1e30)
    out = out + jax.nn.softmax(scores, -1) @ v @ p[".segments[0].layers[0].attn.out"][layer][n]
  return out


def row_logits(p, tokens, segments, positions, cfg):
  seq = len(tokens)
  visible = (segments[:, None] == segments[None]) & np.tri(seq, dtype=bool)
  x = p[".embed"][tokens]
  for layer in range(cfg.model.num_layers):
    y = norm(x, p[".segments[0].layers[0].attn_norm.scale"][layer])
    x = x + attend(y, p, layer, positions, visible, cfg)
    y = norm(x, p[".segments[0].layers[0].mlp_norm.scale"][layer])
    gate = y @ p[".segments[0].layers[0].mlp.gate"][layer]
    up = y @ p[".segments[0].layers[0].mlp.up"][layer]
    x = x + (gate / (1 + jnp.exp(-gate)) * up) @ p[".segments[0].layers[0].mlp.down"][layer]
  head = p[".embed"] if cfg.model.tie_embeddings else p[".head"]
  return norm(x, p[".final_norm.scale"]) @ head.T


def reference_loss(p, rows, cfg):
  total = 0.0
  for b in range(len(rows["tokens"])):
    row = {k: v[b] for k, v in rows.items()}
    logits = row_logits(p, row["tokens"], row["segment_ids"], row["positions"], cfg)
    lse = jax.nn.logsumexp(logits, -1)
    label = logits[np.arange(len(lse)), row["targets"]]
    smooth = cfg.step.label_smoothing
    loss = lse - (1 - smooth) * label - smooth * logits.mean(-1) + cfg.step.z_loss * lse**2
    total += jnp.sum(loss * row["loss_mask"])
  return total / rows["loss_mask"].sum()


@pytest.mark.parametrize(
  "changes",
  [
    {"model.num_kv_heads": 1, "step.z_loss": 1e-2},
    {"model.qk_norm": True, "model.tie_embeddings": True, "step.label_smoothing": 0.1},
    {
      "model.num_kv_heads": 4,
      "model.head_dim": 10,
      "model.rope_theta": 500.0,
      "step.remat": "full",
    },
  ],
  ids=["multi-query", "qk-norm-tied", "wide-heads"],
)
def test_loss_and_gradients(mesh, changes):
  # Weights larger than at initialisation, so that attention is far from uniform.
  cfg = tiny_config({"model.init_std": 0.3, "data.seq_len": 12, **changes})
  rows, model = random_rows(cfg, 3, seed=5), make_decoder(cfg)
  sums = lambda m: loss_sums(m, rows, cfg.step, TRAINING)[0]
  f = lambda m: sums(m).objective / rows["loss_mask"].sum()
  loss, grads = jax.jit(jax.value_and_grad(f))(model)

  plain = lambda tree: {
    k.removesuffix(".value").removesuffix(".weight"): np.asarray(v)
    for k, v in named_leaves(tree).items()
  }
  params, grads = plain(model), plain(grads)
  with jax.enable_x64(True), jax.set_mesh(None):
    params64 = {k: jnp.asarray(v.astype(np.float64)) for k, v in params.items()}
    want_loss, want = jax.jit(jax.value_and_grad(lambda p: reference_loss(p, rows, cfg)))(params64)
  assert want_loss.dtype == np.float64
  np.testing.assert_allclose(loss, want_loss, LOSS_RTOL)
  assert grads.keys() == want.keys()
  for name, g in want.items():
    np.testing.assert_allclose(grads[name], g, GRAD_RTOL, GRAD_ATOL, err_msg=name)
