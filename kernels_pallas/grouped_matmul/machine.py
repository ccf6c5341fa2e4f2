"""What the grouped matmul kernels share: the ring of stages, the loop over tiles, the stores.

A persistent grid of thread blocks, each of one warpgroup that loads tiles with TMA and two that
multiply them with wgmma, 64 (or 128) rows each. The loading warpgroup runs ahead through a ring of
shared-memory stages, from one output tile into the next; the multiplying ones do not wait for each
other, so that one stores its rows while the other keeps the tensor cores busy.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul.worklist import ROW_ALIGNMENT, Tiling

WARPGROUPS = 2  # that multiply; a third one loads
LOAD_REGISTERS, COMPUTE_REGISTERS = 40, 232  # (512 - 40) / 2, rounded down to a multiple of 8
FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def swizzled(shape: tuple[int, ...], dtype) -> plgpu.SMEM:
  """Shared memory as wgmma reads it and as warpgroups write it without bank conflicts."""
  lanes = 128 // jnp.dtype(dtype).itemsize
  transforms = (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(128))
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def staging(tiling: Tiling, dtype, *, short: bool = False):
  """Where one warpgroup puts a [64, n] result, a stripe at a time, on the way to global memory.

  With `short`, the same memory is also lent without the swizzle: then a copy may start at any row.
  """
  dtype = jnp.dtype(dtype)
  shape = (tiling.slots, 64, 128 // dtype.itemsize)
  if not short:
    return swizzled(shape, dtype)
  return plgpu.RefUnion(swizzled(shape, dtype), plgpu.SMEM(shape, dtype))


def stripes_of(y, dtype):
  """The [64, n] registers `y`, 128 bytes of columns at a time."""
  width = 128 // jnp.dtype(dtype).itemsize
  for i in range(0, y.shape[1], width):
    yield y[:, i : i + width]


def swiglu_stripes_of(y, dtype):
  """`silu(gate) * up`, where `y` holds gate and then up, 128 bytes of columns at a time."""
  width, half = 128 // jnp.dtype(dtype).itemsize, y.shape[1] // 2
  for i in range(0, half, width):
    gate, up = y[:, i : i + width], y[:, half + i : half + i + width]
    yield gate * up / (1 + jnp.exp(-gate))


def _wait_for_slot(i: int, slots: int) -> None:
  """Until stripe `i` may be written: the copy out of its slot has been read.

  The first stripe waits for all earlier copies, which may have ended at any slot; they were issued
  a tile ago.
  """
  plgpu.wait_smem_to_gmem(slots - 1 if i else 0, wait_read_only=True)


def store_rows(stripes, smem, y_gmem, row, column):
  """Writes 64 rows to `y_gmem[row:, column:]`, a stripe of columns at a time.

  Of the stripes that `smem` holds, one is filled while TMA reads the others.
  """
  slots, _, width = smem.shape
  for i, stripe in enumerate(stripes):
    _wait_for_slot(i, slots)
    smem[i % slots] = stripe.astype(smem.dtype)
    plgpu.commit_smem()
    columns = pl.ds(column + i * width, width)
    plgpu.copy_smem_to_gmem(smem.at[i % slots], y_gmem.at[pl.ds(row, 64), columns])


def store_some_rows(make, smem, plain_smem, y_gmem, row, begin, end, column, tiling: Tiling):
  """Writes rows `begin` to `end - 1` of the 64 that the stripes of `make()` have.

  TMA copies have a static size.
  """
  if tiling.short == "wait":
    _store_ladder(make(), plain_smem, y_gmem, row, begin, end, column, 1, one_group=False)
    return
  on_tiles = lax.rem(begin, ROW_ALIGNMENT) + lax.rem(end, ROW_ALIGNMENT) == 0

  @pl.when(on_tiles)
  def _():
    _store_ladder(make(), smem, y_gmem, row, begin, end, column, ROW_ALIGNMENT, one_group=True)

  @pl.when(~on_tiles)
  def _():
    _store_ladder(make(), plain_smem, y_gmem, row, begin, end, column, 1, one_group=True)


def _store_ladder(stripes, smem, y_gmem, row, begin, end, column, shortest, *, one_group):
  """Copies that add up to the number of rows in binary.

  With `one_group`, those of a stripe count as one copy to wait for; or else everything stops after
  each stripe until they are done.
  """
  slots, _, width = smem.shape
  slots = slots if one_group else 1
  for i, stripe in enumerate(stripes):
    _wait_for_slot(i, slots)
    smem[i % slots] = stripe.astype(smem.dtype)
    plgpu.commit_smem()
    columns = pl.ds(column + i * width, width)
    for length in (32, 16, 8, 4, 2, 1):
      if length < shortest:
        continue
      first = begin + ((end - begin) & ~(2 * length - 1))  # Longer copies wrote the rows before it.
      first = pl.multiple_of(first, shortest)

      @pl.when((end - begin) & length != 0)
      def _(i=i, first=first, length=length, columns=columns):
        plgpu.copy_smem_to_gmem(
          smem.at[i % slots, pl.ds(first, length)],
          y_gmem.at[pl.ds(pl.multiple_of(row + first, shortest), length), columns],
          commit_group=not one_group,
        )

    if one_group:
      plgpu.commit_smem_to_gmem_group()
    else:
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def for_each_tile(total, head_at, body, tiling: Tiling):
  """Calls `body(*head_at(i), step, tile)` for the tiles i of this thread block.

  `body` returns the pipeline steps of the tile; `step` and `tile` count those, and the tiles that
  have any, from the first tile on. `head_at` must take an i past the last one.
  """
  block, num_blocks = lax.axis_index("block"), tiling.num_blocks // tiling.cluster

  def visit(n, carry):
    step, tile, head = carry
    if tiling.lookahead:
      later = head_at(block + (n + 1) * num_blocks)
    else:
      head, later = head_at(block + n * num_blocks), ()
    steps = body(*head, step, tile)
    return step + steps, tile + jnp.minimum(steps, 1), later

  head = head_at(block) if tiling.lookahead else ()
  num_tiles = lax.div(total - block + num_blocks - 1, num_blocks)
  lax.fori_loop(0, num_tiles, visit, (jnp.int32(0), jnp.int32(0), head))


def for_each_of_two(totals, head_at, position, body, tiling: Tiling):
  """`for_each_tile` over two lists at once: each is dealt out evenly to the thread blocks.

  A thread block walks both in the order of `position(head)`. The second list is dealt out from
  where the first one ended.
  """
  block, num_blocks = lax.axis_index("block"), tiling.num_blocks // tiling.cluster
  starts = block, lax.rem(block + num_blocks - lax.rem(totals[0], num_blocks), num_blocks)
  heads = tuple(head_at(start, which) for which, start in enumerate(starts))
  counts = [
    lax.div(n - s + num_blocks - 1, num_blocks) for n, s in zip(totals, starts, strict=True)
  ]

  def visit(_, carry):
    step, tile, indices, heads = carry
    earlier = position(heads[1]) < position(heads[0])
    second = (indices[0] >= totals[0]) | ((indices[1] < totals[1]) & earlier)
    pick = lambda a, b: jnp.where(second, b, a)
    head = tuple(pick(a, b) for a, b in zip(*heads, strict=True))
    index = pick(*indices) + num_blocks
    later = tuple(pick(a, b) for a, b in zip(head_at(index, 0), head_at(index, 1), strict=True))
    steps = body(*head, step, tile)
    heads = tuple(
      tuple(jnp.where(second == which, new, old) for new, old in zip(later, heads[w], strict=True))
      for w, which in enumerate((False, True))
    )
    indices = jnp.where(second, indices[0], index), jnp.where(second, index, indices[1])
    return step + steps, tile + jnp.minimum(steps, 1), indices, heads

  carry = (jnp.int32(0), jnp.int32(0), starts, heads)
  lax.fori_loop(0, counts[0] + counts[1], visit, carry)


def load_tiles(lhs, rhs, slot, lhs_smem, rhs_smem, ready, tiling: Tiling):
  """Loads one stage. What a cluster shares, each of its thread blocks loads a half of for both."""
  shared = lambda name: "cluster" if tiling.share == name else None
  plgpu.copy_gmem_to_smem(lhs, lhs_smem.at[slot], ready.at[slot], collective_axes=shared("lhs"))
  plgpu.copy_gmem_to_smem(rhs, rhs_smem.at[slot], ready.at[slot], collective_axes=shared("rhs"))


class Reader:
  """The side of the ring of one multiplying warpgroup, in one tile.

  Attributes:
    wg: 0 or 1.
    steps: pipeline steps of this tile.
    step: of all tiles before it.
    tile: how many tiles with steps came before it.
  """

  def __init__(self, barriers, wg: int, steps, step, tile, tiling: Tiling):
    self.ready, self.free, *lead = barriers
    self.lead = lead[0] if lead else None
    self.wg, self.steps, self.step, self.tile, self.tiling = wg, steps, step, tile, tiling

  def _slot(self, k):
    return lax.rem(self.step + k, self.tiling.stages)

  def _turn(self):
    return self.lead.at[lax.rem(self.tile, lead_barriers(self.tiling))]

  def start(self):
    """Lets warpgroup 0 be some steps ahead, so that they do not come to their stores together."""
    if self.lead is not None and self.wg == 1:

      @pl.when(self.steps > 0)
      def _():
        plgpu.barrier_wait(self._turn())

  def _signal(self, k):
    if self.lead is not None and self.wg == 0:

      @pl.when(k == jnp.minimum(self.tiling.lead, self.steps) - 1)
      def _():
        plgpu.barrier_arrive(self._turn())

  def multiply(self, shape, operands):
    """The sum over the steps of `a @ b`, where `(a, b) = operands(slot, k)`: float32 registers."""

    def accumulate(acc):
      @pl.loop(0, self.steps)
      def _(k):
        slot = self._slot(k)
        plgpu.barrier_wait(self.ready.at[slot])
        self._signal(k)  # Before `operands`, in which one warpgroup may wait for the other.
        plgpu.wgmma(acc, *operands(slot, k))
        plgpu.wgmma_wait(1)  # The one before has read its stage.

        @pl.when(k > 0)
        def _():
          plgpu.barrier_arrive(self.free.at[self._slot(k - 1)])

      return acc[...]

    y = pl.run_scoped(accumulate, plgpu.ACC(shape))

    @pl.when(self.steps > 0)
    def _():
      plgpu.barrier_arrive(self.free.at[self._slot(self.steps - 1)])

    return y

  def skip(self):
    """Passes the stages on unread."""

    @pl.loop(0, self.steps)
    def _(k):
      slot = self._slot(k)
      plgpu.barrier_wait(self.ready.at[slot])
      if self.tiling.share:
        # One thread arrives at a cluster barrier for its warpgroup: first, all must have seen
        # `ready`, which may be two phases on by the time that a late one looks.
        plgpu.commit_smem()
      plgpu.barrier_arrive(self.free.at[slot])
      self._signal(k)


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


def lead_barriers(tiling: Tiling) -> int:
  """Warpgroup 0 is at most `stages` steps ahead, so fewer tiles than this."""
  return tiling.stages + 2


def ring(tiling: Tiling):
  """The barriers: `ready[s]`: stage s is loaded; `free[s]`: all its readers have read it.

  With a lead, a third one: warpgroup 0 is ahead far enough.
  """
  ready = plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages)
  readers = dict(num_arrivals=WARPGROUPS, num_barriers=tiling.stages)
  if tiling.share:  # A shared tile is written into both thread blocks of the cluster.
    free = plgpu.ClusterBarrier(collective_axes=("cluster",), **readers)
  else:
    free = plgpu.Barrier(**readers)
  lead = [plgpu.Barrier(num_barriers=lead_barriers(tiling))] if tiling.lead else []
  return [ready, free, *lead]


def launch(body, out_type, scratch, tiling: Tiling, interpret):
  """`plgpu.kernel` over the persistent grid."""
  cluster = dict(cluster=(tiling.cluster,), cluster_names=("cluster",)) if tiling.share else {}
  return plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=scratch,
    grid=(tiling.num_blocks // tiling.cluster,),
    grid_names=("block",),
    num_threads=WARPGROUPS + 1,
    thread_name="warpgroup",
    interpret=interpret,
    **cluster,
  )
