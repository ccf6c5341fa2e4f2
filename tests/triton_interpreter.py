"""Triton's kernels on the CPU, called as from JAX: its interpreter in the place of a GPU.

Triton decides when it is imported whether kernels are interpreted. So a process of its own does it.
"""

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import numpy as np


@contextmanager
def interpreter() -> Iterator[Callable[..., Callable]]:
  """Makes, of sizes of blocks, a function like `kernels_triton.call.call` that takes these."""
  context = multiprocessing.get_context("spawn")
  with futures.ProcessPoolExecutor(1, context) as pool:
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
      pool.submit(os.getpid).result()

    def with_blocks(**blocks):
      def call(launch, inputs, outputs, in_place=None):
        def run(*arrays):
          named = {name: np.asarray(a) for name, a in zip(inputs, arrays, strict=True)}
          shapes = {name: (s.shape, np.dtype(s.dtype).name) for name, s in outputs.items()}
          own = {name: blocks[name] for name in launch.tiles[0].blocks}
          of = launch.module, launch.kernel, launch.grid(blocks), {**launch.constants, **own}
          return pool.submit(_run, *of, named, shapes, in_place or {}).result()

        return jax.pure_callback(run, tuple(outputs.values()), *inputs.values())

      return call

    yield with_blocks


def _run(
  module: str,
  name: str,
  grid: tuple,
  constants: dict,
  inputs: dict,
  outputs: dict,
  in_place: dict,
) -> tuple[Any, ...]:
  torch = importlib.import_module("torch")
  kernel = getattr(importlib.import_module(f"kernels_triton.{module}"), name)
  tensor = lambda a: (  # numpy's bfloat16 is none that torch knows
    torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16)
    if a.dtype.name == "bfloat16"
    else torch.from_numpy(a.copy())
  )
  arrays = {name: tensor(a) for name, a in inputs.items()}
  made = {n: torch.empty(shape, dtype=getattr(torch, d)) for n, (shape, d) in outputs.items()}
  made |= {name: arrays[of] for name, of in in_place.items()}
  kernel[grid](**arrays, **made, **constants)
  return tuple(a.numpy() for a in made.values())
