"""The CUDA kernels compiled by the host's C++ compiler and registered for jax on the CPU."""

import contextlib
import ctypes
import functools
import os
import shutil
from pathlib import Path

import pytest

from kernels_cuda import library

SHIM = Path(__file__).parent / "cuda_on_host"
COROUTINES = Path(__file__).parent / "on_host"
ORDERS = {"forward": 0, "reverse": 1, "shuffled": 2, "one warp ahead": 3, "one block ahead": 4}


@functools.cache
def host_library() -> ctypes.CDLL:
  """Build, or find beside the kept programs, and register; skip without a C++ compiler."""
  compiler = shutil.which("g++") or shutil.which("c++")
  if compiler is None:
    pytest.skip("no C++ compiler")
  # setjmp moves between stacks here, which _FORTIFY_SOURCE would forbid.
  options = ["-O1", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE", "-x", "c++"]
  path = library.compile_shared(
    [compiler, *options, f"-I{SHIM}", f"-I{COROUTINES}"],
    environ={"XDG_CACHE_HOME": os.environ["JAX_COMPILATION_CACHE_DIR"]},
    extra=(*SHIM.iterdir(), *COROUTINES.iterdir()),
  )
  library.register(path, "cpu")
  return ctypes.CDLL(str(path))


@contextlib.contextmanager
def order(name: str):
  """Run the blocks, and the threads of each, in another order."""
  set_order = host_library().set_order
  set_order(ORDERS[name])
  try:
    yield
  finally:
    set_order(ORDERS["forward"])
