"""Grouped matmul for Hopper in Pallas Mosaic GPU: `y[i] = x[i] @ w[g(i)]`, or with `w[g]^T`.

Operands of 16 or of 8 bits, sums of several products, and SwiGLU on the way out. The machine is
described in `machine`.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul import machine
from kernels_pallas.grouped_matmul.machine import FP8, WARPGROUPS
from kernels_pallas.grouped_matmul.worklist import ROW_ALIGNMENT, Tiling, ceil_div, row_tiles

TILING = Tiling()
TILING_FP8 = Tiling(block_k=128)


def check_operands(a: jax.Array, b: jax.Array, group_sizes: jax.Array) -> None:
  """Raises ValueError for dtypes and sizes that the kernels do not take."""
  if not (a.dtype == b.dtype and a.dtype in (jnp.bfloat16, jnp.float16)) and not (
    a.dtype in FP8 and b.dtype in FP8
  ):
    raise ValueError(
      f"operands of {a.dtype} and {b.dtype}: the kernel takes two of bfloat16, two of float16, or"
      " two of float8_e4m3fn and float8_e5m2. Cast them, or use the XLA implementation"
    )
  if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
    raise ValueError(
      f"group_sizes is {group_sizes.dtype}{group_sizes.shape}: a vector of integers is expected"
    )
  width = 128 // a.dtype.itemsize
  for size in (*a.shape[1:], *b.shape[1:]):
    if size % width:
      raise ValueError(
        f"operands of shapes {a.shape} and {b.shape}: {size} is not a multiple of {width}, the"
        " width of a swizzled tile. Pad it, or use the XLA implementation"
      )


def pad_rows(x_MK: jax.Array, at_least: int) -> jax.Array:
  """Appends zero rows: TMA needs arrays no shorter than a tile, of whole swizzled tiles."""
  m = x_MK.shape[0]
  padded = max(at_least, ceil_div(m, ROW_ALIGNMENT) * ROW_ALIGNMENT)
  return x_MK if padded == m else jnp.pad(x_MK, ((0, padded - m), (0, 0)))


def _kernel(
  tiles_gmem,
  bounds_gmem,
  *refs,
  tiling: Tiling,
  transpose_w: bool,
  scaled: bool,
  products: int,
  outputs: str,
):
  """One thread block."""
  t = tiling
  scale_gmem, refs = (refs[0], refs[1:]) if scaled else (None, refs)
  pairs, refs = [refs[i : i + 2] for i in range(0, 2 * products, 2)], refs[2 * products :]
  x_gmem, w_gmem = pairs[0]
  results, (x_smem, w_smem, ready, free, *staging) = refs[: len(outputs)], refs[len(outputs) :]
  num_groups, contraction = w_gmem.shape[0], x_gmem.shape[1]
  wg_rows, n = t.block_m // WARPGROUPS, w_gmem.shape[1 if transpose_w else 2]
  num_tiles = bounds_gmem[num_groups + 1]
  grid = (jnp.maximum(num_tiles, 1), ceil_div(n, t.block_n))

  def head_at(index):
    """`(group, row, begin, end, number along the columns)` of tile `index`."""
    index = jnp.minimum(index, grid[0] * grid[1] - 1)
    i, j = plgpu.planar_snake(index, grid, 0, t.strip)
    return (*(tiles_gmem[i, c] for c in range(4)), j)

  def for_each_tile(body, carry=()):
    """Calls `body(group, row, begin, end, column, steps, step, peek, carry)`, see `machine`."""

    def visit(group, row, begin, end, j, step, peek, carry):
      row = pl.multiple_of(row, ROW_ALIGNMENT)
      # Rows past the last group are stored as they start out: zero.
      steps = jnp.where(group < num_groups, products * ceil_div(contraction, t.block_k), 0)
      return steps, *body(group, row, begin, end, j * t.block_n, steps, step, peek, carry)

    return machine.for_each_tile(num_tiles * grid[1], head_at, visit, t, carry)

  def load():
    @for_each_tile
    def _(group, row, begin, end, column, steps, step, peek, carry):
      del begin, end  # A short tile loads rows of other groups too, or zeros past the last.
      of_one = lax.div(steps, products)

      for i, (x, w) in enumerate(pairs):  # one product after the other, into the same sums

        @pl.loop(0, of_one)
        def _(k, first=i * of_one, x=x, w=w):
          slot = lax.rem(step + first + k, t.stages)
          plgpu.barrier_wait(free.at[slot])
          k_slice, n_slice = pl.ds(k * t.block_k, t.block_k), pl.ds(column, t.block_n)
          x_tile = x.at[pl.ds(row, t.block_m), k_slice]
          w_tile = w.at[group, n_slice, k_slice] if transpose_w else w.at[group, k_slice, n_slice]
          machine.load_tiles(x_tile, w_tile, slot, x_smem, w_smem, ready)

      return peek(), carry

    for slot in range(t.stages):  # Leave no arrival unobserved.
      plgpu.barrier_wait(free.at[slot])

  def compute(wg):
    for slot in range(t.stages):
      plgpu.barrier_arrive(free.at[slot])
    widths = [t.block_n // 2 if what == "h" else t.block_n for what in outputs]
    store = lambda pending: pending.chores(results, *(smem.at[wg] for smem in staging))
    my_rows = pl.multiple_of(wg * wg_rows, 64)

    def tile(group, row, begin, end, column, steps, step, peek, pending):
      row, begin, end = row + my_rows, begin - my_rows, end - my_rows
      reader = machine.Reader(ready, free, steps, step, t)

      def operands(slot, k):
        del k
        w_tile = w_smem.at[slot].transpose((1, 0)) if transpose_w else w_smem.at[slot]
        return x_smem.at[slot, pl.ds(my_rows, wg_rows)], w_tile

      def multiply():
        y, later = reader.multiply((wg_rows, t.block_n), operands, peek, store(pending))
        if scale_gmem is not None:
          which = jnp.minimum(group, num_groups - 1) if scale_gmem.shape[0] > 1 else 0
          y = y * scale_gmem[which]
        arrays = [(machine.swiglu(y) if what == "h" else y) for what in outputs]
        columns = [lax.div(column, 2) if what == "h" else column for what in outputs]
        arrays = tuple(a.astype(results[0].dtype) for a in arrays)
        return later, machine.Pending(arrays, group, row, begin, end, tuple(columns))

      def skip():  # Nothing to multiply in this half of a short tile.
        reader.skip()
        return peek(), pending

      return lax.cond(end > 0, multiply, skip)

    nothing = machine.Pending.nothing([(wg_rows, w) for w in widths], results[0].dtype)
    for chore in store(for_each_tile(tile, nothing)):
      chore()
    plgpu.wait_smem_to_gmem(0)

  machine.run_warpgroups(compute, load)


def grouped_matmul(
  x_MK: jax.Array,
  w_GKN: jax.Array,
  group_sizes: jax.Array,
  *,
  transpose_w: bool = False,
  more: Sequence[tuple[jax.Array, jax.Array]] = (),
  scale: jax.Array | None = None,
  out_dtype=None,
  tiling: Tiling | None = None,
  interpret=None,
) -> jax.Array:
  """`y[i] = x[i] @ w[g(i)]`, accumulated in fp32; rows past the last group are zero.

  With `transpose_w` it multiplies by `w[g]^T`, read in place: of the gradient of y, this makes the
  gradient of x.

  The tensor cores read 8-bit operands only along the contraction, so these need `transpose_w`: the
  forward pass takes weights stored as [G, N, K], the input gradient takes [G, K, N].

  Args:
    x_MK: [M, K] bfloat16, float16, float8_e4m3fn or float8_e5m2, rows sorted by group ([M, N] if
      `transpose_w`).
    w_GKN: [G, K, N], the same dtype, or any of the two 8-bit ones. K and N are multiples of 64, of
      128 for 8 bits.
    group_sizes: [G] integers >= 0, `sum(group_sizes) <= M`. Not checked: they live on the device.
    transpose_w: multiply by `w[g]^T` instead of `w[g]`.
    more: further pairs, shaped as `x_MK` and `w_GKN`, whose products are added to the fp32 sums:
      the gradient of rows that several matrices multiply, in one pass.
    scale: float32 [1], or [G] for one a group, that multiplies the fp32 sums; None = 1.
    out_dtype: of the result; `x_MK.dtype` if None, bfloat16 for 8-bit operands. float32
      spills registers: few are left beside the next tile's sums.
    tiling: tile sizes and order; None = the measured default.
    interpret: `plgpu.InterpretGPUParams` to run on the CPU.

  Returns:
    [M, N] ([M, K] if `transpose_w`).

  Raises:
    ValueError: a dtype or shape that the kernel does not take.
  """
  pairs = (x_MK, w_GKN), *more
  return _run(pairs, group_sizes, transpose_w, scale, out_dtype, tiling, interpret, "y")[0]


def grouped_swiglu(
  x_MK: jax.Array,
  w_GKN: jax.Array,
  group_sizes: jax.Array,
  *,
  keep: bool = False,
  transpose_w: bool = False,
  scale: jax.Array | None = None,
  out_dtype=None,
  tiling: Tiling | None = None,
  interpret=None,
):
  """`silu(x @ gate[g]) * (x @ up[g])` in one kernel; the arguments are those of `grouped_matmul`.

  The columns of `w_GKN` are half a tile (128) of gate and half a tile of up in turn (`interleave`),
  so that a thread block holds both factors of a product.

  Args:
    x_MK: rows.
    w_GKN: both matrices.
    group_sizes: rows of each group.
    keep: also return `x @ w`, in the same order of columns, for the backward pass. Some registers
      spill then.
    transpose_w: `w_GKN` is stored as [G, N, K].
    scale: as in `grouped_matmul`.
    out_dtype: of the results.
    tiling: tile sizes and order.
    interpret: as in `grouped_matmul`.

  Returns:
    [M, N / 2], or with `keep` a pair of that and [M, N].

  Raises:
    ValueError: a dtype or shape that the kernel does not take.
  """
  n = w_GKN.shape[1 if transpose_w else 2]
  block_n = (tiling or TILING).block_n
  if n % block_n:
    raise ValueError(f"{n} columns of gate and up: a multiple of {block_n} is expected. Pad them")
  which = "hy" if keep else "h"
  pairs = ((x_MK, w_GKN),)
  run = (pairs, group_sizes, transpose_w, scale, out_dtype, tiling, interpret, which)
  return tuple(_run(*run)) if keep else _run(*run)[0]


def interleave(gate_GKF: jax.Array, up_GKF: jax.Array, width: int = 128) -> jax.Array:
  """[G, K, F] twice -> [G, K, 2 F]: `width` columns of gate and of up in turn."""
  blocks = [a.reshape(*a.shape[:2], -1, width) for a in (gate_GKF, up_GKF)]
  return jnp.stack(blocks, axis=3).reshape(*gate_GKF.shape[:2], -1)


def _run(pairs, group_sizes, transpose_w, scale, out_dtype, tiling, interpret, outputs):
  x_MK, w_GKN = pairs[0]
  check_operands(x_MK, w_GKN, group_sizes)
  for pair in pairs[1:]:
    if (got := [(a.shape, a.dtype) for a in pair]) != [(a.shape, a.dtype) for a in pairs[0]]:
      raise ValueError(f"a further pair {got}: shapes and dtypes of the first pair are expected")
  eight_bits = x_MK.dtype in FP8
  num_groups, k, n = w_GKN.shape
  if transpose_w:
    k, n = n, k
  if x_MK.shape[1] != k or group_sizes.shape[0] != num_groups:
    raise ValueError(
      f"x {x_MK.shape}, w {w_GKN.shape} and group_sizes {group_sizes.shape} with"
      f" {transpose_w=}: expected x [M, {k}] and group_sizes [{num_groups}]"
    )
  t = tiling or (TILING_FP8 if eight_bits else TILING)
  if eight_bits and not (transpose_w and t.block_k % 128 == 0):
    raise ValueError(
      f"8-bit operands with {transpose_w=} and block_k={t.block_k}: the tensor cores read them"
      " along the contraction only. Store w transposed, and use a block_k that is a multiple of 128"
    )
  if scale is not None and (scale.dtype != jnp.float32 or scale.shape not in ((1,), (num_groups,))):
    raise ValueError(f"scale is {scale.dtype}{scale.shape}: float32 [1] or [{num_groups}] expected")
  m = x_MK.shape[0]
  out_dtype = jnp.dtype(out_dtype or (jnp.bfloat16 if eight_bits else x_MK.dtype))
  pairs = [(pad_rows(x, t.block_m), w) for x, w in pairs]
  w_tile = (t.block_n, t.block_k) if transpose_w else (t.block_k, t.block_n)
  scratch = [
    machine.swizzled((t.stages, t.block_m, t.block_k), x_MK.dtype),
    machine.swizzled((t.stages, *w_tile), w_GKN.dtype),
    *machine.ring(t),
    *machine.staging(out_dtype, short=True),
  ]
  widths, padded = {"y": n, "h": n // 2}, pairs[0][0].shape[0]
  results = machine.launch(
    functools.partial(
      _kernel,
      tiling=t,
      transpose_w=transpose_w,
      scaled=scale is not None,
      products=len(pairs),
      outputs=outputs,
    ),
    [jax.ShapeDtypeStruct((padded, widths[what]), out_dtype) for what in outputs],
    scratch,
    t,
    interpret,
  )(
    *row_tiles(group_sizes, padded, t.block_m),
    *([] if scale is None else [scale]),
    *itertools.chain(*pairs),
  )
  return [y[:m] for y in results]
