"""Ids as they are drawn -> pieces of text, up to a stop."""

from collections.abc import Iterable, Iterator, Sequence

from ats_jax.data.tokens.tokenizer import StreamDecoder, Tokenizer


class StopText:
  """Passes text on up to the first of some texts, and holds back what may be the start of one.

  The first is the one complete first (of two, the longer), however the text is cut into pieces.

  Attributes:
    found: whether one came; nothing is passed on any more.
  """

  def __init__(self, stops: Sequence[str]):
    self._stops = stops
    self._held = ""
    self.found = False

  def push(self, piece: str) -> str:
    """What may be shown now that `piece` has come."""
    if not self._stops:
      return piece
    held = self._held + piece
    matches = [(held.index(s) + len(s), held.index(s)) for s in self._stops if s in held]
    if matches:
      _, begin = min(matches)
      self.found, self._held = True, ""
      return held[:begin]
    keep = max(
      (n for s in self._stops for n in range(1, len(s)) if held.endswith(s[:n])), default=0
    )
    self._held = held[len(held) - keep :]
    return held[: len(held) - keep]

  def finish(self) -> str:
    """What was held back, as the text is at its end."""
    held, self._held = self._held, ""
    return held


def stream_text(
  tokens: Iterable[int], tokenizer: Tokenizer, prompt: Sequence[int] = ()
) -> Iterator[str]:
  """Turn ids that continue a prompt's into pieces of text that never cut a character."""
  decoder = StreamDecoder(tokenizer, prompt)
  for token in tokens:
    if piece := decoder.push(token):
      yield piece
  if rest := decoder.finish():
    yield rest


def until_stop(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
  """Pass pieces on up to the first of `stops`, as `StopText` does."""
  until = StopText(stops)
  for piece in pieces:
    if text := until.push(piece):
      yield text
    if until.found:
      return
  if rest := until.finish():
    yield rest
