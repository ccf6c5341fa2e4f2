"""Matrices in 8 bits with a scale for each block, as DeepSeek-V3 is published: read, not written.

Beside a matrix NAME in e4m3 there is NAME_scale_inv in float32, a number for each block of rows and
columns (the last of each may be smaller) that its values are multiplied with.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ats_jax.bridge.safetensors_file import Stored

FORMAT = "F8_E4M3"  # dtype of the blocks in a file
SCALES = "_scale_inv"  # suffix of the name of their scales
KNOWN = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


@dataclasses.dataclass(frozen=True)
class Blocks:
  """A matrix with its scales; like a `Tensor` in float32.

  Attributes:
    values: in 8 bits.
    scales: the scales of the blocks.
    block: rows and columns of one.
  """

  values: Stored
  scales: Stored
  block: tuple[int, int]

  @property
  def path(self) -> Path:
    """File of the values."""
    return self.values.path

  @property
  def dtype(self) -> str:
    """What it is read as, in the words of the format."""
    return "F32"

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the matrix."""
    return self.values.shape

  @property
  def nbytes(self) -> int:
    """Bytes in the files."""
    return self.values.nbytes + self.scales.nbytes

  def read(self) -> np.ndarray:
    """Each value times the scale of its block, rounded once, to float32."""
    matrix, scales = self.values.read().astype(np.float32), self.scales.read()
    rows, columns = self.block
    for number, of_row in enumerate(scales):
      band = matrix[number * rows : (number + 1) * rows]
      band *= np.repeat(of_row, columns)[: band.shape[1]]
    return matrix


def joined(tensors: Mapping[str, Stored], fields: Mapping[str, Any]) -> dict[str, Stored]:
  """The tensors of a folder, each matrix in 8 bits together with its scales.

  Args:
    tensors: by name.
    fields: fields of config.json; `quantization_config` has the size of a block.

  Raises:
    ValueError: for another format, or scales that do not fit their matrix; it names the tensor.
  """
  config = fields.get("quantization_config")
  if not config:
    return dict(tensors)
  block = _block(config)
  weights: dict[str, Stored] = {}
  for name, tensor in tensors.items():
    if name.endswith(SCALES) and name.removesuffix(SCALES) in tensors:
      continue
    scales = tensors.get(name + SCALES)
    if tensor.dtype != FORMAT or scales is None:
      weights[name] = tensor  # one in 8 bits without scales is refused where it is needed
      continue
    counts = tuple(math.ceil(size / by) for size, by in zip(tensor.shape, block, strict=False))
    if len(tensor.shape) != 2 or scales.shape != counts or scales.dtype != "F32":
      raise ValueError(
        f"{scales.path}: tensor {name + SCALES} is {scales.dtype} {list(scales.shape)}, and "
        f"{name} {list(tensor.shape)} in blocks of {list(block)} needs F32 {list(counts)}."
      )
    weights[name] = Blocks(tensor, scales, block)
  return weights


def _block(config: Any) -> tuple[int, int]:
  """Rows and columns of a block.

  Raises:
    ValueError: for a format that is not known here.
  """
  size = config.get("weight_block_size") if isinstance(config, Mapping) else None
  match size:
    case [int() as rows, int() as columns] if rows > 0 and columns > 0:
      if all(config.get(key, value) == value for key, value in KNOWN.items()):
        return rows, columns
  raise ValueError(
    f"quantization_config is {config!r} in config.json; what is read here is fp8 in e4m3 with "
    "weight_block_size of two numbers. Save the model in bfloat16 first."
  )
