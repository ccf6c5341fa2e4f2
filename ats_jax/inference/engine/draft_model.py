"""Guesses by a smaller model (Leviathan et al. 2023, arXiv:2211.17192), its likeliest tokens."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from ats_jax.inference.engine.request import Request, Sampling
from ats_jax.inference.engine.schedule import Chunk, Row, Runner, Step

_GREEDY = Request((0,), Sampling(temperature=0.0))


class DraftModel:
  """Guesses what another model would say (`schedule.Draft`).

  Each text has a row and pages of its own there, as far as these suffice. What a row has read stays
  as far as its text begins so.

  Attributes:
    most: tokens of a guess at most.
  """

  def __init__(self, runner: Runner, most: int):
    """Know no text.

    Args:
      runner: the device's side of the model that guesses, which nobody else uses.
      most: tokens of a guess at most.
    """
    self.most, self._runner = most, runner
    self._num_rows = min(runner.max_rows, runner.num_pages // runner.max_pages_per_row)
    if self._num_rows < runner.max_rows:
      logging.warning(
        "draft: of %d texts at once, %d get guesses: there is no memory for more",
        runner.max_rows, self._num_rows,
      )  # fmt: skip
    self._rows: dict[int, int] = {}  # by request
    self._read: dict[int, list[int]] = {}  # by row, the tokens of which it has keys and values

  def guess(self, texts: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """What the model finds likeliest behind each text; of those without a row or room nothing."""
    rows = {number: row for number, row in self._rows.items() if number in texts}
    free = [row for row in range(self._num_rows) if row not in rows.values()]
    new = [number for number in texts if number not in rows]
    self._rows = rows | dict(zip(new, free, strict=False))
    room = self._runner.max_pages_per_row * self._runner.page_size
    wanted = {n: min(self.most, room - len(texts[n])) for n in self._rows}
    going = [number for number in self._rows if wanted[number] > 0]
    # All steps are started before one is read: a row has the token that it drew on the device.
    handles = {number: [self._follow(self._rows[number], texts[number])] for number in going}
    for drawn in range(1, self.most):
      drawing = [number for number in going if wanted[number] > drawn]
      rows = [self._next(self._rows[n], len(texts[n]) + drawn - 1) for n in drawing]
      if rows:
        handle = self._runner.run(Step((), tuple(rows)))
        for number in drawing:
          handles[number].append(handle)
    guesses = {}
    for number, of_text in handles.items():
      row = self._rows[number]
      guesses[number] = [int(self._runner.read(handle).ids[row, 0]) for handle in of_text]
      self._read[row] = [*texts[number], *guesses[number][:-1]]
    return guesses

  def _follow(self, row: int, ids: Sequence[int]) -> Any:
    """Read what is new of a text, and draw what follows; the handle of the last step."""
    pairs = zip(self._read.pop(row, ()), ids[:-1], strict=False)
    at, handle = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)), None
    while at < len(ids):
      end = min(len(ids), at + self._runner.chunk)
      chunk = Chunk(
        row, at, tuple(ids[at:end]), self._pages(row, end), first=at == 0, shared=(),
        last=end == len(ids), request=_GREEDY,
      )  # fmt: skip
      handle, at = self._runner.run(Step((chunk,), ())), end
    return handle

  def _next(self, row: int, position: int) -> Row:
    return Row(row, position, self._pages(row, position + 1), _GREEDY)

  def _pages(self, row: int, tokens: int) -> tuple[int, ...]:
    """Those that hold so many tokens of a row."""
    first = row * self._runner.max_pages_per_row
    return tuple(range(first, first + -(-tokens // self._runner.page_size)))
