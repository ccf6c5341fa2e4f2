"""Launch Triton's kernels from JAX, by the custom call of XLA that runs a PTX program."""

import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kernels_triton.compile import Compiled, compiled
from kernels_triton.plan import Launch

TARGET = "__gpu$xla.gpu.ptx"
ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int8": "i8"}
WARP = 32


def call(
  launch: Launch,
  inputs: Mapping[str, jax.Array],
  outputs: Mapping[str, jax.ShapeDtypeStruct],
  in_place: Mapping[str, str] = {},
) -> tuple[jax.Array, ...]:
  """Run a kernel on arrays of one device.

  Args:
    launch: which kernel, and how.
    inputs: its first arguments by name, in order.
    outputs: the arguments behind them, which it writes.
    in_place: output -> the input that it is, but for what the kernel writes.

  Returns:
    The outputs.

  Raises:
    NoProgramError: as `compile.compiled`.
  """
  arrays = {name: ELEMENTS[str(a.dtype)] for name, a in {**inputs, **outputs}.items()}
  made = compiled(launch, arrays)
  # What Triton adds behind the arguments is scratch memory, which these kernels do not use.
  unread = [jax.ShapeDtypeStruct((16,), jnp.uint8)] * (made.parameters - len(arrays))
  run = jax.ffi.ffi_call(
    TARGET,
    [*outputs.values(), *unread],
    custom_call_api_version=1,
    legacy_backend_config=backend_config(launch, made, len(inputs)),
    input_output_aliases={
      list(inputs).index(of): list(outputs).index(name) for name, of in in_place.items()
    },
  )
  return tuple(run(*inputs.values())[: len(outputs)])


def backend_config(launch: Launch, made: Compiled, first_output: int) -> str:
  """A dictionary as MLIR spells it; the strings of JSON are among those of MLIR."""
  outputs = list(range(first_output, made.parameters))
  grid_x, grid_y = launch.grid(made.tile.blocks)
  return (
    f'{{name = {json.dumps(made.name)}, kernel_type = "ptx", kernel_data = {json.dumps(made.ptx)}'
    f", grid_x = {grid_x}, grid_y = {grid_y}, grid_z = 1"
    f", block_x = {made.tile.num_warps * WARP}, block_y = 1, block_z = 1"
    f", shared_mem_bytes = {made.shared}, output_indices = {outputs}}}"
  )
