"""Reading a file through its verdicts: what is dropped is passed over, the rest as it was left."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator

from ats_jax.config.schema.filters import Filter
from ats_jax.data.corpus import cache
from ats_jax.data.filters.judge import Judge
from ats_jax.data.text.formats.text import Piece, cut_text
from ats_jax.data.text.report import Report

LONGEST = 2**22  # characters that a document is judged by


@dataclasses.dataclass(frozen=True)
class Sieve:
  """The verdicts on the documents of one file.

  Attributes:
    folder: in the cache, with those of all files.
    filters: those of `data.filters`.
    begin: the first of this file.
    end: behind the last.
  """

  folder: cache.Folder
  filters: tuple[Filter, ...]
  begin: int
  end: int

  def passed(self, path: str, pieces: Iterator[Piece], report: Report) -> Iterator[Piece]:
    """The pieces of documents that are kept.

    Args:
      path: path of the file.
      pieces: all pieces of the file, in order.
      report: counts the dropped documents.

    Raises:
      ValueError: if the file has other documents than those that were judged.
    """
    changes = _changes(self.filters)
    for document, reason in self._judged(path, group_documents(pieces)):
      if reason:
        line = next(document).line
        report.drop(reason, f"{path}:{line}" if line else path)
      elif changes:
        yield from _changed(document, changes)
      else:
        yield from document

  def kept[T](
    self, path: str, records: Iterator[tuple[int, T]], report: Report
  ) -> Iterator[tuple[int, T]]:
    """As `passed`, of documents that come whole, each with its place in the file."""
    for (place, document), reason in self._judged(path, records):
      if reason:
        report.drop(reason, f"{path}:{place}")
      else:
        yield place, document

  def _judged[D](self, path: str, documents: Iterable[D]) -> Iterator[tuple[D, str]]:
    """Documents, and why each is dropped; "" = it is kept."""
    verdicts = self.folder.array("verdict")[self.begin : self.end].tolist()
    reasons, at = self.folder.meta["reasons"], 0
    for at, document in enumerate(documents, 1):
      if at > len(verdicts):
        break
      yield document, reasons[verdicts[at - 1]]
    if at != len(verdicts):
      raise ValueError(f"{path} has changed since it was read first. Start again.")


def group_documents(pieces: Iterable[Piece]) -> Iterator[Iterator[Piece]]:
  """Group pieces by document. A document is read to its end before the next one begins."""
  started = 0

  def number(piece: Piece) -> int:
    nonlocal started
    started += piece.starts
    return started

  for _, document in itertools.groupby(pieces, number):
    yield document


@functools.lru_cache(maxsize=4)
def _changes(filters: tuple[Filter, ...]) -> list:
  return Judge(filters).changes()


def _changed(document: Iterator[Piece], changes: list) -> Iterator[Piece]:
  """What the filters left of a document, block by block of `LONGEST` characters."""
  first = next(document)
  yield from cut_text(_left(itertools.chain([first], document), changes), first.line)


def _left(document: Iterable[Piece], changes: list) -> Iterator[str]:
  for block in blocks(document):
    for change in changes:
      block, reason = change(block)
      block = "" if reason else block  # of the first block there is none: it was judged
    yield block


def blocks(document: Iterable[Piece]) -> Iterator[str]:
  """The text of a document in blocks of whole pieces; only the last is shorter than `LONGEST`."""
  texts, chars = [], 0
  for piece in document:
    texts.append(piece.text)
    chars += len(piece.text)
    if chars >= LONGEST:
      yield "".join(texts)
      texts, chars = [], 0
  if texts:
    yield "".join(texts)
