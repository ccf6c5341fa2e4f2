"""What the kernels compute, in plain XLA: the baseline and, in float32, the judge of `measure`.

Letters as in the kernels' modules.
"""

import functools
import itertools

import jax
import jax.numpy as jnp

from kernels_cuda.routing import CLOSED, Route, weights_of
from kernels_cuda.rows import Places


def rms_norm(x_ND, scale_D, eps):
  """As `rms_norm.rms_norm`; any float dtype."""
  x32 = x_ND.astype(jnp.float32)
  inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
  return (x32 * inverse_rms * scale_D).astype(x_ND.dtype)


def add_rms_norm(x_ND, residual_ND, scale_D, eps):
  """As `rms_norm.add_rms_norm`."""
  sum_ND = x_ND + residual_ND
  return sum_ND, rms_norm(sum_ND, scale_D, eps)


def swiglu(gate, up):
  """As `swiglu.swiglu`."""
  return jax.nn.silu(gate) * up


def sort_by_expert(expert_NK, num_experts):
  """As `routing.sort_by_expert`, with two sorts."""
  tokens, choices = expert_NK.shape
  flat_M = expert_NK.reshape(-1)
  order_M = jnp.argsort(flat_M, stable=True).astype(jnp.int32)
  slot_M = jnp.argsort(order_M).astype(jnp.int32)
  ends_E = jnp.searchsorted(flat_M[order_M], jnp.arange(num_experts), side="right")
  used_M = jnp.arange(flat_M.size) < ends_E[-1]
  places = Places(
    source_M=jnp.where(used_M, order_M // choices, tokens),
    choice_M=jnp.where(used_M, order_M, flat_M.size),
    slot_NK=jnp.where(flat_M < num_experts, slot_M, flat_M.size).reshape(expert_NK.shape),
  )
  return places, jnp.diff(ends_E, prepend=0).astype(jnp.int32)


def route(logits_NE, bias_E, valid_N, top_k, num_experts, score, renormalize, route_scale):
  """As `routing.route`."""
  biased_NE = jnp.where(logits_NE > CLOSED, logits_NE + bias_E, -jnp.inf)
  chosen_NK = jax.lax.top_k(jax.lax.stop_gradient(biased_NE), top_k)[1]
  weight_NK = weights_of(
    logits_NE, chosen_NK, score=score, renormalize=renormalize, scale=route_scale
  )
  goes_NK = valid_N[:, None] & (chosen_NK < num_experts)
  return Route(
    weight_NK,
    chosen_NK,
    *sort_by_expert(jnp.where(goes_NK, chosen_NK, num_experts), num_experts),
  )


def _rows(x, index):
  return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def take_rows(x_ND, places):
  """As `rows.take_rows`."""
  return _rows(x_ND, places.source_M)


def _take_backward(places, dout_MD):
  return _rows(dout_MD, places.slot_NK).sum(axis=1).astype(dout_MD.dtype), None


take_rows.defvjp(lambda x_ND, places: (take_rows(x_ND, places), places), _take_backward)


@jax.custom_vjp
def sum_rows(y_MD, weight_NK, places):
  """As `rows.sum_rows`."""
  rows_NKD = _rows(y_MD, places.slot_NK)
  return jnp.einsum("NKD,NK->ND", rows_NKD, weight_NK).astype(y_MD.dtype)


def _sum_forward(y_MD, weight_NK, places):
  return sum_rows(y_MD, weight_NK, places), (y_MD, weight_NK, places)


def _sum_backward(residuals, dout_ND):
  y_MD, weight_NK, places = residuals
  dout_MD = _rows(dout_ND, places.source_M)
  weight_M = _rows(weight_NK.reshape(-1), places.choice_M)
  dy_MD = (dout_MD * weight_M[:, None]).astype(y_MD.dtype)
  dweight_M = jnp.einsum("MD,MD->M", dout_MD.astype(weight_M.dtype), y_MD.astype(weight_M.dtype))
  return dy_MD, _rows(dweight_M, places.slot_NK), None


sum_rows.defvjp(_sum_forward, _sum_backward)


@functools.partial(jax.jit, static_argnames=("b1", "b2", "eps", "weight_decay", "max_norm"))
def _adamw(
  params, grads, mu, nu, steps, learning_rate, decays, b1, b2, eps, weight_decay, max_norm
):
  grads = [g.astype(jnp.float32) for g in grads]
  norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in grads))
  clip = 1.0 if max_norm is None else jnp.where(norm < max_norm, 1.0, max_norm / norm)
  bias1, bias2 = 1.0 - jnp.float32(b1) ** steps, 1.0 - jnp.float32(b2) ** steps
  new = []
  for p, g, m, v, decay in zip(params, grads, mu, nu, decays, strict=True):
    g *= clip
    m32 = b1 * m.astype(jnp.float32) + (1.0 - b1) * g
    v32 = b2 * v.astype(jnp.float32) + (1.0 - b2) * jnp.square(g)
    change = (m32 / bias1) / (jnp.sqrt(v32 / bias2) + eps) + weight_decay * decay * p
    q = (p.astype(jnp.float32) - learning_rate * change).astype(p.dtype)
    new.append((q, m32.astype(m.dtype), v32.astype(v.dtype)))
  return *(list(x) for x in zip(*new, strict=True)), norm


def adamw(params, grads, mu, nu, *, steps, learning_rate, decays, **settings):
  """As `adamw.adamw`: new parameters, moments, norm."""
  return _adamw(params, grads, mu, nu, steps, learning_rate, tuple(decays), **settings)


def grouped_matmul(x_MD, w_EDF, sizes, transpose_w=False):
  """As `grouped_matmul.grouped_matmul`, but a list: the rows of each group, then the rest.

  `sizes` are Python integers, so XLA has one matmul a group.
  """
  formula = "MD,FD->MF" if transpose_w else "MD,DF->MF"
  product = functools.partial(jnp.einsum, formula, precision="highest")
  *groups, rest = split_rows(x_MD, sizes)
  zeros_RF = jnp.zeros((len(rest), w_EDF.shape[1 if transpose_w else 2]), x_MD.dtype)
  return [product(x, w) for x, w in zip(groups, w_EDF, strict=True)] + [zeros_RF]


def grouped_matmul_dw(x_MD, dy_MF, sizes):
  """As `grouped_matmul.grouped_matmul_dw`, but a list of groups."""
  pairs = zip(split_rows(x_MD, sizes)[:-1], split_rows(dy_MF, sizes)[:-1], strict=True)
  return [jnp.einsum("MD,MF->DF", x, dy, precision="highest") for x, dy in pairs]


def split_rows(x_MD, sizes):
  """The rows of each group, and those past the last one."""
  return jnp.split(x_MD, list(itertools.accumulate(sizes)))
