"""Training rows of a text that is tokenised while it is read (`data.reading`)."""

import bisect
import dataclasses
import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.reading import Streaming
from ats_jax.data.corpus import cache
from ats_jax.data.corpus.corpus import nothing_left
from ats_jax.data.rows.contract import Info, Progress, TrainRows
from ats_jax.data.rows.packed import Packed, read_rows
from ats_jax.data.rows.windows import TextPosition, Window, Windows
from ats_jax.data.splits import TextFiles, given_tokenizer
from ats_jax.data.text import remote
from ats_jax.data.text.formats import opening
from ats_jax.data.text.holdout import Split
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import find_files, name_hash
from ats_jax.data.text_format import format_of
from ats_jax.data.tokens.tokenizer import Tokenizer, build_tokenizer
from ats_jax.extensions import formats
from ats_jax.store.paths import is_remote

AHEAD = 2  # windows made before they are asked for
_FIGURES = "first.json"
_ENDS = 2**16  # bytes of a file's beginning and of its end that are hashed


class Visit(NamedTuple):
  """A window in the order of a run, which comes to it once an epoch.

  Attributes:
    row: the first row of the run that is in it.
    epoch: number of the pass over the input, from 0.
    number: number of the window in the input, from 0.
  """

  row: int = 0
  epoch: int = 0
  number: int = 0


class Figures(NamedTuple):
  """Of a window; see `Info`."""

  num_rows: int
  num_tokens: int
  num_documents: int
  bytes_per_token: float
  ids_used: int


class Stream(TrainRows):
  """Rows of windows, one window after the other.

  The rows of a window come in an order of their own in each epoch. So row r is a pure function of
  the fingerprint, the seed and r; it is found from the sizes of the windows before it, or from the
  beginning of a window that a checkpoint names.

  Attributes:
    info: facts about the first window, as those of the whole text are not known.
  """

  def __init__(
    self,
    windows: Windows,
    tokenizer: Tokenizer,
    first: Figures,
    *,
    fingerprint: str,
    seq_len: int,
    size: int,
    visits: Sequence[Visit] = (Visit(),),
  ):
    """Begin at the first window.

    Args:
      windows: the windows of the input.
      tokenizer: the tokenizer of the ids.
      first: of the first window.
      fingerprint: names the content of every row.
      seq_len: positions in a row.
      size: bytes of the input.
      visits: of windows whose first row is known.
    """
    info = Info(tokenizer, seq_len, fingerprint=fingerprint, is_complete=False, **first._asdict())
    self.info = dataclasses.replace(
      info,
      summary=(
        f"a stream of {len(windows.files):,} files, {size / 1e6:,.1f} MB; its first window: "
        f"{info.in_words()}"
      ),
    )
    self._windows, self._figures, self._size = windows, first, size
    self._visits = sorted(visits)
    self._guard = threading.Lock()  # of the list, to which threads append

  def __reduce__(self):
    info = self.info
    make = functools.partial(
      Stream, fingerprint=info.fingerprint, seq_len=info.seq_len, size=self._size,
      visits=self._visits,
    )  # fmt: skip
    return make, (self._windows, info.tokenizer, self._figures)

  def visit(self, row: int) -> Visit:
    """In which window row `row` of the run is."""
    at = self._visits[bisect.bisect_right(self._visits, (row, row, row)) - 1]
    while row >= at.row + (window := self._windows.window(at.number)).rows:
      at = _next_visit(at, window)
      with self._guard:
        if at.row > self._visits[-1].row:
          self._visits.append(at)
    return at

  def read_once(self, rows: np.ndarray | range) -> dict[str, np.ndarray]:
    """Return rows of the first window, by number."""
    return self._windows.dataset(0).read_once(rows)

  def read(self, rows: np.ndarray | range) -> dict[str, np.ndarray]:
    """Return the rows of a run with these numbers, as arrays [*rows.shape, seq_len]."""
    rows = np.asarray(rows)
    return read_rows([self._place(int(row)) for row in rows.flat], rows.shape)

  def documents(self, row: int) -> tuple[str, ...]:
    """Return the names of the documents in row `row` of a run."""
    packed, row_index = self._place(row)
    return packed.document_names(row_index)

  def progress(self, row: int, since: int | None = None) -> Progress:
    """Return the progress at `row`, of unknown epochs. Epochs after the first are news."""
    news = []
    if since is not None and row > since:
      epoch = self.visit(row - 1).epoch
      if epoch > self.visit(max(0, since - 1)).epoch:
        news = [f"all of its text has been read; its epoch {epoch + 1:,} begins"]
    return Progress(None, news=news)

  def position(self, row: int) -> dict[str, Any]:
    """Return what a checkpoint keeps at `row`, with the window that another machine begins at."""
    at = self.visit(row)
    return {**super().position(row), "window": [*at, *self._windows.begin(at.number)]}

  def row_of(self, position: Mapping[str, Any]) -> int:
    """Return the first row that a run at `position` has not read.

    Raises:
      ValueError: also if the input changed.
    """
    begin = super().row_of(position)
    row, epoch, number, *of_text = position["window"]
    self._windows.begins(number, TextPosition(*of_text))
    with self._guard:
      if (at := Visit(row, epoch, number)) not in self._visits:
        bisect.insort(self._visits, at)
    return begin

  def prepare(self, row: int, going: Callable[[], bool]) -> Iterator[None]:
    """Prepare the windows from `row` on, one for each element that is asked for."""
    for ahead in range(AHEAD + 1):
      at = self.visit(row)
      for _ in range(ahead):
        at = _next_visit(at, self._windows.window(at.number))
      self._windows.make(at.number, going)
      yield

  def _place(self, row: int) -> tuple[Packed, int]:
    """The window that row `row` of the run is in, and which of its rows that is."""
    at = self.visit(row)
    dataset = self._windows.dataset(at.number)
    row_index = dataset.row_index(at.epoch * dataset.info.num_rows + row - at.row)
    return dataset.packed, row_index


def _next_visit(at: Visit, window: Window) -> Visit:
  """What comes after a visit of that window."""
  ends = window.end is None
  return Visit(at.row + window.rows, at.epoch + ends, 0 if ends else at.number + 1)


def open_stream(cfg: DataConfig, seed: int, tokenizer: Tokenizer | None = None) -> Stream:
  """The rows of `cfg.paths`, which are tokenised as they are read.

  Args:
    cfg: as for `open_datasets`.
    seed: seed of the order of documents and rows.
    tokenizer: the tokenizer to use in place of `cfg.tokenizer`.

  Raises:
    ValueError: as `open_datasets`, and for what cannot be read in windows.
  """
  text_files, size = find_stream(cfg)
  tokenizer = tokenizer or given_tokenizer(cfg)
  if tokenizer is None:
    if named := [file.path for file in text_files.files if is_remote(file.path)]:
      raise ValueError(
        f"data.reading=streaming: a BPE is trained on many files at once, and {named[0]} is on a "
        "store. Set data.tokenizer to a tokenizer.json, or to 'bytes'."
      )
    tokenizer = build_tokenizer(cfg, text_files.train_texts, corpus_fingerprint=text_files.bpe_key)
  reading = cfg.reading
  assert isinstance(reading, Streaming)
  settings = [format_of(cfg).key, reading.window_mb, cfg.seq_len, cfg.packing, cfg.max_segments]
  fingerprint = cache.digest("stream", text_files.content, tokenizer.fingerprint, settings)
  folder = cache.cache_root(cfg.cache_dir) / f"stream-{cache.digest(fingerprint, seed)}"
  windows = Windows(folder, cfg, text_files.files, tokenizer, seed)
  first = _first(windows)
  if not first.num_rows:  # of others too: a window ends where another document begins
    raise ValueError(nothing_left("no file holds a document"))
  return Stream(windows, tokenizer, first, fingerprint=fingerprint, seq_len=cfg.seq_len, size=size)


def _first(windows: Windows) -> Figures:
  """The figures of the first window, which outlive it."""
  path = windows.folder / _FIGURES
  if not path.exists():
    dataset = windows.dataset(0)
    figures = Figures(*(getattr(dataset.info, name) for name in Figures._fields))
    cache.write_atomically(path, json.dumps(figures))
  return Figures(*json.loads(path.read_text()))


def find_stream(cfg: DataConfig) -> tuple[TextFiles, int]:
  """The files of `cfg.paths` in the order of a hash of their names, and how many bytes they have.

  Their fingerprint is of names, sizes, and of the beginning and the end of each file; of one on a
  store, of the version that the store names.

  Raises:
    ValueError: for files that cannot be read in windows.
  """
  report = Report(strict=cfg.strict)
  unsorted = find_files(cfg.paths, report, cache.cache_root(cfg.cache_dir), copies=False)
  files = sorted(unsorted, key=lambda file: (name_hash(file.name), file.name))
  size, contents = 0, []
  for file in files:
    if file.kind == "tokens" or formats.owner(opening.suffix(file.name)):
      what = "holds ids" if file.kind == "tokens" else "is of a format of an extension"
      raise ValueError(
        f"data.reading=streaming: {file.path} {what}, which is not read in windows. Set "
        "data.reading=whole, or leave the file out."
      )
    if is_remote(file.path):
      length, version = remote.version(file.path)
      contents.append([file.name, file.kind, length, version])
      size += length
      continue
    try:
      length = os.path.getsize(file.path)
      contents.append([file.name, file.kind, length, _ends(file.path, length)])
      size += length
    except OSError as e:  # reported when its documents are read
      contents.append([file.name, file.kind, f"unreadable {e.errno}"])
  return TextFiles(cfg, files, cache.digest(contents), report.summary(), Split(0.0)), size


def _ends(path: str, length: int) -> str:
  with open(path, "rb") as file:
    begin = file.read(_ENDS)
    file.seek(max(0, length - _ENDS))
    return hashlib.blake2b(begin + file.read(_ENDS), digest_size=16).hexdigest()
