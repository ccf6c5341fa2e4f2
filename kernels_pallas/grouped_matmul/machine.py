"""What the grouped matmul kernels share: the ring of stages, the loop over tiles, the stores.

A persistent grid of thread blocks, each of one warpgroup that loads tiles with TMA and two that
multiply them with wgmma, 64 (or 128) rows each. The loading warpgroup runs ahead through a ring of
shared-memory stages, from one output tile into the next. Both multiplying ones finish a tile at the
same time, and would leave the tensor cores idle while they store it: so they keep the result in
registers, and store a part of it in each of the first steps of their next tile, whose products are
on their way meanwhile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul.worklist import ROW_ALIGNMENT, Tiling

WARPGROUPS = 2  # that multiply; a third one loads
LOAD_REGISTERS, COMPUTE_REGISTERS = 24, 240  # 24 + 2 * 240 = 504 = 3 * 168, those at the start
FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def swizzled(shape: tuple[int, ...], dtype):
  """Shared memory as wgmma reads it and as warpgroups write it without bank conflicts."""
  lanes = 128 // jnp.dtype(dtype).itemsize
  tiling = plgpu.TilingTransform((8, lanes))  # pyright: ignore[reportAbstractUsage]
  swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
  return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def staging(dtype, *, short: bool):
  """Where each warpgroup puts 128 bytes of columns of 64 rows on the way to global memory.

  `swizzled`; with `short` there is a second place without the swizzle, from where a copy may start
  at any row.
  """
  shape = (WARPGROUPS, 64, 128 // jnp.dtype(dtype).itemsize)
  return [swizzled(shape, dtype), *([plgpu.SMEM(shape, dtype)] if short else [])]


class Pending(NamedTuple):
  """A warpgroup's result that is still in registers, while the next tile is multiplied.

  Attributes:
    arrays: one [rows, n] for each output of the kernel.
    group: the number of theirs.
    row: of the output, where theirs begin.
    begin: their rows `begin` to `end - 1` are to be stored.
    end: see there.
    columns: of each output, where theirs begin.
  """

  arrays: tuple[jax.Array, ...]
  group: jax.Array
  row: jax.Array
  begin: jax.Array
  end: jax.Array
  columns: tuple[jax.Array, ...]

  @classmethod
  def nothing(cls, shapes, dtype) -> "Pending":
    """Before the first tile."""
    zeros = [plgpu.layout_cast(jnp.zeros(s, dtype), plgpu.Layout.WGMMA) for s in shapes]
    zero = jnp.int32(0)
    return cls(tuple(zeros), zero, zero, zero, zero, tuple(zero for _ in shapes))

  def chores(self, outputs, smem, plain_smem=None):
    """Functions that store a stripe each, to be called in turn with some time in between.

    Args:
      outputs: the arrays in global memory that `arrays` belong to.
      smem: this warpgroup's place of `staging`.
      plain_smem: the one without the swizzle; None = 64 rows are stored together or not at all.
    """
    width = smem.shape[1]
    places = [
      (which, i, j)
      for which, y in enumerate(self.arrays)
      for i in range(0, y.shape[0], 64)
      for j in range(0, y.shape[1], width)
    ]

    def store(which, i, j):
      stripe = self.arrays[which][i : i + 64, j : j + width]
      first, last = jnp.clip(self.begin - i, 0, 64), jnp.clip(self.end - i, 0, 64)
      row, column = self.row + i, pl.multiple_of(self.columns[which] + j, width)

      @pl.when(last - first == 64)
      def _():
        at = pl.multiple_of(row, ROW_ALIGNMENT)
        _store_rows(stripe, smem, outputs[which], at, column)

      if plain_smem is not None:

        @pl.when((last - first < 64) & (last > first))
        def _():
          _store_some_rows(stripe, plain_smem, outputs[which], row, column, first, last)

    return [functools.partial(store, *place) for place in places]


def _put(stripe, smem) -> None:
  """Registers to shared memory, once the copy before has read what is there."""
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  smem[...] = stripe
  plgpu.commit_smem()


def _store_rows(stripe, smem, y_gmem, row, column) -> None:
  """Writes 64 rows to `y_gmem[row:, column:]`."""
  _put(stripe, smem)
  plgpu.copy_smem_to_gmem(smem, y_gmem.at[pl.ds(row, 64), pl.ds(column, smem.shape[1])])


def _store_some_rows(stripe, smem, y_gmem, row, column, begin, end) -> None:
  """Writes rows `begin` to `end - 1` of the 64.

  TMA copies have a static size: these add up to the number of rows in binary.
  """
  _put(stripe, smem)
  for length in (32, 16, 8, 4, 2, 1):
    first = begin + ((end - begin) & ~(2 * length - 1))  # Longer copies wrote the rows before it.

    @pl.when((end - begin) & length != 0)
    def _(first=first, length=length):
      plgpu.copy_smem_to_gmem(
        smem.at[pl.ds(first, length)],
        y_gmem.at[pl.ds(row + first, length), pl.ds(column, smem.shape[1])],
      )


def swiglu(y):
  """`silu(gate) * up`, where the columns of `y` are those of gate and then those of up."""
  half = y.shape[1] // 2
  gate, up = y[:, :half], y[:, half:]
  return gate * up / (1 + jnp.exp(-gate))


def for_each_tile(total, head_at, body, tiling: Tiling, carry=()):
  """Calls `body(*head_at(i), step, peek, carry)` for the tiles i of this thread block.

  `body` returns the pipeline steps of the tile, what `peek()` gave, the next tile's head, and the
  next carry. `peek` reads global memory: the right time is while the tensor cores are busy. `step`
  counts the steps from the first tile on. `head_at` must take an i past the last one. Returns the
  last carry.
  """
  block, num_blocks = lax.axis_index("block"), tiling.num_blocks

  def visit(n, state):
    step, head, carry = state
    peek = lambda: head_at(block + (n + 1) * num_blocks)
    steps, later, carry = body(*head, step, peek, carry)
    return step + steps, later, carry

  num_tiles = lax.div(total - block + num_blocks - 1, num_blocks)
  return lax.fori_loop(0, num_tiles, visit, (jnp.int32(0), head_at(block), carry))[-1]


def load_tiles(lhs, rhs, slot, lhs_smem, rhs_smem, ready):
  """Loads one stage."""
  plgpu.copy_gmem_to_smem(lhs, lhs_smem.at[slot], ready.at[slot])
  plgpu.copy_gmem_to_smem(rhs, rhs_smem.at[slot], ready.at[slot])


class Reader:
  """The side of the ring of one multiplying warpgroup, in one tile.

  Attributes:
    steps: pipeline steps of this tile.
    step: of all tiles before it.
  """

  def __init__(self, ready, free, steps, step, tiling: Tiling):
    self.ready, self.free = ready, free
    self.steps, self.step, self.tiling = steps, step, tiling

  def _slot(self, k):
    return lax.rem(self.step + k, self.tiling.stages)

  def multiply(self, shape, operands, peek, chores):
    """The sum over the steps of `a @ b`, where `(a, b) = operands(slot, k)`: float32 registers.

    Also returns `peek()`, called in the first step while its product is on its way. So are the
    `chores`, each in a step of its own and the two warpgroups in turn: one keeps the tensor cores
    busy meanwhile. Without enough steps for that they come first.
    """
    nothing = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(peek))
    wg, enough = lax.axis_index("warpgroup"), self.steps >= WARPGROUPS * len(chores)

    @pl.when(~enough)
    def _():
      for chore in chores:
        chore()

    def accumulate(acc):
      @pl.loop(0, self.steps, init_carry=lax.cond(self.steps > 0, nothing, peek))
      def later(k, later):
        slot = self._slot(k)
        plgpu.barrier_wait(self.ready.at[slot])
        plgpu.wgmma(acc, *operands(slot, k))
        later = lax.cond(k == 0, peek, lambda: later)
        for i, chore in enumerate(chores):
          pl.when(enough & (k == WARPGROUPS * i + wg))(chore)
        plgpu.wgmma_wait(1)  # The one before has read its stage.

        @pl.when(k > 0)
        def _():
          plgpu.barrier_arrive(self.free.at[self._slot(k - 1)])

        return later

      return acc[...], later

    total = plgpu.ACC(shape)  # pyright: ignore[reportPrivateImportUsage]
    y, later = pl.run_scoped(accumulate, total)

    @pl.when(self.steps > 0)
    def _():
      plgpu.barrier_arrive(self.free.at[self._slot(self.steps - 1)])

    return y, later

  def skip(self):
    """Passes the stages on unread."""

    @pl.loop(0, self.steps)
    def _(k):
      slot = self._slot(k)
      plgpu.barrier_wait(self.ready.at[slot])
      plgpu.barrier_arrive(self.free.at[slot])


def run_warpgroups(compute, load):
  """Runs `compute(wg)` in warpgroups 0 and 1, with most of the registers, and `load()` in 2."""
  warpgroup = lax.axis_index("warpgroup")

  def compute_side():
    plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
    compute(warpgroup)

  def load_side():
    plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
    load()

  lax.cond(warpgroup < WARPGROUPS, compute_side, load_side)


def ring(tiling: Tiling):
  """The barriers: `ready[s]`: stage s is loaded; `free[s]`: all its readers have read it."""
  return [
    plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),
    plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=tiling.stages),
  ]


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
