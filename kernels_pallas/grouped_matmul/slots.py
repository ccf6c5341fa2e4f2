"""The slots of the op `grouped_matmul`: tile parameters as keywords.

Each is a function of `jax.jit` of its own: a program that calls it many times with the same shapes
has it lowered once. Pallas is imported by the first call: that takes longer than all other imports
of a run on a CPU.
"""

import functools

import jax

from kernels_pallas.grouped_matmul.worklist import Tiling


def forward(x_MD, w_EDF, sizes_E, **tiles: int):
  """`grouped_matmul`."""
  return _forward(x_MD, w_EDF, sizes_E, tiling=_tiling(tiles))


def input_gradient(gradients, weights, sizes_E, **tiles: int):
  """The same, transposed; the sum over the pairs in one kernel."""
  return _input_gradient(tuple(gradients), tuple(weights), sizes_E, tiling=_tiling(tiles))


def weight_gradient(x_MD, dy_MF, sizes_E, **tiles: int):
  """`grouped_matmul_dw`."""
  return _weight_gradient(x_MD, dy_MF, sizes_E, tiling=_tiling(tiles))


@functools.partial(jax.jit, static_argnames="tiling")
def _forward(x_MD, w_EDF, sizes_E, tiling):
  from kernels_pallas.grouped_matmul.forward import grouped_matmul

  return grouped_matmul(x_MD, w_EDF, sizes_E, tiling=tiling)


@functools.partial(jax.jit, static_argnames="tiling")
def _input_gradient(gradients, weights, sizes_E, tiling):
  from kernels_pallas.grouped_matmul.forward import grouped_matmul

  first, *more = zip(gradients, weights, strict=True)
  return grouped_matmul(*first, sizes_E, transpose_w=True, more=more, tiling=tiling)


@functools.partial(jax.jit, static_argnames="tiling")
def _weight_gradient(x_MD, dy_MF, sizes_E, tiling):
  from kernels_pallas.grouped_matmul.wgrad import grouped_matmul_dw

  return grouped_matmul_dw(x_MD, dy_MF, sizes_E, tiling=tiling)


def _tiling(tiles) -> Tiling | None:
  return Tiling(**tiles) if tiles else None
