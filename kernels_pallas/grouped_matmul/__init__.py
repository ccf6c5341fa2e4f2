"""Grouped matmul for dropless mixture-of-experts on Hopper, with both gradients."""

from kernels_pallas.grouped_matmul.forward import grouped_matmul, grouped_swiglu, interleave
from kernels_pallas.grouped_matmul.wgrad import align_rows, grouped_matmul_dw
from kernels_pallas.grouped_matmul.worklist import Tiling

__all__ = [
  "Tiling",
  "align_rows",
  "grouped_matmul",
  "grouped_matmul_dw",
  "grouped_swiglu",
  "interleave",
]
