"""Triton's kernels as PTX, compiled on first use for the GPU at hand and kept in a folder."""

import hashlib
import importlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kernels_cuda import library
from kernels_triton.plan import Launch, Tile

# Bytes of shared memory that a block may have, by compute capability (CUDA's programming guide,
# table of technical specifications).
SHARED = {"8.0": 166912, "8.7": 166912, "8.6": 101376, "8.9": 101376, "9.0": 232448}
SHARED |= {"10.0": 232448, "10.3": 232448, "12.0": 101376, "12.1": 101376}
LEAST_SHARED = 101376


class NoProgramError(library.KernelsUnavailableError, ValueError):
  """A kernel that was asked for cannot be had; the message says in one line why.

  A `ValueError`, as it is found while a run is traced, where nobody takes another implementation.
  """


class Compiled(NamedTuple):
  """A kernel that a driver can load.

  Attributes:
    name: of its entry.
    ptx: the program.
    tile: of those of the launch, the first that fits.
    shared: bytes of shared memory of a block.
    parameters: pointers that it takes; those behind its arrays are never read.
  """

  name: str
  ptx: str
  tile: Tile
  shared: int
  parameters: int


def compiled(launch: Launch, arrays: Mapping[str, str]) -> Compiled:
  """The kernel of a launch, from the folder or made now.

  Args:
    launch: which one.
    arrays: argument -> element type, as Triton spells it: "bf16", "fp32".

  Raises:
    NoProgramError: Triton is needed and not installed or fails, or no tile fits this GPU.
  """
  capability = library.newest_target()
  for tile in launch.tiles:
    made = _of_tile(launch, tile, arrays, capability)
    if made.shared <= SHARED.get(capability, LEAST_SHARED):
      return made
  raise NoProgramError(
    f"{_named(launch, arrays, capability)}: no tile fits the shared memory of this GPU; use XLA's "
    "version (ops.kernels)"
  )


def are_kept(capability: str) -> bool:
  """Whether the folder has programs for a compute capability: with them, Triton is not needed."""
  return any(library.cache_folder().glob(f"triton-{capability}-*.json"))


def _named(launch: Launch, arrays: Mapping[str, str], capability: str) -> str:
  """A kernel with the shapes and formats that it is for, and the GPU."""
  shapes = ", ".join(f"{name}={value}" for name, value in launch.constants.items())
  formats = ", ".join(sorted(set(arrays.values())))
  return f"{launch.kernel} in Triton ({shapes}; {formats}) for compute capability {capability}"


def _of_tile(launch: Launch, tile: Tile, arrays: Mapping[str, str], capability: str) -> Compiled:
  key = hashlib.sha256(Path(__file__).with_name(f"{launch.module}.py").read_bytes())
  of = [launch.kernel, tile, sorted(arrays.items()), sorted(launch.constants.items()), capability]
  key.update(json.dumps(of).encode())
  folder = library.cache_folder()
  path = folder / f"triton-{capability}-{key.hexdigest()[:24]}.json"
  if not path.exists():
    made = _compile(launch, tile, arrays, capability)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
      json.dump(made._asdict(), file)
    os.replace(file.name, path)
  fields = json.loads(path.read_text(encoding="utf-8"))
  return Compiled(**{**fields, "tile": Tile(*fields["tile"])})


def _compile(launch: Launch, tile: Tile, arrays: Mapping[str, str], capability: str) -> Compiled:
  try:
    triton = importlib.import_module("triton")
  except ImportError as e:
    raise NoProgramError(
      f"{_named(launch, arrays, capability)}: {library.cache_folder()} has no such program, and "
      "Triton is not installed: pip install triton, or use XLA's version (ops.kernels)"
    ) from e
  error = importlib.import_module("triton.errors").TritonError
  target = importlib.import_module("triton.backends.compiler").GPUTarget
  source = importlib.import_module("triton.compiler").ASTSource
  kernel = getattr(importlib.import_module(f"kernels_triton.{launch.module}"), launch.kernel)
  constants = {**launch.constants, **tile.blocks}
  place = {name: number for number, name in enumerate(kernel.arg_names)}
  try:
    made = triton.compile(
      source(
        fn=kernel,
        signature={n: f"*{arrays[n]}" if n in arrays else "constexpr" for n in kernel.arg_names},
        constexprs={(place[name],): value for name, value in constants.items()},
        # XLA's arrays begin at multiples of 16 bytes and more.
        attrs={(place[name],): [["tt.divisibility", 16]] for name in arrays},
      ),
      target=target("cuda", int(capability.replace(".", "")), 32),
      options={
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
      },
    )
  except (error, RuntimeError) as e:  # RuntimeError: a pass of its compiler
    said = getattr(e, "error_message", None) or str(e)
    last = (said.strip() or type(e).__name__).splitlines()[-1]
    raise NoProgramError(
      f"{_named(launch, arrays, capability)}: Triton {triton.__version__} cannot compile it: {last}"
    ) from e
  ptx = made.asm["ptx"]
  entry = re.search(r"\.entry\s+(\w+)\((.*?)\)", ptx, re.DOTALL)
  if entry is None:
    raise NoProgramError(
      f"{_named(launch, arrays, capability)}: the PTX of Triton {triton.__version__} has no entry"
    )
  return Compiled(entry[1], ptx, tile, made.metadata.shared, entry[2].count(".param"))
