"""Mixture of depths: some tokens of each row go through a layer, the others go past it.

Letters: B batch, T seq, D d_model, H predictor width, C places of a row.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.config.schema import Config
from ats_jax.model.forward_pass import Pass
from ats_jax.model.numerics import Numerics
from ats_jax.model.param import Param, Role, normal, zero_buffer
from ats_jax.model.stats import MoDStats
from ats_jax.ops.dispatch import Places, sum_rows, take_rows
from ats_jax.ops.registry import Kernels
from ats_jax.sharding.apply import (
  all_gather,
  axis_index,
  draw_own_rows,
  einsum,
  ensure_sharding,
  island,
  num_shards,
  reduce_scatter,
  reshard,
)
from ats_jax.sharding.rules import spec

X_AXES = ("batch", "seq", "act_embed")
TOKEN_AXES = ("batch", "seq")
ROW_AXES = ("batch", None)  # whole rows, however others are cut


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutedTokens:
  """The tokens that go through a layer, in order of position.

  Attributes:
    index_BC: int32 position in the row of the token in each place; arbitrary in empty places. Not
      sharded along the row.
    filled_BC: bool, whether a place has a token. Not sharded along the row.
    slot_BT: int32 place of each token; C = none.
    gate_BT: float32 weight of the layer's output for each token.
    kernels: the implementations that gather and scatter rows.
  """

  index_BC: jax.Array
  filled_BC: jax.Array
  slot_BT: jax.Array
  gate_BT: jax.Array
  kernels: Kernels = dataclasses.field(metadata=dict(static=True))

  def take(self, x_BTD: jax.Array) -> jax.Array:
    """Gather activations of the routed tokens [batch, places, d_model], zero in empty places."""

    def local(x_BTD, index_BC, filled_BC, slot_BT):
      rows = take_rows(_flat(x_BTD), _places(index_BC, filled_BC, slot_BT), self.kernels)
      # Of the devices along a row one has the token of a place, and the others zeros.
      return reduce_scatter(rows.reshape(*index_BC.shape, -1), "seq", dim=1)

    axes = (X_AXES, ROW_AXES, ROW_AXES, TOKEN_AXES)
    return island(local, in_axes=axes, out_axes=X_AXES)(
      x_BTD, self.index_BC, self.filled_BC, self.slot_BT
    )

  def take_ids(self, ids_BT: jax.Array, empty: int) -> jax.Array:
    """Gather integers of the routed tokens [batch, places], sharded as in sub-layers.

    Empty places get the value `empty`.
    """
    taken = lambda ids, index: jnp.take_along_axis(ids, index, axis=1)
    ids_BC = island(taken, in_axes=(ROW_AXES, ROW_AXES), out_axes=ROW_AXES)(ids_BT, self.index_BC)
    return reshard(jnp.where(self.filled_BC, ids_BC, empty), "batch", "seq")

  def put(self, y_BCD: jax.Array) -> jax.Array:
    """Scatter `y` times the gate back to [batch, seq, d_model], zero for all other tokens."""

    def local(y_BCD, gate_BT, index_BC, filled_BC, slot_BT):
      places = _places(index_BC, filled_BC, slot_BT)
      y_BCD = all_gather(y_BCD, "seq", dim=1)
      y_ND = sum_rows(_flat(y_BCD), gate_BT.reshape(-1, 1), places, self.kernels)
      return y_ND.reshape(*gate_BT.shape, -1)

    axes = (X_AXES, TOKEN_AXES, ROW_AXES, ROW_AXES, TOKEN_AXES)
    return island(local, in_axes=axes, out_axes=X_AXES)(
      y_BCD, self.gate_BT, self.index_BC, self.filled_BC, self.slot_BT
    )


def _flat(x_BTD: jax.Array) -> jax.Array:
  return x_BTD.reshape(-1, x_BTD.shape[-1])


def _places(index_BC: jax.Array, filled_BC: jax.Array, slot_BT: jax.Array) -> Places:
  """Build the flattened map between tokens and places of a device's rows or parts of rows."""
  (batch, seq), capacity = slot_BT.shape, index_BC.shape[1]
  row_B1 = jnp.arange(batch)[:, None]
  index_BC = index_BC - axis_index("seq") * seq
  is_here_BC = filled_BC & (index_BC >= 0) & (index_BC < seq)
  source = jnp.where(is_here_BC, index_BC + row_B1 * seq, batch * seq).reshape(-1)
  slot = jnp.where(slot_BT < capacity, slot_BT + row_B1 * capacity, batch * capacity)
  return Places(source_M=source, choice_M=source, slot_NK=slot.reshape(-1, 1))


class DepthRouter(nnx.Module):
  """Chooses the tokens that go through a layer (Raposo et al. 2024, arXiv:2404.02258).

  Training takes the highest scores of each row, which no token can know before the row ends.
  Evaluation and generation use a causal rule instead: score over a running quantile (`threshold`,
  a buffer with the number of its updates and the capacity that it is for), or a small predictor.
  """

  def __init__(self, cfg: Config, num: Numerics, rngs: nnx.Rngs):
    self.cfg, self.kernels = cfg.mod, num.kernels
    if self.cfg.routing != "learned":
      return
    width, wide = cfg.model.d_model, num.stored(Role.ROUTER)
    std = cfg.model.init_std
    self.weight = normal(rngs.params(), (width,), ("norm",), std, wide, Role.ROUTER)
    self.threshold = zero_buffer((), (), wide)
    self.updates = zero_buffer((), (), wide)
    self.capacity = zero_buffer((), (), wide)
    if self.cfg.decision == "predictor":
      hidden = max(16, width // 8)
      axes, in_std, role = ("embed", "router"), 1 / math.sqrt(width), Role.ROUTER
      self.predict_in = normal(rngs.params(), (width, hidden), axes, in_std, wide, role)
      self.predict_out = normal(rngs.params(), (hidden,), ("norm",), std, wide, role)

  def __call__(
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    valid_BT: jax.Array,
    rules: Pass,
    *,
    layer: jax.Array,
    key: jax.Array | None,
    places: int,
    free_places_B: jax.Array | None = None,
  ) -> tuple[RoutedTokens, MoDStats]:
    """Choose up to `places` tokens of each row, and return them with statistics.

    Args:
      x_BTD: the residual stream [batch, seq, d_model].
      positions_BT: int32 position of each token in its document.
      valid_BT: bool; padding never goes through.
      rules: how tokens are chosen in this pass.
      layer: int32 index of the layer, for the routings without a router.
      key: the key of this layer and micro-batch; random routing in training needs it.
      places: C, the most tokens of a row that may go through.
      free_places_B: int32, how many places each row has left (generation); None = all.
    """
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    positions_BT, valid_BT = (
      ensure_sharding(positions_BT, *TOKEN_AXES),
      ensure_sharding(valid_BT, *TOKEN_AXES),
    )
    scores_BT = gate_BT = jnp.ones(positions_BT.shape, wide, out_sharding=spec(*TOKEN_AXES))
    predicted_BT = None
    if self.cfg.routing == "learned":
      x_BTD = _unit_rms(x_BTD.astype(wide))  # or scores would grow with the residual stream
      scores_BT = _project("BTD,D->BT", x_BTD, self.weight, TOKEN_AXES)
      gate_BT = jax.nn.sigmoid(scores_BT)
      if self.cfg.decision == "predictor":
        predicted_BT = self._predict(jax.lax.stop_gradient(x_BTD))
      causal_BT = self._causal_rule(scores_BT, predicted_BT) & valid_BT
    else:
      causal_BT = self._pattern(positions_BT, layer, rules.capacity) & valid_BT
      if self.cfg.routing == "random" and rules.training:
        assert key is not None, "random routing draws in training"
        draw = lambda shape, cut: jax.random.uniform(key, shape, wide, out_sharding=cut)
        scores_BT = draw_own_rows(draw, positions_BT.shape, spec(*TOKEN_AXES))
    # The tokens of a row compete, so all devices along it see all of them.
    gather_rows = lambda a_BT: reshard(a_BT, *ROW_AXES)
    scores_BT, valid_BT, causal_BT = map(
      gather_rows, (jax.lax.stop_gradient(scores_BT), valid_BT, causal_BT)
    )
    wanted_BT = causal_BT
    if rules.training and self.cfg.routing != "static":
      wanted_BT = _highest(scores_BT, valid_BT, places)

    order_BT = jnp.cumsum(wanted_BT, axis=1)
    limit = places if free_places_B is None else jnp.minimum(places, free_places_B)[:, None]
    chosen_BT = wanted_BT & (order_BT <= limit)
    count_B1 = jnp.sum(chosen_BT, axis=1, keepdims=True)
    multiple = num_shards("seq")
    # Empty places at the end make the shards of a row equally long.
    padded_places = -(-places // multiple) * multiple
    chosen = RoutedTokens(
      index_BC=jnp.argsort(~chosen_BT, axis=1, stable=True)[:, :padded_places],
      filled_BC=jnp.arange(padded_places) < count_B1,
      slot_BT=reshard(jnp.where(chosen_BT, order_BT - 1, padded_places), *TOKEN_AXES),
      gate_BT=gate_BT,
      kernels=self.kernels,
    )
    total = lambda a_BT: jnp.sum(jnp.where(valid_BT, a_BT, 0), dtype=wide)
    threshold, rows = _threshold(scores_BT, valid_BT, places)
    stats = MoDStats(
      tokens=total(1),
      routed=total(chosen_BT),
      overflow=total(wanted_BT & ~chosen_BT),
      gate=total(chosen_BT * gather_rows(gate_BT)),
      agree=total(causal_BT == wanted_BT),
      threshold=threshold,
      rows=rows,
      predictor_loss=(
        jnp.zeros((), wide)
        if predicted_BT is None
        else total(_binary_cross_entropy(gather_rows(predicted_BT), chosen_BT))
      ),
    )
    return chosen, stats

  def _causal_rule(self, scores_BT: jax.Array, predicted_BT: jax.Array | None) -> jax.Array:
    if predicted_BT is not None:
      return predicted_BT > 0
    # All go, as far as there are places, before the first update.
    return (scores_BT > self.threshold[...]) | (self.updates[...] == 0)

  def _predict(self, x_BTD: jax.Array) -> jax.Array:
    """Log-odds that training would choose a token, from its own activations alone."""
    hidden_BTH = _project("BTD,DH->BTH", x_BTD, self.predict_in, (*TOKEN_AXES, "router"))
    return _project("BTH,H->BT", jax.nn.silu(hidden_BTH), self.predict_out, TOKEN_AXES)

  def _pattern(self, positions_BT: jax.Array, layer: jax.Array, capacity: float) -> jax.Array:
    """Choose tokens by position alone (static or random routing), differently in each layer."""
    if self.cfg.routing == "static":
      steps = lambda at: jnp.floor((at + layer) * capacity)
      return steps(positions_BT + 1) > steps(positions_BT)
    # Independent of the run's seed, so that evaluation makes the same choice without knowing it.
    layer_key = jax.random.fold_in(jax.random.key(0), layer)
    draw = lambda position: jax.random.uniform(jax.random.fold_in(layer_key, position))
    return jax.vmap(jax.vmap(draw))(positions_BT) < capacity

  def updated(self, stats: MoDStats, capacity: float) -> dict[str, jax.Array]:
    """Compute the buffers after a step; a changed capacity restarts the running quantile.

    Args:
      stats: sums over the whole batch.
      capacity: the capacity in this step.
    """
    seen = jnp.where(self.capacity[...] == capacity, self.updates[...], 0.0)
    # A mean over the newest tenth of a young history: early scores move fast.
    decay = jnp.minimum(self.cfg.threshold_decay, seen / (seen + 9.0))
    mean = stats.threshold / jnp.maximum(stats.rows, 1.0)
    moved = decay * self.threshold[...] + (1.0 - decay) * mean
    is_new = stats.rows > 0
    return {
      "threshold": jnp.where(is_new, moved, self.threshold[...]),
      "updates": jnp.where(is_new, seen + 1.0, seen),
      "capacity": jnp.full_like(seen, capacity),
    }


def _unit_rms(x_BTD: jax.Array) -> jax.Array:
  return x_BTD * jax.lax.rsqrt(jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True) + 1e-6)


def _project(formula: str, x: jax.Array, weight: Param, axes: tuple[str, ...]) -> jax.Array:
  return einsum(
    formula, x, weight[...].astype(x.dtype), axes=axes, precision=jax.lax.Precision.HIGHEST
  )


def _highest(scores_BT: jax.Array, valid_BT: jax.Array, places: int) -> jax.Array:
  """Mark the `places` highest scores of each row; of equal ones the first."""
  order_BT = jnp.argsort(jnp.where(valid_BT, -scores_BT, jnp.inf), axis=1, stable=True)
  return (jnp.argsort(order_BT, axis=1) < places) & valid_BT


def _threshold(
  scores_BT: jax.Array, valid_BT: jax.Array, places: int
) -> tuple[jax.Array, jax.Array]:
  """Half-way between the last score in and the first one out, summed over rows that have both."""
  if places == scores_BT.shape[1]:
    return jnp.zeros((), scores_BT.dtype), jnp.zeros((), scores_BT.dtype)
  sorted_BT = jnp.sort(jnp.where(valid_BT, scores_BT, -jnp.inf), axis=1, descending=True)
  edge_B = 0.5 * (sorted_BT[:, places - 1] + sorted_BT[:, places])
  is_edge_B = edge_B > -jnp.inf
  return jnp.sum(jnp.where(is_edge_B, edge_B, 0.0)), jnp.sum(is_edge_B, dtype=scores_BT.dtype)


def _binary_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  return jax.nn.softplus(logits) - labels * logits
