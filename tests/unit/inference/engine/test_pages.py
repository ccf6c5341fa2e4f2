"""Pages against books in which each page's text and users are written down."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ats_jax.inference.engine.pages import Pages, chained

NUM_PAGES, SIZE = 12, 2


class Books:
  """Rows of pages, and what each page holds: the ids of a text up to its end."""

  def __init__(self):
    self.pages = Pages(NUM_PAGES)
    self.rows: list[tuple[int, ...]] = []
    self.content: dict[int, tuple[int, ...]] = {}

  def begin(self, ids: tuple[int, ...], seen: int | None = None) -> None:
    """A row with a text of full pages, as far as there are pages, of which the last are seen."""
    ends = range(SIZE, len(ids) + 1, SIZE)
    keys, key = [], b""
    for end in ends:
      keys.append(key := chained(key, ids[end - SIZE : end]))
    shared = self.pages.share(keys, seen)
    unseen = max(0, len(shared) - seen) if seen is not None else 0
    assert shared[:unseen] == (self.pages.none,) * unseen
    assert [self.content[page] for page in shared[unseen:]] == [
      ids[:end] for end in ends[unseen : len(shared)]
    ]
    missing = len(keys) - len(shared)
    if missing > self.pages.available:
      self.pages.release(shared)
      return
    new = self.pages.take(missing)
    assert not {page for row in self.rows for page in row} & set(new)
    row = shared + new
    assert len({*row[unseen:]}) == len(row) - unseen
    for i in range(len(shared), len(keys)):
      self.content[row[i]] = ids[: ends[i]]
      self.pages.register(row[i], keys[i])
    self.rows.append(row)

  def end(self, number: int) -> None:
    """A row gives its pages back."""
    self.pages.release(self.rows.pop(number % len(self.rows)))

  def forget(self, number: int) -> None:
    """A row gives its first pages back, and goes on."""
    row = self.rows[number % len(self.rows)]
    half = len(row) // 2
    self.rows[number % len(self.rows)] = (self.pages.none,) * half + row[half:]
    self.pages.release(row[:half])

  def check(self) -> None:
    used = {page for row in self.rows for page in row} - {self.pages.none}
    assert self.pages.available == NUM_PAGES - len(used)


class Machine(RuleBasedStateMachine):
  def __init__(self):
    super().__init__()
    self.books = Books()

  @rule(ids=st.lists(st.integers(0, 1), max_size=10).map(tuple), seen=st.sampled_from([None, 0, 2]))
  def begin(self, ids, seen):
    self.books.begin(ids, seen)

  @precondition(lambda self: self.books.rows)
  @rule(number=st.integers(0, NUM_PAGES))
  def forget(self, number):
    self.books.forget(number)

  @precondition(lambda self: self.books.rows)
  @rule(number=st.integers(0, NUM_PAGES))
  def end(self, number):
    self.books.end(number)

  @invariant()
  def adds_up(self):
    self.books.check()


TestPages = Machine.TestCase


@pytest.mark.thorough
def test_a_million_operations_lose_no_page_and_mix_no_texts():
  rng, books = random.Random(0), Books()
  for _ in range(1_000_000):
    if books.rows and rng.random() < 0.5:
      books.end(rng.randrange(NUM_PAGES))
    else:
      books.begin(tuple(rng.choices((0, 1), k=rng.randrange(11))))
    books.check()


def test_what_was_used_least_recently_goes_first_and_a_beginning_last():
  pages = Pages(3)
  a, b, c = chained(b"", [1]), chained(chained(b"", [1]), [2]), chained(b"", [3])
  first, second = pages.take(2)
  pages.register(first, a)
  pages.register(second, b)
  pages.release((first, second))
  (third,) = pages.take(1)
  pages.register(third, c)
  pages.release((third,))
  assert pages.take(1) == (second,)
  assert pages.share([a, b]) == (first,)  # used again: now that of c is the oldest
  pages.release((first,))
  assert pages.take(1) == (third,)
  assert pages.share([c]) == () and pages.share([a]) == (first,)


def test_pages_are_not_known_by_text_where_sharing_is_off():
  pages = Pages(2, share=False)
  (page,) = pages.take(1)
  pages.register(page, chained(b"", [1]))
  assert pages.share([chained(b"", [1])]) == ()
  pages.release((page,))
  assert pages.available == 2


def test_a_key_depends_on_all_that_stands_before():
  assert chained(chained(b"", [1]), [2]) != chained(chained(b"", [3]), [2])
