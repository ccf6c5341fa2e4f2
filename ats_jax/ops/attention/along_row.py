"""How the devices along a row share its attention; `model.numerics.along_row_of` chooses for a run.

`WholeRows` is for rows that are not cut. `ulysses.SwappedHeads` and `ring.Ring` are for rows whose
positions are cut over devices.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol, override

import jax
from jax.ad_checkpoint import checkpoint_name

from ats_jax.ops.attention.block import Rules
from ats_jax.ops.registry import Kernels
from ats_jax.ops.remat import ATTENTION_INPUTS
from ats_jax.sharding.apply import num_shards

Arrays = tuple[jax.Array, jax.Array, jax.Array]
# `(q, k, v, segment_ids, sinks) -> y` of whole rows.
OfRows = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


class AttentionOptions(NamedTuple):
  """What is computed, and by what; static. The first three are those of `ops.attention`."""

  max_segments: int
  window: int | None
  soft_cap: float | None
  kernels: Kernels

  def rules(self, *, is_diagonal: bool) -> Rules:
    """Of one part of it."""
    return Rules(is_diagonal, self.max_segments, self.window, self.soft_cap)


class AlongRow(Protocol):
  """Attention of the positions of a device to those of the whole row; equal by value."""

  @property
  def sinks_axis(self) -> str:
    """The logical axis of the heads whose sinks a device needs."""
    ...

  def row_multiple(self) -> int:
    """What the number of positions in a row must be a multiple of."""
    ...

  def attend(
    self,
    of_rows: OfRows,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKV: jax.Array,
    segment_ids_BR: jax.Array,
    sinks_N: jax.Array | None,
    options: AttentionOptions,
  ) -> jax.Array:
    """`ops.attention.causal.attention` inside an island.

    Args:
      of_rows: computes it of whole rows.
      q_BTNH: queries of this device's positions.
      k_BTKH: keys likewise.
      v_BTKV: values likewise.
      segment_ids_BR: int32, of whole rows.
      sinks_N: float32 [heads], or None.
      options: what `of_rows` computes.

    Returns:
      y_BTNV like the queries, as wide as the values.
    """
    ...


@dataclasses.dataclass(frozen=True)
class WholeRows(AlongRow):
  """A device has all positions of its rows."""

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
    of_rows: OfRows,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKV: jax.Array,
    segment_ids_BR: jax.Array,
    sinks_N: jax.Array | None,
    options: AttentionOptions,
  ) -> jax.Array:
    del options
    assert num_shards("seq") == 1, "rows are cut: choose by `model.numerics.along_row_of`"
    return of_rows(*named(q_BTNH, k_BTKH, v_BTKV), segment_ids_BR, sinks_N)


WHOLE_ROWS = WholeRows()


def named(q: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
  """The inputs of attention with the names that remat policies know them by."""
  q, k, v = (checkpoint_name(x, n) for x, n in zip((q, k, v), ATTENTION_INPUTS, strict=True))
  return q, k, v
