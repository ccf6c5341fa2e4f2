"""Causal flash attention, forward and backward (FlashAttention-2, arXiv:2307.08691).

A query sees one run of keys, from `first` to itself, and a key is seen by one run of queries, from
itself to `last`. Both never fall along a row. So packed documents and windows are the same to these
kernels, and whole blocks are left out wherever nothing is seen.

A head's width is read in two parts that are powers of two, such as 128 and 64 of 192; the second
part may be 0. Arrays are [batch, seq, heads, width], statistics [batch, heads, seq] in float32.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(base, rows, stride, begin: tl.constexpr, width: tl.constexpr, seq, masked: tl.constexpr):
  """Columns [begin, begin + width) of some rows; 0 past the end."""
  at = base + rows[:, None] * stride + (begin + tl.arange(0, width))[None, :]
  return tl.load(at, mask=rows[:, None] < seq, other=0.0) if masked else tl.load(at)


@triton.jit
def _store(base, rows, stride, begin: tl.constexpr, part, width: tl.constexpr, seq):
  at = base + rows[:, None] * stride + (begin + tl.arange(0, width))[None, :]
  tl.store(at, part.to(base.dtype.element_ty), mask=rows[:, None] < seq)


@triton.jit
def _tanh(x):
  return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _scores(a0, a1, b0, b1, width_1: tl.constexpr, scale: tl.constexpr, soft_cap: tl.constexpr):
  """A @ b.T, to be multiplied by `_factor`; with a soft cap, its hyperbolic tangent."""
  s = tl.dot(a0, tl.trans(b0), input_precision="ieee")
  if width_1:
    s = tl.dot(a1, tl.trans(b1), s, input_precision="ieee")
  if soft_cap > 0:
    s = _tanh(s * (scale / soft_cap))
  return s


@triton.jit
def _forward_blocks(
  state,
  q0,
  q1,
  k_base,
  v_base,
  begin,
  end,
  rows,
  first,
  seq: tl.constexpr,
  k_stride: tl.constexpr,
  v_stride: tl.constexpr,
  width_0: tl.constexpr,
  width_1: tl.constexpr,
  value_0: tl.constexpr,
  value_1: tl.constexpr,
  scale: tl.constexpr,
  soft_cap: tl.constexpr,
  factor: tl.constexpr,
  block_n: tl.constexpr,
  masked: tl.constexpr,
):
  """Attend to the keys of [begin, end), block by block."""
  y0, y1, top, total = state
  for start in tl.range(begin, end, block_n):
    keys = start + tl.arange(0, block_n)
    k0 = _load(k_base, keys, k_stride, 0, width_0, seq, masked)
    k1 = k0
    if width_1:
      k1 = _load(k_base, keys, k_stride, width_0, width_1, seq, masked)
    s = _scores(q0, q1, k0, k1, width_1, scale, soft_cap)
    if masked:
      seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= first[:, None])
      s = tl.where(seen, s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1) * factor)
    finite = higher
    if masked:  # a row that has seen nothing yet
      finite = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(s * factor - finite[:, None])
    fade = tl.exp2(top - finite)
    total = total * fade + tl.sum(p, 1)
    top = higher
    v0 = _load(v_base, keys, v_stride, 0, value_0, seq, masked)
    p = p.to(v0.dtype)
    y0 = tl.dot(p, v0, y0 * fade[:, None], input_precision="ieee")
    if value_1:
      v1 = _load(v_base, keys, v_stride, value_0, value_1, seq, masked)
      y1 = tl.dot(p, v1, y1 * fade[:, None], input_precision="ieee")
  return y0, y1, top, total


@triton.jit
def attention_forward(
  q,
  k,
  v,
  first,
  sinks,
  y,
  lse,
  seq: tl.constexpr,
  heads: tl.constexpr,
  kv_heads: tl.constexpr,
  width_0: tl.constexpr,
  width_1: tl.constexpr,
  value_0: tl.constexpr,
  value_1: tl.constexpr,
  scale: tl.constexpr,
  soft_cap: tl.constexpr,
  has_sinks: tl.constexpr,
  block_m: tl.constexpr,
  block_n: tl.constexpr,
):
  """One block of queries of one head. Grid: (cdiv(seq, block_m), batch * heads).

  Args:
    q: queries [batch, seq, heads, width_0 + width_1].
    k: keys like them, with `kv_heads` heads.
    v: values, value_0 + value_1 wide.
    first: int32 [batch, seq], the first key that a query sees.
    sinks: float32 [heads], the logit of a place with value 0; read if `has_sinks`.
    y: the result [batch, seq, heads, value_0 + value_1].
    lse: float32 [batch, heads, seq], logarithms of the softmax's denominators, sinks included.
    scale: of the scores.
    soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; 0 = they stay.
  """
  width: tl.constexpr = width_0 + width_1
  value: tl.constexpr = value_0 + value_1
  q_stride: tl.constexpr = heads * width
  k_stride: tl.constexpr = kv_heads * width
  v_stride: tl.constexpr = kv_heads * value
  factor: tl.constexpr = (soft_cap if soft_cap > 0 else scale) * LOG2_E
  top_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_m  # the longest first
  batch = (tl.program_id(1) // heads).to(tl.int64)
  head = tl.program_id(1) % heads
  kv_head = head // (heads // kv_heads)
  rows = top_row + tl.arange(0, block_m)
  q_base = q + batch * seq * q_stride + head * width
  k_base = k + batch * seq * k_stride + kv_head * width
  v_base = v + batch * seq * v_stride + kv_head * value
  first += batch * seq
  even: tl.constexpr = seq % block_m == 0
  q0 = _load(q_base, rows, q_stride, 0, width_0, seq, not even)
  q1 = q0
  if width_1:
    q1 = _load(q_base, rows, q_stride, width_0, width_1, seq, not even)
  first_rows = tl.load(first + rows, mask=rows < seq, other=0)
  last_row = tl.minimum(top_row + block_m, seq) - 1
  begin = tl.load(first + top_row) // block_n * block_n
  # All queries of the block see all keys of [full, full_end).
  full_end = (top_row + 1) // block_n * block_n
  full = tl.minimum(tl.cdiv(tl.load(first + last_row), block_n) * block_n, full_end)

  y0 = tl.zeros([block_m, value_0], tl.float32)
  y1 = tl.zeros([block_m, value_1 if value_1 else 16], tl.float32)
  top = tl.full([block_m], float("-inf"), tl.float32)
  total = tl.zeros([block_m], tl.float32)
  state = (y0, y1, top, total)
  state = _forward_blocks(
    state, q0, q1, k_base, v_base, begin, full, rows, first_rows, seq, k_stride, v_stride,
    width_0, width_1, value_0, value_1, scale, soft_cap, factor, block_n, True,
  )  # fmt: skip
  state = _forward_blocks(
    state, q0, q1, k_base, v_base, full, full_end, rows, first_rows, seq,
    k_stride, v_stride, width_0, width_1, value_0, value_1, scale, soft_cap, factor, block_n, False,
  )  # fmt: skip
  y0, y1, top, total = _forward_blocks(
    state, q0, q1, k_base, v_base, full_end, last_row + 1, rows, first_rows, seq, k_stride,
    v_stride, width_0, width_1, value_0, value_1, scale, soft_cap, factor, block_n, True,
  )  # fmt: skip

  if has_sinks:
    sink = tl.load(sinks + head) * LOG2_E
    higher = tl.maximum(top, sink)
    fade = tl.exp2(top - higher)
    total = total * fade + tl.exp2(sink - higher)
    y0 *= fade[:, None]
    y1 *= fade[:, None]
    top = higher
  y_base = y + batch * seq * heads * value + head * value
  _store(y_base, rows, heads * value, 0, y0 / total[:, None], value_0, seq)
  if value_1:
    _store(y_base, rows, heads * value, value_0, y1 / total[:, None], value_1, seq)
  lse += (batch * heads + head) * seq
  tl.store(lse + rows, (top + tl.log2(total)) / LOG2_E, mask=rows < seq)


@triton.jit
def _key_gradient_blocks(
  state,
  k0,
  k1,
  v0,
  v1,
  q_base,
  dy_base,
  lse,
  delta,
  begin,
  end,
  keys,
  last,
  seq: tl.constexpr,
  q_stride: tl.constexpr,
  y_stride: tl.constexpr,
  width_0: tl.constexpr,
  width_1: tl.constexpr,
  value_0: tl.constexpr,
  value_1: tl.constexpr,
  scale: tl.constexpr,
  soft_cap: tl.constexpr,
  factor: tl.constexpr,
  block_m: tl.constexpr,
  masked: tl.constexpr,
):
  """Add what the queries of [begin, end) give. Scores are transposed: [keys, queries]."""
  dk0, dk1, dv0, dv1 = state
  for start in tl.range(begin, end, block_m):
    rows = start + tl.arange(0, block_m)
    q0 = _load(q_base, rows, q_stride, 0, width_0, seq, masked)
    q1 = q0
    if width_1:
      q1 = _load(q_base, rows, q_stride, width_0, width_1, seq, masked)
    dy0 = _load(dy_base, rows, y_stride, 0, value_0, seq, masked)
    dy1 = dy0
    if value_1:
      dy1 = _load(dy_base, rows, y_stride, value_0, value_1, seq, masked)
    if masked:
      lse_rows = tl.load(lse + rows, mask=rows < seq, other=0.0)
      delta_rows = tl.load(delta + rows, mask=rows < seq, other=0.0)
    else:
      lse_rows = tl.load(lse + rows)
      delta_rows = tl.load(delta + rows)
    s = _scores(k0, k1, q0, q1, width_1, scale, soft_cap)
    p = tl.exp2(s * factor - (lse_rows * LOG2_E)[None, :])
    if masked:
      seen = (keys[:, None] <= rows[None, :]) & (rows[None, :] <= last[:, None])
      p = tl.where(seen, p, 0.0)
    weights = p.to(dy0.dtype)
    dv0 = tl.dot(weights, dy0, dv0, input_precision="ieee")
    dp = tl.dot(v0, tl.trans(dy0), input_precision="ieee")
    if value_1:
      dv1 = tl.dot(weights, dy1, dv1, input_precision="ieee")
      dp = tl.dot(v1, tl.trans(dy1), dp, input_precision="ieee")
    ds = p * (dp - delta_rows[None, :])
    if soft_cap > 0:
      ds *= 1 - s * s
    ds = ds.to(q0.dtype)
    dk0 = tl.dot(ds, q0, dk0, input_precision="ieee")
    if width_1:
      dk1 = tl.dot(ds, q1, dk1, input_precision="ieee")
  return dk0, dk1, dv0, dv1


@triton.jit
def attention_key_gradient(
  q,
  k,
  v,
  last,
  dy,
  lse,
  delta,
  dk,
  dv,
  seq: tl.constexpr,
  heads: tl.constexpr,
  kv_heads: tl.constexpr,
  width_0: tl.constexpr,
  width_1: tl.constexpr,
  value_0: tl.constexpr,
  value_1: tl.constexpr,
  scale: tl.constexpr,
  soft_cap: tl.constexpr,
  block_m: tl.constexpr,
  block_n: tl.constexpr,
):
  """Gradients of one block of keys and values. Grid: (cdiv(seq, block_n), batch * kv_heads).

  Args:
    q: queries, as in `attention_forward`; so are all without a line here.
    k: keys.
    v: values.
    last: int32 [batch, seq], the last query that sees a key.
    dy: gradient of the result.
    lse: statistics of the forward pass: weights are `exp(score - lse)`.
    delta: float32 [batch, heads, seq], the sum of `y * dy` over a head's width.
    dk: gradient like the keys.
    dv: gradient like the values.
  """
  width: tl.constexpr = width_0 + width_1
  value: tl.constexpr = value_0 + value_1
  q_stride: tl.constexpr = heads * width
  y_stride: tl.constexpr = heads * value
  k_stride: tl.constexpr = kv_heads * width
  v_stride: tl.constexpr = kv_heads * value
  group: tl.constexpr = heads // kv_heads
  factor: tl.constexpr = (soft_cap if soft_cap > 0 else scale) * LOG2_E
  top_key = tl.program_id(0) * block_n
  batch = (tl.program_id(1) // kv_heads).to(tl.int64)
  kv_head = tl.program_id(1) % kv_heads
  keys = top_key + tl.arange(0, block_n)
  k_at = batch * seq * k_stride + kv_head * width
  v_at = batch * seq * v_stride + kv_head * value
  even: tl.constexpr = seq % block_n == 0
  k0 = _load(k + k_at, keys, k_stride, 0, width_0, seq, not even)
  v0 = _load(v + v_at, keys, v_stride, 0, value_0, seq, not even)
  k1 = k0
  v1 = v0
  if width_1:
    k1 = _load(k + k_at, keys, k_stride, width_0, width_1, seq, not even)
  if value_1:
    v1 = _load(v + v_at, keys, v_stride, value_0, value_1, seq, not even)
  last += batch * seq
  last_keys = tl.load(last + keys, mask=keys < seq, other=-1)
  end = tl.load(last + tl.minimum(top_key + block_n, seq) - 1) + 1
  begin = top_key // block_m * block_m
  # All queries of [full, full_end) see all keys of the block.
  full = tl.cdiv(top_key + block_n - 1, block_m) * block_m
  full_end = tl.maximum((tl.load(last + top_key) + 1) // block_m * block_m, full)

  dk0 = tl.zeros([block_n, width_0], tl.float32)
  dk1 = tl.zeros([block_n, width_1 if width_1 else 16], tl.float32)
  dv0 = tl.zeros([block_n, value_0], tl.float32)
  dv1 = tl.zeros([block_n, value_1 if value_1 else 16], tl.float32)
  for member in range(group):
    head = kv_head * group + member
    q_base = q + batch * seq * q_stride + head * width
    dy_base = dy + batch * seq * y_stride + head * value
    lse_base = lse + (batch * heads + head) * seq
    delta_base = delta + (batch * heads + head) * seq
    state = (dk0, dk1, dv0, dv1)
    state = _key_gradient_blocks(
      state, k0, k1, v0, v1, q_base, dy_base, lse_base, delta_base, begin, tl.minimum(full, end),
      keys, last_keys, seq, q_stride, y_stride, width_0, width_1, value_0, value_1, scale, soft_cap,
      factor, block_m, True,
    )  # fmt: skip
    state = _key_gradient_blocks(
      state, k0, k1, v0, v1, q_base, dy_base, lse_base, delta_base, full, full_end, keys,
      last_keys, seq, q_stride, y_stride, width_0, width_1, value_0, value_1, scale, soft_cap,
      factor, block_m, False,
    )  # fmt: skip
    dk0, dk1, dv0, dv1 = _key_gradient_blocks(
      state, k0, k1, v0, v1, q_base, dy_base, lse_base, delta_base, full_end, end, keys,
      last_keys, seq, q_stride, y_stride, width_0, width_1, value_0, value_1, scale, soft_cap,
      factor, block_m, True,
    )  # fmt: skip
  _store(dk + k_at, keys, k_stride, 0, dk0 * scale, width_0, seq)
  _store(dv + v_at, keys, v_stride, 0, dv0, value_0, seq)
  if width_1:
    _store(dk + k_at, keys, k_stride, width_0, dk1 * scale, width_1, seq)
  if value_1:
    _store(dv + v_at, keys, v_stride, value_0, dv1, value_1, seq)


@triton.jit
def _query_gradient_blocks(
  state,
  q0,
  q1,
  dy0,
  dy1,
  k_base,
  v_base,
  lse_rows,
  delta_rows,
  begin,
  end,
  rows,
  first,
  seq: tl.constexpr,
  k_stride: tl.constexpr,
  v_stride: tl.constexpr,
  width_0: tl.constexpr,
  width_1: tl.constexpr,
  value_0: tl.constexpr,
  value_1: tl.constexpr,
  scale: tl.constexpr,
  soft_cap: tl.constexpr,
  factor: tl.constexpr,
  block_n: tl.constexpr,
  masked: tl.constexpr,
):
  """Add what the keys of [begin, end) give."""
  dq0, dq1 = state
  for start in tl.range(begin, end, block_n):
    keys = start + tl.arange(0, block_n)
    k0 = _load(k_base, keys, k_stride, 0, width_0, seq, masked)
    v0 = _load(v_base, keys, v_stride, 0, value_0, seq, masked)
    k1 = k0
    if width_1:
      k1 = _load(k_base, keys, k_stride, width_0, width_1, seq, masked)
    s = _scores(q0, q1, k0, k1, width_1, scale, soft_cap)
    p = tl.exp2(s * factor - (lse_rows * LOG2_E)[:, None])
    if masked:
      seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= first[:, None])
      p = tl.where(seen, p, 0.0)
    dp = tl.dot(dy0, tl.trans(v0), input_precision="ieee")
    if value_1:
      v1 = _load(v_base, keys, v_stride, value_0, value_1, seq, masked)
      dp = tl.dot(dy1, tl.trans(v1), dp, input_precision="ieee")
    ds = p * (dp - delta_rows[:, None])
    if soft_cap > 0:
      ds *= 1 - s * s
    ds = ds.to(k0.dtype)
    dq0 = tl.dot(ds, k0, dq0, input_precision="ieee")
    if width_1:
      dq1 = tl.dot(ds, k1, dq1, input_precision="ieee")
  return dq0, dq1


@triton.jit
def attention_query_gradient(
  q,
  k,
  v,
  first,
  dy,
  lse,
  delta,
  dq,
  seq: tl.constexpr,
  heads: tl.constexpr,
  kv_heads: tl.constexpr,
  width_0: tl.constexpr,
  width_1: tl.constexpr,
  value_0: tl.constexpr,
  value_1: tl.constexpr,
  scale: tl.constexpr,
  soft_cap: tl.constexpr,
  block_m: tl.constexpr,
  block_n: tl.constexpr,
):
  """Gradient of one block of queries of one head. Grid: (cdiv(seq, block_m), batch * heads).

  Args: as in `attention_forward` and `attention_key_gradient`.
  """
  width: tl.constexpr = width_0 + width_1
  value: tl.constexpr = value_0 + value_1
  q_stride: tl.constexpr = heads * width
  y_stride: tl.constexpr = heads * value
  k_stride: tl.constexpr = kv_heads * width
  v_stride: tl.constexpr = kv_heads * value
  factor: tl.constexpr = (soft_cap if soft_cap > 0 else scale) * LOG2_E
  top_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_m  # the longest first
  batch = (tl.program_id(1) // heads).to(tl.int64)
  head = tl.program_id(1) % heads
  kv_head = head // (heads // kv_heads)
  rows = top_row + tl.arange(0, block_m)
  q_at = batch * seq * q_stride + head * width
  dy_base = dy + batch * seq * y_stride + head * value
  k_base = k + batch * seq * k_stride + kv_head * width
  v_base = v + batch * seq * v_stride + kv_head * value
  first += batch * seq
  even: tl.constexpr = seq % block_m == 0
  q0 = _load(q + q_at, rows, q_stride, 0, width_0, seq, not even)
  dy0 = _load(dy_base, rows, y_stride, 0, value_0, seq, not even)
  q1 = q0
  dy1 = dy0
  if width_1:
    q1 = _load(q + q_at, rows, q_stride, width_0, width_1, seq, not even)
  if value_1:
    dy1 = _load(dy_base, rows, y_stride, value_0, value_1, seq, not even)
  statistics = (batch * heads + head) * seq
  lse_rows = tl.load(lse + statistics + rows, mask=rows < seq, other=0.0)
  delta_rows = tl.load(delta + statistics + rows, mask=rows < seq, other=0.0)
  first_rows = tl.load(first + rows, mask=rows < seq, other=0)
  last_row = tl.minimum(top_row + block_m, seq) - 1
  begin = tl.load(first + top_row) // block_n * block_n
  full_end = (top_row + 1) // block_n * block_n
  full = tl.minimum(tl.cdiv(tl.load(first + last_row), block_n) * block_n, full_end)

  dq0 = tl.zeros([block_m, width_0], tl.float32)
  dq1 = tl.zeros([block_m, width_1 if width_1 else 16], tl.float32)
  state = (dq0, dq1)
  state = _query_gradient_blocks(
    state, q0, q1, dy0, dy1, k_base, v_base, lse_rows, delta_rows, begin, full, rows, first_rows,
    seq, k_stride, v_stride, width_0, width_1, value_0, value_1, scale, soft_cap, factor, block_n,
    True,
  )  # fmt: skip
  state = _query_gradient_blocks(
    state, q0, q1, dy0, dy1, k_base, v_base, lse_rows, delta_rows, full,
    full_end, rows, first_rows, seq, k_stride, v_stride, width_0, width_1, value_0, value_1, scale,
    soft_cap, factor, block_n, False,
  )  # fmt: skip
  dq0, dq1 = _query_gradient_blocks(
    state, q0, q1, dy0, dy1, k_base, v_base, lse_rows, delta_rows, full_end, last_row + 1, rows,
    first_rows, seq, k_stride, v_stride, width_0, width_1, value_0, value_1, scale, soft_cap,
    factor, block_n, True,
  )  # fmt: skip
  _store(dq + q_at, rows, q_stride, 0, dq0 * scale, width_0, seq)
  if width_1:
    _store(dq + q_at, rows, q_stride, width_0, dq1 * scale, width_1, seq)
