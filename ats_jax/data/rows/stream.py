"""Training rows of a text that is tokenised while it is read (`data.streaming`)."""

import bisect
import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ats_jax.config.schema import DataConfig
from ats_jax.data.corpus import cache
from ats_jax.data.corpus.corpus import nothing_left, train_texts
from ats_jax.data.rows.dataset import Dataset, check_same, in_words, read_rows
from ats_jax.data.rows.windows import Place, Window, Windows
from ats_jax.data.splits import Found, bpe_key, given_tokenizer
from ats_jax.data.text import remote
from ats_jax.data.text.formats import opening
from ats_jax.data.text.holdout import Split
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import find_files, name_hash
from ats_jax.data.tokens.tokenizer import Tokenizer, build_tokenizer
from ats_jax.extensions import formats
from ats_jax.store.paths import is_remote

AHEAD = 2  # windows made before they are asked for
_FIGURES = "first.json"
_ENDS = 2**16  # bytes of a file's beginning and of its end that are hashed


class Turn(NamedTuple):
  """A window in the order of a run.

  Attributes:
    row: the first row of the run that is in it.
    epoch: how often the input has been read.
    number: of the window.
  """

  row: int = 0
  epoch: int = 0
  number: int = 0


class Figures(NamedTuple):
  """Of a window; see `Rows` and `TrainRows`."""

  num_rows: int
  num_tokens: int
  num_documents: int
  bytes_per_token: float
  ids_used: int


class Stream:
  """Rows of windows, one window after the other; see `TrainRows`.

  The rows of a window come in an order of their own in each epoch. So row r is a pure function of
  the fingerprint, the seed and r; it is found from the sizes of the windows before it, or from the
  beginning of a window that a checkpoint names.

  Figures of the whole text are not known. `num_rows` and so on are those of the first window.

  Attributes:
    tokenizer: what made the ids.
    fingerprint: names the content of every row.
    seq_len: positions in a row.
    size: of the input, in bytes.
  """

  are_ready = False

  def __init__(
    self,
    windows: Windows,
    tokenizer: Tokenizer,
    first: Figures,
    *,
    fingerprint: str,
    seq_len: int,
    size: int,
    turns: Sequence[Turn] = (Turn(),),
  ):
    self._windows, self.tokenizer, self._figures = windows, tokenizer, first
    self.fingerprint, self.seq_len, self.size = fingerprint, seq_len, size
    self.num_rows, self.num_tokens, self.num_documents = first[:3]
    self.bytes_per_token = first.bytes_per_token
    self._turns = sorted(turns)
    self._guard = threading.Lock()  # of the list, to which threads append

  def __reduce__(self):
    make = functools.partial(
      Stream, fingerprint=self.fingerprint, seq_len=self.seq_len, size=self.size, turns=self._turns
    )
    return make, (self._windows, self.tokenizer, self._figures)

  @property
  def ids_used(self) -> int:
    """Of the first window."""
    return self._figures.ids_used

  def in_words(self) -> str:
    """See `TrainRows`."""
    return (
      f"a stream of {len(self._windows.files):,} files, {self.size / 1e6:,.1f} MB; its first "
      f"window: {in_words(self)}"
    )

  def rows(self, indices: np.ndarray | range) -> dict[str, np.ndarray]:
    """Rows of the first window; see `Rows`."""
    return self.counted().rows(indices)

  def counted(self) -> Dataset:
    """The rows that `num_rows` counts."""
    return self._windows.dataset(0)

  def turn(self, row: int) -> Turn:
    """In which window row `row` of the run is."""
    at = self._turns[bisect.bisect_right(self._turns, (row, row, row)) - 1]
    while row >= at.row + (found := self._windows.window(at.number)).rows:
      at = _behind(at, found)
      with self._guard:
        if at.row > self._turns[-1].row:
          self._turns.append(at)
    return at

  def place(self, row: int) -> tuple[Dataset, int]:
    """The window that row `row` of the run is in, and which of its rows that is."""
    at = self.turn(row)
    dataset = self._windows.dataset(at.number)
    return dataset, dataset.row_index(at.epoch * dataset.num_rows + row - at.row)

  def row_length(self, row: int) -> int:
    """See `TrainRows`."""
    del row
    return self.seq_len

  def global_rows(self, indices: np.ndarray | range) -> dict[str, np.ndarray]:
    """See `TrainRows`."""
    indices = np.asarray(indices)
    return read_rows([self.place(int(row)) for row in indices.flat], indices.shape)

  def position(self, row: int) -> dict[str, Any]:
    """See `TrainRows`; with the window, so that another machine need not begin at the first."""
    at = self.turn(row)
    return {"row": row, "data": self.fingerprint, "window": [*at, *self._windows.begin(at.number)]}

  def row_of(self, position: Mapping[str, Any]) -> int:
    """See `TrainRows`.

    Raises:
      ValueError: if the position is one in other data, or the input changed.
    """
    check_same(self.fingerprint, position)
    row, epoch, number, *place = position["window"]
    self._windows.begins(number, Place(*place))
    with self._guard:
      if (at := Turn(row, epoch, number)) not in self._turns:
        bisect.insort(self._turns, at)
    return position["row"]

  def news(self, first: int, end: int) -> Sequence[str]:
    """See `TrainRows`: of epochs behind the first."""
    done = self.turn(end - 1).epoch if end > first else 0
    if done <= self.turn(max(0, first - 1)).epoch:
      return ()
    return [f"all of its text has been read; its epoch {done + 1:,} begins"]

  def epochs(self, row: int) -> float | None:
    """See `TrainRows`: that is not known."""
    del row

  def passes(self, row: int) -> dict[str, float | None]:
    """See `TrainRows`: it has no name."""
    del row
    return {}

  def make_ready(self, row: int, ahead: int, going: Callable[[], bool]) -> None:
    """Make the window of row `row`, or one that comes after it.

    Args:
      row: of the run.
      ahead: how many windows later.
      going: see `Windows.make`.

    Raises:
      ValueError: see `Windows.make`.
      InterruptedError: likewise.
    """
    at = self.turn(row)
    for _ in range(ahead):
      at = _behind(at, self._windows.window(at.number))
    self._windows.make(at.number, going)

  def ahead(self, row: int, going: Callable[[], bool]) -> None:
    """See `TrainRows`."""
    for count in range(AHEAD + 1):
      self.make_ready(row, count, going)


def _behind(at: Turn, window: Window) -> Turn:
  """What comes after a turn of that window."""
  ends = window.end is None
  return Turn(at.row + window.rows, at.epoch + ends, 0 if ends else at.number + 1)


def open_stream(cfg: DataConfig, seed: int, tokenizer: Tokenizer | None = None) -> Stream:
  """The rows of `cfg.paths`, which are tokenised as they are read.

  Args:
    cfg: as for `open_datasets`.
    seed: of the order of documents and rows.
    tokenizer: as for `open_documents`.

  Raises:
    ValueError: as `open_datasets`, and for what cannot be read in windows.
  """
  found, size = find_stream(cfg)
  words = tokenizer or given_tokenizer(cfg)
  if words is None:
    if named := [file.path for file in found.files if is_remote(file.path)]:
      raise ValueError(
        f"data.streaming=true: a BPE is trained on many files at once, and {named[0]} is on a "
        "store. Set data.tokenizer to a tokenizer.json, or to 'bytes'."
      )
    texts = lambda: train_texts(found.files, cfg, found.split)
    words = build_tokenizer(cfg, texts, corpus_fingerprint=bpe_key(cfg, found))
  how = [cfg.text_field, cfg.window_mb, cfg.seq_len, cfg.packing, cfg.max_segments]
  fingerprint = cache.digest("stream", found.content, words.fingerprint, how)
  folder = cache.cache_root(cfg.cache_dir) / f"stream-{cache.digest(fingerprint, seed)}"
  windows = Windows(folder, cfg, found.files, words, seed)
  first = _first(windows)
  if not first.num_rows:  # of others too: a window ends where another document begins
    raise ValueError(nothing_left("no file holds a document"))
  return Stream(windows, words, first, fingerprint=fingerprint, seq_len=cfg.seq_len, size=size)


def _first(windows: Windows) -> Figures:
  """The figures of the first window, which outlive it."""
  path = windows.folder / _FIGURES
  if not path.exists():
    dataset = windows.dataset(0)
    figures = Figures(*(getattr(dataset, name) for name in Figures._fields))
    cache.write_atomically(path, json.dumps(figures))
  return Figures(*json.loads(path.read_text()))


def find_stream(cfg: DataConfig) -> tuple[Found, int]:
  """The files of `cfg.paths` in the order of a hash of their names, and how many bytes they have.

  Their fingerprint is of names, sizes, and of the beginning and the end of each file; of one on a
  store, of the version that the store names.

  Raises:
    ValueError: for files that cannot be read in windows.
  """
  report = Report(strict=cfg.strict)
  found = find_files(cfg.paths, report, cache.cache_root(cfg.cache_dir), copies=False)
  files = sorted(found, key=lambda file: (name_hash(file.name), file.name))
  size, contents = 0, []
  for file in files:
    if file.kind == "tokens" or formats.owner(opening.suffix(file.name)):
      what = "holds ids" if file.kind == "tokens" else "is of a format of an extension"
      raise ValueError(
        f"data.streaming=true: {file.path} {what}, which is not read in windows. Set "
        "data.streaming=false, or leave the file out."
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
  return Found(files, cache.digest(contents), report.summary(), Split(0.0)), size


def _ends(path: str, length: int) -> str:
  with open(path, "rb") as file:
    begin = file.read(_ENDS)
    file.seek(max(0, length - _ENDS))
    return hashlib.blake2b(begin + file.read(_ENDS), digest_size=16).hexdigest()
