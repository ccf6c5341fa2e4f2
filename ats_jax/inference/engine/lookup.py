"""Guesses from the text itself: what followed the last time that it read as it does now.

Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) needs no second model. It pays where
an answer repeats what stands before it: changed code, quotations, tables, names.
"""

from collections.abc import Mapping, Sequence

# Tokens that must have come before, those of the most certain guess first. A guess behind a single
# one is often wrong, but costs little where a step takes as long as reading all weights.
LENGTHS = (3, 2, 1)


class PromptLookup:
  """Guesses tokens that followed the same few before (`schedule.Draft`).

  Attributes:
    most: tokens of a guess at most.
  """

  def __init__(self, most: int):
    """Know no text.

    Args:
      most: tokens of a guess at most.
    """
    self.most = most
    self._known: dict[int, _Seen] = {}

  def guess(self, texts: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """What may follow each text."""
    self._known = {number: self._known.get(number) or _Seen() for number in texts}
    return {number: self._known[number].after(ids, self.most) for number, ids in texts.items()}


class _Seen:
  """Where in a text its runs of tokens came last."""

  def __init__(self):
    self._next: dict[tuple[int, ...], int] = {}  # position behind the last place of a run
    self._number = 0  # tokens that stand behind a run which is noted

  def after(self, ids: Sequence[int], most: int) -> list[int]:
    """What followed the longest run that ends the text and came before; [] = none did."""
    for end in range(max(1, self._number), len(ids)):
      for length in LENGTHS:
        if length <= end:
          self._next[tuple(ids[end - length : end])] = end
    self._number = len(ids)
    for length in LENGTHS:
      at = self._next.get(tuple(ids[len(ids) - length :])) if length <= len(ids) else None
      if at is not None:
        break
    else:
      return []
    found = list(ids[at : at + most])
    while len(found) < most:  # the text repeats itself: so do the tokens that are guessed
      found.append(found[len(found) - (len(ids) - at)])
    return found
