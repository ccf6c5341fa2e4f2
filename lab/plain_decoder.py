"""A decoder and its AdamW step in plain JAX: the baseline that `plain_step.py` times.

It has nothing of ats_jax but the numbers of a config. Parameters are a dict of arrays, layers are
one `lax.scan`, attention is jax's own (cuDNN on a GPU), causal and without documents. The loss goes
in chunks and recomputes their logits. AdamW is a `tree.map`; it decays every parameter. Experts
are dropless: tokens are sorted by expert, and multiplied by the sample kernels for Hopper that
ship with jax, or by `jax.lax.ragged_dot` where there is no GPU.

Letters: B batch, T seq, D d_model, N tokens or query heads, K key/value heads, H head_dim, F d_ff,
V vocab, E experts, M rows sorted by expert, C choices of a token.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.config import Config
from ats_jax.config.schema.optimizer import AdamW

Params = dict[str, Any]
# Of the sample kernels: the fastest that were found on an H200.
TILES: dict[str, Any] = {
  "block_m": 128,
  "block_n": 128,
  "block_k": 64,
  "max_concurrent_steps": 5,
  "grid_block_n": 4,
}
TILES_OF_GRADIENT = TILES | {"max_concurrent_steps": 4}
UNSUPPORTED = (
  ("model.qk_norm", False),
  ("model.tie_embeddings", False),
  ("model.dropout", 0.0),
  ("mod.routing", "none"),
  ("moe.num_shared", 0),
  ("moe.null_experts", 0),
  ("step.accum_steps", 1),
)


def check(cfg: Config) -> None:
  """Refuse what this program does not compute.

  Raises:
    ValueError: if a setting asks for more than the plain step has.
  """
  for name, wanted in UNSUPPORTED:
    section, field = name.split(".")
    found = getattr(getattr(cfg, section), field)
    if found != wanted:
      raise ValueError(f"{name}={found!r}: the plain step has only {name}={wanted!r}.")
  if cfg.step.remat not in ("full", "dots"):
    raise ValueError(f"step.remat={cfg.step.remat!r}: the plain step has 'full' and 'dots'.")


def init(cfg: Config, key: jax.Array) -> Params:
  """Weights from N(0, init_std^2), norms of 1; those of layers have a leading [num_layers]."""
  m, dtype, keys = cfg.model, cfg.precision.param_dtype, iter(jax.random.split(key, 8))
  layers, width, head = m.num_layers, m.d_model, m.head_dim
  normal = lambda *shape: (jax.random.normal(next(keys), shape) * m.init_std).astype(dtype)
  blocks = {
    "attn_norm": jnp.ones((layers, width), dtype),
    "mlp_norm": jnp.ones((layers, width), dtype),
    "q": normal(layers, width, m.num_heads * head),
    "kv": normal(layers, width, 2 * m.num_kv_heads * head),
    "out": normal(layers, m.num_heads * head, width),
  }
  experts = cfg.moe.num_experts
  wide = cfg.moe.d_ff if experts else m.d_ff
  each = (layers, experts) if experts else (layers,)
  blocks["gate_up"] = normal(*each, width, 2 * wide)
  blocks["down"] = normal(*each, wide, width)
  if experts:
    blocks["router"] = normal(layers, width, experts)
  return {
    "embed": normal(m.vocab_size, width),
    "blocks": blocks,
    "norm": jnp.ones((width,), dtype),
    "head": normal(width, m.vocab_size),
  }


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """RMSNorm in float32; the result has the dtype of `x`."""
  wide = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype)


def rope(x_BTNH: jax.Array, theta: float) -> jax.Array:
  """Rotate the pairs (i, i + head_dim / 2) by the position."""
  seq, head = x_BTNH.shape[1], x_BTNH.shape[-1]
  angles = np.outer(np.arange(seq), theta ** -(np.arange(0, head, 2) / head))[None, :, None]
  cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
  a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def attention(cfg: Config, x_BTD: jax.Array, p: Params) -> jax.Array:
  """Causal grouped-query attention and its output projection."""
  m, shape = cfg.model, x_BTD.shape[:2]
  q_BTNH = (x_BTD @ p["q"].astype(x_BTD.dtype)).reshape(*shape, m.num_heads, m.head_dim)
  kv = (x_BTD @ p["kv"].astype(x_BTD.dtype)).reshape(*shape, 2 * m.num_kv_heads, m.head_dim)
  k_BTKH, v_BTKH = jnp.split(kv, 2, axis=2)
  y_BTNH = jax.nn.dot_product_attention(
    rope(q_BTNH, m.rope_theta),
    rope(k_BTKH, m.rope_theta),
    v_BTKH,
    is_causal=True,
    implementation="cudnn" if jax.default_backend() == "gpu" else "xla",
  )
  return y_BTNH.reshape(*shape, -1) @ p["out"].astype(x_BTD.dtype)


@jax.custom_vjp
def sample_ragged_dot(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """Multiply group by group with the Hopper kernel among jax's samples."""
  from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

  return ragged_dot_mgpu.ragged_dot(x_MD, w_EDF, group_sizes=sizes_E, **TILES)


def _ragged_dot_backward(saved, dy_MF):
  from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

  x_MD, w_EDF, sizes_E = saved
  dy_MF = dy_MF.astype(x_MD.dtype)
  dx_MD = ragged_dot_mgpu.ragged_dot(dy_MF, w_EDF, group_sizes=sizes_E, transpose_rhs=True, **TILES)
  dw_EDF = transposed_ragged_dot_mgpu.transposed_ragged_dot(
    x_MD, dy_MF, group_sizes=sizes_E, **TILES_OF_GRADIENT
  )
  return dx_MD, dw_EDF.astype(w_EDF.dtype), None


sample_ragged_dot.defvjp(
  lambda x, w, sizes: (sample_ragged_dot(x, w, sizes), (x, w, sizes)), _ragged_dot_backward
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dispatch(x_ND: jax.Array, order_M: jax.Array, place_M: jax.Array, choices: int) -> jax.Array:
  """Each token's row once for each of its choices, in the order of the experts."""
  return jnp.take(x_ND, order_M // choices, axis=0, mode="clip")


def _dispatch_backward(choices, place_M, dy_MD):  # a gather and a sum in place of a scatter
  rows_NCD = jnp.take(dy_MD, place_M, axis=0, mode="clip").reshape(-1, choices, dy_MD.shape[-1])
  return rows_NCD.astype(jnp.float32).sum(axis=1).astype(dy_MD.dtype), None, None


dispatch.defvjp(
  lambda x, order, place, choices: (dispatch(x, order, place, choices), place), _dispatch_backward
)


@jax.custom_vjp
def permute(y_MD: jax.Array, place_M: jax.Array, order_M: jax.Array) -> jax.Array:
  """Rows back in the order of the tokens; the gradient is the opposite gather."""
  return jnp.take(y_MD, place_M, axis=0, mode="clip")


permute.defvjp(
  lambda y, place, order: (permute(y, place, order), order),
  lambda order, dy: (jnp.take(dy, order, axis=0, mode="clip"), None, None),
)


def experts(cfg: Config, x_BTD: jax.Array, p: Params) -> jax.Array:
  """Dropless top-k experts without a balance loss."""
  moe, x_ND, dtype = cfg.moe, x_BTD.reshape(-1, x_BTD.shape[-1]), x_BTD.dtype
  logits_NE = (x_ND @ p["router"].astype(dtype)).astype(jnp.float32)
  weight_NC, expert_NC = jax.lax.top_k(jax.nn.softmax(logits_NE), moe.top_k)
  weight_NC = weight_NC / jnp.sum(weight_NC, axis=-1, keepdims=True)
  chosen_M = expert_NC.reshape(-1)
  order_M = jnp.argsort(chosen_M, stable=True)
  index_M = jnp.arange(order_M.size, dtype=order_M.dtype)
  place_M = jnp.zeros_like(order_M).at[order_M].set(index_M, unique_indices=True)
  sizes_E = jnp.bincount(chosen_M, length=moe.num_experts).astype(jnp.int32)
  multiply = sample_ragged_dot if jax.default_backend() == "gpu" else jax.lax.ragged_dot
  rows_MD = dispatch(x_ND, order_M, place_M, moe.top_k)
  gate_MF, up_MF = jnp.split(multiply(rows_MD, p["gate_up"].astype(dtype), sizes_E), 2, axis=-1)
  rows_MD = multiply(jax.nn.silu(gate_MF) * up_MF, p["down"].astype(dtype), sizes_E)
  y_NCD = permute(rows_MD, place_M, order_M).reshape(-1, moe.top_k, x_ND.shape[-1])
  return jnp.sum(y_NCD * weight_NC[..., None].astype(dtype), axis=1).reshape(x_BTD.shape)


def feed_forward(x_BTD: jax.Array, p: Params) -> jax.Array:
  """SwiGLU, gate and up in one matmul."""
  gate_BTF, up_BTF = jnp.split(x_BTD @ p["gate_up"].astype(x_BTD.dtype), 2, axis=-1)
  return (jax.nn.silu(gate_BTF) * up_BTF) @ p["down"].astype(x_BTD.dtype)


def loss_of(cfg: Config, params: Params, tokens_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
  """Mean cross-entropy of the next token."""
  m, dtype = cfg.model, cfg.precision.compute_dtype
  feed = functools.partial(experts, cfg) if cfg.moe.num_experts else feed_forward

  def block(x_BTD, p):
    x_BTD = x_BTD + attention(cfg, rms_norm(x_BTD, p["attn_norm"], m.norm_eps), p)
    return x_BTD + feed(rms_norm(x_BTD, p["mlp_norm"], m.norm_eps), p), None

  policies = jax.checkpoint_policies
  full = cfg.step.remat == "full"
  policy = policies.nothing_saveable if full else policies.dots_with_no_batch_dims_saveable
  block = jax.checkpoint(block, policy=policy, prevent_cse=False)
  x_BTD = params["embed"].astype(dtype)[tokens_BT]
  x_BTD, _ = jax.lax.scan(block, x_BTD, params["blocks"])
  x_BTD = rms_norm(x_BTD, params["norm"], m.norm_eps)
  head_DV = params["head"].astype(dtype)

  def of_chunk(total, chunk):
    x_ND, targets_N = chunk
    logits_NV = (x_ND @ head_DV).astype(jnp.float32)
    of_target_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=-1)[:, 0]
    return total + jnp.sum(jax.nn.logsumexp(logits_NV, axis=-1) - of_target_N), None

  chunks = max(1, targets_BT.size // cfg.step.loss_chunk_tokens)
  chunked = x_BTD.reshape(chunks, -1, m.d_model), targets_BT.reshape(chunks, -1)
  total, _ = jax.lax.scan(jax.checkpoint(of_chunk), jnp.float32(0.0), chunked)
  return total / targets_BT.size


def make_step(cfg: Config):
  """Returns the jitted `(params, mu, nu, count, tokens, targets) -> (..., loss, grad_norm)`."""
  opt = cfg.optimizer
  assert isinstance(opt, AdamW)

  def step(params, mu, nu, count, tokens_BT, targets_BT):
    loss, grads = jax.value_and_grad(functools.partial(loss_of, cfg))(params, tokens_BT, targets_BT)
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    norm = jnp.sqrt(sum(squares))
    clip = jnp.minimum(1.0, opt.grad_clip / norm)
    count = count + 1

    def update(p, g, m, v):
      g = g.astype(jnp.float32) * clip
      new_m = opt.b1 * m.astype(jnp.float32) + (1 - opt.b1) * g
      new_v = opt.b2 * v.astype(jnp.float32) + (1 - opt.b2) * g * g
      root = jnp.sqrt(new_v / (1 - opt.b2**count)) + opt.eps
      direction = new_m / (1 - opt.b1**count) / root
      wide = p.astype(jnp.float32)
      wide = wide - opt.learning_rate * (direction + opt.weight_decay * wide)
      return wide.astype(p.dtype), new_m.astype(m.dtype), new_v.astype(v.dtype)

    updated = jax.tree.map(update, params, grads, mu, nu)
    pick = lambda i: jax.tree.map(lambda t: t[i], updated, is_leaf=lambda t: isinstance(t, tuple))
    return pick(0), pick(1), pick(2), count, loss, norm

  return jax.jit(step, donate_argnums=(0, 1, 2))


def first_state(cfg: Config, params: Params) -> tuple[Params, Params, Params, jax.Array]:
  """Parameters, moments of 0, and the count of updates."""
  zeros = lambda dtype: jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
  optimizer = cfg.optimizer
  assert isinstance(optimizer, AdamW)
  return params, zeros(optimizer.mu_dtype), zeros(optimizer.nu_dtype), jnp.float32(0.0)
