"""Programs that are compiled before there is anything to run them with.

In a block of `compiling` a `Jitted` function is compiled for its arguments, arrays or shapes, and
not run. What it returns is `Absent`, so that the code around it runs as it is. Where it is called
later with arrays of such shapes, jax has the program already.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ats_jax.checkpoint.layout import abstract_like

_compiling = contextvars.ContextVar("compiling", default=False)


class Absent(jax.ShapeDtypeStruct):
  """An array that was not computed; to the host it is zeros."""

  def __len__(self) -> int:
    """As of an array."""
    return self.shape[0]

  def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
    """Zeros."""
    return np.zeros(self.shape, self.dtype)

  def is_deleted(self) -> bool:
    """As of an array."""
    return False

  def copy_to_host_async(self) -> None:
    """As of an array."""


@contextlib.contextmanager
def compiling() -> Iterator[None]:
  """Compile what is called in the block, in this thread, and compute nothing."""
  token = _compiling.set(True)
  try:
    yield
  finally:
    _compiling.reset(token)


class Jitted[**P, R]:
  """A function that `jax.jit` compiles; in a block of `compiling` it is not run.

  Attributes:
    jitted: what `jax.jit` made of it.
  """

  def __init__(self, f: Callable[P, R], **options: Any):
    """Compile nothing yet.

    Args:
      f: the function.
      **options: of `jax.jit`.
    """
    self.jitted = jax.jit(f, **options)

  def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
    """The result, or `Absent` in place of its arrays."""
    if not _compiling.get():
      return self.jitted(*args, **kwargs)
    lowered = self.jitted.lower(*args, **kwargs)
    shardings = lowered.compile().output_shardings
    return jax.tree.map(_absent, lowered.out_info, shardings)


def eager[**P, R](f: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
  """Call a function of single operations; in a block of `compiling` nothing of it is compiled."""
  if not _compiling.get():
    return f(*args, **kwargs)
  found = abstract_like(jax.eval_shape(f, *args, **kwargs), jax.sharding.get_mesh())
  return jax.tree.map(lambda x: _absent(x, x.sharding), found)


def _absent(x: jax.ShapeDtypeStruct, sharding: Any) -> Absent:
  return Absent(x.shape, x.dtype, sharding=sharding)
