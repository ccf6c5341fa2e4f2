"""Pages of the cache: who uses which, and which hold the beginning of a text that may come again.

Only full pages are shared, and a page that is full is never written again, so none is ever copied.
A row whose layers all have a window gives back pages before it: in their place stands `Pages.none`.
"""

import collections
import hashlib
from collections.abc import Sequence

import numpy as np


def chained(parent: bytes, ids: Sequence[int]) -> bytes:
  """The key of a full page: a digest of its ids and of all that stand before them.

  Args:
    parent: the key of the page before; b"" = there is none.
    ids: of the page.
  """
  # 128 bits: texts by users must not meet in a key, or one would read the other's page.
  return hashlib.blake2b(parent + np.asarray(ids, np.int64).tobytes(), digest_size=16).digest()


class Pages:
  """A fixed number of pages. Each is free, in use by so many rows, or kept for its text.

  Kept pages are as available as free ones: the one that was used least recently is taken first.

  Attributes:
    none: stands where a row has no page any more.
  """

  def __init__(self, num_pages: int, *, share: bool = True):
    """All are free.

    Args:
      num_pages: how many there are.
      share: keep pages by their text. Not for models whose layers skip tokens.
    """
    self.none = num_pages
    self._share = share
    self._users = [0] * num_pages
    self._free = list(range(num_pages))[::-1]
    self._kept: collections.OrderedDict[int, None] = collections.OrderedDict()  # oldest first
    self._page_of: dict[bytes, int] = {}
    self._key_of: dict[int, bytes] = {}

  @property
  def available(self) -> int:
    """How many can be taken."""
    return len(self._free) + len(self._kept)

  def take(self, number: int) -> tuple[int, ...]:
    """Pages for a row to write; their former texts are forgotten. There must be so many."""
    assert number <= self.available
    return tuple(self._take() for _ in range(number))

  def _take(self) -> int:
    if self._free:
      page = self._free.pop()
    else:
      page, _ = self._kept.popitem(last=False)
      del self._page_of[self._key_of.pop(page)]
    assert not self._users[page]
    self._users[page] = 1
    return page

  def share(self, keys: Sequence[bytes], seen: int | None = None) -> tuple[int, ...]:
    """The pages of the longest known beginning of a text, which now have one more user.

    Args:
      keys: of its full pages, in order.
      seen: how many of them a token behind them sees, the last ones: of the others nothing need be
        known, and none is used; None = all.
    """
    number = run = 0  # of pages in the beginning, and known ones in a row
    for count, key in enumerate(keys, 1):
      run = run + 1 if key in self._page_of else 0
      if run == count or (seen is not None and run >= seen):
        number = count
      elif seen is None:
        break
    unseen = max(0, number - seen) if seen is not None else 0
    found = tuple(self._page_of[key] for key in keys[unseen:number])
    for page in found:
      self._kept.pop(page, None)
      self._users[page] += 1
    return (self.none,) * unseen + found

  def register(self, page: int, key: bytes) -> None:
    """Make a page in use, full and for ever unchanged, known by its text."""
    assert self._users[page] and page not in self._key_of
    if self._share and key not in self._page_of:  # else another row wrote the same at once
      self._page_of[key], self._key_of[page] = page, key

  def release(self, pages: Sequence[int]) -> None:
    """Take back the pages of a row, of which the last is the first to be taken again."""
    for page in reversed(pages):
      if page == self.none:
        continue
      assert self._users[page] > 0
      self._users[page] -= 1
      if self._users[page]:
        continue
      if page in self._key_of:
        self._kept[page] = None
      else:
        self._free.append(page)
