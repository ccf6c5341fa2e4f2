"""The whole loss and its gradients against a second decoder, written here on a dict of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TRAINING, make_decoder, named_leaves, random_rows, tiny_config
from rope_reference import rotate

from ats_jax.step.objective import loss_sums

# The reference runs in float64, the decoder in float32 with activations of order one.
LOSS_RTOL = 2e-6
# Gradients of order 1e-3 to 1e-1 pass through two layers in float32.
GRAD_RTOL, GRAD_ATOL = 2e-4, 1e-6


def norm(x, scale, m):
  scale = 1 + scale if m.norm_plus_one else scale
  return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + m.norm_eps) * scale


def cap(x, most):
  return most * jnp.tanh(x / most) if most else x


def attend(x, weight, positions, visible, m, has_window):
  """One row, one head at a time."""
  out = 0.0
  theta = m.window_rope_theta if has_window and m.window_rope_theta else m.rope_theta
  if has_window:
    visible = visible & ~np.tri(len(x), k=-m.window, dtype=bool)
  everything = {}
  for name, heads in (("q", m.num_heads), ("k", m.num_kv_heads), ("v", m.num_kv_heads)):
    y = jnp.einsum("td,dnh->tnh", x, weight(f"attn.{name}"))
    if m.qkv_bias:
      y = y + weight(f"attn.{name}.bias")
    if m.qk_norm and name != "v":
      shape = y.shape if m.qk_norm_scope == "head" else (len(x), heads * m.head_dim)
      y = norm(y.reshape(shape), weight(f"attn.{name}_norm.scale"), m).reshape(y.shape)
    everything[name] = y
  for n in range(m.num_heads):
    group = n * m.num_kv_heads // m.num_heads
    q, k, v = everything["q"][:, n], everything["k"][:, group], everything["v"][:, group]
    q, k = rotate(q, positions, theta), rotate(k, positions, theta)
    scores = cap(q @ k.T * (m.attn_scale or q.shape[-1] ** -0.5), m.attn_soft_cap)
    weights = jnp.where(visible, jnp.exp(scores), 0.0)
    total = weights.sum(-1, keepdims=True)
    if m.attn_sinks:
      total = total + jnp.exp(weight("attn.sinks")[n])
    out = out + (weights / total) @ v @ weight("attn.out")[n]
  return out + weight("attn.out.bias") if m.attn_out_bias else out


def row_logits(p, tokens, segments, positions, cfg):
  seq, m = len(tokens), cfg.model
  period = m.full_every or 1  # of the pattern that is scanned
  visible = (segments[:, None] == segments[None]) & np.tri(seq, dtype=bool)
  x = p[".embed"][tokens] * (m.d_model**0.5 if m.scale_embeddings else 1)
  after = lambda y, weight, name: norm(y, weight(name), m) if m.post_norms else y
  for layer in range(m.num_layers):
    segment = layer if m.num_layers == period else 0  # one of each kind: nothing is repeated
    where, repeat = divmod(layer, period)[::-1] if not segment else (0, 0)
    place = f".segments[{segment}].layers[{where}]"
    weight = lambda name, place=place, repeat=repeat: p[f"{place}.{name}"][repeat]
    has_window = m.window > 0 and not (m.full_every and (layer + 1) % m.full_every == 0)
    y = norm(x, weight("attn_norm.scale"), m)
    y = attend(y, weight, positions, visible, m, has_window)
    x = x + after(y, weight, "attn_post_norm.scale")
    y = norm(x, weight("mlp_norm.scale"), m)
    gate, up = y @ weight("mlp.gate"), y @ weight("mlp.up")
    half = jnp.sqrt(2 / jnp.pi) * (gate + 0.044715 * gate**3)
    gelu = gate * (1 + jnp.tanh(half)) / 2
    if m.activation == "clamped":
      gate, up = jnp.minimum(gate, m.gate_limit), 1 + jnp.clip(up, -m.gate_limit, m.gate_limit)
    slope = m.gate_slope if m.activation == "clamped" else 1.0
    gate = gelu if m.activation == "gelu_tanh" else gate / (1 + jnp.exp(-slope * gate))
    x = x + after((gate * up) @ weight("mlp.down"), weight, "mlp_post_norm.scale")
  head = p[".embed"] if m.tie_embeddings else p[".head"]
  return cap(norm(x, p[".final_norm.scale"], m) @ head.T, m.logit_soft_cap)


def reference_loss(p, rows, cfg):
  def row_loss(row):
    logits = row_logits(p, row["tokens"], row["segment_ids"], row["positions"], cfg)
    lse = jax.nn.logsumexp(logits, -1)
    label = logits[np.arange(len(lse)), row["targets"]]
    smooth = cfg.step.label_smoothing
    loss = lse - (1 - smooth) * label - smooth * logits.mean(-1) + cfg.step.z_loss * lse**2
    return jnp.sum(loss * row["loss_mask"])

  return jnp.sum(jax.vmap(row_loss)(rows)) / rows["loss_mask"].sum()


@pytest.mark.parametrize(
  "changes",
  [
    {
      "model.num_kv_heads": 4,
      "model.head_dim": 10,
      "model.rope_theta": 500.0,
      "model.qkv_bias": True,
      "model.qk_norm": True,
      "model.qk_norm_scope": "all",
      "model.window": 3,
      "model.attn_out_bias": True,
      "model.attn_sinks": True,
      "model.activation": "clamped",
      "model.gate_limit": 0.5,
      "model.tie_embeddings": True,
      "step.remat": "full",
    },
    {
      "model.num_kv_heads": 1,
      "model.qk_norm": True,
      "model.window": 3,
      "model.full_every": 2,
      "model.window_rope_theta": 50.0,
      "model.attn_scale": 0.2,
      "model.attn_soft_cap": 1.5,
      "model.logit_soft_cap": 2.0,
      "model.post_norms": True,
      "model.norm_plus_one": True,
      "model.scale_embeddings": True,
      "model.activation": "gelu_tanh",
      "step.z_loss": 1e-2,
      "step.label_smoothing": 0.1,
    },
  ],
  ids=["biases", "soft-caps"],
)
def test_loss_and_gradients(mesh, changes):
  # Weights larger than at initialisation, so that attention is far from uniform.
  cfg = tiny_config({"model.init_std": 0.3, "data.seq_len": 12, **changes})
  rows = random_rows(cfg, 3, seed=5)
  # No weight is 0 or 1, as biases and norms are at first.
  waves = lambda a: 0.1 * jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape)
  model = jax.jit(lambda: jax.tree.map(lambda a: a + waves(a), make_decoder(cfg)))()
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
