"""Weights from JAX and back: by the names of checkpoints, by files, and without a copy.

Ours are [*inputs, *outputs] there, with heads in a dimension of their own; matrices here are
[outputs, inputs]. A view of the same memory is enough for that, both ways.
"""

import math
import os
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ats_jax.pytorch.decoder import Decoder

# Of matrices with more than two dimensions in a checkpoint, how many are inputs; of others one.
INPUT_DIMENSIONS = {"out": 2}
OUTER = "model."  # in front of names in a file: where `hf` keeps the decoder
IN_ORDER = ("embed", "head")  # ours are [vocab, d_model] too


def put(model: nn.Module, arrays: Mapping[str, Any], *, share: bool = False) -> None:
  """Give a model the weights and buffers of JAX.

  Args:
    model: a `Decoder`; its tensors are replaced.
    arrays: by the names of a checkpoint: tensors, jax arrays, or what else speaks DLPack.
    share: use their memory, on whatever device it is. Such weights are to be read, not trained: jax
      takes its arrays for constants. False = a copy.

  Raises:
    ValueError: if an array is missing, is left over or has another shape.
  """
  left = dict(model.state_dict())
  for ours, array in arrays.items():
    name = their_name(ours, left)
    old = left.pop(name)
    tensor = array if isinstance(array, Tensor) else torch.from_dlpack(array)
    new = as_theirs(name, tensor, old.dim())
    if new.shape != old.shape:
      raise ValueError(f"{ours} is {list(new.shape)}, and the model has {list(old.shape)}.")
    if share:
      path, _, leaf = name.rpartition(".")
      is_buffer = leaf in dict(model.get_submodule(path).named_buffers(recurse=False))
      value = new if is_buffer else nn.Parameter(new, requires_grad=False)
      setattr(model.get_submodule(path), leaf, value)
    else:
      with torch.no_grad():
        old.copy_(new)
  if left:
    raise ValueError(f"these tensors have no array: {', '.join(sorted(left)[:5])}.")


def their_name(ours: str, known: Mapping[str, Any]) -> str:
  """The tensor that a checkpoint calls `ours`: it leaves out the name of a module's only array.

  Raises:
    ValueError: if there is none.
  """
  name = ours.replace("/", ".")
  for candidate in (name, f"{name}.weight"):
    if candidate in known:
      return candidate
  raise ValueError(f"the model has no {ours}.")


def as_ours(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
  """A tensor of a model, or a moment of one, as it stands in a checkpoint."""
  return (tensor.T if _is_turned(name, tensor.dim()) else tensor).reshape(shape)


def as_theirs(name: str, ours: Tensor, dimensions: int) -> Tensor:
  """The inverse of `as_ours`: a view with so many dimensions."""
  if not _is_turned(name, dimensions):
    return ours.flatten() if dimensions == 1 else ours
  inputs = INPUT_DIMENSIONS.get(name.split(".")[-2], 1) if ours.dim() > 2 else 1
  return ours.reshape(math.prod(ours.shape[:inputs]), -1).T


def _is_turned(name: str, dimensions: int) -> bool:
  is_matrix = dimensions == 2 and name.endswith((".weight", "predict_in"))
  return is_matrix and name.split(".")[-2] not in IN_ORDER


def load(model: Decoder, path: str | os.PathLike[str]) -> None:
  """Read the weights of an export, `bridge export --family=ats_jax`.

  Raises:
    RuntimeError: naming the tensors that are missing or left over.
  """
  tensors = safetensors.torch.load_file(path)
  model.load_state_dict({n.removeprefix(OUTER): tensor for n, tensor in tensors.items()})


def save(model: Decoder, path: str | os.PathLike[str]) -> None:
  """Write a file that `load` reads, and `bridge import` beside its config.json."""
  tensors = {OUTER + name: tensor.contiguous() for name, tensor in model.state_dict().items()}
  safetensors.torch.save_file(tensors, path, {"format": "pt"})
