"""What the kernels compute, in numpy and float64, one group at a time."""

import numpy as np


def grouped_matmul(x_MK, w_GKN, group_sizes, transpose_w: bool = False) -> np.ndarray:
  """`y[i] = x[i] @ w[g(i)]`; rows past the last group are zero.

  Args:
    x_MK: [M, K], rows sorted by group ([M, N] if `transpose_w`).
    w_GKN: [G, K, N].
    group_sizes: [G] integers, `sum(group_sizes) <= M`.
    transpose_w: multiply by `w[g]^T`: the input gradient, if `x_MK` is the gradient of y.

  Returns:
    float64 [M, N] ([M, K] if `transpose_w`).
  """
  x_MK, w_GKN = np.asarray(x_MK, np.float64), np.asarray(w_GKN, np.float64)
  w_GKN = w_GKN.swapaxes(1, 2) if transpose_w else w_GKN
  y_MN = np.zeros((x_MK.shape[0], w_GKN.shape[2]))
  ends = np.cumsum(group_sizes)
  for w_KN, start, end in zip(w_GKN, ends - group_sizes, ends, strict=True):
    y_MN[start:end] = x_MK[start:end] @ w_KN
  return y_MN


def grouped_matmul_dw(x_MK, dy_MN, group_sizes) -> np.ndarray:
  """`dw[g] = x_g^T @ dy_g` over the rows of group g; an empty group gives zeros.

  Args:
    x_MK: [M, K], rows sorted by group.
    dy_MN: [M, N], the gradient of y.
    group_sizes: [G] integers, `sum(group_sizes) <= M`.

  Returns:
    float64 [G, K, N].
  """
  x_MK, dy_MN = np.asarray(x_MK, np.float64), np.asarray(dy_MN, np.float64)
  ends = np.cumsum(group_sizes)
  return np.stack([x_MK[s:e].T @ dy_MN[s:e] for s, e in zip(ends - group_sizes, ends, strict=True)])
