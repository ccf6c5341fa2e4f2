"""Attention of one token a row to keys and values in pages."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
E4M3_BIAS = tl.constexpr(256.0)  # 2^(15 - 7), of the biases of exponents in float16 and e4m3


@triton.jit
def widened(tile, dtype: tl.constexpr, e4m3: tl.constexpr):
  """A tile in `dtype`; int8 that is the bits of e4m3 comes divided by `E4M3_BIAS`.

  By integers, as GPUs before sm_89 have no instruction for it. NaN becomes 480; its scale is NaN.
  """
  if e4m3:
    bits = tile.to(tl.int16)  # with its sign in the highest bit, as in float16
    tile = ((bits & -0x8000) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
  return tile.to(dtype)


@triton.jit
def capped(s, soft_cap: tl.constexpr):
  """Scores within a soft cap (0 = none), for `exp2`."""
  if soft_cap > 0:
    s = soft_cap * (2 * tl.sigmoid(2 * s / soft_cap) - 1)
  return s * LOG2_E


@triton.jit
def paged_attention(
  new,
  pages,
  scales,
  table,
  lengths,
  into,
  parts,
  lse,
  written,
  heads: tl.constexpr,
  kv_heads: tl.constexpr,
  width: tl.constexpr,
  page: tl.constexpr,
  row_pages: tl.constexpr,
  splits: tl.constexpr,
  window: tl.constexpr,
  soft_cap: tl.constexpr,
  scale: tl.constexpr,
  e4m3: tl.constexpr,
  block_m: tl.constexpr,
  block_n: tl.constexpr,
):
  """A program attends with the queries of one key head to one of `splits` parts of a row's keys.

  new [rows, heads and twice kv_heads, width], queries, keys and values of the token, pages [pages,
  page, kv_heads, keys and values of width], table [rows, row_pages], lengths [rows] with the token
  itself, into [rows], its slot among those of all pages, -1 = none; parts [rows, kv_heads, splits,
  group, width] and lse [rows, kv_heads, splits, group] in float32, with a group of heads /
  kv_heads; written, the pages, into which the token is put. A part without a key is 0, and has an
  lse of -inf.

  With scales [pages, page, kv_heads, 2] the pages have the token already: new has queries only,
  into and written are None. With `e4m3` pages in int8 are the bits of that format.
  """
  row, head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
  group: tl.constexpr = heads // kv_heads
  bias: tl.constexpr = E4M3_BIAS if e4m3 else 1.0
  row_heads: tl.constexpr = heads + 2 * kv_heads if scales is None else heads
  length = tl.load(lengths + row)
  first = 0
  if window > 0:
    first = tl.maximum(length - window, 0)
  each = tl.cdiv(tl.cdiv(length - first // page * page, page), splits) * page
  begin = first // page * page + tl.program_id(1) * each
  end = tl.minimum(begin + each, length)
  queries, columns = tl.arange(0, block_m), tl.arange(0, width)
  at = (row * row_heads + head * group + queries)[:, None] * width + columns[None, :]
  q_tile = tl.load(new + at, mask=queries[:, None] < group, other=0.0)
  y = tl.zeros([block_m, width], tl.float32)
  top = tl.full([block_m], float("-inf"), tl.float32)
  total = tl.zeros([block_m], tl.float32)
  if scales is None:
    of_token = new + (row * row_heads + heads + head) * width + columns
    key, value = tl.load(of_token), tl.load(of_token + kv_heads * width)
    is_last = (begin < length) & (end == length)  # the token is of this part
    slot = tl.load(into + row).to(tl.int64)
    if is_last & (slot >= 0):
      put = written + (slot * kv_heads + head) * 2 * width + columns
      tl.store(put, key)
      tl.store(put + width, value)
    score = tl.sum(q_tile.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
    top = tl.where(is_last, capped(score, soft_cap), top)
    total = tl.where(is_last, 1.0, total)
    y = tl.where(is_last, value.to(tl.float32)[None, :], y)
    end = tl.minimum(end, length - 1)
  for start in tl.range(begin, end, block_n):
    page_id = tl.load(table + row * row_pages + start // page).to(tl.int64)
    tokens = start + tl.arange(0, block_n)
    slots = page_id * page + tokens % page
    where = (slots[:, None] * kv_heads + head) * 2 * width + columns[None, :]
    seen = (tokens < end) & (tokens >= first)
    k_tile = tl.load(pages + where, mask=seen[:, None], other=0)
    v_tile = tl.load(pages + where + width, mask=seen[:, None], other=0)
    k_tile = widened(k_tile, q_tile.dtype, e4m3)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
    if scales is not None:
      of_slots = scales + (slots * kv_heads + head) * 2
      s *= tl.load(of_slots, mask=seen, other=0.0).to(tl.float32)[None, :] * bias
    s = tl.where(seen[None, :], capped(s, soft_cap), float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(s - finite[:, None])
    fade = tl.exp2(top - finite)
    total = total * fade + tl.sum(p, 1)
    if scales is not None:
      p *= tl.load(of_slots + 1, mask=seen, other=0.0).to(tl.float32)[None, :] * bias
    v_tile = widened(v_tile, q_tile.dtype, e4m3)
    y = tl.dot(p.to(v_tile.dtype), v_tile, y * fade[:, None], input_precision="ieee")
    top = higher
  some = total > 0
  y = tl.where(some[:, None], y / tl.where(some, total, 1.0)[:, None], 0.0)
  log_sum = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) / LOG2_E, float("-inf"))
  part = (row * kv_heads + head) * splits + tl.program_id(1)
  is_query = queries < group
  of_part = (part * group + queries)[:, None] * width + columns[None, :]
  tl.store(parts + of_part, y, mask=is_query[:, None])
  tl.store(lse + part * group + queries, log_sum, mask=is_query)


@triton.jit
def merge(
  parts,
  lse,
  out,
  group: tl.constexpr,
  width: tl.constexpr,
  splits: tl.constexpr,
  block_s: tl.constexpr,
):
  """A program joins the parts of one query of `paged_attention`.

  out [rows, heads, width]; `block_s` is a power of two from `splits` on.
  """
  of, query = tl.program_id(0), tl.program_id(1)
  numbers, columns = tl.arange(0, block_s), tl.arange(0, width)
  rows = (of * splits + numbers) * group + query
  is_part = numbers < splits
  log_sum = tl.load(lse + rows, mask=is_part, other=float("-inf"))
  top = tl.max(log_sum)
  share = tl.exp2((log_sum - tl.where(top == float("-inf"), 0.0, top)) * LOG2_E)
  y = tl.load(parts + rows[:, None] * width + columns[None, :], mask=is_part[:, None], other=0.0)
  total = tl.sum(share)
  y = tl.sum(y * share[:, None], 0) / tl.where(total == 0, 1.0, total)
  tl.store(out + (of * group + query) * width + columns, y)
