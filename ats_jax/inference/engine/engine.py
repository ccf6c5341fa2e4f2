"""Requests in, pieces of text out: the loop over a device, which is kept two steps ahead.

One would do if what a step has drawn were known at its end: it takes the host a while to see it.

With a draft it is not (`schedule` says why). A search on the device in the ids of its rows would
keep it ahead, but then no draft that needs the host, or another model, could take its place, and
the host would have to plan pages for positions that it does not know. The price is that the device
waits for the host between two steps.
"""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from ats_jax.data.tokens.tokenizer import StreamDecoder, Tokenizer
from ats_jax.inference.engine.request import Finished, Request
from ats_jax.inference.engine.schedule import Draft, Drawn, Runner, Scheduler, Tokens
from ats_jax.inference.text import StopText

STEPS_AHEAD = 2  # steps that are started before one is read


class Likeliest(NamedTuple):
  """How likely a token was, and which ones were likeliest: pairs of id and logarithm."""

  logprob: float
  likeliest: tuple[tuple[int, float], ...]


class Event(NamedTuple):
  """Something new of a request.

  Attributes:
    id: of the request.
    ids: tokens that were drawn; at most one.
    text: what of the text is new; "" while it ends inside a character or in what may be a stop.
    logprobs: of `ids`, if the request asks for them.
    finished: why it is the last event of the request; None = it is not.
    message: why the request was refused, in a line.
  """

  id: int
  ids: tuple[int, ...] = ()
  text: str = ""
  logprobs: tuple[Likeliest, ...] = ()
  finished: Finished | None = None
  message: str = ""


class _Text:
  """The text of one request so far."""

  def __init__(self, tokenizer: Tokenizer, request: Request):
    self.num_likeliest = request.sampling.logprobs
    self._decoder = StreamDecoder(tokenizer, request.prompt)
    self._until = StopText(request.sampling.stop)

  def push(self, token: int) -> str:
    """What a token adds."""
    return self._until.push(self._decoder.push(token))

  @property
  def stopped(self) -> bool:
    """Whether a text came that ends it."""
    return self._until.found

  def finish(self) -> str:
    """What was held back."""
    return self._until.push(self._decoder.finish()) + self._until.finish()


class Engine:
  """Continues texts, as many at once as there are rows and pages for.

  What one request asks for, and how it ends, changes no other. A Ctrl-C in any method leaves the
  engine as it was, or with work that is done again; requests go on with the next call, or are
  cancelled. An error of the runner is not caught: the device is then not to be trusted.
  """

  def __init__(
    self,
    runner: Runner,
    tokenizer: Tokenizer,
    *,
    share: bool = True,
    draft: Draft | None = None,
  ):
    """Begin with no request.

    Args:
      runner: the device's side.
      tokenizer: of the model.
      share: reuse pages with the beginning of a text that came before. Not for models whose layers
        skip tokens.
      draft: guesses how texts go on. Right guesses save steps, and draws are as without: with the
        same seed the same tokens, but for rounding. Not for models whose layers skip tokens.
    """
    self._runner, self._tokenizer, self._ahead = runner, tokenizer, 0 if draft else STEPS_AHEAD
    self._scheduler = Scheduler(runner, share=share, draft=draft)
    self._texts: dict[int, _Text] = {}
    self._handles: collections.deque[Any] = collections.deque()  # of steps in flight
    self._unsaid: collections.deque[tuple[Drawn, Tokens]] = collections.deque()
    self._events: collections.deque[Event] = collections.deque()
    self._next_id = 0

  @property
  def busy(self) -> bool:
    """Whether there are events to come."""
    return bool(self._events or self._unsaid or self._handles) or self._scheduler.busy

  def submit(self, request: Request) -> int:
    """Take a request; its events have the id that is returned.

    One that can never be done has a single event, with `message`.
    """
    job, self._next_id = self._next_id, self._next_id + 1
    ends = frozenset(request.sampling.stop_ids)
    if not request.sampling.ignore_end:
      ends |= self._tokenizer.end_ids
    try:
      self._check(request)
      self._scheduler.submit(job, request, ends)
    except ValueError as e:
      self._events.append(Event(job, finished=Finished.REFUSED, message=str(e)))
    else:
      self._texts[job] = _Text(self._tokenizer, request)
    return job

  def _check(self, request: Request) -> None:
    """Refuse ids that the tokenizer does not have."""
    known = self._tokenizer.vocab_size
    for name, ids in (("prompt", request.prompt), ("stop_ids", request.sampling.stop_ids)):
      if wrong := [i for i in ids if not 0 <= i < known]:
        raise ValueError(f"{name}: {wrong[0]} is no id of a token: they are 0 to {known - 1}.")

  def cancel(self, job: int) -> None:
    """End a request; of one that has ended, nothing more is said."""
    if text := self._texts.pop(job, None):
      self._scheduler.finish(job, Finished.CANCELLED)
      self._events.append(Event(job, text=text.finish(), finished=Finished.CANCELLED))

  def events(self) -> Iterator[Event]:
    """What comes of the requests, in order, until all have ended; more may be submitted meanwhile.

    Who stops to listen may listen again later, and misses nothing.
    """
    while self.busy:
      if not self._events:
        self._advance()
      while self._events:
        yield self._events.popleft()

  def _advance(self) -> None:
    """Wait for a step and start another, as early as what it depends on is known."""
    in_flight = len(self._handles)
    if in_flight and not self._ahead:
      self._read()
    started = self._start()
    assert in_flight or started or self._unsaid, "requests wait for nothing"
    if self._ahead and in_flight and (in_flight == self._ahead or not started):
      self._read()  # else let the device have the next step at once
    while self._unsaid:  # only now, as the device computes meanwhile
      self._say(*self._unsaid.popleft())

  def _start(self) -> bool:
    """Start the next step if there is one."""
    with self._whole():
      step = self._scheduler.plan()
      if started := bool(step.chunks or step.decode):
        self._handles.append(self._runner.run(step))
    return started

  def _read(self) -> None:
    """Wait for the oldest step in flight."""
    tokens = self._runner.read(self._handles[0])
    with self._whole():
      self._handles.popleft()
      self._unsaid.extend((drawn, tokens) for drawn in self._scheduler.complete(tokens))

  @contextlib.contextmanager
  def _whole(self) -> Iterator[None]:
    """Compute again what is in flight if this is left in the middle."""
    done = False
    try:
      yield
      done = True
    finally:
      if not done:
        self._handles.clear()
        self._scheduler.abandon()

  def _say(self, drawn: Drawn, tokens: Tokens) -> None:
    """Add the event of a token."""
    if drawn.id not in self._texts:  # cancelled, or a token before it completed a stop
      return
    text, finished = self._texts[drawn.id], drawn.finished
    ids, piece = (), ""
    if drawn.token is not None:
      ids, piece = (drawn.token,), text.push(drawn.token)
      if text.stopped:
        finished = Finished.STOP
        self._scheduler.finish(drawn.id, finished)
    if finished:
      if not text.stopped:
        piece += text.finish()
        finished = Finished.STOP if text.stopped else finished
      del self._texts[drawn.id]
    logprobs = self._logprobs(drawn, text.num_likeliest, tokens) if ids else ()
    self._events.append(Event(drawn.id, ids, piece, logprobs, finished))

  @staticmethod
  def _logprobs(drawn: Drawn, number: int, tokens: Tokens) -> tuple[Likeliest, ...]:
    if not number:
      return ()
    at = drawn.row, drawn.place
    ids, logprobs = tokens.likeliest[at][:number], tokens.likeliest_logprobs[at][:number]
    pairs = tuple(zip(map(int, ids), map(float, logprobs), strict=True))
    return (Likeliest(float(tokens.logprobs[at]), pairs),)
