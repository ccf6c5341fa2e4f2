"""Weight gradient of the grouped matmul for Hopper in Pallas Mosaic GPU: `dw[g] = x_g^T @ dy_g`.

The groups cut the contraction. A group is walked from its first row, rounded down to what TMA can
address; in the first and the last step, the rows of other groups are overwritten with zeros in
shared memory. The machine is described in `machine`.

The tensor cores read 8-bit operands only along the contraction, here the rows. So these come
transposed, in copies (`align_rows`) where every group starts at a whole step: nothing to overwrite.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul import forward, machine
from kernels_pallas.grouped_matmul.machine import FP8, WARPGROUPS
from kernels_pallas.grouped_matmul.worklist import (
  ROW_ALIGNMENT,
  Tiling,
  ceil_div,
  groups_by_size,
  round_up,
)

TILING = Tiling()


def _keep_rows(ref, begin, end):
  """Overwrites with zeros the rows of `ref` in shared memory before `begin` and from `end` on."""
  row = plgpu.broadcasted_iota(jnp.int32, (ref.shape[0], 64), 0, layout=plgpu.Layout.WGMMA)
  for i in range(0, ref.shape[1], 64):
    part = ref.at[:, pl.ds(i, 64)]
    values = part[...]
    part[...] = jnp.where((row >= begin) & (row < end), values, jnp.zeros_like(values))
  plgpu.commit_smem()


def _kernel(groups_gmem, bounds_gmem, *refs, tiling: Tiling, transposed: bool, scaled: bool):
  """One thread block."""
  t = tiling
  scale_gmem, refs = (refs[0], refs[1:]) if scaled else (None, refs)
  x_gmem, dy_gmem, dw_gmem, x_smem, dy_smem, ready, free, masked, staging = refs
  num_groups, k, n = dw_gmem.shape
  wg_rows, wg_columns = t.block_m // WARPGROUPS, t.block_n // WARPGROUPS
  alignment = t.block_k if transposed else ROW_ALIGNMENT
  grid = (ceil_div(k, t.block_m), ceil_div(n, t.block_n))

  def head_at(index):
    """`(group, start, rows, number along K, number along N)` of tile `index`."""
    group, index = lax.div(index, grid[0] * grid[1]), lax.rem(index, grid[0] * grid[1])
    i, j = plgpu.planar_snake(index, grid, 0, t.strip)
    group = jnp.minimum(group, num_groups - 1)
    return (*(groups_gmem[group, c] for c in range(3)), i, j)

  def for_each_tile(body, carry=()):
    """Calls `body(group, base, begin, end, k_row, n_column, steps, step, peek, carry)`.

    The rows of the group are `base + begin` to `base + end - 1`; the rest is as in `machine`.
    """

    def visit(group, start, rows, i, j, step, peek, carry):
      begin = lax.rem(start, alignment)
      base = pl.multiple_of(start - begin, alignment)
      steps = jnp.where(rows > 0, lax.div(begin + rows + t.block_k - 1, t.block_k), 0)
      args = group, base, begin, begin + rows, i * t.block_m, j * t.block_n, steps, step
      return steps, *body(*args, peek, carry)

    return machine.for_each_tile(num_groups * grid[0] * grid[1], head_at, visit, t, carry)

  def load():
    @for_each_tile
    def _(group, base, begin, end, k_row, n_column, steps, step, peek, carry):
      del group, begin, end

      @pl.loop(0, steps)
      def _(s):
        slot = lax.rem(step + s, t.stages)
        plgpu.barrier_wait(free.at[slot])
        rows = pl.ds(pl.multiple_of(base + s * t.block_k, alignment), t.block_k)
        k_slice, n_slice = pl.ds(k_row, t.block_m), pl.ds(n_column, t.block_n)
        if transposed:
          tiles = x_gmem.at[k_slice, rows], dy_gmem.at[n_slice, rows]
        else:
          tiles = x_gmem.at[rows, k_slice], dy_gmem.at[rows, n_slice]
        machine.load_tiles(*tiles, slot, x_smem, dy_smem, ready)

      return peek(), carry

    for slot in range(t.stages):  # Leave no arrival unobserved.
      plgpu.barrier_wait(free.at[slot])

  def compute(wg):
    total = bounds_gmem[num_groups]
    for slot in range(t.stages):
      plgpu.barrier_arrive(free.at[slot])

    my_row, my_column = pl.multiple_of(wg * wg_rows, 64), pl.multiple_of(wg * wg_columns, 64)
    store = lambda pending: pending.chores([dw_gmem.at[pending.group]], staging.at[wg])

    def tile(group, base, begin, end, k_row, n_column, steps, step, peek, pending):
      reader = machine.Reader(ready, free, steps, step, t)
      my_rows = pl.ds(my_row, wg_rows)

      def operands(slot, s):
        if transposed:
          return x_smem.at[slot, my_rows], dy_smem.at[slot].transpose((1, 0))
        x_tile = x_smem.at[slot, :, my_rows]
        first, last = begin - s * t.block_k, end - s * t.block_k

        # Zeros in x suffice against the rows of other groups.
        @pl.when((first > 0) | (last < t.block_k))
        def _():
          _keep_rows(x_tile, first, last)

        # Rows past the last group may hold anything, also NaN: zeros in dy too. The other
        # warpgroup reads what this one overwrites, and the other way round.
        @pl.when(base + (s + 1) * t.block_k > total)
        def _():
          _keep_rows(dy_smem.at[slot, :, pl.ds(my_column, wg_columns)], first, last)
          plgpu.barrier_arrive(masked)
          plgpu.barrier_wait(masked)

        return x_tile.transpose((1, 0)), dy_smem.at[slot]

      dw, later = reader.multiply((wg_rows, t.block_n), operands, peek, store(pending))
      if scale_gmem is not None:
        dw = dw * scale_gmem[0]
      arrays = (dw.astype(dw_gmem.dtype),)
      rows = jnp.int32(0), jnp.int32(wg_rows)
      return later, machine.Pending(arrays, group, k_row + my_row, *rows, (n_column,))

    nothing = machine.Pending.nothing([(wg_rows, t.block_n)], dw_gmem.dtype)
    for chore in store(for_each_tile(tile, nothing)):
      chore()
    plgpu.wait_smem_to_gmem(0)

  machine.run_warpgroups(compute, load)


def align_rows(x_MK: jax.Array, group_sizes: jax.Array, multiple: int = 128) -> jax.Array:
  """Copies the rows of each group to where a multiple of `multiple` starts, zeros in between.

  `align_rows(x, group_sizes).T` is what `grouped_matmul_dw` takes of 8-bit operands.

  Args:
    x_MK: [M, K], rows sorted by group.
    group_sizes: [G] integers, `sum(group_sizes) <= M`.
    multiple: a power of two.

  Returns:
    [P, K] with `P = (M // multiple + G) * multiple`, which is enough for any sizes.
  """
  sizes = group_sizes.astype(jnp.int32)
  num_groups, m = sizes.shape[0], x_MK.shape[0]
  ends, ends_P = jnp.cumsum(sizes), jnp.cumsum(round_up(sizes, multiple))
  row_P = jnp.arange((m // multiple + num_groups) * multiple, dtype=jnp.int32)
  group_P = jnp.searchsorted(ends_P, row_P, side="right", method="compare_all")
  group_P = jnp.minimum(group_P, num_groups - 1)
  offset_P = row_P - (ends_P - round_up(sizes, multiple))[group_P]
  used_P = (offset_P < sizes[group_P]) & (row_P < ends_P[-1])
  source_P = jnp.where(used_P, (ends - sizes)[group_P] + offset_P, m)
  return x_MK.at[source_P].get(mode="fill", fill_value=0)


def grouped_matmul_dw(
  x_MK: jax.Array,
  dy_MN: jax.Array,
  group_sizes: jax.Array,
  *,
  scale: jax.Array | None = None,
  out_dtype=None,
  tiling: Tiling | None = None,
  interpret=None,
) -> jax.Array:
  """`dw[g] = x_g^T @ dy_g` over the rows of group g, accumulated in fp32, zeros if it is empty.

  Rows past the last group contribute nothing, whatever they hold.

  Args:
    x_MK: [M, K] bfloat16 or float16, rows sorted by group; or 8-bit, [K, P], the transpose of what
      `align_rows` returns.
    dy_MN: [M, N], the same dtype, the gradient of y; or 8-bit [N, P]. K and N are multiples of 64
      (8-bit: of 8, and P of 128).
    group_sizes: [G] integers >= 0, `sum(group_sizes) <= M`. Not checked: they live on the device.
    scale: float32 [1] that multiplies the fp32 sums; None = 1.
    out_dtype: of the result; `x_MK.dtype` if None, bfloat16 for 8-bit operands. float32
      spills registers: few are left beside the next tile's sums.
    tiling: tile sizes and order: `block_m` cuts K, `block_n` cuts N, `block_k` cuts the rows; None
      = the measured default.
    interpret: `plgpu.InterpretGPUParams` to run on the CPU.

  Returns:
    [G, K, N].

  Raises:
    ValueError: a dtype or shape that the kernel does not take.
  """
  forward.check_operands(x_MK, dy_MN, group_sizes)
  transposed = x_MK.dtype in FP8
  t = tiling or (forward.TILING_FP8 if transposed else TILING)
  axis = 1 if transposed else 0
  if x_MK.shape[axis] != dy_MN.shape[axis]:
    raise ValueError(f"x {x_MK.shape} and dy {dy_MN.shape}: the same number of rows is expected")
  if scale is not None and (scale.dtype != jnp.float32 or scale.shape != (1,)):
    raise ValueError(f"scale is {scale.dtype}{scale.shape}: float32 [1] is expected")
  sizes, out_dtype = group_sizes, jnp.dtype(out_dtype or x_MK.dtype)
  if transposed:
    if t.block_k % 128:
      raise ValueError(f"block_k={t.block_k}: a multiple of 128 is expected for 8-bit operands")
    out_dtype = jnp.dtype(jnp.bfloat16) if out_dtype == x_MK.dtype else out_dtype
    (k, n), sizes = (x_MK.shape[0], dy_MN.shape[0]), round_up(group_sizes, 128)
    x_MK, dy_MN = forward.pad_rows(x_MK, t.block_m), forward.pad_rows(dy_MN, t.block_n)
    x_tile, dy_tile = (t.block_m, t.block_k), (t.block_n, t.block_k)
  else:
    k, n = x_MK.shape[1], dy_MN.shape[1]
    x_MK, dy_MN = forward.pad_rows(x_MK, t.block_k), forward.pad_rows(dy_MN, t.block_k)
    x_tile, dy_tile = (t.block_k, t.block_m), (t.block_k, t.block_n)
  scratch = [
    machine.swizzled((t.stages, *x_tile), x_MK.dtype),
    machine.swizzled((t.stages, *dy_tile), dy_MN.dtype),
    *machine.ring(t),
    plgpu.Barrier(num_arrivals=WARPGROUPS),
    *machine.staging(out_dtype, short=False),
  ]
  return machine.launch(
    functools.partial(_kernel, tiling=t, transposed=transposed, scaled=scale is not None),
    jax.ShapeDtypeStruct((group_sizes.shape[0], k, n), out_dtype),
    scratch,
    t,
    interpret,
  )(*groups_by_size(sizes), *([] if scale is None else [scale]), x_MK, dy_MN)
