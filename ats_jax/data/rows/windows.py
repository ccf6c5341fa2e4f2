"""Windows of a text that is not tokenised whole: a bounded ring of them on disk.

A window is the documents of so many characters, in the order of the input, tokenised and packed
like a text of its own. Where it begins follows from the input and the windows before it; what is
known of that is kept for good, in a few bytes a window. So any window can be made at any time by
any process, with the same content.
"""

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import shutil
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from absl import logging

from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.reading import Streaming
from ats_jax.data.corpus import cache, prepared
from ats_jax.data.corpus.corpus import Corpus, warn_of_malformed
from ats_jax.data.corpus.shards import DEFAULT_OPTIONS, Shards
from ats_jax.data.corpus.tokenise import add_texts, piece_batches, write_corpus
from ats_jax.data.rows.dataset import Dataset
from ats_jax.data.splits import Opened, pack
from ats_jax.data.text import remote
from ats_jax.data.text.formats.text import Piece
from ats_jax.data.text.holdout import Split
from ats_jax.data.text.report import Report, in_words
from ats_jax.data.text.source import SourceFile
from ats_jax.data.text_format import format_of
from ats_jax.data.tokens.tokenizer import Tokenizer
from ats_jax.store.paths import is_remote

RING = 4  # windows on disk: the one before, the one that is read, and those that are made ahead
_OPEN = 2  # that a process reads from; the others may be taken away
_LOCKS = 64  # files that say which windows are read from
_MAKING = "making.lock"
_KNOWN = "windows.json"


class TextPosition(NamedTuple):
  """A position in the input files, at which a window begins or ends.

  Attributes:
    file: index of the file.
    piece: number of pieces of the file that come before (`formats.text`).
    part: number of windows that hold earlier parts of the document, if it is longer than a window.
  """

  file: int = 0
  piece: int = 0
  part: int = 0


class Window(NamedTuple):
  """What is known of a window for good.

  Attributes:
    begin: position at which its text begins.
    rows: number of its rows.
    end: position at which the next window begins; None = the input ends.
    content: a hash of its ids.
  """

  begin: TextPosition
  rows: int
  end: TextPosition | None
  content: str


class ChangedError(ValueError):
  """The input is not what it was when the run began."""

  def __init__(self, number: int):
    super().__init__(
      f"The input changed since the run began: window {number} of the stream is not the one "
      "that was read. Restore the files, or use another --workdir and another data.cache_dir."
    )


class Windows:
  """The windows of some files, by number; of one run's settings.

  Attributes:
    folder: folder of the ring of windows in the cache.
    files: the input, in the order in which it is read.
  """

  def __init__(self, folder: Path, cfg: DataConfig, files: list[SourceFile], tokenizer: Tokenizer,
               seed: int):  # fmt: skip
    self.folder, self.files = folder, files
    self._cfg, self._tokenizer, self._seed = cfg, tokenizer, seed
    assert isinstance(cfg.reading, Streaming)
    self._size = max(1, round(cfg.reading.window_mb * 1e6))
    self._text = _WindowReader(files, cfg, folder)
    self._begins = {0: TextPosition()}
    self._known: dict[int, Window] = {}
    self._open: OrderedDict[int, tuple[Dataset, IO]] = OrderedDict()
    self._guard = threading.Lock()  # of the three dicts above
    weakref.finalize(self, _close, self._open)
    folder.mkdir(parents=True, exist_ok=True)

  def __reduce__(self):
    return _windows, (
      self.folder, self._cfg, self.files, self._tokenizer, self._seed, self._begins
    )  # fmt: skip

  def begins(self, number: int, position: TextPosition) -> None:
    """Note where a window begins, which a checkpoint says.

    Raises:
      ChangedError: if it begins elsewhere.
    """
    self._read_known()
    with self._guard:
      if self._begins.setdefault(number, position) != position:
        raise ChangedError(number)

  def begin(self, number: int) -> TextPosition:
    """Where a window begins; those before it are made if need be."""
    while number not in self._begins:
      before = max(n for n in self._begins if n < number)
      if self.window(before).end is None:
        raise ChangedError(number)
    return self._begins[number]

  def window(self, number: int) -> Window:
    """What is known of a window, which is made if nothing is."""
    if number not in self._known:
      self._read_known()
    if number not in self._known:
      self.make(number)
    return self._known[number]

  def dataset(self, number: int) -> Dataset:
    """Its rows; it is made if it is not there, and stays there while it is read."""
    with self._guard:
      if number in self._open:
        self._open.move_to_end(number)
        return self._open[number][0]
    with contextlib.ExitStack() as stack:
      use = stack.enter_context(self._in_use(number))
      self.make(number)
      dataset = self._packed(number)
      stack.pop_all()
    with self._guard:
      closed = [self._open.pop(number)] if number in self._open else []  # by another thread
      self._open[number] = dataset, use
      closed += [self._open.popitem(last=False)[1] for _ in range(len(self._open) - _OPEN)]
    for _, file in closed:
      file.close()
    return dataset

  def make(self, number: int, going: Callable[[], bool] = lambda: True) -> None:
    """Make a window, unless it is there.

    Args:
      number: number of the window.
      going: whether to go on; asked often.

    Raises:
      ValueError: if `data.strict` and something is malformed.
      ChangedError: if it is another one than before.
      InterruptedError: if `going` said no.
    """
    folder, begin = self._folder(number), self.begin(number)
    with self._in_use(number):
      if number not in self._known or not cache.finished(folder, "corpus"):
        with cache.locked(self.folder / _MAKING):
          self._read_known()
          if not cache.finished(folder, "corpus"):
            self._make_room(number)
            folder.mkdir(exist_ok=True)
            made = cache.cached(folder, "corpus", lambda to: self._tokenise(to, begin, going))
            logging.info("Window %d: %s.", number, in_words(made.meta["balance"]))
            warn_of_malformed(made, self._cfg.strict)
          self._note(number, begin)
      os.utime(folder)

  def _folder(self, number: int) -> Path:
    return self.folder / f"window-{number:06}"

  def _use_lock(self, number: int) -> Path:
    return self.folder / f"use-{number % _LOCKS:02}.lock"

  def _in_use(self, number: int) -> IO:
    """A file: until it is closed, or the process ends, nobody takes the window away."""
    file = open(self._use_lock(number), "w")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_SH)
    return file

  def _tokenise(
    self, folder: Path, begin: TextPosition, going: Callable[[], bool]
  ) -> dict[str, Any]:
    """Write the corpus of the window that begins there; its files are those that it has text of."""
    first, last = begin.file, begin.file
    pieces = self._text.window(begin, self._size, going)

    def numbered() -> Iterator[tuple[int, Piece]]:
      nonlocal last
      for number, piece in pieces:
        last = number
        yield number - first, piece

    def fill(shards: Shards, report: Report) -> None:
      add_texts(shards, piece_batches(numbered()), self._tokenizer)
      report.join(*self._text.counted())

    files = self.files[first:]
    facts = write_corpus(folder, files, self._cfg, self._tokenizer, DEFAULT_OPTIONS, fill)
    end = self._text.end
    return {**facts, "files": facts["files"][: last - first + 1], "end": end and list(end)}

  def _packed(self, number: int) -> Dataset:
    """The rows of a window that is there."""
    folder = self._folder(number)
    corpus = cache.finished(folder, "corpus")
    assert corpus is not None, "nobody takes it away while it is read or made"
    first = self._begins[number].file
    documents = Corpus(corpus, self.files[first : first + len(corpus.meta["files"])])
    content = cache.digest("window", self.folder.name, number)
    opened = Opened(documents, self._tokenizer, Split(0.0), content, prepared.NOTHING_PASSED_OVER)
    cfg = dataclasses.replace(self._cfg, cache_dir=str(folder))
    return pack(cfg, self._seed, opened, np.arange(len(documents)), f"window {number}", says=False)

  def _note(self, number: int, begin: TextPosition) -> None:
    """Keep what is known of a window that is there.

    Raises:
      ChangedError: if it was another one.
    """
    dataset = self._packed(number)
    folder = dataset.packed.corpus.folder
    end = folder.meta["end"]
    content = cache.digest(sorted(cache.hashes(folder.path, "tokens-*.bin").items()))
    window = Window(begin, dataset.info.num_rows, end and TextPosition(*end), content)
    if self._known.get(number, window) != window:
      raise ChangedError(number)
    if number not in self._known:
      self._take(number, window)
      text = json.dumps({n: self._known[n] for n in sorted(self._known)})
      cache.write_atomically(self.folder / _KNOWN, text)

  def _read_known(self) -> None:
    """Take in what other processes have found."""
    path = self.folder / _KNOWN
    windows = json.loads(path.read_text()) if path.exists() else {}
    for number, (begin, rows, end, content) in windows.items():
      window = Window(TextPosition(*begin), rows, end and TextPosition(*end), content)
      self._take(int(number), window)

  def _take(self, number: int, window: Window) -> None:
    with self._guard:
      if self._begins.setdefault(number, window.begin) != window.begin:
        raise ChangedError(number)
      self._known[number] = window
      if window.end is not None:
        self._begins[number + 1] = window.end

  def _make_room(self, number: int) -> None:
    """Take away windows that nobody reads from, longest unread first, until there is room."""
    remote.remove_unlent(self.folder)
    for leftover in self.folder.glob("gone-*"):  # of a process that was killed
      shutil.rmtree(leftover)
    there = {int(path.name.partition("-")[2]): path for path in self.folder.glob("window-*")}
    there.pop(number, None)
    by_age = sorted(there.items(), key=lambda item: item[1].stat().st_mtime_ns)
    surplus = len(there) + 1 - RING
    for other, path in by_age:
      if surplus <= 0:
        return
      with open(self._use_lock(other), "w") as use:
        try:
          fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
          continue
        gone = path.with_name(f"gone-{other}")
        path.rename(gone)
        shutil.rmtree(gone)
        surplus -= 1


def _windows(
  folder: Path, cfg: DataConfig, files: list[SourceFile], tokenizer: Tokenizer, seed: int,
  begins: dict[int, TextPosition],
) -> Windows:  # fmt: skip
  made = Windows(folder, cfg, files, tokenizer, seed)
  for number, position in begins.items():
    made.begins(number, position)
  return made


def _close(windows: OrderedDict[int, tuple[Dataset, IO]]) -> None:
  for _, use in windows.values():
    use.close()


class _WindowReader:
  """The pieces of all files in order, in windows; goes on where the last one ended.

  Attributes:
    end: end of the window that was read last; None = the input ended.
  """

  def __init__(self, files: list[SourceFile], cfg: DataConfig, folder: Path):
    self._files, self._read, self._folder = files, format_of(cfg).pieces, folder
    self._strict = cfg.strict
    self.end: TextPosition | None = None
    self._pieces: Iterator[tuple[TextPosition, Piece]] | None = None

  def window(
    self, begin: TextPosition, size: int, going: Callable[[], bool]
  ) -> Iterator[tuple[int, Piece]]:
    """(number of the file, piece) of a window.

    It ends with the document that fills it. One that is twice as long is cut.

    Args:
      begin: position at which the window begins.
      size: in characters.
      going: whether to go on.

    Raises:
      InterruptedError: if not.
    """
    if self._pieces is None or self.end != begin:
      self._open(begin)
    assert self._pieces is not None
    numbered, self._pieces = self._pieces, None  # so that a window that breaks off is begun anew
    chars, part = 0, begin.part
    position = None
    while self._next is not None:
      position, piece = self._next
      if chars >= (size if piece.starts else 2 * size):
        break
      if not going():
        raise InterruptedError("told to stop")
      part = 0 if piece.starts else part
      starts = piece.starts or not chars
      yield position.file, piece._replace(starts=starts, part=part)
      chars += len(piece.text)
      self._next = next(numbered, None)
    self.end = None
    if self._next is not None:
      position, piece = self._next
      self.end = position._replace(part=0 if piece.starts else part + 1)
    self._pieces = numbered

  def counted(self) -> tuple[Report, str]:
    """What was counted in the window that was read last, and the lines on what was malformed."""
    counts, lines = self._report.taken(), self._lines.getvalue()
    self._lines.seek(0)
    self._lines.truncate()
    if self._next is not None:  # which was read already
      if self._next[1].starts:
        counts.records, counts.documents = counts.records - 1, counts.documents - 1
      self._report.records = self._report.documents = 1
    return counts, lines

  def _open(self, begin: TextPosition) -> None:
    """Read up to a position; what is malformed before it belongs to another window."""
    self._lines = io.StringIO()
    self._report = Report(strict=self._strict, file=self._lines)
    self._pieces = self._from(begin)
    self._next = next(self._pieces, None)
    if begin != TextPosition():
      self.counted()

  def _from(self, begin: TextPosition) -> Iterator[tuple[TextPosition, Piece]]:
    for number in range(begin.file, len(self._files)):
      held = begin.piece if number == begin.file else 0
      with contextlib.ExitStack() as stack:
        file = self._files[number]
        if is_remote(file.path):
          path = stack.enter_context(remote.local_copy(file.path, file.name, self._folder))
          file = file._replace(path=path)
        for count, piece in enumerate(self._read(file, self._report)):
          if count >= held:
            yield TextPosition(number, count), piece
