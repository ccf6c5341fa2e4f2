"""Files of token ids, which are memory-mapped where they are."""

import os
import tokenize
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ats_jax.data.text.formats.text import Piece
from ats_jax.data.text.report import Report
from ats_jax.extensions import formats

SUFFIXES = (".bin", ".npy")
# Shards of llm.c, and of modded-nanogpt after it, begin with 256 numbers: a magic one, a version,
# and how many ids follow. The first two say of which type they are.
_HEADER_OF_LLM_C = 1024  # bytes
_DTYPES_OF_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
# What numpy makes of the header of a damaged file, beside a ValueError.
_BAD_HEADERS = (
  ValueError, TypeError, SyntaxError, tokenize.TokenError, OverflowError, EOFError, MemoryError,
  RecursionError, LookupError, AttributeError,
)  # fmt: skip


@formats.register(*SUFFIXES)
def tokens(path: str, text_field: str, report: Report) -> Iterator[Piece]:
  """Ids, which `token_documents` reads: there is no text."""
  del path, text_field, report
  yield from ()


def token_array(path: str, vocab_size: int) -> np.ndarray:
  """The ids of a .bin or .npy file as a 1-D memory-mapped array.

  Raises:
    ValueError: if the file does not hold a 1-D array of integers.
  """
  try:
    if Path(path).suffix.lower() == ".npy":
      array = np.lib.format.open_memmap(path, "r")
      if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
          f"expected a 1-D array of integers, got {array.dtype} of shape {array.shape}."
        )
      return array.view(np.ndarray)
    size = os.path.getsize(path)
    dtype, skipped = token_dtype(vocab_size), 0
    header = np.fromfile(path, "<i4", 3).tolist()
    if kind := _DTYPES_OF_LLM_C.get(tuple(header[:2])):
      dtype, skipped = np.dtype(kind), _HEADER_OF_LLM_C
      if len(header) < 3 or size != skipped + header[2] * dtype.itemsize:
        raise ValueError(
          f"{size:,} bytes, and its header, which is one of llm.c, says {header[2:]} ids of "
          f"{dtype}. Copy the file again."
        )
    if size % dtype.itemsize:
      raise ValueError(
        f"{size} bytes is no whole number of {dtype} ids "
        f"(the dtype follows from the tokenizer's {vocab_size} ids)."
      )
    if size == skipped:
      return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", offset=skipped).view(np.ndarray)
  except OSError as e:
    raise ValueError(f"{path}: cannot be read ({e.strerror}).") from e
  except _BAD_HEADERS as e:
    raise ValueError(f"{path}: {' '.join(str(e).split())}") from e


def token_dtype(vocab_size: int) -> np.dtype:
  """uint16 if every id fits, else uint32."""
  return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def token_documents(
  path: str, *, vocab_size: int, bos_id: int, eos_id: int, report: Report, chunk: int = 2**24
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Where the documents of a token file are.

  A document ends before each eos (and at the end of the file); a bos before it is not part of it.

  Returns:
    line: each document's number in the file from 1, counting empty ones.
    start: of its first token.
    length: its tokens, eos not counted. All int64; documents without a token are left out.

  Raises:
    ValueError: if an id is outside the vocabulary, with the file, the position and the id.
  """
  ids = token_array(path, vocab_size)
  ends = []
  for at in range(0, len(ids), chunk):
    part = ids[at : at + chunk]
    outside = (part >= vocab_size) | (part < 0)
    if outside.any():
      first = int(outside.argmax())
      raise ValueError(
        f"{path}: id {int(part[first])} at position {at + first} is outside the vocabulary "
        f"[0, {vocab_size}). Set data.tokenizer to the one the file was made with."
      )
    ends.append(np.flatnonzero(part == eos_id) + at)
  if not len(ids):
    report.records += 1
    report.skip("empty", path)
  if len(ids) and ids[-1] != eos_id:
    ends.append(np.array([len(ids)]))
  end = np.concatenate(ends) if ends else np.empty(0, np.int64)
  start = np.concatenate([[0], end[:-1] + 1])[: len(end)]
  if bos_id != eos_id and len(ids):
    start += (ids[np.minimum(start, len(ids) - 1)] == bos_id) & (start < end)
  line = np.arange(1, len(end) + 1)
  report.records += len(line)
  full = start < end
  report.documents += int(full.sum())
  for number in line[~full]:
    report.skip("empty", f"{path}#{number}")
  return line[full], start[full].astype(np.int64), (end - start)[full].astype(np.int64)
