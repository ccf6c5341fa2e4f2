"""How likely texts are: known tokens through the pages of an engine, many texts at a time.

Texts are read in the order of their tokens, so that those with one beginning follow each other: it
is read once, and the others take its pages. A step holds parts of texts that are about equally
long, so that little of it is filled up.
"""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ats_jax.inference.engine.pages import Pages, chained

LEAST_TOKENS = 32  # of a part that programs are compiled for
LOOK_AHEAD = 256  # texts that wait, of which those are taken whose beginning nobody is reading


class Text(NamedTuple):
  """Tokens whose probabilities are asked for.

  Attributes:
    context: ids before them, at least one.
    continuation: their ids.
  """

  context: Sequence[int]
  continuation: Sequence[int]


class Score(NamedTuple):
  """How likely a continuation is.

  Attributes:
    logprobs: [tokens] natural logarithms of probabilities, each behind all that stands before.
    greedy: whether each token is the likeliest one at its place.
  """

  logprobs: np.ndarray
  greedy: bool

  @property
  def logprob(self) -> float:
    """That of the whole continuation."""
    return float(self.logprobs.sum(dtype=np.float64))


class Part(NamedTuple):
  """Some tokens of a text, for a row of the device to read.

  Attributes:
    row: of the device's state.
    start: position of the first of them.
    ids: the tokens.
    targets: of each the token behind it, or -1 if it is not asked for.
    pages: of the row, in order, those that hold `ids` among them.
    first: the row begins anew.
  """

  row: int
  start: int
  ids: tuple[int, ...]
  targets: tuple[int, ...]
  pages: tuple[int, ...]
  first: bool


class Runner(Protocol):
  """The device's side; `schedule.Runner` says what the sizes are."""

  page_size: int
  num_pages: int
  max_rows: int
  max_pages_per_row: int
  chunk: int

  def score(self, parts: Sequence[Part], shape: tuple[int, int]) -> Any:
    """Start a step of parts, filled up to [rows, tokens]; return what `scores` wants."""
    ...

  def scores(self, handle: Any) -> tuple[np.ndarray, np.ndarray]:
    """Wait for a step: [rows, tokens], logarithms of targets, and whether each is the likeliest."""
    ...


@dataclasses.dataclass(eq=False)
class _Job:
  """A text that is not done.

  Attributes:
    ids: what is read: all but its last token.
    targets: as of `Part`.
    keys: of the full pages that others may take.
    row: of the device; -1 = it waits.
    pages: of the row.
    at: tokens that are read, or were known in pages.
    first: nothing of it was read.
    logprobs: what came.
    greedy: whether all that came were the likeliest.
  """

  ids: tuple[int, ...]
  targets: tuple[int, ...]
  keys: list[bytes]
  row: int = -1
  pages: tuple[int, ...] = ()
  at: int = 0
  first: bool = True
  logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
  greedy: bool = True


class Scorer:
  """Scores texts; what was read of one is kept for later ones, as far as there are pages.

  After a Ctrl-C it is not to be used any more.
  """

  def __init__(self, runner: Runner, vocab_size: int, *, share: bool = True):
    """Begin with empty pages.

    Args:
      runner: the device's side, which nobody else uses meanwhile.
      vocab_size: of the tokenizer.
      share: reuse pages with the beginning of a text that came before. Not for models whose layers
        skip tokens.
    """
    self._runner, self._vocab, self._sharing = runner, vocab_size, share
    self._pages = Pages(runner.num_pages, share=share)
    self._rows = list(range(runner.max_rows))
    self._waiting: collections.deque[_Job] = collections.deque()
    self._running: list[_Job] = []  # in the order in which they began
    self._promised: set[bytes] = set()  # keys of pages that those which run will fill

  @property
  def room(self) -> int:
    """Tokens of a text at most, its last one not counted: that is not read."""
    runner = self._runner
    return min(runner.num_pages, runner.max_pages_per_row) * runner.page_size

  def score(self, texts: Sequence[Text]) -> list[Score]:
    """The scores of texts, in their order.

    Raises:
      ValueError: for a text that cannot be scored; then none is.
    """
    jobs = [self._job(number, text) for number, text in enumerate(texts)]
    self._waiting.extend(sorted((j for j in jobs if max(j.targets, default=-1) >= 0),
                                key=lambda job: job.ids))  # fmt: skip
    flight = collections.deque[tuple[list[tuple[_Job, Part]], Any]]()
    while self._waiting or self._running or flight:
      self._admit()
      if step := self._plan():
        parts, shape = step
        flight.append((parts, self._runner.score([part for _, part in parts], shape)))
      if len(flight) > 1 or not step:  # the device has the next one while this one is read
        self._take(*flight.popleft())
    return [Score(np.concatenate(j.logprobs or [np.zeros(0, np.float32)]), j.greedy) for j in jobs]

  def _job(self, number: int, text: Text) -> _Job:
    ids, known = (*text.context, *text.continuation), len(text.context)
    if not known:
      raise ValueError(
        f"text {number}: the context is empty: it needs at least the token that begins a document."
      )
    if wrong := [i for i in ids if not 0 <= i < self._vocab]:
      raise ValueError(
        f"text {number}: {wrong[0]} is no id of a token: they are 0 to {self._vocab - 1}."
      )
    if len(ids) - 1 > self.room:
      raise ValueError(
        f"text {number} has {len(ids):,} tokens, but there is room for {self.room + 1:,}. "
        "Shorten its context."
      )
    targets = (-1,) * (known - 1) + ids[known:]
    size, keys = self._runner.page_size, list[bytes]()
    for end in range(size, known if self._sharing else 0, size):  # its last token must be read
      keys.append(chained(keys[-1] if keys else b"", ids[end - size : end]))
    return _Job(ids[:-1], targets, keys)

  def _admit(self) -> None:
    """Give rows and pages to texts that wait, but those whose beginning is being read."""
    passed_over = []
    for _ in range(min(LOOK_AHEAD, len(self._waiting))):
      if not self._rows:
        break
      job = self._waiting.popleft()
      shared = self._pages.share(job.keys)
      missing = -(-len(job.ids) // self._runner.page_size) - len(shared)
      enough = missing <= self._pages.available
      if enough and self._promised.isdisjoint(job.keys[len(shared) : len(shared) + 1]):
        job.row, job.pages = heapq.heappop(self._rows), shared + self._pages.take(missing)
        job.at = len(shared) * self._runner.page_size
        self._promised.update(job.keys[len(shared) :])
        self._running.append(job)
        continue
      self._pages.release(shared)
      passed_over.append(job)
      if not enough:
        break
    self._waiting.extendleft(reversed(passed_over))

  def _plan(self) -> tuple[list[tuple[_Job, Part]], tuple[int, int]] | None:
    """The next step: the text that began first, and such as have about as much to read."""
    if not self._running:
      assert not self._waiting, "texts wait for nothing"
      return None
    width, begins = self._kind(self._running[0])
    rows = max(1, min(self._runner.max_rows, self._runner.chunk // width))
    alike = (job for job in self._running if self._kind(job) == (width, begins))
    chosen = list(itertools.islice(alike, rows))
    parts = []
    for job in chosen:
      end = min(len(job.ids), job.at + width)
      cut = slice(job.at, end)
      part = Part(job.row, job.at, job.ids[cut], job.targets[cut], job.pages, job.first)
      parts.append((job, part))
      self._note(job, end)
    return parts, (1 if len(chosen) == 1 else rows, width)

  def _kind(self, job: _Job) -> tuple[int, bool]:
    """The width of the step that reads what comes next, and whether that is the beginning."""
    wanted = min(len(job.ids) - job.at, self._runner.chunk)
    return max(LEAST_TOKENS, 1 << (wanted - 1).bit_length()), job.at == 0

  def _note(self, job: _Job, end: int) -> None:
    """Take tokens as read up to `end`: later steps see them in the pages."""
    size = self._runner.page_size
    for number in range(job.at // size, min(end // size, len(job.keys))):
      self._promised.discard(job.keys[number])
      self._pages.register(job.pages[number], job.keys[number])
    job.at, job.first = end, False
    if end == len(job.ids):  # steps run in order: who writes these pages next does so later
      self._running.remove(job)
      heapq.heappush(self._rows, job.row)
      self._pages.release(job.pages)

  def _take(self, parts: list[tuple[_Job, Part]], handle: Any) -> None:
    """Wait for a step."""
    logprobs, likeliest = self._runner.scores(handle)
    for row, (job, part) in enumerate(parts):
      asked = np.flatnonzero(np.array(part.targets) >= 0)
      job.logprobs.append(logprobs[row, asked])
      job.greedy = job.greedy and bool(likeliest[row, asked].all())
