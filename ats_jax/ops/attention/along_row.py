"""How the devices along a row share its attention.

`attend_whole_rows` is for rows that are not sharded, `ulysses.attend_by_heads` for rows whose
positions are sharded. `model.numerics.along_row_of` chooses one for a run.
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from ats_jax.ops.remat import ATTENTION_INPUTS
from ats_jax.sharding.apply import num_shards

# `(q, k, v, segment_ids, sinks) -> y` of whole rows.
WholeRowAttention = Callable[
  [jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array
]
# `ops.attention.causal.attention` inside an island: computes attention of whole rows by its first
# argument. The others are those of this device's positions, but segment ids of whole rows, and
# sinks of the heads whose rows it has.
AlongRow = Callable[
  [WholeRowAttention, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array
]


def attend_whole_rows(
  attend_rows: WholeRowAttention,
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKV: jax.Array,
  segment_ids_BT: jax.Array,
  sinks_N: jax.Array | None,
) -> jax.Array:
  """Attention where each device has all positions of its rows; y_BTNV."""
  assert num_shards("seq") == 1, "rows are cut: choose by `model.numerics.along_row_of`"
  return attend_rows(*checkpoint_inputs(q_BTNH, k_BTKH, v_BTKV), segment_ids_BT, sinks_N)


def checkpoint_inputs(
  q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Name the inputs of attention for remat policies (`checkpoint_name`)."""
  q, k, v = (checkpoint_name(x, n) for x, n in zip((q, k, v), ATTENTION_INPUTS, strict=True))
  return q, k, v
