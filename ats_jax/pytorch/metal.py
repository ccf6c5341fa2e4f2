"""Shaders for Apple GPUs in place of PyTorch's own operations, where both are there."""

import functools
import importlib.util
import logging
import os
from types import ModuleType

import torch
from torch import Tensor

SWITCH = "ATS_METAL"  # "off" = PyTorch's own operations


@functools.cache
def shaders() -> ModuleType | None:
  """`kernels_metal.ops`, which comes with ats_jax; None where it is missing or switched off."""
  log = logging.getLogger(__name__)
  if os.environ.get(SWITCH) == "off":
    log.warning("on mps without Metal shaders: %s=off", SWITCH)
    return None
  if importlib.util.find_spec("kernels_metal") is None:
    log.warning("on mps without Metal shaders: kernels_metal is not installed; ats_jax brings it")
    return None
  log.info("on mps with Metal shaders; %s=off for PyTorch's own operations", SWITCH)
  # No import statement: loaders of remote code refuse a file that imports what is not there.
  return importlib.import_module("kernels_metal.ops")


def shaders_for(x: Tensor) -> ModuleType | None:
  """The shaders, if `x` is on an Apple GPU and nothing else makes kernels of the program."""
  if x.device.type != "mps" or torch.compiler.is_compiling():
    return None
  return shaders()
