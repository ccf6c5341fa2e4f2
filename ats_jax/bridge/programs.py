"""The forward pass of a run as a program of its own: StableHLO, a graph of PyTorch, ONNX."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from ats_jax.bridge.safetensors_file import Slot, Writer
from ats_jax.checkpoint import layout
from ats_jax.config.schema import Config
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.layout import stacks
from ats_jax.sharding.apply import reshard

OPSETS = range(18, 24)
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# Files of an exported program.
WEIGHTS = "weights.safetensors"
PROGRAM = "program.stablehlo"
ABOUT = "program.json"  # names and shapes of its arguments


def stablehlo(
  cfg: Config, model: Decoder, rules: Pass, folder: Path, *, rows: int, seq_len: int, opset: int
) -> list[str]:
  """Write a program that `jax.export.deserialize` runs without this package.

  It takes {name: array} of `weights.safetensors`, and int32 tokens [rows, seq_len], one document a
  row; it gives float32 logits.

  Args:
    cfg: the run, resolved.
    model: on one device, of implementations in XLA.
    rules: rules of sparse layers in evaluation.
    folder: exists.
    rows: number of rows of the batch.
    seq_len: positions in a row.
    opset: version of the operators of ONNX; nothing reads it here.

  Returns:
    The files.

  Raises:
    ValueError: if a kernel of this machine would be in it, or jax lacks the package to write it.
  """
  del cfg, opset
  if importlib.util.find_spec("flatbuffers") is None:
    raise ValueError(
      "--format=stablehlo needs flatbuffers, which is not installed: pip install flatbuffers"
    )
  chosen = {name for _, name in model.num.kernels.names}
  if chosen:
    raise ValueError(
      f"--format=stablehlo: {sorted(chosen)} are kernels of this machine. Set JAX_PLATFORMS=cpu, "
      "or ops.kernels to xla for each."
    )
  paths, structure = jax.tree.flatten_with_path(model)
  word = lambda path: jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
  weights = {word(path): leaf for path, leaf in paths}
  names = list(weights)

  def logits(weights: Mapping[str, jax.Array], tokens_BT: jax.Array) -> jax.Array:
    decoder = structure.unflatten([weights[name] for name in names])
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    x_BTD, _ = decoder(
      tokens_BT, positions_BT=positions_BT, segment_ids_BT=jnp.ones_like(tokens_BT), rules=rules
    )
    return reshard(decoder.logits(x_BTD), None, None, None)

  tokens = jax.ShapeDtypeStruct((rows, seq_len), jnp.int32)
  exported = jax.export.export(jax.jit(logits), platforms=PLATFORMS)(weights, tokens)
  (folder / PROGRAM).write_bytes(exported.serialize())
  arrays = {name: np.asarray(leaf) for name, leaf in sorted(weights.items())}
  slots = [Slot(name, array.dtype, array.shape) for name, array in arrays.items()]
  with Writer(folder / WEIGHTS, slots) as writer:
    for name, array in arrays.items():
      writer.write(name, array)
  about = {"tokens": [rows, seq_len], "platforms": PLATFORMS, "jax": jax.__version__}
  (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
  return [PROGRAM, WEIGHTS, ABOUT]


def torch_program(
  cfg: Config, model: Decoder, rules: Pass, folder: Path, *, rows: int, seq_len: int, opset: int
) -> list[str]:
  """Write what `torch.export.load` reads; as `stablehlo`, for rows of any number and length."""
  del rules, rows, seq_len, opset
  from ats_jax.pytorch import graph

  graph.write_program(_in_torch(cfg, model), folder / "model.pt2")
  return ["model.pt2"]


def onnx(
  cfg: Config, model: Decoder, rules: Pass, folder: Path, *, rows: int, seq_len: int, opset: int
) -> list[str]:
  """Write an ONNX file; as `torch_program`.

  Raises:
    ValueError: for an opset that is not written.
  """
  del rules, rows, seq_len
  if opset not in OPSETS:
    raise ValueError(f"--opset={opset}: {OPSETS[0]} to {OPSETS[-1]} are written.")
  from ats_jax.pytorch import graph

  graph.write_onnx(_in_torch(cfg, model), folder / "model.onnx", opset)
  return sorted(path.name for path in folder.iterdir())


FORMATS: Mapping[str, Callable[..., list[str]]] = {
  "stablehlo": stablehlo,
  "torch": torch_program,
  "onnx": onnx,
}


def _in_torch(cfg: Config, model: Decoder) -> Any:
  """The model in PyTorch, in float32 on the CPU."""
  import torch  # pyright: ignore[reportMissingImports]

  from ats_jax.pytorch import weights
  from ats_jax.pytorch.decoder import Decoder as Theirs

  leaves = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(model)]
  arrays = {}
  for name, part in layout.named_arrays(model, stacks=stacks(cfg)).items():
    stacked = leaves[part.number]
    arrays[name] = torch.tensor(stacked if part.layer is None else stacked[part.layer])
  theirs = Theirs(cfg)
  weights.put(theirs, arrays)
  return theirs
