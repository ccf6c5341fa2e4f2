"""Weight gradient of the grouped matmul for Hopper in Pallas Mosaic GPU: `dw[g] = x_g^T @ dy_g`.

The machine is that of `forward`; here the groups cut the contraction. A group is walked from its
first row, rounded down to what TMA can address; in the first and the last step, the rows of other
groups are overwritten with zeros in shared memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul import forward
from kernels_pallas.grouped_matmul.worklist import ROW_ALIGNMENT, Tiling, ceil_div, groups_by_size

TILING = Tiling()


def _keep_rows(ref, begin, end):
  """Overwrites with zeros the rows of `ref` in shared memory before `begin` and from `end` on."""
  row = plgpu.broadcasted_iota(jnp.int32, (ref.shape[0], 64), 0, layout=plgpu.Layout.WGMMA)
  for i in range(0, ref.shape[1], 64):
    part = ref.at[:, pl.ds(i, 64)]
    values = part[...]
    part[...] = jnp.where((row >= begin) & (row < end), values, jnp.zeros_like(values))
  plgpu.commit_smem()


def _kernel(
  groups_gmem, total_gmem, x_gmem, dy_gmem, dw_gmem, x_smem, dy_smem, ready, free, masked, *staging,
  tiling: Tiling,
):  # fmt: skip
  """One thread block. `ready[s]`: stage s is loaded; `free[s]`: both warpgroups have read it."""
  t = tiling
  num_groups, k, n = dw_gmem.shape
  wg_rows, wg_columns = t.block_m // forward.WARPGROUPS, t.block_n // forward.WARPGROUPS
  grid = (ceil_div(k, t.block_m), ceil_div(n, t.block_n))

  def for_each_tile(body):
    """Calls `body(group, base, begin, end, k_row, n_column, steps, step)`, `step` steps on.

    The rows of the group are `base + begin` to `base + end - 1`.
    """

    @plgpu.nd_loop(
      (num_groups, grid[0] * grid[1]), collective_axes="block", init_carry=jnp.int32(0)
    )
    def _(loop, carry):
      group, start, rows = (groups_gmem[loop.index[0], c] for c in range(3))
      i, j = plgpu.planar_snake(loop.index[1], grid, 0, t.strip)
      begin = lax.rem(start, ROW_ALIGNMENT)
      base = pl.multiple_of(start - begin, ROW_ALIGNMENT)
      steps = jnp.where(rows > 0, lax.div(begin + rows + t.block_k - 1, t.block_k), 0)
      body(group, base, begin, begin + rows, i * t.block_m, j * t.block_n, steps, carry)
      return carry + steps

  def load():
    @for_each_tile
    def _(group, base, begin, end, k_row, n_column, steps, step):
      del group, begin, end

      @pl.loop(0, steps)
      def _(s):
        slot = lax.rem(step + s, t.stages)
        plgpu.barrier_wait(free.at[slot])
        rows = pl.ds(base + s * t.block_k, t.block_k)
        x_tile = x_gmem.at[rows, pl.ds(k_row, t.block_m)]
        dy_tile = dy_gmem.at[rows, pl.ds(n_column, t.block_n)]
        plgpu.copy_gmem_to_smem(x_tile, x_smem.at[slot], ready.at[slot])
        plgpu.copy_gmem_to_smem(dy_tile, dy_smem.at[slot], ready.at[slot])

    for slot in range(t.stages):  # Leave no arrival unobserved.
      plgpu.barrier_wait(free.at[slot])

  def compute(wg: int):
    total = total_gmem[0]
    for slot in range(t.stages):
      plgpu.barrier_arrive(free.at[slot])

    @for_each_tile
    def _(group, base, begin, end, k_row, n_column, steps, step):
      def accumulate(acc):
        @pl.loop(0, steps)
        def _(s):
          slot = lax.rem(step + s, t.stages)
          plgpu.barrier_wait(ready.at[slot])
          x_tile = x_smem.at[slot, :, pl.ds(wg * wg_rows, wg_rows)]
          first, last = begin - s * t.block_k, end - s * t.block_k

          # Zeros in x suffice against the rows of other groups.
          @pl.when((first > 0) | (last < t.block_k))
          def _():
            _keep_rows(x_tile, first, last)

          # Rows past the last group may hold anything, also NaN: zeros in dy too. The other
          # warpgroup reads what this one overwrites, and the other way round.
          @pl.when(base + (s + 1) * t.block_k > total)
          def _():
            _keep_rows(dy_smem.at[slot, :, pl.ds(wg * wg_columns, wg_columns)], first, last)
            plgpu.barrier_arrive(masked)
            plgpu.barrier_wait(masked)

          plgpu.wgmma(acc, x_tile.transpose((1, 0)), dy_smem.at[slot])
          plgpu.wgmma_wait(1)  # The one before has read its stage.

          @pl.when(s > 0)
          def _():
            plgpu.barrier_arrive(free.at[lax.rem(step + s - 1, t.stages)])

        return acc[...]

      dw = pl.run_scoped(accumulate, plgpu.ACC((wg_rows, t.block_n)))

      @pl.when(steps > 0)
      def _():
        plgpu.barrier_arrive(free.at[lax.rem(step + steps - 1, t.stages)])

      for i in range(0, wg_rows, 64):
        row = k_row + wg * wg_rows + i
        forward.store_swizzled(dw[i : i + 64], staging[wg], dw_gmem.at[group], row, n_column)

    plgpu.wait_smem_to_gmem(0)

  forward.run_warpgroups(compute, load)


def grouped_matmul_dw(
  x_MK: jax.Array,
  dy_MN: jax.Array,
  group_sizes: jax.Array,
  *,
  out_dtype=None,
  tiling: Tiling = TILING,
  interpret=None,
) -> jax.Array:
  """`dw[g] = x_g^T @ dy_g` over the rows of group g, accumulated in fp32, zeros if it is empty.

  Rows past the last group contribute nothing, whatever they hold.

  Args:
    x_MK: [M, K] bfloat16 or float16, rows sorted by group.
    dy_MN: [M, N], the same dtype, the gradient of y. K and N are multiples of 64.
    group_sizes: [G] integers >= 0, `sum(group_sizes) <= M`. Not checked: they live on the device.
    out_dtype: of the result; `x_MK.dtype` if None.
    tiling: tile sizes and order: `block_m` cuts K, `block_n` cuts N, `block_k` cuts the rows.
    interpret: `plgpu.InterpretGPUParams` to run on the CPU.

  Returns:
    [G, K, N].

  Raises:
    ValueError: a dtype or shape that the kernel does not take.
  """
  forward.check_operands(x_MK, dy_MN, group_sizes)
  if x_MK.shape[0] != dy_MN.shape[0]:
    raise ValueError(f"x {x_MK.shape} and dy {dy_MN.shape}: the same number of rows is expected")
  t, out_dtype = tiling, jnp.dtype(out_dtype or x_MK.dtype)
  x_MK, dy_MN = forward.pad_rows(x_MK, t.block_k), forward.pad_rows(dy_MN, t.block_k)
  stripe = (64, 128 // out_dtype.itemsize)
  scratch = [
    forward.swizzled((t.stages, t.block_k, t.block_m), x_MK.dtype),
    forward.swizzled((t.stages, t.block_k, t.block_n), x_MK.dtype),
    *forward.ring(t),
    plgpu.Barrier(num_arrivals=forward.WARPGROUPS),
    *[forward.swizzled((2, *stripe), out_dtype)] * forward.WARPGROUPS,
  ]
  out_shape = (group_sizes.shape[0], x_MK.shape[1], dy_MN.shape[1])
  return forward.launch(
    functools.partial(_kernel, tiling=t),
    jax.ShapeDtypeStruct(out_shape, out_dtype),
    scratch,
    t,
    interpret,
  )(*groups_by_size(group_sizes), x_MK, dy_MN)
