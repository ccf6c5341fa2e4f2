"""Mixture of experts: a router, many small feed-forwards, and the dispatch of tokens to them.

Letters: B batch, T seq, D d_model, F expert width, E experts on a device, K choices, M slots,
C places of an expert in a row, R rank of an adapter.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ats_jax.config.schema import Config
from ats_jax.extensions import routers
from ats_jax.model.layers import MLP, ExpertLinear, gating
from ats_jax.model.layout import expert_capacity
from ats_jax.model.numerics import Numerics
from ats_jax.model.param import residual_std
from ats_jax.model.router import Router
from ats_jax.model.stats import MoEStats
from ats_jax.ops.dispatch import place_in_bins, sum_rows, take_rows
from ats_jax.ops.expert_exchange import ExpertCompute, run_experts
from ats_jax.ops.grouped_matmul import add_by_group, grouped_matmuls
from ats_jax.ops.remat import EXPERT_RESULTS
from ats_jax.ops.swiglu import gated
from ats_jax.sharding.apply import (
  all_sum,
  all_to_all,
  ensure_sharding,
  island,
  num_shards,
)
from ats_jax.sharding.shards import gather_weight

KERNEL_WIDTHS = 64  # grouped matmuls of any kernel take multiples of it
X_AXES = ("batch", "seq", "act_embed")


class MoE(nnx.Module):
  """`sum_k weight_k * expert_k(x)`, plus the experts that every token shares."""

  def __init__(self, cfg: Config, num: Numerics, rngs: nnx.Rngs):
    moe, d_model = cfg.moe, cfg.model.d_model
    self.cfg, self.num, self.gating = moe, num, gating(cfg.model)
    self.router: Router = routers.find(moe.router)(cfg, num, rngs)
    experts, stream, wide = self.router.num_slots, {"expert_embed": d_model}, {"ff": moe.d_ff}
    std, residual = cfg.model.init_std, residual_std(cfg.model)
    linear = functools.partial(ExpertLinear, experts, num=num, rngs=rngs, bias=moe.expert_bias)
    self.gate, self.up = linear(stream, wide, std=std), linear(stream, wide, std=std)
    self.down = linear(wide, stream, std=residual)
    self.shared = MLP(cfg.model, num, rngs, moe.num_shared * moe.d_ff) if moe.num_shared else None

  def __call__(
    self,
    x_BTD: jax.Array,
    valid_BT: jax.Array,
    *,
    training: bool,
    key: jax.Array | None,
    fp8: bool = False,
  ) -> tuple[jax.Array, MoEStats]:
    """Map [batch, seq, d_model] to the same shape, and return statistics.

    Args:
      x_BTD: normalised activations in the compute dtype.
      valid_BT: bool; padding goes to no expert and gets 0.
      training: capacity mode drops choices in training only: in evaluation and generation they
        would make the result depend on what else is in the batch.
      key: for the router's noise; None = no noise.
      fp8: whether the shared expert multiplies in 8 bits; the others never do.
    """
    routing, stats = self.router(x_BTD, valid_BT, key if training else None)
    with_capacity = training and self.cfg.dispatch == "capacity"
    rows_through = self._capacity if with_capacity else self._dropless
    layers = (self.gate, self.up, self.down)
    biases = [layer.bias for layer in layers if layer.bias is not None]

    def local(*args):
      rows, rest = args[:3], iter(args[3:])  # of the weights, which are behind the rows' routes
      gathered = lambda stored, used: gather_weight(next(rest), stored, used)
      whole = [tuple(map(gathered, layer.stored_axes, layer.axes)) for layer in layers]
      whole = [layer.of_device(of, x_BTD.dtype) for layer, of in zip(layers, whole, strict=True)]
      return rows_through(*rows, *whole, *rest)

    y_BTD, dropped, overflow = island(
      local,
      in_axes=(
        X_AXES,
        *[(*X_AXES[:2], "choice")] * 2,
        *(axes for layer in layers for axes in layer.stored_axes),
        *(bias.axes for bias in biases),
      ),
      out_axes=(X_AXES, (), ()),
    )(
      x_BTD,
      *routing,
      *(matrix for layer in layers for matrix in layer.matrices(x_BTD.dtype)),
      *(bias[...].astype(x_BTD.dtype) for bias in biases),
    )
    if self.shared is not None:
      valid_BT = ensure_sharding(valid_BT, *X_AXES[:2])
      y_BTD += jnp.where(valid_BT[..., None], self.shared(x_BTD, fp8=fp8), 0)
    return y_BTD, stats._replace(dropped=dropped, overflow=overflow)

  def _dropless(self, x_BTD, expert_BTK, weight_BTK, *weights):
    """On one device: compute all rows routed to its experts, with grouped matmuls."""
    moe, kernels, num_local = self.cfg, self.num.kernels, len(jax.tree.leaves(weights[0])[0])
    compute = functools.partial(_grouped_mlp, gating=self.gating, kernels=kernels)
    groups = moe.num_groups, moe.top_groups
    experts = ExpertCompute(compute, num_local, moe.exchange.factor, kernels, *groups)
    x_ND, expert_NK, weight_NK = (_flat(a) for a in (x_BTD, expert_BTK, weight_BTK))
    y_ND, overflow = run_experts(x_ND, expert_NK, weight_NK, weights, experts, moe.exchange.name)
    y_BTD, none = all_sum(y_ND, "ff").reshape(x_BTD.shape), jnp.zeros((), weight_BTK.dtype)
    return y_BTD, none, _over_tokens(overflow.astype(none.dtype))

  def _capacity(self, x_BTD, expert_BTK, weight_BTK, *weights):
    """On one device: compute C places of every expert and row, whether filled or not."""
    batch, seq, kernels = *x_BTD.shape[:2], self.num.kernels
    x_ND, expert_NK, weight_NK = (_flat(a) for a in (x_BTD, expert_BTK, weight_BTK))
    num_local = len(jax.tree.leaves(weights[0])[0])
    num_experts = num_local * num_shards("experts")
    places_C = expert_capacity(seq, self.cfg.top_k, self.cfg.capacity_factor, self.cfg.num_experts)
    row_N1 = jnp.repeat(jnp.arange(batch), seq)[:, None]
    bin_NK = expert_NK * batch + jnp.where(expert_NK < num_experts, row_N1, 0)
    priority = jax.lax.stop_gradient(weight_NK) if self.cfg.drop_policy == "weight" else None
    places = place_in_bins(bin_NK, num_experts * batch, places_C, priority)
    rows_EMD = all_to_all(_by_expert(take_rows(x_ND, places, kernels), num_experts), "experts")
    rows_EMD = _swap_blocks(rows_EMD, num_local)
    y_EMD = _batched_mlp(rows_EMD, weights, gating=self.gating, kernels=kernels)
    y_EMD = all_to_all(_swap_back(y_EMD, num_shards("experts")), "experts")
    y_MD = y_EMD.reshape(-1, x_ND.shape[1])
    y_ND = all_sum(sum_rows(y_MD, weight_NK, places, kernels), "ff")
    y_BTD = y_ND.reshape(x_BTD.shape)
    dropped = jnp.sum((expert_NK < num_experts) & (places.slot_NK == places.source_M.size))
    dropped = _over_tokens(dropped.astype(weight_NK.dtype))
    return y_BTD, dropped, jnp.zeros_like(dropped)


def _grouped_mlp(x_MD, sizes_E, weights, *, gating, kernels):
  product = functools.partial(_grouped, kernels=kernels)
  times = lambda x_MD, matrices: _multiply(product, matrices, x_MD, sizes_E)
  plus = lambda y_MF, bias_EF: add_by_group(y_MF, bias_EF, sizes_E)
  return _mlp(x_MD, weights, times, plus, gating, kernels)


def _batched_mlp(x_EMD, weights, *, gating, kernels):
  times = lambda x_EMD, matrices: _multiply(_batched, matrices, x_EMD)
  plus = lambda y_EMF, bias_EF: y_EMF + bias_EF[:, None]
  return _mlp(x_EMD, weights, times, plus, gating, kernels)


def _grouped(matrices, x_MD, sizes_E, *, kernels):
  return grouped_matmuls(x_MD, matrices, sizes_E, kernels)


def _batched(matrices, x_EMD):
  return tuple(jnp.einsum("EMD,EDF->EMF", x_EMD, matrix_EDF) for matrix_EDF in matrices)


def _multiply(product, matrices, *args):
  """`product(matrices, *args)`, of arrays or of what is packed (`ExpertLinear.of_device`)."""
  first = matrices[0]
  return (product if isinstance(first, jax.Array) else first.of(product))(matrices, *args)


def _mlp(x, weights, times, plus, gating, kernels):
  """Apply the gated feed-forward of each row's expert.

  `times` multiplies rows by the matrices of their experts, `plus` adds the biases of their experts.
  Of each layer, `weights` has its matrices and the factors of its adapter; behind them, biases.
  """
  layers, biases = weights[:3], weights[3:]
  gate, up = _products(x, layers[:2], times)
  if biases:
    gate, up = plus(gate, biases[0]), plus(up, biases[1])
  gate, up = checkpoint_name(gate, EXPERT_RESULTS[0]), checkpoint_name(up, EXPERT_RESULTS[1])
  (y,) = _products(gated(gate, up, gating, kernels), layers[2:], times)
  if biases:  # the devices along ff hold shares of y, which are added up later
    y = plus(y, biases[2] / num_shards("ff"))
  return checkpoint_name(y, EXPERT_RESULTS[2])  # the gradients of the weights need it


def _products(x, layers, times):
  """The rows times the matrices of each layer, plus the product of its adapter's factors."""
  results = times(x, tuple(matrix for matrix, *_ in layers))

  def adapted(y, factors):
    if not factors:
      return y
    inner_EDR, outer_ERF = factors
    # The kernels were chosen for the widths of the model: a rank is filled up to one of these.
    missing = -outer_ERF.shape[1] % KERNEL_WIDTHS
    inner_EDR = jnp.pad(inner_EDR, ((0, 0), (0, 0), (0, missing)))
    outer_ERF = jnp.pad(outer_ERF, ((0, 0), (0, missing), (0, 0)))
    (part,) = times(x, (inner_EDR,))
    return y + times(part, (outer_ERF,))[0]

  return tuple(adapted(y, of[1:]) for y, of in zip(results, layers, strict=True))


def _over_tokens(count: jax.Array) -> jax.Array:
  """Sum a count over the devices that hold different tokens."""
  return all_sum(count, "batch", "seq")


def _flat(a_BTx: jax.Array) -> jax.Array:
  return a_BTx.reshape(-1, a_BTx.shape[-1])


def _by_expert(rows_MD: jax.Array, num_experts: int) -> jax.Array:
  return rows_MD.reshape(num_experts, -1, rows_MD.shape[-1])


def _swap_blocks(rows: jax.Array, num_local: int) -> jax.Array:
  """[devices * E, M, D] as received -> [E, devices * M, D]."""
  blocks = rows.reshape(-1, num_local, *rows.shape[1:])
  return jnp.swapaxes(blocks, 0, 1).reshape(num_local, -1, rows.shape[-1])


def _swap_back(rows: jax.Array, num_devices: int) -> jax.Array:
  """[E, devices * M, D] -> [devices * E, M, D]."""
  blocks = rows.reshape(rows.shape[0], num_devices, -1, rows.shape[-1])
  return jnp.swapaxes(blocks, 0, 1).reshape(num_devices * rows.shape[0], -1, rows.shape[-1])
