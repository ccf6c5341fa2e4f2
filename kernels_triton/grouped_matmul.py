"""One matmul for each group of consecutive rows: the experts of a mixture."""

import triton
import triton.language as tl

ROWS_TOGETHER = tl.constexpr(
  8
)  # blocks of rows whose columns follow one another: they share weights


@triton.jit
def _product(
  acc,
  x,
  w,
  rows,
  end,
  columns,
  d_in: tl.constexpr,
  d_out: tl.constexpr,
  transposed: tl.constexpr,
  block_k: tl.constexpr,
):
  """Add x[rows] @ w[:, columns], rows from `end` on left out."""
  for start in tl.range(0, d_in, block_k):
    inner = start + tl.arange(0, block_k)
    within = (inner < d_in) | (d_in % block_k == 0)
    a = tl.load(
      x + rows[:, None].to(tl.int64) * d_in + inner[None, :],
      mask=(rows[:, None] < end) & within[None, :],
      other=0.0,
    )
    fits = within[:, None] & (columns[None, :] < d_out)
    if transposed:
      at = columns[None, :] * d_in + inner[:, None]
    else:
      at = inner[:, None] * d_out + columns[None, :]
    b = tl.load(w + at, mask=fits, other=0.0)
    acc = tl.dot(a, b, acc, input_precision="ieee")
  return acc


@triton.jit
def grouped_matmul(
  x,
  w,
  x_more,
  w_more,
  starts,
  y,
  rows: tl.constexpr,
  groups: tl.constexpr,
  d_in: tl.constexpr,
  d_out: tl.constexpr,
  transposed: tl.constexpr,
  pairs: tl.constexpr,
  block_m: tl.constexpr,
  block_n: tl.constexpr,
  block_k: tl.constexpr,
):
  """`y[m] = x[m] @ w[g(m)]`, and for a second pair that product too. Grid: `plan.grouped_matmul`.

  Args:
    x: [rows, d_in], sorted by group.
    w: [groups, d_in, d_out], or [groups, d_out, d_in] if `transposed`.
    x_more: the same of a second pair; not read if `pairs` is 1.
    w_more: likewise.
    starts: int32 [groups + 2], first row of each group and of what is behind them, and `rows`.
    y: [rows, d_out]; 0 behind the groups.
  """
  columns_of_blocks: tl.constexpr = (d_out + block_n - 1) // block_n
  enough: tl.constexpr = rows // block_m + groups + 1
  blocks: tl.constexpr = enough if enough < rows else rows  # `plan.num_tiles`
  together: tl.constexpr = ROWS_TOGETHER * columns_of_blocks
  program = tl.program_id(0)
  first = program // together * ROWS_TOGETHER
  height = tl.minimum(blocks - first, ROWS_TOGETHER)
  block = first + program % together % height
  columns = program % together // height * block_n + tl.arange(0, block_n)
  # Which group this block of rows is of, and which of its blocks.
  group = tl.program_id(1)  # 0, as those below, in Triton's type
  begin = group
  end = group
  before = group
  for candidate in range(groups + 1):
    start = tl.load(starts + candidate)
    stop = tl.load(starts + candidate + 1)
    count = (stop - start + block_m - 1) // block_m
    is_this = (block >= before) & (block < before + count)
    group = tl.where(is_this, candidate, group)
    begin = tl.where(is_this, start + (block - before) * block_m, begin)
    end = tl.where(is_this, stop, end)
    before += count
  if begin < end:
    at = begin + tl.arange(0, block_m)
    acc = tl.zeros([block_m, block_n], tl.float32)
    if group < groups:
      matrix = group.to(tl.int64) * d_in * d_out
      acc = _product(acc, x, w + matrix, at, end, columns, d_in, d_out, transposed, block_k)
      if pairs == 2:
        more = w_more + matrix
        acc = _product(acc, x_more, more, at, end, columns, d_in, d_out, transposed, block_k)
    place = y + at[:, None].to(tl.int64) * d_out + columns[None, :]
    tl.store(
      place,
      acc.to(y.dtype.element_ty),
      mask=(at[:, None] < end) & (columns[None, :] < d_out),
    )


@triton.jit
def weight_gradient(
  x,
  dy,
  starts,
  dw,
  d_in: tl.constexpr,
  d_out: tl.constexpr,
  block_m: tl.constexpr,
  block_n: tl.constexpr,
  block_k: tl.constexpr,
):
  """`dw[e] = x[rows of e].T @ dy[rows of e]`. Grid: `plan.grouped_weight_gradient`.

  Args:
    x: [rows, d_in], sorted by group.
    dy: [rows, d_out].
    starts: int32, first row of each group, and the row behind the last one.
    dw: [groups, d_in, d_out]; 0 for an empty group.
  """
  columns_of_blocks: tl.constexpr = (d_out + block_n - 1) // block_n
  inputs = tl.program_id(0) // columns_of_blocks * block_m + tl.arange(0, block_m)
  outputs = tl.program_id(0) % columns_of_blocks * block_n + tl.arange(0, block_n)
  group = tl.program_id(1)
  end = tl.load(starts + group + 1)
  acc = tl.zeros([block_m, block_n], tl.float32)
  for start in tl.range(tl.load(starts + group), end, block_k):
    at = start + tl.arange(0, block_k)
    rows = at[:, None].to(tl.int64)
    within = at[:, None] < end
    a = tl.load(x + rows * d_in + inputs[None, :], within & (inputs[None, :] < d_in), other=0.0)
    b = tl.load(
      dy + rows * d_out + outputs[None, :], within & (outputs[None, :] < d_out), other=0.0
    )
    acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
  place = dw + group.to(tl.int64) * d_in * d_out + inputs[:, None] * d_out + outputs[None, :]
  tl.store(
    place, acc.to(dw.dtype.element_ty), mask=(inputs[:, None] < d_in) & (outputs[None, :] < d_out)
  )
