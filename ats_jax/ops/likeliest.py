"""Log-probabilities of some tokens at each position, without holding those of all.

Letters: B batch, T seq, D d_model, V vocab, K tokens at a position, C positions of a chunk.
"""

import jax
import jax.numpy as jnp

from ats_jax.sharding.apply import island, num_shards, row_axis


def likeliest(
  x_BTD: jax.Array, head_VD: jax.Array, k: int, temperature: float, chunk: int, soft_cap: float
) -> tuple[jax.Array, jax.Array]:
  """Ids of the K likeliest tokens and their log-probabilities, [batch, seq * K] each."""

  def of_chunk(logprobs_CV: jax.Array, _: jax.Array) -> tuple[jax.Array, jax.Array]:
    logprobs_CK, ids_CK = jax.lax.top_k(logprobs_CV, k)
    return ids_CK, logprobs_CK

  nothing = jnp.zeros_like(x_BTD[..., 0], jnp.int32)
  ids, logprobs = _in_chunks(x_BTD, head_VD, nothing, of_chunk, 2, temperature, chunk, soft_cap)
  return ids, logprobs


def logprobs_of(
  x_BTD: jax.Array,
  head_VD: jax.Array,
  ids_BTK: jax.Array,
  temperature: float,
  chunk: int,
  soft_cap: float,
) -> jax.Array:
  """Log-probabilities of given tokens, [batch, seq * K], differentiable.

  The derivative computes the logits a second time. No device needs more than those of its share of
  a chunk, but each needs the whole head.

  Args:
    x_BTD: final activations.
    head_VD: output matrix.
    ids_BTK: int32 [batch, seq * K].
    temperature: what the logits are divided by.
    chunk: positions of all devices together whose logits exist at one time.
    soft_cap: as of `cross_entropy.linear_cross_entropy`.
  """

  def of_chunk(logprobs_CV: jax.Array, ids_CK: jax.Array) -> tuple[jax.Array]:
    return (jnp.take_along_axis(logprobs_CV, ids_CK, axis=-1),)

  (found,) = _in_chunks(x_BTD, head_VD, ids_BTK, of_chunk, 1, temperature, chunk, soft_cap)
  return found


def _in_chunks(x_BTD, head_VD, ids_BTK, of_chunk, results, temperature, chunk, soft_cap):
  """What `of_chunk` makes of log-probabilities [C, V] and ids [C, K], [batch, seq * K] each."""
  axes = row_axis(x_BTD.shape[0]), "seq", "act_embed"
  size = max(1, chunk // (num_shards(axes[0]) * num_shards(axes[1])))

  def local(x_BTD, head_VD, ids_BTK):
    rows, positions, width = x_BTD.shape
    number = rows * positions
    padded = lambda a: jnp.pad(a, ((0, -number % size), (0, 0))).reshape(-1, size, a.shape[-1])

    @jax.checkpoint
    def step(_, inputs):
      x_CD, ids_CK = inputs
      logits_CV = jnp.einsum("CD,VD->CV", x_CD, head_VD, preferred_element_type=jnp.float32)
      if soft_cap:
        logits_CV = soft_cap * jnp.tanh(logits_CV / soft_cap)
      return None, of_chunk(jax.nn.log_softmax(logits_CV / temperature, axis=-1), ids_CK)

    inputs = padded(x_BTD.reshape(number, width)), padded(ids_BTK.reshape(number, -1))
    _, found = jax.lax.scan(step, None, inputs)
    return tuple(a.reshape(-1, a.shape[-1])[:number].reshape(rows, -1) for a in found)

  in_axes = axes, (None, "act_embed"), axes[:2]
  found = island(local, in_axes=in_axes, out_axes=(axes[:2],) * results)(x_BTD, head_VD, ids_BTK)
  return found
