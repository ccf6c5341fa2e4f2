"""Which rows do what in the next step of the device; a state machine that knows no device.

Requests are served in the order in which they came. Those that run are always the oldest, so the
oldest keeps its pages until it ends: when pages run out, the newest gives its own back, and what it
has written is computed again when there is room. That every request ends follows.

The host plans steps before it knows what those before have drawn. A text that turns out to have
ended there has one more token in each step planned since, which is dropped. With a draft a step is
read before the next is planned: what follows can only be guessed from all tokens so far, and a
guess decides which positions come next.
"""

import collections
import dataclasses
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ats_jax.inference.engine.pages import Pages, chained
from ats_jax.inference.engine.request import Finished, Request

# Pages that a row gets at once where there are enough: the device waits whenever it is sent some.
PAGES_AHEAD = 8


class Chunk(NamedTuple):
  """Known tokens for a row to read.

  Attributes:
    row: of the device's state.
    start: position of the first of them.
    ids: the tokens.
    pages: of the row, in order, those that hold `ids` among them.
    first: the row begins anew: what the device keeps of it is of another request.
    shared: with `first`, the tokens before `start`, whose keys and values are in `pages` already.
    last: the token that follows is drawn; the row decodes from the next step on.
    request: whose tokens they are. Behind its prompt they are tokens that were drawn before the
      row lost its pages.
  """

  row: int
  start: int
  ids: tuple[int, ...]
  pages: tuple[int, ...]
  first: bool
  shared: tuple[int, ...]
  last: bool
  request: Request


class Row(NamedTuple):
  """A row that draws one more token, and perhaps others behind it.

  Attributes:
    row: of the device's state, which holds the token that it drew last.
    position: of that token.
    pages: of the row, in order; the last may be new.
    request: of the row.
    guess: tokens that may follow. As long as they are those that are drawn, another one is.
  """

  row: int
  position: int
  pages: tuple[int, ...]
  request: Request
  guess: tuple[int, ...] = ()


class Step(NamedTuple):
  """What the device does at once; no row is in it twice, and no row reads what another writes."""

  chunks: tuple[Chunk, ...]
  decode: tuple[Row, ...]


class Tokens(NamedTuple):
  """What a step has drawn. Only rows that drew have values that mean something.

  Attributes:
    counts: [rows] how many tokens a row has drawn, which come first.
    ids: [rows, tokens] the tokens.
    logprobs: [rows, tokens], natural logarithms of their probabilities.
    likeliest: [rows, tokens, n] ids of the likeliest tokens, best first; n is at least what any
      request of the step asks for.
    likeliest_logprobs: [rows, tokens, n] theirs.
  """

  counts: np.ndarray
  ids: np.ndarray
  logprobs: np.ndarray
  likeliest: np.ndarray
  likeliest_logprobs: np.ndarray


class Runner(Protocol):
  """The device's side. Steps run in the order in which they were started.

  Attributes:
    page_size: tokens of a page.
    num_pages: pages of all rows together.
    max_rows: rows at once.
    max_pages_per_row: pages of one row, so the context.
    chunk: known tokens of a step at most.
    window: tokens that one sees in every layer, itself among them; 0 = in some layer it sees all
      before it. Layers share the pages of a row, so one without a window keeps them for all.
  """

  page_size: int
  num_pages: int
  max_rows: int
  max_pages_per_row: int
  chunk: int
  window: int

  def run(self, step: Step) -> Any:
    """Start a step, and return at once with what `read` wants."""
    ...

  def read(self, handle: Any) -> Tokens:
    """Wait for a step. After a Ctrl-C it is asked again for the same."""
    ...


class Draft(Protocol):
  """What guesses how texts go on. A wrong guess costs time, and changes no text.

  Attributes:
    most: tokens of a guess at most.
  """

  most: int

  def guess(self, texts: Mapping[int, Sequence[int]]) -> Mapping[int, Sequence[int]]:
    """The ids that may follow texts; of some perhaps none.

    Args:
      texts: prompt and answer so far by request, of all that draw in the next step. What it keeps
        of a request that is not among them, it may forget.
    """
    ...


@dataclasses.dataclass(eq=False)
class _Job:
  """A request that has not ended.

  Attributes:
    id: grows with the time of arrival.
    request: what is asked.
    ends: ids that end the text.
    ids: prompt and what is known to be drawn.
    keys: of full pages of `ids`, as far as they were needed.
    row: of the device; None = it waits.
    pages: of the row.
    planned: positions that planned steps have written.
    known: positions that chunks write; the others are decoded.
    first: no step of the row was planned yet.
    pending: tokens of planned steps that were not read yet.
    last_step: number of the last planned step that it is in.
    registered: how many of its pages are known by their text.
    finished: why it ended.
  """

  id: int
  request: Request
  ends: frozenset[int]
  ids: list[int]
  keys: list[bytes] = dataclasses.field(default_factory=list)
  row: int | None = None
  pages: tuple[int, ...] = ()
  planned: int = 0
  known: int = 0
  first: bool = True
  pending: int = 0
  last_step: int = 0
  registered: int = 0
  finished: Finished | None = None

  @property
  def num_drawn(self) -> int:
    """Tokens that were drawn, those not read yet among them."""
    return len(self.ids) - len(self.request.prompt) + self.pending

  @property
  def decodes(self) -> bool:
    """Whether it runs, has read all, and wants another token."""
    return (
      self.row is not None
      and self.planned >= self.known
      and self.num_drawn < self.request.sampling.max_tokens
    )


class Drawn(NamedTuple):
  """A token that came of a request.

  Attributes:
    id: of the request.
    row: where it is in `Tokens`.
    place: which token of the row it is there.
    token: None = it ended the text and is no part of it.
    finished: why it is the last; None = it is not.
  """

  id: int
  row: int
  place: int
  token: int | None
  finished: Finished | None


class Scheduler:
  """Rows, pages and the order of requests. Steps are planned by `plan` and read by `complete`."""

  def __init__(self, runner: Runner, *, share: bool = True, draft: Draft | None = None):
    """Begin with no request.

    Args:
      runner: what there is to share out; it is not called.
      share: reuse pages with the beginning of a text that came before.
      draft: guesses how texts go on; with it, each step must be read before the next is planned.
    """
    self._shape, self._sharing, self._draft = runner, share, draft
    self._jobs: dict[int, _Job] = {}  # in order of arrival
    self._step = 0  # number of the last planned one
    self._short = False  # pages did not suffice for the oldest that waited
    self.abandon()

  @property
  def busy(self) -> bool:
    """Whether a request has not ended."""
    return bool(self._jobs)

  def abandon(self) -> None:
    """Forget the device: all that has not ended waits, and is computed again from its tokens.

    For when a step was interrupted, so that nobody knows what it did. Steps that were planned and
    not read are not to be read any more.
    """
    self._pages = Pages(self._shape.num_pages, share=self._sharing)
    self._rows = list(range(self._shape.max_rows))  # free ones, a heap
    self._running: list[_Job] = []  # older ones first; all are older than those that wait
    self._waiting = collections.deque(self._jobs.values())
    self._flight: collections.deque[list[tuple[_Job, int]]] = collections.deque()  # who draws where
    self._limbo: list[tuple[int, tuple[int, ...]]] = []  # pages that a step in flight may write
    for job in self._waiting:
      job.row, job.pages, job.planned, job.pending, job.registered = None, (), 0, 0, 0

  def submit(self, job_id: int, request: Request, ends: frozenset[int]) -> None:
    """Take a request.

    Args:
      job_id: larger than any before.
      request: what is asked.
      ends: tokens that end its text.

    Raises:
      ValueError: if it can never be done.
    """
    room = min(self._shape.num_pages, self._shape.max_pages_per_row) * self._shape.page_size
    length, wanted = len(request.prompt), request.sampling.max_tokens
    if not length:
      raise ValueError("the prompt is empty: it needs at least the token that begins a document.")
    if length >= room:
      raise ValueError(
        f"the prompt has {length:,} tokens, but prompt and answer have room for {room:,} together. "
        "Shorten it."
      )
    if length + wanted > room:
      raise ValueError(
        f"max_tokens={wanted:,} and a prompt of {length:,} tokens are more than the {room:,} that "
        f"there is room for. Use max_tokens={room - length} or a shorter prompt."
      )
    job = _Job(job_id, request, ends, list(request.prompt))
    self._jobs[job_id] = job
    self._waiting.append(job)

  def finish(self, job_id: int, reason: Finished) -> None:
    """End a request; one that has ended stays as it is."""
    job = self._jobs.pop(job_id, None)
    if job is None:
      return
    job.finished = reason
    if job.row is None:
      self._waiting.remove(job)
    else:
      self._stop(job)

  def plan(self) -> Step:
    """The next step; an empty one if only steps in flight, or nothing, can go on."""
    for job in self._running:
      self._register(job)
      self._forget(job)
    if self._short:
      self._take_back(self._running)
    going, starved = list[_Job](), False
    for job in list(self._running):
      if not job.decodes:  # perhaps as it has just lost its row
        continue
      if job.planned < len(job.pages) * self._shape.page_size or self._grow(job):
        going.append(job)
      else:
        starved = True
    guesses: Mapping[int, Sequence[int]] = {}
    if self._draft:
      assert not self._flight, "a guess goes on from what is known"
      guesses = self._draft.guess({job.id: job.ids for job in going})
    decode = [(job, self._row(job, guesses.get(job.id, ()))) for job in going]
    chunks = self._chunks(admit=not starved)
    if chunks or decode:
      self._note(chunks, decode)
    return Step(tuple(chunk for _, chunk in chunks), tuple(row for _, row in decode))

  def complete(self, tokens: Tokens) -> list[Drawn]:
    """Read the oldest step in flight: the tokens of requests that have not ended since."""
    read = self._step - len(self._flight) + 1
    drawn = []
    for job, row in self._flight.popleft():
      job.pending -= 1
      if not job.finished:
        drawn += self._draw(job, row, tokens.ids[row, : tokens.counts[row]].tolist())
    limbo, self._limbo = self._limbo, []
    for last_step, pages in limbo:
      if last_step > read:
        self._limbo.append((last_step, pages))
      else:
        self._pages.release(pages)
    return drawn

  def _draw(self, job: _Job, row: int, tokens: list[int]) -> Iterator[Drawn]:
    """Take what a row has drawn, up to the end of the text."""
    job.planned += len(tokens) - 1  # those guesses were right, so what was written for them stays
    for place, token in enumerate(tokens):
      reason = Finished.END if token in job.ends else None
      if not reason:
        job.ids.append(token)
        if len(job.ids) - len(job.request.prompt) == job.request.sampling.max_tokens:
          reason = Finished.LENGTH
      if reason:
        self.finish(job.id, reason)
      yield Drawn(job.id, row, place, None if reason is Finished.END else token, reason)
      if reason:
        return
    if self._draft:
      self._take_back([job])  # what wrong guesses had

  def _row(self, job: _Job, guess: Sequence[int]) -> Row:
    """What a row does next. A guess gets pages that are left over, but none of another row."""
    assert job.row is not None
    if not guess:
      return Row(job.row, job.planned, job.pages, job.request)
    size = self._shape.page_size
    wanted = job.planned + 1 + min(len(guess), job.request.sampling.max_tokens - job.num_drawn - 1)
    while len(job.pages) * size < wanted and self._pages.available > len(self._running):
      job.pages += self._pages.take(1)
    room = min(wanted, len(job.pages) * size) - job.planned - 1
    return Row(job.row, job.planned, job.pages, job.request, tuple(guess[:room]))

  def _chunks(self, *, admit: bool) -> list[tuple[_Job, Chunk]]:
    """What is read in the next step: first of rows that have begun, then of requests that wait.

    What fits into a step is not cut to fill one up: a program for few tokens takes nearly as long
    as one for many, as both read all weights.
    """
    budget, chunks = self._shape.chunk, list[tuple[_Job, Chunk]]()

    def fits(number: int) -> bool:
      return min(number, self._shape.chunk) <= budget

    def read(job: _Job) -> None:
      nonlocal budget
      assert job.row is not None
      end = min(job.known, job.planned + budget)
      budget -= end - job.planned
      chunks.append((job, Chunk(
        job.row, job.planned, tuple(job.ids[job.planned : end]), job.pages, job.first,
        tuple(job.ids[: job.planned]) if job.first else (), end == job.known, job.request,
      )))  # fmt: skip

    for job in self._running:
      if job.planned < job.known and fits(job.known - job.planned):
        read(job)
    self._short = False
    while admit and budget and self._waiting and self._rows and self._admit(self._waiting[0], fits):
      read(self._running[-1])
    return chunks

  def _note(self, chunks: list[tuple[_Job, Chunk]], decode: list[tuple[_Job, Row]]) -> None:
    """Take a step as planned."""
    self._step += 1
    draws = []
    for job, chunk in chunks:
      job.planned, job.first, job.last_step = job.planned + len(chunk.ids), False, self._step
      if chunk.last:
        draws.append((job, chunk.row))
    for job, row in decode:
      job.planned, job.last_step = job.planned + 1, self._step
      draws.append((job, row.row))
    for job, _ in draws:
      job.pending += 1
    self._flight.append(draws)

  def _admit(self, job: _Job, fits: Callable[[int], bool]) -> bool:
    """Give the oldest that waits a row and all pages of what it has, if they are there.

    And if a step has room for as many tokens as are to be read, which `fits` tells.
    """
    if job.pending:  # it has just lost its row, and its last token is on the way
      return False
    size = self._shape.page_size
    # One token at least is read: what follows is drawn from it.
    seen = -(-(self._shape.window - 1) // size) if self._shape.window else None
    shared = self._pages.share(self._keys(job, (len(job.ids) - 1) // size), seen)
    missing = -(-len(job.ids) // size) - len(shared)
    # A page for each row that runs, or soon one would have to give all of its own back.
    enough = missing + len(self._running) <= self._pages.available
    self._short = not enough
    if not enough or not fits(len(job.ids) - len(shared) * size):
      self._pages.release(shared)
      return False
    self._waiting.popleft()
    self._running.append(job)
    job.row, job.first = heapq.heappop(self._rows), True  # few rows stay dense, if the lowest go
    job.pages = shared + self._pages.take(missing)
    job.planned, job.registered, job.known = len(shared) * size, len(shared), len(job.ids)
    return True

  def _grow(self, job: _Job) -> bool:
    """Give a row more pages, one from the newest row if need be; whether there was one."""
    if not self._pages.available:
      self._take_back(self._running)
    while not self._pages.available:
      if self._limbo:  # they come when a step in flight has been read
        return False
      newest = self._running[-1]
      self._stop(newest)
      self._waiting.appendleft(newest)
      if newest is job:
        return False
    length = len(job.request.prompt) + job.request.sampling.max_tokens
    wanted = -(-length // self._shape.page_size) - len(job.pages)
    left = self._pages.available // (2 * len(self._running))
    # Guesses are sent with all pages at each step, and behind a window there are to be few.
    one = self._draft or self._shape.window or self._short
    job.pages += self._pages.take(1 if one else max(1, min(PAGES_AHEAD, wanted, left)))
    return True

  def _take_back(self, jobs: Sequence[_Job]) -> None:
    """Take pages from rows that neither what they have planned or known nor a next token uses."""
    for job in jobs:
      last = max(job.planned, job.known - 1)
      if unused := job.pages[last // self._shape.page_size + 1 :]:
        job.pages = job.pages[: -len(unused)]
        self._let_go(job, unused)

  def _stop(self, job: _Job) -> None:
    """Take row and pages from a request that runs."""
    assert job.row is not None
    self._register(job)
    self._running.remove(job)
    heapq.heappush(self._rows, job.row)
    self._let_go(job, job.pages)
    job.row, job.pages, job.planned, job.registered = None, (), 0, 0

  def _let_go(self, job: _Job, pages: tuple[int, ...]) -> None:
    """Take pages from a request; those that a step in flight may use, when that was read."""
    if job.last_step > self._step - len(self._flight):
      self._limbo.append((job.last_step, pages))
    else:
      self._pages.release(pages)

  def _forget(self, job: _Job) -> None:
    """Take pages from a request that its next token does not see, and so no later one.

    They are known by their text, as others may still begin with it.
    """
    if not self._shape.window:
      return
    first_seen = job.planned - self._shape.window + 1
    unseen = min(first_seen // self._shape.page_size, job.registered)
    if unseen > 0 and job.pages[unseen - 1] != self._pages.none:
      pages, job.pages = job.pages, (self._pages.none,) * unseen + job.pages[unseen:]
      self._let_go(job, pages[:unseen])

  def _register(self, job: _Job) -> None:
    """Make pages known that planned steps have filled with tokens that are known."""
    full = min(job.planned, len(job.ids)) // self._shape.page_size
    if full > job.registered:
      keys = self._keys(job, full)
      for i in range(job.registered, full):
        self._pages.register(job.pages[i], keys[i])
      job.registered = full

  def _keys(self, job: _Job, number: int) -> list[bytes]:
    """The keys of the first pages of a text."""
    size = self._shape.page_size
    for i in range(len(job.keys), number):
      parent = job.keys[-1] if job.keys else b""
      job.keys.append(chained(parent, job.ids[i * size : (i + 1) * size]))
    return job.keys[:number]
