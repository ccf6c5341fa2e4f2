"""A few of the documents that were kept and dropped, to look at."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ats_jax.data.filters.sieve import group_documents
from ats_jax.data.text.formats.text import Piece
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile, document_name

_OF_EACH = 5  # reasons and verdicts: those with the lowest keys, which are any
_CHARS = 600  # of a text


def take_samples(
  files: list[SourceFile],
  read: Callable[[SourceFile, Report], Iterator[Piece]],
  columns: Mapping[str, np.ndarray],
  verdict: np.ndarray,
  instead: np.ndarray,
  reasons: list[str],
) -> list[dict[str, Any]]:
  """Beginnings of documents, which are read again; of a duplicate also the one that was kept.

  Args:
    files: all files.
    read: reads the documents of one.
    columns: `file`, `line` and `key` of each document.
    verdict: [documents], indices of `reasons`.
    instead: [documents], which one is kept in the place of a duplicate; -1 = it is none.
    reasons: in words; "" = kept.

  Returns:
    For each sample its `reason`, `name` and `text`, and `kept` and `kept_text` of a duplicate.
  """
  chosen = [
    (number, int(document))
    for number in range(len(reasons))
    for document in _lowest(np.flatnonzero(verdict == number), columns["key"])
  ]
  others = {int(instead[document]) for _, document in chosen} - {-1}
  texts = _texts(files, read, columns["file"], sorted({d for _, d in chosen} | others))
  name = lambda d: document_name(files[int(columns["file"][d])], int(columns["line"][d]))
  samples = []
  for number, document in chosen:
    sample = {"reason": reasons[number], "name": name(document), "text": texts[document]}
    if (original := int(instead[document])) >= 0:
      sample |= {"kept": name(original), "kept_text": texts[original]}
    samples.append(sample)
  return samples


def _lowest(which: np.ndarray, keys: np.ndarray) -> np.ndarray:
  few = which[np.argpartition(keys[which], _OF_EACH)[:_OF_EACH]] if len(which) > _OF_EACH else which
  return few[np.argsort(keys[few])]


def _texts(
  files: list[SourceFile],
  read: Callable[[SourceFile, Report], Iterator[Piece]],
  file: np.ndarray,
  wanted: list[int],
) -> dict[int, str]:
  """The beginnings of these documents; a file is read as far as the last of its own."""
  texts: dict[int, str] = {}
  for number in sorted({int(file[document]) for document in wanted}):
    begin = int(np.searchsorted(file, number))
    places = {document - begin for document in wanted if file[document] == number}
    documents = group_documents(read(files[number], Report(strict=False)))
    for place, document in enumerate(documents):
      if place in places:
        texts[begin + place] = next(document).text[:_CHARS]
        if place == max(places):
          break
  return texts
