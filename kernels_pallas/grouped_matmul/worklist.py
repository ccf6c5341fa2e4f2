"""How a grouped matmul is cut into tiles: small int32 tables, made on the device by XLA."""

import dataclasses

import jax
import jax.numpy as jnp

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
    share: which operand's tile two neighbouring thread blocks (a cluster) load once for both, each
      a half: "" for none, "lhs" (then they compute tiles side by side), or "rhs" (tiles one below
      the other).
    lookahead: look up the next tile before working on this one.
    lead: pipeline steps that warpgroup 0 is ahead of warpgroup 1 at the start of a tile, so that
      one stores while the other multiplies; 0 = as it comes. Less than `stages`.
    slots: stripes of 128 bytes a row that a warpgroup can have on the way to global memory.
    short: how the rows of a tile that holds rows of other groups too are stored: "wait" for each
      stripe of columns, or as one "group" of copies that the next stripe does not wait for.
    balance: deal tiles that are more than half full and the others out to the thread blocks
      separately.
  """

  block_m: int = 128
  block_n: int = 256
  block_k: int = 64
  stages: int = 4
  strip: int = 16
  num_blocks: int = 132
  share: str = ""
  lookahead: bool = False
  lead: int = 0
  slots: int = 2
  short: str = "wait"
  balance: bool = False

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
    if self.stages < 2 or self.strip < 1 or self.num_blocks < self.cluster or self.slots < 1:
      raise ValueError(
        f"Tiling has stages={self.stages}, strip={self.strip}, num_blocks={self.num_blocks},"
        f" slots={self.slots}: at least 2, 1, {self.cluster} and 1 are needed"
      )
    if not 0 <= self.lead < self.stages:
      raise ValueError(
        f"Tiling.lead is {self.lead}: it must be 0 to stages - 1 = {self.stages - 1}"
      )
    for name, choices in (("share", ("", "lhs", "rhs")), ("short", ("wait", "group"))):
      if getattr(self, name) not in choices:
        raise ValueError(f"Tiling.{name} is {getattr(self, name)!r}: it must be one of {choices}")
    if self.num_blocks % self.cluster:
      raise ValueError(f"Tiling.num_blocks is {self.num_blocks}: a cluster takes two")

  @property
  def cluster(self) -> int:
    """Thread blocks of a cluster."""
    return 2 if self.share else 1


def ceil_div(a: int, b: int) -> int:
  """The least integer that is not below a / b."""
  return -(-a // b)


def round_up(a, multiple: int):
  """The least multiple that is not below a."""
  return ceil_div(a, multiple) * multiple


def _running_sum(x_N: jax.Array) -> jax.Array:
  """Prefix sum of a short vector as one masked reduction: one kernel, cumsum takes several."""
  i = jnp.arange(x_N.shape[0])
  return jnp.sum(jnp.where(i[None, :] <= i[:, None], x_N[None, :], 0), axis=1, dtype=jnp.int32)


def row_tiles(
  group_sizes: jax.Array, m: int, block_m: int, light_rows: int = 0
) -> tuple[jax.Array, jax.Array]:
  """Cuts the rows into tiles that hold rows of one group only.

  The tiles of a group start at its first row, rounded down to a multiple of `ROW_ALIGNMENT`, and
  then every `block_m` rows: only the first and the last one are short. The rows past the last group
  are cut too, as a group of their own with number G.

  With `light_rows`, tiles that take less time (those that end within as many rows, and those of
  group G) make a list of their own, so that each list can be dealt out evenly to the thread blocks.

  Args:
    group_sizes: [G] int32, rows of each group, `sum(group_sizes) <= m`.
    m: rows in all.
    block_m: rows of a tile.
    light_rows: 0 = one list of all tiles.

  Returns:
    `(tiles, counts)`: int32 `[lists, L, 4]`, rows `(group, row, begin, end)`, where the tile at
    `row` owns rows `row + begin` to `row + end - 1`, and int32 `[lists]`, how many of the L are in
    use. The others own no rows and are of group G.
  """
  num_groups = group_sizes.shape[0]
  ends_of_groups = _running_sum(group_sizes.astype(jnp.int32))
  row_ends = jnp.concatenate([ends_of_groups, jnp.full(1, m, jnp.int32)])
  row_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends_of_groups])
  first_rows = row_starts // ROW_ALIGNMENT * ROW_ALIGNMENT
  counts = jnp.where(row_ends > row_starts, ceil_div(row_ends - first_rows, block_m), 0)
  group = jnp.arange(num_groups + 1, dtype=jnp.int32)
  if light_rows:
    last_rows = row_ends - first_rows - (counts - 1) * block_m
    light = jnp.where(group == num_groups, counts, (counts > 0) & (last_rows <= light_rows))
    counts = jnp.stack([counts - light, light])
    first_rows = jnp.stack([first_rows, first_rows + counts[0] * block_m])
  else:
    counts, first_rows = counts[None], first_rows[None]

  # One reduction for all columns of the table: each kernel less is a microsecond or two.
  length = ceil_div(m + (num_groups + 1) * (ROW_ALIGNMENT - 1), block_m) + num_groups
  tile_ends = jax.vmap(_running_sum)(counts)
  tile_ends, tile_starts = tile_ends[:, None, None, :], (tile_ends - counts)[:, None, None, :]
  i = jnp.arange(length, dtype=jnp.int32)[None, :, None, None]
  column = jnp.arange(4)[None, None, :, None]
  row = first_rows[:, None, None, :] + (i - tile_starts) * block_m
  begin, end = jnp.maximum(row_starts - row, 0), jnp.minimum(row_ends - row, block_m)
  values = jnp.select(
    [column == 0, column == 1, column == 2], [group - num_groups, row, begin], end
  )
  chosen = (tile_starts <= i) & (i < tile_ends)
  tiles = jnp.sum(jnp.where(chosen, values, 0), axis=3, dtype=jnp.int32)
  return tiles + jnp.where(jnp.arange(4) == 0, num_groups, 0), tile_ends[:, 0, 0, -1]


def groups_by_size(group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Lists the groups from the largest to the smallest, so that the longest tiles start first.

  Args:
    group_sizes: [G] int32.

  Returns:
    `(groups, total)`: int32 `[G, 3]`, rows `(group, first row, rows)`, where equal sizes keep their
    order, and int32 `[1]`, the rows of all groups.
  """
  sizes = group_sizes.astype(jnp.int32)
  row_ends = _running_sum(sizes)
  i = jnp.arange(sizes.shape[0], dtype=jnp.int32)
  larger = sizes[None, :] > sizes[:, None]
  earlier = (sizes[None, :] == sizes[:, None]) & (i[None, :] < i[:, None])
  rank = jnp.sum(larger | earlier, axis=1)
  chosen = rank[None, :, None] == i[:, None, None]  # A permutation: one source for each place.
  groups = jnp.stack([i, row_ends - sizes, sizes], axis=1)
  return jnp.sum(jnp.where(chosen, groups[None], 0), axis=1, dtype=jnp.int32), row_ends[-1:]
