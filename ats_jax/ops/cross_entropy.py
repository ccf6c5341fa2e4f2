"""Output head and cross-entropy in one pass, a chunk of tokens at a time.

Letters: B batch, T seq, D d_model, V vocab (a device's share of it), C tokens of a chunk.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ats_jax.ops import registry
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import (
  all_max,
  all_sum,
  axis_index,
  island,
  num_isolated_replicas,
  num_shards,
  reduce_scatter,
  row_axis,
)

HEAD_AXES = ("vocab", "embed")
_WHOLE_HEAD = ("vocab", "act_embed")  # gathered by the devices that share the tokens


class LossSums(NamedTuple):
  """Sums over tokens, weighted by the mask; float32 scalars.

  Attributes:
    objective: the loss to minimise: smoothed cross-entropy + z_loss * logsumexp^2.
    cross_entropy: plain cross-entropy in nats; its terms [batch, seq] with `per_token`.
    z: squared logsumexp.
    correct: the number of tokens whose target has the highest score.
  """

  objective: jax.Array
  cross_entropy: jax.Array
  z: jax.Array
  correct: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8, 9))
def linear_cross_entropy(
  x_BTD: jax.Array,
  head_VD: jax.Array,
  targets_BT: jax.Array,
  mask_BT: jax.Array,
  z_loss: float,
  label_smoothing: float,
  chunk_tokens: int,
  kernels: Kernels = XLA,
  soft_cap: float = 0.0,
  per_token: bool = False,
) -> LossSums:
  """Score `x @ head.T` against targets without ever holding `[tokens, vocab]`.

  The forward rule of the derivative computes both gradients while a chunk's logits exist: three
  matmuls instead of the four that recomputing the logits costs. Only `objective` is
  differentiable, by activations and matrix; to differentiate another sum, or by the mask, is an
  error. `token_logprobs` is for losses that need more.

  Args:
    x_BTD: final activations [batch, seq, d_model], sharded by `final_activation_axes`.
    head_VD: output matrix [vocab, d_model], same dtype, sharded by `HEAD_AXES`.
    targets_BT: int32 [batch, seq].
    mask_BT: float32 weights; 0 = not counted.
    z_loss: weight of logsumexp^2 (PaLM, arXiv:2204.02311, section 5).
    label_smoothing: share of the target spread evenly over the vocabulary.
    chunk_tokens: tokens of all devices together whose logits exist at one time.
    kernels: the chosen implementations; a sharded vocabulary, dtypes other than bfloat16 and capped
      logits always run in XLA.
    soft_cap: logits z become `soft_cap * tanh(z / soft_cap)` (Gemma 2, arXiv:2408.00118); 0 = they
      stay as they are.
    per_token: return each token's cross-entropy instead of their sum.

  Returns:
    Sums over all tokens.

  Raises:
    TypeError: if another sum than `objective`, or the mask, is differentiated.
  """
  how = z_loss, label_smoothing, chunk_tokens, kernels, soft_cap, per_token
  return _sums_and_grads(x_BTD, head_VD, targets_BT, mask_BT, *how, with_grads=False)[0]


def _forward(x_BTD, head_VD, targets_BT, mask_BT, *how):
  if mask_BT.perturbed:
    raise TypeError("linear_cross_entropy has no derivative by the mask; use token_logprobs.")
  values = (a.value for a in (x_BTD, head_VD, targets_BT, mask_BT))
  return _sums_and_grads(*values, *how, with_grads=True)


def _backward(
  z_loss, label_smoothing, chunk_tokens, kernels, soft_cap, per_token, grads, cotangent
):
  is_zero = lambda c: type(c) is SymbolicZero
  if not all(map(is_zero, (cotangent.cross_entropy, cotangent.z, cotangent.correct))):
    raise TypeError(
      "of the sums of linear_cross_entropy only `objective` has a derivative; take the others as "
      "auxiliary results, or use token_logprobs."
    )
  dx_BTD, dhead_VD = grads
  scale = jnp.zeros(()) if is_zero(cotangent.objective) else cotangent.objective
  return (dx_BTD * scale).astype(dx_BTD.dtype), (dhead_VD * scale).astype(dx_BTD.dtype), None, None


linear_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def token_logprobs(
  x_BTD: jax.Array,
  head_VD: jax.Array,
  targets_BT: jax.Array,
  chunk_tokens: int,
  kernels: Kernels = XLA,
  soft_cap: float = 0.0,
) -> jax.Array:
  """The log-probability of each target under `softmax(x @ head.T)`, for losses of any form.

  The derivative computes the logits a second time, a chunk at a time, because a token's weight in
  the loss is known only then. `linear_cross_entropy` does not, for weights known beforehand.

  Args:
    x_BTD: final activations [batch, seq, d_model], sharded by `final_activation_axes`.
    head_VD: output matrix [vocab, d_model], same dtype, sharded by `HEAD_AXES`.
    targets_BT: int32 [batch, seq].
    chunk_tokens: tokens of all devices together whose logits exist at one time.
    kernels: as in `linear_cross_entropy`.
    soft_cap: as in `linear_cross_entropy`.

  Returns:
    float32 [batch, seq], sharded like the targets.
  """
  axes = final_activation_axes(x_BTD)

  def local(x_BTD, head_VD, targets_BT):
    tokens = targets_BT.size
    split = functools.partial(_split, chunk=min(_local_chunk(chunk_tokens, axes), tokens))

    def step(_, inputs):
      x_CD, targets_C = inputs
      logits_CV = _cap(_logits(x_CD, head_VD), soft_cap)
      rows = _token_statistics(
        logits_CV, targets_C, 0.0, _usable_kernels(kernels, soft_cap), x_CD.dtype
      )
      return None, rows.label - rows.lse

    _, logprobs = jax.lax.scan(step, None, (split(x_BTD), split(targets_BT)))
    return logprobs.reshape(-1)[:tokens].reshape(targets_BT.shape)

  args = x_BTD, head_VD, targets_BT
  return island(local, in_axes=(axes, _WHOLE_HEAD, axes[:2]), out_axes=axes[:2])(*args)


def _logprobs_forward(x_BTD, head_VD, targets_BT, *how):
  args = x_BTD, head_VD, targets_BT
  return token_logprobs(*args, *how), args


def _logprobs_backward(chunk_tokens, kernels, soft_cap, args, cotangent_BT):
  # The gradient of a cross-entropy in which token t has the weight -cotangent[t].
  x_BTD, head_VD, targets_BT = args
  how = 0.0, 0.0, chunk_tokens, kernels, soft_cap, False
  _, (dx_BTD, dhead_VD) = _sums_and_grads(
    x_BTD, head_VD, targets_BT, -cotangent_BT, *how, with_grads=True
  )
  return dx_BTD, dhead_VD.astype(dx_BTD.dtype), None


token_logprobs.defvjp(_logprobs_forward, _logprobs_backward)


def _sums_and_grads(
  x_BTD,
  head_VD,
  targets_BT,
  mask_BT,
  z_loss,
  label_smoothing,
  chunk_tokens,
  kernels,
  soft_cap,
  per_token,
  with_grads,
):
  of_chunk = functools.partial(
    _chunk,
    z_loss=z_loss,
    label_smoothing=label_smoothing,
    kernels=_usable_kernels(kernels, soft_cap),
    soft_cap=soft_cap,
    per_token=per_token,
    with_grads=with_grads,
  )
  axes = final_activation_axes(x_BTD)
  of_tokens = axes[:2]
  local = functools.partial(
    _local,
    of_chunk=of_chunk,
    chunk=_local_chunk(chunk_tokens, axes),
    over_tokens=lambda s: all_sum(s, *of_tokens),
    scatter=lambda d_VD: all_sum(_reduce_scatter_widths(d_VD), *of_tokens, excluding="embed"),
    per_token=per_token,
    with_grads=with_grads,
  )
  scalar: Any = ()  # a tree of axes in the place of one of arrays
  each: Any = of_tokens if per_token else scalar
  sums = LossSums(scalar, each, scalar, scalar)
  grads = (axes, HEAD_AXES) if with_grads else None
  return island(local, in_axes=(axes, _WHOLE_HEAD, of_tokens, of_tokens), out_axes=(sums, grads))(
    x_BTD, head_VD, targets_BT, mask_BT
  )


def final_activation_axes(x_BTD: jax.Array) -> tuple[str, ...]:
  """Logical axes of the final activations; the stages of a pipeline share their rows."""
  return (row_axis(x_BTD.shape[0]), "seq", "act_embed")


def _local(
  x_BTD, head_VD, targets_BT, mask_BT, *,
  of_chunk, chunk, over_tokens, scatter, per_token, with_grads,
):  # fmt: skip
  """Compute the sums and gradients of one device's tokens and its shard of the vocabulary."""
  tokens, d_model = targets_BT.size, x_BTD.shape[-1]
  chunk = min(chunk, tokens)
  split = functools.partial(_split, chunk=chunk)  # padded tokens have mask 0

  def step(dhead_VD, inputs):
    sums, dx_CD, dchunk_VD = of_chunk(head_VD, *inputs)
    return (dhead_VD + dchunk_VD, (sums, dx_CD)) if with_grads else (None, (sums, None))

  dhead_VD = jnp.zeros(head_VD.shape, jnp.float32) if with_grads else None
  inputs = (split(x_BTD), split(targets_BT), split(mask_BT))
  dhead_VD, (sums, dx) = jax.lax.scan(step, dhead_VD, inputs)
  each = sums.cross_entropy
  sums = jax.tree.map(lambda s: over_tokens(jnp.sum(s)), sums)
  if per_token:
    sums = sums._replace(cross_entropy=each.reshape(-1)[:tokens].reshape(targets_BT.shape))
  if dhead_VD is None or dx is None:
    return sums, None
  dx_BTD = dx.reshape(-1, d_model)[:tokens].reshape(x_BTD.shape)
  return sums, (all_sum(dx_BTD, "vocab").astype(x_BTD.dtype), scatter(dhead_VD))


def _reduce_scatter_widths(dhead_VD):
  """Reduce-scatter the gradient of the head along its width."""
  ways, (vocab, d_model) = num_shards("embed"), dhead_VD.shape
  # Blocks go by the first dimension: by another one, XLA would have the width outermost, and copy
  # what the optimizer updates.
  d_WVd = jnp.moveaxis(dhead_VD.reshape(vocab, ways, d_model // ways), 1, 0)
  return reduce_scatter(d_WVd, "embed").reshape(vocab, d_model // ways)


def _local_chunk(chunk_tokens, axes):
  devices = num_shards(axes[0]) * num_shards(axes[1]) * num_isolated_replicas()
  return max(1, chunk_tokens // devices)


def _split(a, chunk):
  """[batch, seq, ...] -> [chunks, chunk, ...], with zeros at the end."""
  a = a.reshape(-1, *a.shape[2:])
  a = jnp.pad(a, [(0, -len(a) % chunk)] + [(0, 0)] * (a.ndim - 1))
  return a.reshape(-1, chunk, *a.shape[1:])


def _logits(x_CD, head_VD):
  return jnp.einsum("CD,VD->CV", x_CD, head_VD, preferred_element_type=jnp.float32)


def _cap(logits_CV, soft_cap):
  return soft_cap * jnp.tanh(logits_CV / soft_cap) if soft_cap else logits_CV


def _usable_kernels(kernels, soft_cap):
  return XLA if soft_cap else kernels


class _TokenStatistics(NamedTuple):
  """float32 [C] for each token: log-sum-exp, the target's logit, the largest and the mean logit."""

  lse: jax.Array
  label: jax.Array
  top: jax.Array
  mean: jax.Array


def _chunk(
  head_VD,
  x_CD,
  targets_C,
  mask_C,
  *,
  z_loss,
  label_smoothing,
  kernels,
  soft_cap,
  per_token,
  with_grads,
):
  """Compute the sums of a chunk of tokens, and their part of the gradients."""
  logits_CV = _cap(_logits(x_CD, head_VD), soft_cap)
  if with_grads:
    rows, dlogits_CV = _token_statistics_and_gradient(
      logits_CV, targets_C, mask_C, z_loss, label_smoothing, kernels, x_CD.dtype
    )
  else:
    rows, dlogits_CV = (
      _token_statistics(logits_CV, targets_C, label_smoothing, kernels, x_CD.dtype),
      None,
    )
  cross_entropy_C = rows.lse - rows.label
  objective_C = cross_entropy_C + z_loss * jnp.square(rows.lse)
  if label_smoothing:
    objective_C += label_smoothing * (rows.label - rows.mean)
  sums = LossSums(
    objective=jnp.sum(objective_C * mask_C),
    cross_entropy=cross_entropy_C * mask_C if per_token else jnp.sum(cross_entropy_C * mask_C),
    z=jnp.sum(jnp.square(rows.lse) * mask_C),
    correct=jnp.sum((rows.label >= rows.top) * mask_C),
  )
  if dlogits_CV is None:
    return sums, None, None
  if soft_cap:
    dlogits_CV = (dlogits_CV * (1 - jnp.square(logits_CV / soft_cap))).astype(dlogits_CV.dtype)
  # A float32 result where the vocabulary is sharded: its shares are still to be added up.
  partial = jnp.float32 if num_shards("vocab") > 1 else x_CD.dtype
  dx_CD = jnp.einsum("CV,VD->CD", dlogits_CV, head_VD, preferred_element_type=partial)
  dhead_VD = jnp.einsum("CV,CD->VD", dlogits_CV, x_CD, preferred_element_type=jnp.float32)
  return sums, dx_CD, dhead_VD


def _kernel(slot, kernels, logits_CV, dtype):
  # With a sharded vocabulary no device can compute the sums of a row alone.
  if num_shards("vocab") > 1 or dtype != jnp.bfloat16:
    return None
  tokens, vocab = logits_CV.shape
  return registry.kernel("linear_cross_entropy", slot, kernels, rows=tokens, vocab=vocab)


def _from_kernel(statistics_C4, vocab):
  lse_C, label_C, top_C, logits_C = statistics_C4.T
  return _TokenStatistics(lse_C, label_C, top_C, logits_C / vocab)


def _token_statistics(logits_CV, targets_C, label_smoothing, kernels, dtype):
  kernel = _kernel("value", kernels, logits_CV, dtype)
  if kernel is not None:
    statistics_C4 = kernel(logits_CV, targets_C, label_smoothing=label_smoothing)
    return _from_kernel(statistics_C4, logits_CV.shape[1])
  return _softmax_statistics(logits_CV, _is_target(logits_CV, targets_C))[0]


def _token_statistics_and_gradient(
  logits_CV, targets_C, mask_C, z_loss, label_smoothing, kernels, dtype
):
  """`_TokenStatistics`, and the gradient of the masked objective by the logits in `dtype`."""
  kernel = _kernel("gradient", kernels, logits_CV, dtype)
  if kernel is not None:
    dlogits_CV, statistics_C4 = kernel(
      logits_CV, targets_C, mask_C, z_loss=z_loss, label_smoothing=label_smoothing
    )
    return _from_kernel(statistics_C4, logits_CV.shape[1]), dlogits_CV
  is_target_CV = _is_target(logits_CV, targets_C)
  rows, exp_CV, total_C = _softmax_statistics(logits_CV, is_target_CV)
  # d objective / d logits = (1 + 2 z lse) softmax - (1 - s) onehot - s / V, times the mask
  weight_C = (1.0 + 2.0 * z_loss * rows.lse) / total_C
  dlogits_CV = exp_CV * weight_C[:, None] - (1.0 - label_smoothing) * is_target_CV
  vocab = logits_CV.shape[1] * num_shards("vocab")
  dlogits_CV = (dlogits_CV - label_smoothing / vocab) * mask_C[:, None]
  return rows, dlogits_CV.astype(dtype)


def _is_target(logits_CV, targets_C):
  num_local = logits_CV.shape[1]
  ids_V = jnp.arange(num_local) + axis_index("vocab") * num_local
  return ids_V == targets_C[:, None]


def _softmax_statistics(logits_CV, is_target_CV):
  """Compute `_TokenStatistics`, `exp(logits - top)` of this shard, and its sum over all shards."""
  top_C = all_max(jnp.max(logits_CV, axis=-1), "vocab")
  exp_CV = jnp.exp(logits_CV - top_C[:, None])
  total_C = all_sum(jnp.sum(exp_CV, axis=-1), "vocab")
  label_C = all_sum(jnp.sum(jnp.where(is_target_CV, logits_CV, 0.0), axis=-1), "vocab")
  vocab = logits_CV.shape[1] * num_shards("vocab")
  mean_C = all_sum(jnp.sum(logits_CV, axis=-1), "vocab") / vocab
  return _TokenStatistics(top_C + jnp.log(total_C), label_C, top_C, mean_C), exp_CV, total_C
