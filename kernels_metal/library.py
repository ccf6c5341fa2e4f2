"""The compiled shaders of one element type."""

import functools
from pathlib import Path
from typing import Any

import torch

ELEMENTS = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
FILES = ("rms_norm", "rope", "swiglu", "routing")


def _sources_folder() -> Path:
  """`csrc/` beside this file, or where a wheel puts it: in the data folder of ats_jax."""
  folder = Path(__file__).parent
  beside = folder / "csrc"
  return beside if beside.is_dir() else folder.parent / "ats_jax" / "_data" / folder.name


SOURCES = _sources_folder()


def source(dtype: torch.dtype) -> str:
  """All shaders in one text, for elements of `dtype`.

  Raises:
    ValueError: if there are none for it.
  """
  if dtype not in ELEMENTS:
    raise ValueError(f"the Metal kernels take {', '.join(map(str, ELEMENTS))}, not {dtype}.")
  common, *others = ((SOURCES / f"{name}.metal").read_text() for name in ("common", *FILES))
  return "\n".join([common, f"using Element = {ELEMENTS[dtype]};", *others])


@functools.cache
def shaders(dtype: torch.dtype) -> Any:
  """The shaders for elements of `dtype`, compiled when first asked for.

  bfloat16 needs macOS 14.

  Raises:
    ValueError: if there are none for it.
    RuntimeError: if this PyTorch has no Metal, or Apple's compiler refuses them.
  """
  try:
    return torch.mps.compile_shader(source(dtype))
  except RuntimeError as e:
    raise RuntimeError(f"{e}\nATS_METAL=off runs PyTorch's own operations instead.") from e
