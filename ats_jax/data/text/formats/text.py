"""Text: documents of any length in pieces of bounded length; plain files of it."""

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ats_jax.data.text.formats.opening import open_decompressed
from ats_jax.data.text.report import Report
from ats_jax.extensions import formats

PIECE = 2**18  # characters encoded at a time; a longer document is cut where it cannot matter
# Between words, where the usual splitting patterns (of GPT-2, GPT-4, Llama 3) never join: before a
# single space, after a single line break. The ids of the parts are those of the whole.
_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
_MARKS = re.compile(r"(?<=\n)\ufeff")
SUFFIXES = """.txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .yaml .yml .toml .ini
  .cfg .py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .kt .js .ts .go .rs .rb .php .swift .scala .hs
  .ml .jl .r .lua .pl .sh .sql .css .srt"""


class Piece(NamedTuple):
  """A part of a document of text.

  Attributes:
    line: its record in the file, from 1; 0 in a file that is one document.
    starts: whether it is the first of its document.
    text: the part.
    part: of a document that is cut for validation; each part is a document to train on or to hold
      out.
  """

  line: int
  starts: bool
  text: str
  part: int = 0


@formats.register(*SUFFIXES.split())
def text(path: str, text_field: str, report: Report) -> Iterator[Piece]:
  """One document a file, in UTF-8."""
  del text_field
  try:  # the whole file first: half a document is no document
    num_chars = sum(map(len, _decoded(path)))
  except UnicodeDecodeError as e:
    detail = f"not UTF-8 at byte {e.start} ({e.object[:1].hex()})"
    report.lost("not UTF-8", path, detail)
    return
  report.records += 1
  if not num_chars:
    report.skip("empty", path)
    return
  yield from cut_text(_decoded(path), 0)


def _decoded(path: str) -> Iterator[str]:
  """Blocks of the text, without byte order marks at its start and where another file was joined on.

  Raises UnicodeDecodeError with `start` counted in the file.
  """
  decoder = codecs.getincrementaldecoder("utf-8")()
  offset, last = 0, "\n"
  with open_decompressed(path) as f:
    while True:
      block = f.read(PIECE)
      pending = len(decoder.getstate()[0])
      try:
        text = decoder.decode(block, final=not block)
      except UnicodeDecodeError as e:
        e.object, e.start = e.object[e.start :], offset - pending + e.start
        raise
      yield _MARKS.sub("", last + text)[1:]
      last = text[-1:] or last
      if not block:
        return
      offset += len(block)


def one_document(text: str, line: int, where: str, report: Report) -> Iterator[Piece]:
  """Cut a document that is in memory into pieces; a malformed one goes to `report`.

  Args:
    text: text of the document.
    line: number of its record.
    where: that is, in words.
    report: takes an empty one, and one that has no UTF-8 form.
  """
  if not text:
    report.skip("empty", where)
    return
  try:
    text.encode()
  except UnicodeEncodeError as e:
    report.bad("lone surrogate", where, f"a lone surrogate at character {e.start} of the text")
    return
  yield from cut_text((text[i : i + PIECE] for i in range(0, len(text), PIECE)), line)


def cut_text(blocks: Iterable[str], line: int) -> Iterator[Piece]:
  """Cut the blocks of a text into pieces that end between words."""
  rest, starts = "", True
  for block in blocks:
    unseen = max(PIECE, len(rest) - 2)  # a cut shows two characters later
    rest += block
    while len(rest) > PIECE and (at := _CUT.search(rest, unseen)):
      yield Piece(line, starts, rest[: at.start()])
      rest, starts, unseen = rest[at.start() :], False, PIECE
    if len(rest) > 8 * PIECE:  # one word of two million characters: cut anywhere
      yield Piece(line, starts, rest)
      rest, starts = "", False
  if rest:
    yield Piece(line, starts, rest)
