"""Weights in MXFP4: four bits each, with a power of two for each 32 (OCP Microscaling Formats 1.0).

Letters: E experts, N outputs, G groups of inputs, B bytes of a group, D = 32 G inputs.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from ats_jax.bridge.family import Values
from ats_jax.bridge.safetensors_file import Stored
from ats_jax.config.schema import Config

METHOD = "mxfp4"  # `quant_method` of a config.json
BLOCKS = "_blocks"  # suffixes of the two tensors of a weight
SCALES = "_scales"
GROUP_BYTES = 16
BIAS = 127  # of a scale's exponent
MOST = 252  # 6 times a higher scale is more than bfloat16 holds; 255 stands for NaN
_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_SIGNED = np.concatenate([_VALUES, -_VALUES])
# The first and the second value of each byte.
_LOW, _HIGH = np.tile(_SIGNED, 16), np.repeat(_SIGNED, 16)


def dequantise(blocks_NGB: np.ndarray, scales_NG: np.ndarray) -> np.ndarray:
  """Float32 [D, N], exact."""
  scale_GN = np.ldexp(np.float32(1), scales_NG.T.astype(np.int32) - BIAS)
  bytes_GBN = np.ascontiguousarray(np.moveaxis(blocks_NGB, 0, -1))  # four bits move, not 32
  values_GB2N = np.stack([_LOW.take(bytes_GBN), _HIGH.take(bytes_GBN)], axis=2)
  values_GB2N *= scale_GN[:, None, None]
  return values_GB2N.reshape(-1, blocks_NGB.shape[0])


@dataclasses.dataclass(frozen=True)
class Mxfp4Weight:
  """A weight [E, D, N] of bfloat16 that a folder holds as two tensors in MXFP4.

  It has the interface of `Stored`, so that the rest of an import does not know the format.

  Attributes:
    blocks: uint8 [E, N, G, B], two values a byte.
    scales: uint8 [E, N, G], the exponent of each group.
  """

  blocks: Stored
  scales: Stored

  @property
  def path(self) -> Path:
    """The file that holds the blocks."""
    return self.blocks.path

  @property
  def dtype(self) -> str:
    """The dtype of what `read` returns, which holds all values exactly."""
    return "BF16"

  @property
  def shape(self) -> tuple[int, ...]:
    """[experts, inputs, outputs], as `read` returns it."""
    experts, outputs, groups, _ = self.blocks.shape
    return experts, 2 * GROUP_BYTES * groups, outputs

  @property
  def nbytes(self) -> int:
    """Bytes of both tensors in their files."""
    return self.blocks.nbytes + self.scales.nbytes

  def read(self) -> np.ndarray:
    """Read and dequantise both tensors into an array of bfloat16 [E, D, N].

    Besides the result, one expert at a time is in memory in float32.

    Raises:
      ValueError: for a scale that no weight in MXFP4 has.
    """
    blocks_ENGB, scales_ENG = self.blocks.read(), self.scales.read()
    if (most := int(np.max(scales_ENG, initial=0))) > MOST:
      raise ValueError(
        f"{self.scales.path}: a scale of MXFP4 is {most}, expected at most {MOST}. Copy it again."
      )
    weights = np.empty(self.shape, ml_dtypes.bfloat16)
    for weight_DN, blocks_NGB, scales_NG in zip(weights, blocks_ENGB, scales_ENG, strict=True):
      weight_DN[...] = dequantise(blocks_NGB, scales_NG)
    return weights


def joined(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
  """The tensors of a folder by name, an `Mxfp4Weight` in place of each pair of blocks and scales.

  Raises:
    ValueError: naming a tensor that is missing or is none of a pair.
  """
  weights = dict(tensors)
  for name in tensors:
    stem = name.removesuffix(BLOCKS)
    if stem == name:
      continue
    blocks, scales = weights.pop(name), weights.pop(stem + SCALES, None)
    if scales is None:
      raise ValueError(f"{blocks.path} holds {name}, and no file holds {stem + SCALES}.")
    for tensor, stored in ((name, blocks), (stem + SCALES, scales)):
      if stored.dtype != "U8":
        raise ValueError(f"{stored.path}: tensor {tensor} is in {stored.dtype}, MXFP4 is in U8.")
    if len(blocks.shape) != 4 or blocks.shape != (*scales.shape, GROUP_BYTES):
      raise ValueError(
        f"{blocks.path}: tensor {name} is {list(blocks.shape)}, and its scales are "
        f"{list(scales.shape)}; expected [experts, outputs, groups, {GROUP_BYTES}] and the same "
        "without the last."
      )
    weights[stem] = Mxfp4Weight(blocks, scales)
  return weights


@dataclasses.dataclass(frozen=True)
class Quantised:
  """`quantization_config`: none, or MXFP4. It does not change the settings of a model."""

  keys: tuple[str, ...] = ("quantization_config",)

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    scheme = theirs.get("quantization_config")
    if scheme and scheme.get("quant_method") != METHOD:
      raise ValueError(
        f"quantization_config has quant_method {scheme.get('quant_method')!r} in config.json, and "
        f"this program reads {METHOD!r}, or weights that are not quantised."
      )
    return {}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    del cfg
    return {}
