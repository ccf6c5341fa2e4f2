"""Matrices in 8 bits with a scale for each block, by the definition."""

import ml_dtypes
import numpy as np

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def quantise(matrix, block):
  """Values and scales by the definition: the largest of a block becomes the largest of e4m3."""
  rows, columns = (-(-size // by) for size, by in zip(matrix.shape, block, strict=True))
  values, scales = np.empty(matrix.shape, FP8), np.empty((rows, columns), np.float32)
  for i in range(rows):
    for j in range(columns):
      at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
      scales[i, j] = np.abs(matrix[at]).max() / 448
      values[at] = (matrix[at] / scales[i, j]).astype(FP8)
  return values, scales


def dequantised(values, scales, block):
  """Exactly, then rounded once."""
  spread = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[tuple(map(slice, values.shape))]
  return (values.astype(np.float64) * spread).astype(np.float32)
