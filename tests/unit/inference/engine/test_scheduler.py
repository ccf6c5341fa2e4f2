"""What the scheduler plans, step by step."""

import numpy as np
from fake_device import FakeDevice

from ats_jax.inference.engine.request import Finished, Request, Sampling
from ats_jax.inference.engine.schedule import PAGES_AHEAD, Scheduler, Tokens

LETTER, END = 7, 9


def scheduler(lengths, max_tokens=8, **shape):
  """A scheduler with prompts of such lengths; each has its own tokens."""
  made = Scheduler(FakeDevice(**shape))
  for i, length in enumerate(lengths):
    submit(made, i, length, max_tokens)
  return made


def submit(made, number, length, max_tokens=8):
  prompt = [10 + number] * length
  made.submit(number, Request(prompt, Sampling(max_tokens=max_tokens)), frozenset({END}))


def drawn(ids=LETTER):
  """Tokens of a step: the same in each row, or as given by row."""
  row_ids = np.full((8, 1), LETTER)
  for row, token in ids.items() if isinstance(ids, dict) else ():
    row_ids[row] = token
  return Tokens(np.ones(8, int), row_ids, np.zeros((8, 1)), *[np.zeros((8, 1, 0))] * 2)


def chunks(step):
  """Row, first position, number of tokens and whether a token is drawn."""
  return [(c.row, c.start, len(c.ids), c.last) for c in step.chunks]


def decodes(step):
  return [(row.row, row.position) for row in step.decode]


def test_prompts_are_read_in_turn_while_rows_that_have_read_theirs_decode():
  made = scheduler([3, 9, 2])
  steps = [made.plan() for _ in range(3)]  # nothing was read
  assert [decodes(step) for step in steps] == [[], [(0, 3)], [(0, 4)]]
  # The second prompt is not cut to fill up a step, and is longer than one.
  assert [chunks(step) for step in steps] == [
    [(0, 0, 3, True)], [(1, 0, 7, False)], [(1, 7, 2, True), (2, 0, 2, True)]
  ]  # fmt: skip
  made.complete(drawn())
  fourth = made.plan()
  assert (chunks(fourth), decodes(fourth)) == ([], [(0, 5), (1, 9), (2, 2)])
  assert [c.first for step in steps for c in step.chunks] == [True, True, False, True]


def test_a_text_that_has_ended_wastes_one_token_and_its_pages_wait_for_that():
  made = scheduler([3, 4], max_rows=1, num_pages=9)
  made.plan()
  assert decodes(made.plan()) == [(0, 3)]  # the host does not know yet that it has ended
  (end,) = made.complete(drawn({0: END}))
  assert (end.id, end.token, end.finished) == (0, None, Finished.END)
  (chunk,) = made.plan().chunks
  assert (chunk.row, chunk.first, chunk.ids) == (0, True, (11,) * 4)
  assert made._pages.available == 7  # one is written by the step in flight
  assert made.complete(drawn()) == []  # that of the wasted token
  assert made._pages.available == 8


def test_the_last_token_is_never_planned_too_far():
  made = scheduler([3], max_tokens=2)
  made.plan()
  assert decodes(made.plan()) == [(0, 3)]
  assert made.plan() == ((), ())
  assert [d.finished for d in (*made.complete(drawn()), *made.complete(drawn()))] == [
    None, Finished.LENGTH
  ]  # fmt: skip
  assert not made.busy


def test_the_newest_gives_up_its_pages_and_comes_back_first_with_what_it_has():
  made = scheduler([4, 4, 4], num_pages=4, max_rows=3, chunk=12, max_tokens=6)
  assert [c[0] for c in chunks(made.plan())] == [0, 1]  # a page for each to grow: two fit
  made.plan()  # both take one more
  for _ in range(3):
    made.complete(drawn())
    assert len(made.plan().decode) == 2
  made.complete(drawn())
  assert made.plan() == ((), ())  # no page is left; those of the newest are still being written
  made.complete(drawn())
  assert decodes(made.plan()) == [(0, 8)]
  while not (step := made.plan()).chunks:
    if made._flight:
      made.complete(drawn())
  (back, *_) = step.chunks
  assert back.request.prompt == [11] * 4 and back.first
  assert back.shared + back.ids == (*[11] * 4, *[LETTER] * (len(back.shared + back.ids) - 4))


def test_a_row_gets_several_pages_and_gives_back_what_it_has_not_reached():
  made = scheduler([4], num_pages=40, max_rows=2, max_pages_per_row=40, chunk=160, max_tokens=60)
  made.plan()
  tables = {len(row.pages) for _ in range(20) for row in made.plan().decode}
  assert tables == {1 + PAGES_AHEAD}  # of which the tokens fill six
  for _ in range(21):
    made.complete(drawn())
  submit(made, 1, 32 * 4)
  assert not made.plan().chunks  # 31 pages are left, and one of them is to grow by
  made.complete(drawn())
  (chunk,), (row,) = made.plan()
  assert (len(chunk.pages), row.position, len(row.pages)) == (32, 25, 7)


def test_pages_that_no_token_sees_any_more_are_given_back_and_known_while_nobody_takes_them():
  made = scheduler([4], max_tokens=16, window=6, num_pages=9)
  in_use = []
  while made.busy:
    step = made.plan()
    in_use.append(9 - made._pages.available)
    assert all(page != made._pages.none for row in step.decode for page in row.pages[-2:])
    if len(made._flight) > 1 or not (step.chunks or step.decode):
      made.complete(drawn())
  # Six tokens of the window are in at most three pages of four.
  assert max(in_use) == 3
  made.submit(1, Request([10] * 4 + [LETTER] * 12, Sampling(max_tokens=1)), frozenset())
  (chunk,) = made.plan().chunks
  assert (chunk.start, chunk.pages[0]) == (12, made._pages.none)  # two pages suffice
  made.complete(drawn())
  made.submit(2, Request([99] * 30, Sampling(max_tokens=6)), frozenset())  # takes all pages
  while made.busy:
    made.plan()
    made.complete(drawn())
  made.submit(3, Request([10] * 4 + [LETTER] * 12, Sampling(max_tokens=1)), frozenset())
  assert made.plan().chunks[0].start == 0


class Guesses:
  """A draft that guesses the same of every text."""

  most = 6

  def __init__(self, *ids):
    self.ids = ids

  def guess(self, texts):
    return dict.fromkeys(texts, self.ids)


def test_a_guess_takes_pages_that_are_left_over_and_gives_them_back_if_it_was_wrong():
  made = Scheduler(FakeDevice(num_pages=4), draft=Guesses(*[LETTER] * 6))
  submit(made, 0, 4, max_tokens=12)
  made.plan()
  made.complete(drawn())
  (row,) = made.plan().decode
  assert (row.position, len(row.pages), row.guess) == (4, 3, (LETTER,) * 6)
  made.complete(drawn())  # one token: the guess was wrong
  assert made._pages.available == 2
  submit(made, 1, 4, max_tokens=3)
  (row,) = (step := made.plan()).decode
  assert (row.position, len(row.pages), row.guess) == (5, 3, (LETTER,) * 6)
  assert not step.chunks  # there is no page to grow by
  right = np.full((8, 7), LETTER)
  (*_, last) = made.complete(
    Tokens(np.full(8, 7), right, np.zeros((8, 7)), *[np.zeros((8, 7, 0))] * 2)
  )
  assert last.place == 6
  (row,) = made.plan().decode
  assert (row.position, row.guess) == (12, (LETTER,) * 2)  # of 12 tokens three are left


def test_lowest_rows_first_and_a_cancelled_row_is_taken_by_the_next():
  made = scheduler([1, 1, 1], num_pages=14)
  assert [c[0] for c in chunks(made.plan())] == [0, 1, 2]
  made.complete(drawn())
  made.finish(1, Finished.CANCELLED)
  made.finish(0, Finished.CANCELLED)
  submit(made, 3, 2)
  step = made.plan()
  assert (chunks(step), decodes(step)) == ([(0, 0, 2, True)], [(2, 1)])
  made.finish(99, Finished.CANCELLED)  # of one that has ended, nothing


def test_a_large_request_is_not_passed_by_small_ones_behind_it():
  made = scheduler([4, 20, 1, 1], num_pages=8, chunk=40, max_tokens=8)
  assert [c[0] for c in chunks(made.plan())] == [0, 1]
  made = scheduler([12, 20, 1, 1], num_pages=8, chunk=40, max_tokens=8)
  assert [c[0] for c in chunks(made.plan())] == [0]


def test_an_interrupted_device_is_forgotten():
  made = scheduler([3, 2])
  made.plan()
  made.plan()
  made.complete(drawn())
  made.abandon()
  assert made._pages.available == 14 and made.busy
  step = made.plan()
  assert [(c.ids[:4], c.first) for c in step.chunks] == [
    ((10, 10, 10, LETTER), True), ((11, 11, LETTER), True)
  ]  # fmt: skip
