"""Checks of what the kernels are called with."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_cuda import library

PACK = 8  # rows are read 16 bytes at a time


def expect(
  op: str, name: str, x: jax.Array, shape: Sequence[int | None], *dtypes: Any
) -> tuple[int, ...]:
  """Return the shape of `x`.

  Args:
    op: for the message.
    name: for the message.
    x: an argument.
    shape: expected; None = any size.
    *dtypes: allowed ones.

  Raises:
    ValueError: another shape or dtype.
  """
  fits = x.ndim == len(shape) and all(
    want is None or got == want for got, want in zip(x.shape, shape, strict=True)
  )
  if not fits or x.dtype not in [jnp.dtype(d) for d in dtypes]:
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    names = " or ".join(jnp.dtype(d).name for d in dtypes)
    raise ValueError(f"{op}: {name} is {x.dtype.name}{list(x.shape)}, expected {names}[{sizes}]")
  return x.shape


def expect_packs(op: str, width: int, most: int | None = None) -> None:
  """Check the width of rows.

  Raises:
    ValueError: not a multiple of 8 elements, or more than `most`.
  """
  if width % PACK or (most is not None and width > most):
    limit = f" and at most {most}" if most is not None else ""
    raise ValueError(f"{op}: rows have {width} elements, expected a multiple of {PACK}{limit}")


def call(name: str, out: Any, *args: jax.Array, aliases: dict | None = None, **attributes: Any):
  """Call an XLA target of the library; floats among the attributes become float32."""
  library.ensure_loaded()
  settings = {k: np.float32(v) if isinstance(v, float) else v for k, v in attributes.items()}
  return jax.ffi.ffi_call(name, out, input_output_aliases=aliases)(*args, **settings)


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
  """Shape and dtype of an array."""
  return jax.ShapeDtypeStruct(x.shape, x.dtype)
