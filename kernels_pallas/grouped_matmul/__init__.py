"""Grouped matmul for dropless mixture-of-experts on Hopper, with both gradients."""

from kernels_pallas.grouped_matmul.forward import grouped_matmul
from kernels_pallas.grouped_matmul.wgrad import grouped_matmul_dw
from kernels_pallas.grouped_matmul.worklist import Tiling

__all__ = ["Tiling", "grouped_matmul", "grouped_matmul_dw"]
