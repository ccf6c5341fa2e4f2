"""Weights from JAX and back: by the names of checkpoints, by files, and without a copy.

Ours are [*inputs, *outputs] there, with heads in a dimension of their own; matrices here are
[outputs, inputs]. A view of the same memory is enough for that, both ways.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ats_jax.bridge.pytorch.decoder import Decoder

# Weights of more dimensions than two in a checkpoint: of these so many are inputs.
INPUT_DIMENSIONS = {"out": 2}
IN_ORDER = ("embed", "head")  # ours are [vocab, d_model] too


def checkpoint_names(model: nn.Module) -> dict[str, str]:
  """What a checkpoint of JAX calls each tensor of a model: "layers/0/attn/q" of its weight."""
  names = {name: name.replace(".", "/") for name in model.state_dict()}
  within = Counter(name.rpartition("/")[0] for name in names.values())
  alone = lambda name: name.endswith("/weight") and within[name.removesuffix("/weight")] == 1
  return {n: o.removesuffix("/weight") if alone(o) else o for n, o in names.items()}


def put(model: nn.Module, arrays: Mapping[str, Any], *, share: bool = False) -> None:
  """Give a model the weights and buffers of JAX.

  Args:
    model: a `Decoder`; its tensors are replaced.
    arrays: by the names of a checkpoint: jax arrays, or what else speaks DLPack.
    share: use their memory where a device and dtype allow it. Such weights are to be read, not
      trained: jax takes its arrays for constants. False = a copy.

  Raises:
    ValueError: if an array is missing, is left over or has another shape.
  """
  names = checkpoint_names(model)
  if wrong := set(names.values()) ^ set(arrays):
    raise ValueError(f"these arrays are on one side only: {', '.join(sorted(wrong)[:5])}.")
  for name, ours in names.items():
    holder, leaf = _holder(model, name)
    old = getattr(holder, leaf)
    new = _theirs(name, torch.from_dlpack(arrays[ours]), len(old.shape))
    if new.shape != old.shape:
      raise ValueError(f"{ours} is {list(new.shape)}, and the model has {list(old.shape)}.")
    if share:
      trained = isinstance(old, nn.Parameter)
      setattr(holder, leaf, nn.Parameter(new, requires_grad=False) if trained else new)
    else:
      with torch.no_grad():
        old.copy_(new)


def get(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
  """The weights and buffers of a model as checkpoints have them, by name; views of its memory.

  Args:
    model: a `Decoder`.
    shapes: of the arrays of the checkpoint, by name.
  """
  state = model.state_dict()
  return {
    ours: as_ours(name, state[name], shapes[ours])
    for name, ours in checkpoint_names(model).items()
  }


def as_ours(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
  """A tensor of a model, or a moment of one, as it stands in a checkpoint."""
  return (tensor.T if _is_turned(name, tensor.dim()) else tensor).reshape(shape)


def as_theirs(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
  """The inverse of `as_ours`."""
  return _theirs(name, tensor, len(shape)).reshape(shape)


def _is_turned(name: str, dimensions: int) -> bool:
  return dimensions == 2 and name.split(".")[-2] not in IN_ORDER and _is_matrix(name)


def _is_matrix(name: str) -> bool:
  return name.endswith((".weight", "predict_in"))


def _theirs(name: str, ours: Tensor, dimensions: int) -> Tensor:
  """An array of ours as a tensor of `dimensions`; a view."""
  if not _is_turned(name, dimensions):
    return ours.flatten() if dimensions == 1 else ours
  inputs = INPUT_DIMENSIONS.get(name.split(".")[-2], 1) if ours.dim() > 2 else 1
  return ours.reshape(math.prod(ours.shape[:inputs]), -1).T


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
  path, _, leaf = name.rpartition(".")
  return model.get_submodule(path), leaf


def load(model: Decoder, path: str | os.PathLike[str]) -> None:
  """Read the weights of an export, `bridge export --family=ats_jax`.

  Raises:
    RuntimeError: naming the tensors that are missing or left over.
  """
  model.load_state_dict(safetensors.torch.load_file(path))


def save(model: Decoder, path: str | os.PathLike[str]) -> None:
  """Write a file that `load` reads, and `bridge import` beside its config.json."""
  tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
  safetensors.torch.save_file(tensors, path, {"format": "pt"})
