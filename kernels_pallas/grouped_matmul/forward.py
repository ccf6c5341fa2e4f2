"""Grouped matmul for Hopper in Pallas Mosaic GPU: `y[i] = x[i] @ w[g(i)]`, or with `w[g]^T`.

A persistent grid of thread blocks, each of one warpgroup that loads tiles with TMA and two that
multiply them with wgmma, 64 (or 128) rows each. The loading warpgroup runs ahead through a ring of
shared-memory stages, from one output tile into the next; the multiplying ones do not wait for each
other, so that one stores its rows while the other keeps the tensor cores busy.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul.worklist import ROW_ALIGNMENT, Tiling, ceil_div, row_tiles

WARPGROUPS = 2  # that multiply; a third one loads
LOAD_REGISTERS, COMPUTE_REGISTERS = 40, 232  # (512 - 40) / 2, rounded down to a multiple of 8
TILING = Tiling()


def swizzled(shape: tuple[int, ...], dtype) -> plgpu.SMEM:
  """Shared memory as wgmma reads it and as warpgroups write it without bank conflicts."""
  lanes = 128 // jnp.dtype(dtype).itemsize
  transforms = (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(128))
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def check_operands(a: jax.Array, b: jax.Array, group_sizes: jax.Array) -> None:
  """Raises ValueError for dtypes and sizes that the kernels do not take."""
  if a.dtype != b.dtype or a.dtype not in (jnp.bfloat16, jnp.float16):
    raise ValueError(
      f"operands of {a.dtype} and {b.dtype}: the kernel takes two of bfloat16 or two of float16."
      " Cast them, or use the XLA implementation"
    )
  if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
    raise ValueError(
      f"group_sizes is {group_sizes.dtype}{group_sizes.shape}: a vector of integers is expected"
    )
  for size in (*a.shape[1:], *b.shape[1:]):
    if size % 64:
      raise ValueError(
        f"operands of shapes {a.shape} and {b.shape}: {size} is not a multiple of 64, the width of"
        " a swizzled tile. Pad it, or use the XLA implementation"
      )


def pad_rows(x_MK: jax.Array, at_least: int) -> jax.Array:
  """Appends zero rows: TMA needs arrays no shorter than a tile, of whole swizzled tiles."""
  m = x_MK.shape[0]
  padded = max(at_least, ceil_div(m, ROW_ALIGNMENT) * ROW_ALIGNMENT)
  return x_MK if padded == m else jnp.pad(x_MK, ((0, padded - m), (0, 0)))


def store_swizzled(y, smem, y_gmem, row, column):
  """Writes the [64, n] registers `y` to `y_gmem[row:, column:]`, a stripe of columns at a time.

  `smem` holds two stripes: one is filled while TMA reads the other.
  """
  width = smem.shape[-1]
  for i in range(y.shape[1] // width):
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    smem[i % 2] = y[:, i * width : (i + 1) * width].astype(smem.dtype)
    plgpu.commit_smem()
    columns = pl.ds(column + i * width, width)
    plgpu.copy_smem_to_gmem(smem.at[i % 2], y_gmem.at[pl.ds(row, 64), columns])


def _store_short(y, smem, y_gmem, row, begin, end, column):
  """Writes rows `begin` to `end - 1` of the 64, in copies that add up to their number in binary.

  TMA copies have a static size. `smem` is not swizzled, so that a copy may start at any row; it is
  the memory of `store_swizzled`, hence the waits before and after.
  """
  width = smem.shape[-1]
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  for i in range(y.shape[1] // width):
    smem[...] = y[:, i * width : (i + 1) * width].astype(smem.dtype)
    plgpu.commit_smem()
    columns = pl.ds(column + i * width, width)
    for length in (32, 16, 8, 4, 2, 1):
      first = begin + ((end - begin) & ~(2 * length - 1))  # Longer copies wrote the rows before it.

      @pl.when((end - begin) & length != 0)
      def _(first=first, length=length, columns=columns):
        y_rows = y_gmem.at[pl.ds(row + first, length), columns]
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(first, length)], y_rows)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _kernel(
  tiles_gmem, count_gmem, x_gmem, w_gmem, y_gmem, x_smem, w_smem, ready, free, *staging,
  tiling: Tiling, transpose_w: bool,
):  # fmt: skip
  """One thread block. `ready[s]`: stage s is loaded; `free[s]`: both warpgroups have read it."""
  t = tiling
  num_groups, contraction = w_gmem.shape[0], x_gmem.shape[1]
  wg_rows = t.block_m // WARPGROUPS
  grid = (count_gmem[0], ceil_div(y_gmem.shape[1], t.block_n))

  def for_each_tile(body):
    """Calls `body(group, row, begin, end, column, steps, step)`, `step` steps on."""

    @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="block", init_carry=jnp.int32(0))
    def _(loop, carry):
      i, j = plgpu.planar_snake(loop.index[0], grid, 0, t.strip)
      group, row, begin, end = (tiles_gmem[i, c] for c in range(4))
      row = pl.multiple_of(row, ROW_ALIGNMENT)
      # Rows past the last group are stored as they start out: zero.
      steps = jnp.where(group < num_groups, ceil_div(contraction, t.block_k), 0)
      body(group, row, begin, end, j * t.block_n, steps, carry)
      return carry + steps

  def load():
    @for_each_tile
    def _(group, row, begin, end, column, steps, step):
      del begin, end  # A short tile loads rows of other groups too, or zeros past the last row.

      @pl.loop(0, steps)
      def _(k):
        slot = lax.rem(step + k, t.stages)
        plgpu.barrier_wait(free.at[slot])
        k_slice, n_slice = pl.ds(k * t.block_k, t.block_k), pl.ds(column, t.block_n)
        x_tile = x_gmem.at[pl.ds(row, t.block_m), k_slice]
        w_tile = (
          w_gmem.at[group, n_slice, k_slice] if transpose_w else w_gmem.at[group, k_slice, n_slice]
        )
        plgpu.copy_gmem_to_smem(x_tile, x_smem.at[slot], ready.at[slot])
        plgpu.copy_gmem_to_smem(w_tile, w_smem.at[slot], ready.at[slot])

    for slot in range(t.stages):  # Leave no arrival unobserved.
      plgpu.barrier_wait(free.at[slot])

  def compute(wg: int):
    smem, short_smem = staging[wg]
    my_rows = pl.ds(wg * wg_rows, wg_rows)
    for slot in range(t.stages):
      plgpu.barrier_arrive(free.at[slot])

    @for_each_tile
    def _(group, row, begin, end, column, steps, step):
      del group
      row, begin, end = row + wg * wg_rows, begin - wg * wg_rows, end - wg * wg_rows

      def accumulate(acc):
        @pl.loop(0, steps)
        def _(k):
          slot = lax.rem(step + k, t.stages)
          plgpu.barrier_wait(ready.at[slot])
          w_tile = w_smem.at[slot].transpose((1, 0)) if transpose_w else w_smem.at[slot]
          plgpu.wgmma(acc, x_smem.at[slot, my_rows], w_tile)
          plgpu.wgmma_wait(1)  # The one before has read its stage.

          @pl.when(k > 0)
          def _():
            plgpu.barrier_arrive(free.at[lax.rem(step + k - 1, t.stages)])

        return acc[...]

      @pl.when(end > 0)
      def _():
        y = pl.run_scoped(accumulate, plgpu.ACC((wg_rows, t.block_n)))

        @pl.when(steps > 0)
        def _():
          plgpu.barrier_arrive(free.at[lax.rem(step + steps - 1, t.stages)])

        for i in range(0, wg_rows, 64):
          first, last = jnp.clip(begin - i, 0, 64), jnp.clip(end - i, 0, 64)

          @pl.when(last - first == 64)
          def _(i=i):
            store_swizzled(y[i : i + 64], smem, y_gmem, row + i, column)

          @pl.when(last - first < 64)
          def _(i=i, first=first, last=last):
            _store_short(y[i : i + 64], short_smem, y_gmem, row + i, first, last, column)

      @pl.when(end <= 0)  # Nothing to multiply in this half of a short tile.
      def _():
        @pl.loop(0, steps)
        def _(k):
          slot = lax.rem(step + k, t.stages)
          plgpu.barrier_wait(ready.at[slot])
          plgpu.barrier_arrive(free.at[slot])

    plgpu.wait_smem_to_gmem(0)

  run_warpgroups(compute, load)


def run_warpgroups(compute, load):
  """Runs `compute(i)` in warpgroups 0 and 1, with most of the registers, and `load()` in 2."""
  warpgroup = lax.axis_index("warpgroup")

  def compute_side():
    plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
    lax.cond(warpgroup == 0, lambda: compute(0), lambda: compute(1))

  def load_side():
    plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
    load()

  lax.cond(warpgroup < WARPGROUPS, compute_side, load_side)


def ring(tiling: Tiling):
  """The `ready` and `free` barriers of the ring of stages."""
  loads = plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages)
  readers = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=tiling.stages)
  return loads, readers


def launch(body, out_type, scratch, tiling: Tiling, interpret):
  """`plgpu.kernel` over the persistent grid."""
  return plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=scratch,
    grid=(tiling.num_blocks,),
    grid_names=("block",),
    num_threads=WARPGROUPS + 1,
    thread_name="warpgroup",
    interpret=interpret,
  )


def grouped_matmul(
  x_MK: jax.Array,
  w_GKN: jax.Array,
  group_sizes: jax.Array,
  *,
  transpose_w: bool = False,
  out_dtype=None,
  tiling: Tiling = TILING,
  interpret=None,
) -> jax.Array:
  """`y[i] = x[i] @ w[g(i)]`, accumulated in fp32; rows past the last group are zero.

  With `transpose_w` it multiplies by `w[g]^T`, read in place: of the gradient of y, this makes the
  gradient of x.

  Args:
    x_MK: [M, K] bfloat16 or float16, rows sorted by group ([M, N] if `transpose_w`).
    w_GKN: [G, K, N], the same dtype. K and N are multiples of 64.
    group_sizes: [G] integers >= 0, `sum(group_sizes) <= M`. Not checked: they live on the device.
    transpose_w: multiply by `w[g]^T` instead of `w[g]`.
    out_dtype: of the result; `x_MK.dtype` if None.
    tiling: tile sizes and order.
    interpret: `plgpu.InterpretGPUParams` to run on the CPU.

  Returns:
    [M, N] ([M, K] if `transpose_w`).

  Raises:
    ValueError: a dtype or shape that the kernel does not take.
  """
  check_operands(x_MK, w_GKN, group_sizes)
  num_groups, k, n = w_GKN.shape
  if transpose_w:
    k, n = n, k
  if x_MK.shape[1] != k or group_sizes.shape[0] != num_groups:
    raise ValueError(
      f"x {x_MK.shape}, w {w_GKN.shape} and group_sizes {group_sizes.shape} with"
      f" {transpose_w=}: expected x [M, {k}] and group_sizes [{num_groups}]"
    )
  t, m, out_dtype = tiling, x_MK.shape[0], jnp.dtype(out_dtype or x_MK.dtype)
  x_MK = pad_rows(x_MK, t.block_m)
  stripe = (64, 128 // out_dtype.itemsize)
  w_tile = (t.block_n, t.block_k) if transpose_w else (t.block_k, t.block_n)
  scratch = [
    swizzled((t.stages, t.block_m, t.block_k), x_MK.dtype),
    swizzled((t.stages, *w_tile), x_MK.dtype),
    *ring(t),
  ]
  for _ in range(WARPGROUPS):
    short = plgpu.SMEM(stripe, out_dtype)
    scratch.append(plgpu.RefUnion(swizzled((2, *stripe), out_dtype), short))
  y_MN = launch(
    functools.partial(_kernel, tiling=t, transpose_w=transpose_w),
    jax.ShapeDtypeStruct((x_MK.shape[0], n), out_dtype),
    scratch,
    t,
    interpret,
  )(*row_tiles(group_sizes, x_MK.shape[0], t.block_m), x_MK, w_GKN)
  return y_MN[:m]
