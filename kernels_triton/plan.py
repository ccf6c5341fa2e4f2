"""What is launched for given shapes, without Triton: grids, constants and tiles."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Tile(NamedTuple):
  """How a kernel is cut.

  Attributes:
    blocks: constants of the kernel.
    num_warps: of a program.
    num_stages: loads in flight.
  """

  blocks: Mapping[str, int]
  num_warps: int
  num_stages: int


class Launch(NamedTuple):
  """A kernel for one shape.

  Attributes:
    module: of `kernels_triton`.
    kernel: its name there.
    constants: of the kernel; those of tiles come on top.
    tiles: the preferred first. The first whose memory a GPU has is taken.
    grid: the blocks of a tile -> how many programs there are along two axes.
  """

  module: str
  kernel: str
  constants: Mapping[str, Any]
  tiles: Sequence[Tile]
  grid: Callable[[Mapping[str, int]], tuple[int, int]]


def split(width: int) -> tuple[int, int] | None:
  """Two powers of two that add up to a width; the second may be 0. None = there are none."""
  large = 1 << (width.bit_length() - 1)
  small = width - large
  is_power = small & (small - 1) == 0
  return (large, small) if large >= 16 and (small == 0 or (is_power and small >= 16)) else None


def _tiles(names: str, *sizes: tuple[int, ...]) -> tuple[Tile, ...]:
  """Of blocks by name, warps and stages."""
  return tuple(
    Tile(dict(zip(names.split(), blocks, strict=True)), warps, stages)
    for *blocks, warps, stages in sizes
  )


# The first that fits the shared memory of a GPU is taken: the later ones are for 99 KiB and for
# wide heads. Measured on an H200 (docs/lab/records/triton_tiles.csv).
SIZES = "block_m block_n"
FORWARD = _tiles(SIZES, (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 1))
FORWARD_PARTS = _tiles(SIZES, (64, 64, 4, 2), (64, 32, 4, 1))
KEY_GRADIENT = _tiles(SIZES, (32, 64, 4, 3), (32, 64, 4, 2), (32, 64, 4, 1), (32, 32, 4, 1))
KEY_GRADIENT_WIDE = _tiles(SIZES, (64, 64, 8, 2), (32, 64, 4, 1), (32, 32, 4, 1))
QUERY_GRADIENT = _tiles(
  SIZES, (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1)
)
QUERY_GRADIENT_PARTS = _tiles(SIZES, (64, 64, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1))
MERGE = (Tile({}, num_warps=1, num_stages=1),)
GROUPED = _tiles("block_m block_n block_k", (128, 256, 64, 8, 3), (128, 128, 32, 8, 3))
# Of so few rows, as in generation, the time is that of reading weights. Where wide blocks make too
# few programs for all multiprocessors, narrow ones are faster (docs/lab/records/few_rows.csv).
# The limit is that of all slots `few_rows`: with 128 in place of 64, 64 streams of 9.23B were 1.09
# times as fast on an H200 (docs/lab/records/decode.csv).
FEW_ROWS = 128
GROUPED_FEW = _tiles("block_m block_n block_k", (16, 64, 128, 4, 4))
GROUPED_NARROW = _tiles("block_m block_n block_k", (16, 32, 256, 4, 5))
ENOUGH_PROGRAMS = 128
GROUPED_WEIGHTS = _tiles("block_m block_n block_k", (128, 256, 32, 8, 4), (128, 128, 32, 8, 3))


def attention(
  q_shape: Sequence[int],
  k_shape: Sequence[int],
  v_width: int,
  soft_cap: float | None,
  has_sinks: bool,
  *,
  in_parts: bool,
) -> tuple[Launch, Launch, Launch]:
  """Forward, gradient of keys and values, gradient of queries.

  Args:
    q_shape: [batch, seq, heads, width]; widths are those that `split` takes.
    k_shape: [batch, seq, kv_heads, width].
    v_width: of a value.
    soft_cap: of scores, or None.
    has_sinks: whether there are sinks.
    in_parts: whether rows may hold several documents, or a window is set: then a query sees few
      keys, which small blocks waste less on, but for heads wider than 192.
  """
  (batch, seq, heads, width), kv_heads = q_shape, k_shape[2]
  parts, value_parts = split(width), split(v_width)
  if parts is None or value_parts is None:
    raise ValueError(
      f"attention in Triton: widths {width} and {v_width}: expected two powers of two from 16 on, "
      "or sums of two, such as 80, 96, 128, 192. Use ops.kernels=attention=xla"
    )
  constants = {
    "seq": seq,
    "heads": heads,
    "kv_heads": kv_heads,
    "width_0": parts[0],
    "width_1": parts[1],
    "value_0": value_parts[0],
    "value_1": value_parts[1],
    "scale": width**-0.5,
    "soft_cap": float(soft_cap or 0),
  }
  forward = {**constants, "has_sinks": has_sinks}
  is_wide = width > 192
  in_parts = in_parts and not is_wide
  tiles = FORWARD_PARTS if in_parts else FORWARD
  query_tiles = QUERY_GRADIENT_PARTS if in_parts else QUERY_GRADIENT
  key_tiles = KEY_GRADIENT_WIDE if is_wide else KEY_GRADIENT
  queries = lambda blocks: (math.ceil(seq / blocks["block_m"]), batch * heads)
  keys = lambda blocks: (math.ceil(seq / blocks["block_n"]), batch * kv_heads)
  return (
    Launch("attention", "attention_forward", forward, tiles, queries),
    Launch("attention", "attention_key_gradient", constants, key_tiles, keys),
    Launch("attention", "attention_query_gradient", constants, query_tiles, queries),
  )


def grouped_matmul(rows: int, w_shape: Sequence[int], *, transposed: bool, pairs: int) -> Launch:
  """Rows times the matrices of their groups.

  Args:
    rows: of all groups.
    w_shape: [groups, d_in, d_out], or [groups, d_out, d_in] if `transposed`.
    transposed: multiply by transposed matrices.
    pairs: 1 or 2 products to add up.
  """
  groups, d_in, d_out = w_shape if not transposed else (w_shape[0], w_shape[2], w_shape[1])
  constants = {
    "groups": groups,
    "d_in": d_in,
    "d_out": d_out,
    "transposed": transposed,
    "pairs": pairs,
  }

  def grid(blocks):
    return num_tiles(rows, groups, blocks["block_m"]) * math.ceil(d_out / blocks["block_n"]), 1

  tiles = GROUPED
  if rows <= FEW_ROWS and not transposed:
    is_wide = grid(GROUPED_FEW[0].blocks)[0] >= ENOUGH_PROGRAMS
    tiles = GROUPED_FEW if is_wide else GROUPED_NARROW
  return Launch("grouped_matmul", "grouped_matmul", {**constants, "rows": rows}, tiles, grid)


def grouped_weight_gradient(groups: int, d_in: int, d_out: int) -> Launch:
  """Of each group, its transposed rows times the gradients of its results."""
  constants = {"d_in": d_in, "d_out": d_out}

  def grid(blocks):
    return math.ceil(d_in / blocks["block_m"]) * math.ceil(d_out / blocks["block_n"]), groups

  return Launch("grouped_matmul", "weight_gradient", constants, GROUPED_WEIGHTS, grid)


def num_tiles(rows: int, groups: int, block_m: int) -> int:
  """Blocks of rows that all groups may need, and the rows behind them; each has a row at least."""
  return min(rows, rows // block_m + groups + 1)


PAGED = _tiles("block_n", (64, 4, 3), (32, 4, 2), (32, 4, 1))
PROGRAMS = 264  # twice the multiprocessors of a Hopper GPU


def paged_attention(
  q_shape: Sequence[int],
  pages_shape: Sequence[int],
  row_pages: int,
  window: int | None,
  soft_cap: float | None,
  *,
  scaled: bool = False,
  e4m3: bool = False,
) -> Launch:
  """Attention of one token a row to keys and values in pages.

  Args:
    q_shape: [rows, heads, width]; the width is a power of two from 16 on.
    pages_shape: [pages, slots of a page, kv_heads, keys and values of this width].
    row_pages: pages of a row at most.
    window: as in `ops.attention.causal.attention`, as the soft cap.
    soft_cap: of scores, or None.
    scaled: the pages have scales, and the token already.
    e4m3: they are the bits of that format, in int8.
  """
  (rows, heads, width), (_, page, kv_heads, _) = q_shape, pages_shape
  splits = max(1, min(row_pages, PROGRAMS // (rows * kv_heads), 32))
  constants = {
    "heads": heads,
    "kv_heads": kv_heads,
    "width": width,
    "page": page,
    "row_pages": row_pages,
    "splits": splits,
    "window": window or 0,
    "soft_cap": float(soft_cap or 0),
    "scale": width**-0.5,
    "e4m3": e4m3,
    "block_m": max(16, 1 << (heads // kv_heads - 1).bit_length()),
  }
  constants |= {"into": None, "written": None} if scaled else {"scales": None}
  tiles = [tile for tile in PAGED if page % tile.blocks["block_n"] == 0]
  return Launch(
    "decode", "paged_attention", constants, tiles, lambda blocks: (rows * kv_heads, splits)
  )


def merge(rows: int, kv_heads: int, group: int, splits: int, width: int) -> Launch:
  """Join the parts of `paged_attention`.

  Args:
    rows: of a call.
    kv_heads: key/value heads.
    group: query heads of each.
    splits: parts of a row.
    width: of a head.
  """
  constants = {"group": group, "width": width, "splits": splits}
  constants["block_s"] = 1 << (splits - 1).bit_length()
  return Launch("decode", "merge", constants, MERGE, lambda blocks: (rows * kv_heads, group))
