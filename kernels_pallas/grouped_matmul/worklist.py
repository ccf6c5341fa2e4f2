"""How a grouped matmul is cut into tiles: small int32 tables, made on the device by XLA."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

# A TMA copy into swizzled shared memory must start at a multiple of this many rows.
ROW_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True)
class Tiling:
  """The tile of one thread block, and the order in which the tiles are visited.

  No field changes the numbers that come out.

  Attributes:
    block_m: rows of an output tile. Two warpgroups split them, so a multiple of 128.
    block_n: columns of an output tile, a multiple of 128. The fp32 accumulator must fit in
      registers: `block_m * block_n <= 128 * 256`.
    block_k: how much of the contraction one pipeline stage holds, a multiple of 64 (of 128 for
      8-bit operands).
    stages: pipeline stages in shared memory.
    strip: tiles along the first output axis that are visited together while the second axis is
      walked, so that what they share stays in the L2 cache.
    num_blocks: thread blocks of the persistent grid. 132 is one for each SM of an H100 SXM or an
      H200.
  """

  block_m: int = 128
  block_n: int = 256
  block_k: int = 64
  stages: int = 4
  strip: int = 16
  num_blocks: int = 132

  def __post_init__(self):
    for name, multiple in (("block_m", 128), ("block_n", 128), ("block_k", 64)):
      value = getattr(self, name)
      if value <= 0 or value % multiple:
        raise ValueError(f"Tiling.{name} is {value}: it must be a positive multiple of {multiple}")
    if self.block_m * self.block_n > 128 * 256:
      raise ValueError(
        f"Tiling of {self.block_m} x {self.block_n}: an output tile of more than 128 x 256 elements"
        " does not fit in the registers of two warpgroups. Make one side smaller"
      )
    if self.stages < 2 or self.strip < 1 or self.num_blocks < 1:
      raise ValueError(
        f"Tiling has stages={self.stages}, strip={self.strip}, num_blocks={self.num_blocks}: at"
        " least 2, 1 and 1 are needed"
      )


def ceil_div(a, b: int):
  """The least integer that is not below a / b, of an int or an array of them."""
  return -(-a // b)


def round_up(a, multiple: int):
  """The least multiple that is not below a."""
  return ceil_div(a, multiple) * multiple


def _sums_before(x_N: jax.Array) -> jax.Array:
  """[N + 1] sums of the first 0 to N elements, as one masked reduction: cumsum takes several."""
  i, j = jnp.arange(x_N.shape[0] + 1)[:, None], jnp.arange(x_N.shape[0])
  return jnp.sum(jnp.where(j < i, x_N, 0), axis=1, dtype=jnp.int32)


def row_tiles(group_sizes: jax.Array, m: int, block_m: int) -> tuple[jax.Array, jax.Array]:
  """Cuts the rows into tiles that hold rows of one group only.

  The tiles of a group start at its first row, rounded down to a multiple of `ROW_ALIGNMENT`, and
  then every `block_m` rows: only the first and the last one are short. The rows past the last group
  are cut too, as a group of their own with number G.

  Args:
    group_sizes: [G] int32, rows of each group, `sum(group_sizes) <= m`.
    m: rows in all.
    block_m: rows of a tile.

  Returns:
    `(tiles, bounds)`: int32 `[L, 4]`, rows `(group, row, begin, end)`, where the tile at `row` owns
    rows `row + begin` to `row + end - 1`, zeros after the last tile; and int32 `[G + 2]`, the first
    tile of each group and the number of all tiles.
  """
  num_groups = group_sizes.shape[0]
  row_bounds = _sums_before(group_sizes.astype(jnp.int32))
  row_ends = jnp.concatenate([row_bounds[1:], jnp.full(1, m, jnp.int32)])
  first_rows = row_bounds // ROW_ALIGNMENT * ROW_ALIGNMENT
  counts = jnp.where(row_ends > row_bounds, ceil_div(row_ends - first_rows, block_m), 0)
  tile_bounds = _sums_before(counts)

  # One reduction for all columns of the table: each kernel less is a microsecond or two.
  length = ceil_div(m + (num_groups + 1) * (ROW_ALIGNMENT - 1), block_m) + num_groups
  shape = length, 4, num_groups + 1
  i, column, group = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
  row = first_rows + (i - tile_bounds[:-1]) * block_m
  begin, end = jnp.maximum(row_bounds - row, 0), jnp.minimum(row_ends - row, block_m)
  values = lax.select_n(column, group, row, begin, end)
  chosen = (tile_bounds[:-1] <= i) & (i < tile_bounds[1:])
  return jnp.sum(jnp.where(chosen, values, 0), axis=2, dtype=jnp.int32), tile_bounds


def groups_by_size(group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Lists the groups from the largest to the smallest, so that the longest tiles start first.

  Args:
    group_sizes: [G] int32.

  Returns:
    `(groups, bounds)`: int32 `[G, 3]`, rows `(group, first row, rows)`, where equal sizes keep
    their order, and int32 `[G + 1]`, the first row of each group and the rows of all.
  """
  sizes = group_sizes.astype(jnp.int32)
  bounds = _sums_before(sizes)
  i = jnp.arange(sizes.shape[0], dtype=jnp.int32)
  larger = sizes[None, :] > sizes[:, None]
  earlier = (sizes[None, :] == sizes[:, None]) & (i[None, :] < i[:, None])
  rank = jnp.sum(larger | earlier, axis=1)
  chosen = rank[None, :, None] == i[:, None, None]  # A permutation: one source for each place.
  groups = jnp.stack([i, bounds[:-1], sizes], axis=1)
  return jnp.sum(jnp.where(chosen, groups[None], 0), axis=1, dtype=jnp.int32), bounds
