"""Documents -> rows of a fixed length, as a plan: which part of which document goes where."""

from array import array
from typing import NamedTuple

import numpy as np

_WINDOW = 1024  # rows that first_fit keeps open


class Layout(NamedTuple):
  """Rows as lists of pieces; all arrays are int64.

  A document of n text tokens has n + 1 positions: inputs [bos, t_0 .. t_n-1], targets
  [t_0 .. t_n-1, eos]. A piece is a run of them. Row i holds pieces [first[i], first[i + 1]), each
  behind its context: as many of the document's positions before it as `data.overlap` asks for.

  Attributes:
    document: [pieces] index of the piece's document.
    begin: [pieces] its first position in the document.
    length: [pieces] how many positions.
    first: [rows + 1].
  """

  document: np.ndarray
  begin: np.ndarray
  length: np.ndarray
  first: np.ndarray


def make_layout(
  lengths: np.ndarray,
  order: np.ndarray,
  *,
  seq_len: int,
  packing: str,
  max_segments: int,
  overlap: int = 0,
) -> Layout:
  """Groups documents into rows.

  Args:
    lengths: [documents] positions of each (text tokens + 1).
    order: a permutation of the documents; they are taken in this order.
    seq_len: positions in a row.
    packing: 'concat' cuts the stream of documents at row ends. The others cut only documents
      longer than a row, into pieces that fill one and a rest, and place pieces whole: 'first_fit'
      in the first of 1024 open rows with room; 'best_fit' longest piece first, in the row with the
      least room that is enough (Ding et al. 2024, "Fewer Truncations").
    max_segments: pieces in a row at most.
    overlap: positions before a piece, as far as its document has them, that its row has room for.

  Returns:
    A plan that holds each position of each document once. Rows are numbered in the order in which
    their longest pieces come ('concat': in the order of the stream).
  """
  ordered = np.asarray(lengths, np.int64)[order]
  if packing == "concat":
    document, begin, length, first = _concat(ordered, seq_len, max_segments, overlap)
  else:
    document, begin, length = _cut(ordered, seq_len, overlap)
    place = {"first_fit": _first_fit, "best_fit": _best_fit}[packing]
    size = length + context(begin, overlap)
    document, begin, length, first = _group(
      document, begin, length, _place(size, seq_len, max_segments, place)
    )
  return Layout(np.asarray(order, np.int64)[document], begin, length, first)


def context(begin: np.ndarray | int, overlap: int) -> np.ndarray:
  """How many positions of its document stand before a piece in its row."""
  return np.minimum(begin, overlap)


def _concat(lengths: np.ndarray, seq_len: int, max_segments: int, overlap: int):
  starts = np.concatenate([[0], np.cumsum(lengths)])  # of documents in the stream, and its end
  rows = np.arange(0, starts[-1], seq_len)
  first = np.searchsorted(starts, rows, "right")
  last = np.searchsorted(starts, np.minimum(rows + seq_len, starts[-1]), "left")
  if overlap or (last - first + 1 > max_segments).any():
    rows = _short_rows(starts, seq_len, max_segments, overlap)
  cuts = np.union1d(starts[:-1], rows)
  document = np.searchsorted(starts, cuts, "right") - 1
  length = np.diff(np.append(cuts, starts[-1]))
  first = np.append(np.searchsorted(cuts, rows), len(cuts))
  return document, cuts - starts[document], length, first


def _short_rows(starts: np.ndarray, seq_len: int, max_segments: int, overlap: int) -> np.ndarray:
  """Where rows start behind their context, and end before their document max_segments + 1."""
  rows, at, end = array("q"), 0, int(starts[-1])
  while at < end:
    rows.append(at)
    document = int(np.searchsorted(starts, at, "right")) - 1
    room = seq_len - min(at - int(starts[document]), overlap)
    at = min(at + room, int(starts[min(document + max_segments, len(starts) - 1)]))
  return np.array(rows)


def _cut(lengths: np.ndarray, seq_len: int, overlap: int):
  """Pieces that fill a row with their context, and a rest."""
  overlap = min(overlap, seq_len - 1)  # no piece of a shorter row has one
  step = seq_len - overlap
  count = 1 + np.maximum(-(-(lengths - seq_len) // step), 0)
  document = np.repeat(np.arange(len(lengths)), count)
  number = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)
  begin = number * step + np.where(number > 0, overlap, 0)
  end = np.minimum(number * step + seq_len, lengths[document])
  return document, begin, end - begin


def _place(lengths: np.ndarray, seq_len: int, max_segments: int, place) -> np.ndarray:
  """[pieces] row of each piece. Whole rows need no search."""
  row = np.empty(len(lengths), np.int64)
  full = lengths == seq_len
  row[full] = np.arange(full.sum())
  row[~full] = place(lengths[~full], seq_len, max_segments) + full.sum()
  return row


def _first_fit(lengths: np.ndarray, seq_len: int, max_segments: int) -> np.ndarray:
  room = np.zeros(_WINDOW, np.int64)  # of the open rows
  open_row, segments = [0] * _WINDOW, [0] * _WINDOW
  row, rows = array("q"), 0
  for length in memoryview(lengths):
    slot = int(np.argmax(room >= length))
    if room[slot] < length:  # none has room: a new row instead of the fullest one
      slot = int(np.argmin(room))
      open_row[slot], segments[slot], room[slot] = rows, 0, seq_len
      rows += 1
    row.append(open_row[slot])
    segments[slot] += 1
    room[slot] = room[slot] - length if segments[slot] < max_segments else 0
  return np.array(row)


def _best_fit(lengths: np.ndarray, seq_len: int, max_segments: int) -> np.ndarray:
  with_room = [array("q") for _ in range(seq_len)]  # rows by the room they have
  rooms = 0  # bit r is set if with_room[r] is not empty: the best fit is one shift away
  row, segments = np.empty(len(lengths), np.int64), array("q")
  for piece in memoryview(np.argsort(-lengths, kind="stable")):
    length = int(lengths[piece])
    if fits := rooms >> length:
      room = length + (fits & -fits).bit_length() - 1
      best = with_room[room].pop()
      rooms ^= (not with_room[room]) << room
    else:
      best, room = len(segments), seq_len
      segments.append(0)
    row[piece] = best
    segments[best] += 1
    room -= length
    if room and segments[best] < max_segments:
      with_room[room].append(best)
      rooms |= 1 << room
  return row


def _group(document: np.ndarray, begin: np.ndarray, length: np.ndarray, row: np.ndarray):
  """Sorts pieces by row, and rows by when their longest piece came.

  So a row's number does not depend on its content, and any range of rows is a fair sample.
  """
  by_length = np.argsort(-length, kind="stable")
  rows, longest = np.unique(row[by_length], return_index=True)
  rank = np.empty(len(rows), np.int64)
  rank[rows[np.argsort(by_length[longest])]] = np.arange(len(rows))
  by_rank = np.argsort(rank[row], kind="stable")
  first = np.searchsorted(rank[row[by_rank]], np.arange(len(rows) + 1))
  return document[by_rank], begin[by_rank], length[by_rank], first
