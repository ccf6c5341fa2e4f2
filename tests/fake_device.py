"""A device for the inference engine, in numpy: it draws from the text that its pages hold."""

import collections
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.inference.engine.request import Finished, Request
from ats_jax.inference.engine.schedule import Row, Step, Tokens
from ats_jax.inference.text import until_stop

TOKENIZER = ByteTokenizer()
NUM_LETTERS = 6


def draw(ids, request: Request) -> int:
  """The token behind `ids`: a small letter, or one time in 25 the end."""
  number = zlib.crc32(np.asarray(ids, np.int32).tobytes(), request.sampling.seed)
  return TOKENIZER.eos_id if number % 25 == 0 else ord("a") + number % NUM_LETTERS


def alone(request: Request, window: int = 0) -> tuple[list[int], str, Finished]:
  """The tokens, the text and the end of a request that nobody shares the device with."""
  ids, sampling, reason = list(request.prompt), request.sampling, Finished.LENGTH
  while (number := len(ids) - len(request.prompt)) < sampling.max_tokens:
    token = draw(ids[-window:], request)
    if (token == TOKENIZER.eos_id and not sampling.ignore_end) or token in sampling.stop_ids:
      reason = Finished.END
      break
    ids.append(token)
    if any(stop in TOKENIZER.decode(ids[-number - 1 :]) for stop in sampling.stop):
      reason = Finished.STOP
      break
  drawn = ids[len(request.prompt) :]
  return drawn, "".join(until_stop(TOKENIZER.decode(drawn), sampling.stop)), reason


class Foresight:
  """A draft that knows how texts go on, and is wrong at some places (`schedule.Draft`)."""

  most = 3

  def __init__(self, requests: Mapping[int, Request], window: int = 0):
    self._requests, self._window = requests, window

  def guess(self, texts: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    found = {}
    for number, ids in texts.items():
      chance = zlib.crc32(np.asarray(ids, np.int32).tobytes(), 7)
      guess = []
      for _ in range(chance % (self.most + 1)):
        guess.append(draw([*ids, *guess][-self._window :], self._requests[number]))
      if guess and chance // 4 % 3 == 0:
        guess[chance // 12 % len(guess)] = 0
      found[number] = guess
    return found


class FakeDevice:
  """Runs each step as late as it may, and refuses steps that a real device could not run.

  Attributes:
    interrupt: where the next Ctrl-C comes: before a step is "run", when it is "started" and nobody
      knows its handle, where one is "read", or "" = nowhere.
    num_steps: how many were started.
    num_read: tokens of their chunks.
  """

  def __init__(self, page_size=4, num_pages=14, max_rows=4, max_pages_per_row=9, chunk=7, window=0):
    self.page_size, self.num_pages, self.max_rows = page_size, num_pages, max_rows
    self.max_pages_per_row, self.chunk = max_pages_per_row, chunk
    self.window = window
    self.interrupt = ""
    self.num_steps = self.num_read = 0
    self._pages = np.full((num_pages + 1, page_size), -1, np.int32)  # the last is none
    self._last = np.zeros(max_rows, np.int32)
    self._seen: list[list[int]] = [[] for _ in range(max_rows)]  # as penalties would count them
    self._owner: list[Request | None] = [None] * max_rows
    self._started: collections.deque[Step] = collections.deque()
    self._results: dict[int, Tokens] = {}
    self._num_done = 0
    self._num_lost = 0  # steps that are not read

  def run(self, step: Step) -> int:
    self._control_c("run")
    assert step.chunks or step.decode
    assert sum(len(c.ids) for c in step.chunks) <= self.chunk and all(c.ids for c in step.chunks)
    rows = [entry.row for entry in (*step.chunks, *step.decode)]
    assert len(set(rows)) == len(rows) and set(rows) <= set(range(self.max_rows))
    self._started.append(step)
    self._check_pages()
    self.num_steps += 1
    self.num_read += sum(len(c.ids) for c in step.chunks)
    self._control_c("started")
    return self.num_steps

  def read(self, handle: int) -> Tokens:
    self._control_c("read")
    while self._num_done < handle:
      self._results = {self._num_done + 1: self._do(self._started.popleft())}
      self._num_done += 1
    return self._results[handle]

  def _control_c(self, where: str) -> None:
    if self.interrupt == where:
      self.interrupt = ""
      if where != "read":
        self._num_lost = self.num_steps
      raise KeyboardInterrupt

  def _check_pages(self) -> None:
    """Nobody else may know a page that a row of the newest step writes."""
    spans = lambda step: [
      *((c.request, c.pages, c.start, c.start + len(c.ids)) for c in step.chunks),
      *((r.request, r.pages, r.position, r.position + 1 + len(r.guess)) for r in step.decode),
    ]
    lost = max(0, self._num_lost - self._num_done)  # which the order of steps makes harmless
    known = [(request, page) for s in list(self._started)[lost:] for request, pages, *_ in spans(s)
             for page in pages]  # fmt: skip
    for request, pages, begin, end in spans(self._started[-1]):
      own = [page for page in pages if page != self.num_pages]
      assert len(pages) <= self.max_pages_per_row and len(set(own)) == len(own)
      written = pages[begin // self.page_size : (end - 1) // self.page_size + 1]
      assert len(written) * self.page_size >= end - begin and self.num_pages not in written
      assert not [p for other, p in known if p in written and other is not request]

  def _do(self, step: Step) -> Tokens:
    most = max((len(row.guess) for row in step.decode), default=0)
    drawn, counts = np.full((self.max_rows, 1 + most), -1, np.int32), np.ones(self.max_rows, int)
    for chunk in step.chunks:
      if chunk.first:
        self._owner[chunk.row] = chunk.request
        self._seen[chunk.row] = list(chunk.shared)
      self._write(chunk, chunk.start, chunk.ids)
      if chunk.last:
        drawn[chunk.row, 0] = self._draw(chunk, chunk.start + len(chunk.ids))
    for row in step.decode:
      tokens = self._decode(row)
      drawn[row.row, : len(tokens)], counts[row.row] = tokens, len(tokens)
    last = drawn[np.arange(self.max_rows), counts - 1]
    self._last = np.where(last < 0, self._last, last)
    likeliest = np.stack([drawn, drawn + 1], axis=2)
    return Tokens(counts, drawn, -0.5 * drawn, likeliest, -0.5 * likeliest)

  def _decode(self, row: Row) -> list[int]:
    """As many tokens as the guess is right, and one more; wrong ones stay in the pages."""
    tokens = []
    for guessed in (*row.guess, None):
      at = row.position + len(tokens)
      self._write(row, at, tokens[-1:] or [self._last[row.row]])
      tokens.append(self._draw(row, at + 1))
      if tokens[-1] != guessed:
        break
    self._put(row, row.position + len(tokens), row.guess[len(tokens) - 1 :])
    return tokens

  def _write(self, entry, start: int, ids) -> None:
    assert self._owner[entry.row] is entry.request
    assert len(self._seen[entry.row]) == start
    self._seen[entry.row] += map(int, ids)
    self._put(entry, start, ids)

  def _put(self, entry, start: int, ids) -> None:
    for position, token in enumerate(ids, start):
      page = entry.pages[position // self.page_size]
      self._pages[page, position % self.page_size] = token

  def _draw(self, entry, length: int) -> int:
    ids = self._pages[list(entry.pages)].ravel()[:length][-self.window :]
    assert ids.tolist() == self._seen[entry.row][-self.window :]
    return draw(ids, entry.request)
