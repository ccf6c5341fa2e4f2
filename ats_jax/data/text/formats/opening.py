"""What the suffixes of a file say of its content and its compression; opening it."""

import bz2
import gzip
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ats_jax.data.text.formats import extra

# What libraries raise for a damaged file beside OSError, by the modules that define it.
_LIBRARY_ERRORS = {
  "backports.zstd": "ZstdError",
  "compression.zstd": "ZstdError",
  "pyarrow": "ArrowException",
}
_ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


def _zstd(path: str, mode: str) -> BinaryIO:
  zstd = extra.import_extra(_ZSTD, path)
  # By default a window of more than 128 MiB is refused; `zstd --long=31` makes one of 2 GiB.
  widest = zstd.DecompressionParameter.window_log_max.bounds()[1]
  options = {zstd.DecompressionParameter.window_log_max: widest}
  return zstd.open(path, mode, options=options)


# Suffix of a compressed file -> what opens it as a stream.
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".zst": _zstd}


def open_decompressed(path: str) -> BinaryIO:
  """Open a file for reading bytes, decompressed if its name says that it is compressed.

  Raises:
    ValueError: if that needs a module that is not installed.
  """
  return OPENERS.get(Path(path).suffix.lower(), open)(path, "rb")


def suffix(path: str) -> str:
  """The suffix that says what a file holds, in small letters, without that of a compression."""
  name = Path(path).name.lower()
  compression = Path(name).suffix
  return Path(name.removesuffix(compression) if compression in OPENERS else name).suffix


def is_compressed(path: str) -> bool:
  """Whether `open_decompressed` decompresses it."""
  return Path(path).suffix.lower() in OPENERS


def errors() -> tuple[type[Exception], ...]:
  """What reading a file raises where it is damaged; for an `except`, which asks when it must."""
  modules = ((sys.modules.get(name), error) for name, error in _LIBRARY_ERRORS.items())
  loaded = (getattr(module, error) for module, error in modules if module)
  return (OSError, EOFError, zlib.error, *loaded)


def reason(error: Exception) -> str:
  """What is wrong, on one line."""
  text = getattr(error, "strerror", None) or str(error) or type(error).__name__
  return " ".join(text.split()).rstrip(".")
