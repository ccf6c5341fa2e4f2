"""Context parallelism: how the devices along a row share its attention.

`WholeRows` is for rows that are not sharded, `ulysses.Ulysses` and `ring.Ring` for rows whose
positions are sharded. `model.numerics.along_row_of` chooses one for a run.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol, override

import jax
from jax.ad_checkpoint import checkpoint_name

from ats_jax.ops.attention.block import MaskRules
from ats_jax.ops.registry import Kernels
from ats_jax.ops.remat import ATTENTION_INPUTS
from ats_jax.sharding.apply import num_shards

QueryKeyValue = tuple[jax.Array, jax.Array, jax.Array]
# `(q, k, v, segment_ids, sinks) -> y` of whole rows.
WholeRowAttention = Callable[
  [jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array
]


class AttentionOptions(NamedTuple):
  """Options and implementations of attention; static. The first three are those of `attention`."""

  max_segments: int
  window: int | None
  soft_cap: float | None
  kernels: Kernels

  def rules(self, *, is_diagonal: bool) -> MaskRules:
    """The mask of one block of queries and keys."""
    return MaskRules(is_diagonal, self.max_segments, self.window, self.soft_cap)


class ContextParallel(Protocol):
  """Attention of a device's positions to those of the whole row. Hashed by value: it is static."""

  @property
  def sinks_axis(self) -> str:
    """The logical axis of the heads whose sinks a device needs."""
    ...

  def row_multiple(self) -> int:
    """The number that the positions of a row must be a multiple of."""
    ...

  def attend(
    self,
    attend_rows: WholeRowAttention,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKV: jax.Array,
    segment_ids_BR: jax.Array,
    sinks_N: jax.Array | None,
    options: AttentionOptions,
  ) -> jax.Array:
    """`ops.attention.causal.attention` inside an island.

    Args:
      attend_rows: computes attention of whole rows.
      q_BTNH: queries of this device's positions.
      k_BTKH: keys of this device's positions.
      v_BTKV: values of this device's positions.
      segment_ids_BR: int32 segment ids of whole rows.
      sinks_N: float32 [heads], or None.
      options: the options of attention.

    Returns:
      y_BTNV, shaped like the queries, as wide as the values.
    """
    ...


@dataclasses.dataclass(frozen=True)
class WholeRows(ContextParallel):
  """Attention where each device has all positions of its rows."""

  @property
  @override
  def sinks_axis(self) -> str:
    return "heads_of_rows"

  @override
  def row_multiple(self) -> int:
    return 1

  @override
  def attend(
    self,
    attend_rows: WholeRowAttention,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKV: jax.Array,
    segment_ids_BR: jax.Array,
    sinks_N: jax.Array | None,
    options: AttentionOptions,
  ) -> jax.Array:
    del options
    assert num_shards("seq") == 1, "rows are cut: choose by `model.numerics.along_row_of`"
    return attend_rows(*checkpoint_inputs(q_BTNH, k_BTKH, v_BTKV), segment_ids_BR, sinks_N)


WHOLE_ROWS = WholeRows()


def checkpoint_inputs(q: jax.Array, k: jax.Array, v: jax.Array) -> QueryKeyValue:
  """Name the inputs of attention for remat policies (`checkpoint_name`)."""
  q, k, v = (checkpoint_name(x, n) for x, n in zip((q, k, v), ATTENTION_INPUTS, strict=True))
  return q, k, v
