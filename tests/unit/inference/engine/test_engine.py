"""Many requests at once against each alone, on a device that draws from what its pages hold."""

import itertools
import random
import re

import hypothesis
import hypothesis.strategies as st
import pytest
from fake_device import TOKENIZER, FakeDevice, Foresight, alone
from hypothesis.stateful import RuleBasedStateMachine, rule

from ats_jax.inference.engine.engine import Engine, Event
from ats_jax.inference.engine.request import Finished, Request, Sampling

BOS = TOKENIZER.bos_id


def request(prompt="", **sampling):
  return Request((BOS, *TOKENIZER.encode(prompt)), Sampling(**{"max_tokens": 12, **sampling}))


def results(engine, requests):
  """Ids, text and end of each, as `alone` gives them."""
  numbers = [engine.submit(r) for r in requests]
  events = list(engine.events())
  return [joined([e for e in events if e.id == n]) for n in numbers]


def joined(events):
  ids = list(itertools.chain.from_iterable(e.ids for e in events))
  return ids, "".join(e.text for e in events), events[-1].finished


class World:
  """An engine in use, and what is expected of each request that has not ended."""

  def __init__(self, *, guesses: bool, window: int):
    self.device = FakeDevice(window=window)
    self.asked: dict[int, Request] = {}
    self.draft = Foresight(self.asked, window) if guesses else None
    self.engine = Engine(self.device, TOKENIZER, draft=self.draft)
    self.events: dict[int, list[Event]] = {}
    self.deadline: dict[int, int] = {}  # in steps of the device
    self.num_ended = 0

  def submit(self, beginning: int, length: int, **sampling) -> None:
    """Ask; prompts with the same beginning share pages."""
    words = ["", "abcdefgh", "abcdefghijklmnop", "abcdefgXijklmnop"]
    new = request(words[beginning] + "0123456789"[:length], **sampling)
    number = self.engine.submit(new)
    self.asked[number], self.events[number] = new, []
    self.deadline[number] = self.device.num_steps + self._work()

  def _work(self) -> int:
    """Steps within which all that was asked must be done, one after the other."""
    return sum(len(r.prompt) + 3 * r.sampling.max_tokens + 6 for r in self.asked.values())

  def cancel(self, number: int) -> None:
    if self.asked:
      chosen = list(self.asked)[number % len(self.asked)]
      self.engine.cancel(chosen)

  def interrupt(self, where: str) -> None:
    """A Ctrl-C comes in one of the next steps."""
    self.device.interrupt = where

  def next_event(self) -> bool:
    """Take an event; whether there was one."""
    try:
      for event in self.engine.events():
        self._take(event)
        return True
    except KeyboardInterrupt:
      self.deadline = dict.fromkeys(self.asked, self.device.num_steps + self._work())
      return True
    return False

  def _take(self, event: Event) -> None:
    events = self.events[event.id]
    events.append(event)
    assert self.device.num_steps <= self.deadline[event.id]
    if not event.finished:
      return
    ids, text, reason = alone(self.asked.pop(event.id), self.device.window)
    got_ids, got_text, got_reason = joined(events)
    if got_reason is Finished.CANCELLED:
      assert got_ids == ids[: len(got_ids)] and got_text == TOKENIZER.decode(got_ids)
    else:
      assert (got_ids, got_text, got_reason) == (ids, text, reason)
    del self.events[event.id], self.deadline[event.id]
    self.num_ended += 1

  def finish(self) -> None:
    """Wait for the rest; then nothing is in use."""
    while self.next_event():
      pass
    assert not self.asked and not self.engine.busy
    scheduler = self.engine._scheduler
    assert scheduler._pages.available == self.device.num_pages
    assert sorted(scheduler._rows) == list(range(self.device.max_rows))


SAMPLING = st.fixed_dictionaries({
  "seed": st.integers(0, 3),
  "max_tokens": st.integers(1, 9),
  "stop": st.sampled_from([(), ("a",), ("ab", "cd")]),
})  # fmt: skip


class Machine(RuleBasedStateMachine):
  guesses, window = False, 0

  def __init__(self):
    super().__init__()
    self.world = World(guesses=self.guesses, window=self.window)

  @rule(beginning=st.integers(0, 3), length=st.integers(0, 10), sampling=SAMPLING)
  def submit(self, beginning, length, sampling):
    self.world.submit(beginning, length, **sampling)

  @rule(number=st.integers(0, 9))
  def cancel(self, number):
    self.world.cancel(number)

  @rule(where=st.sampled_from(["run", "started", "read"]))
  def interrupt(self, where):
    self.world.interrupt(where)

  @rule(number=st.integers(1, 8))
  def listen(self, number):
    for _ in range(number):
      self.world.next_event()

  def teardown(self):
    self.world.finish()


TestEngine = Machine.TestCase
TestEngine.settings = hypothesis.settings(max_examples=60, stateful_step_count=40)


class GuessingMachine(Machine):
  guesses = True


TestEngineThatGuesses = GuessingMachine.TestCase
TestEngineThatGuesses.settings = TestEngine.settings


class WindowMachine(Machine):
  window = 6


TestEngineWithWindow = WindowMachine.TestCase
TestEngineWithWindow.settings = TestEngine.settings


@pytest.mark.thorough
@pytest.mark.parametrize(("guesses", "window"), [(False, 0), (True, 0), (True, 6)])
def test_a_million_operations_end_every_request_with_its_own_text(guesses, window):
  rng, world = random.Random(0), World(guesses=guesses, window=window)
  for _ in range(1_000_000):
    kind = rng.random()
    if kind < 0.12 and len(world.asked) < 30:
      stop = rng.choice([(), (), ("a",), ("ab", "cd")])
      world.submit(rng.randrange(4), rng.randrange(11), seed=rng.randrange(4),
                   max_tokens=rng.randrange(1, 10), stop=stop)  # fmt: skip
    elif kind < 0.13:
      world.cancel(rng.randrange(30))
    elif kind < 0.132:
      world.interrupt(rng.choice(["run", "started", "read"]))
    else:
      world.next_event()
  world.finish()
  assert world.num_ended > 50_000


def test_texts_are_the_same_alone_together_preempted_and_with_shared_pages():
  requests = [request("abcdefgh" + str(i % 2), seed=i, max_tokens=20) for i in range(8)]
  expected = [alone(r) for r in requests]
  assert {reason for *_, reason in expected} == {Finished.END, Finished.LENGTH}
  tokens_read = []
  for shape, share in (({}, False), ({}, True), ({"num_pages": 90, "max_rows": 8}, False)):
    device = FakeDevice(**shape)
    assert results(Engine(device, TOKENIZER, share=share), requests) == expected
    tokens_read.append(device.num_read)
  preempted, shared, roomy = tokens_read
  assert roomy == sum(len(r.prompt) for r in requests) < preempted
  assert shared < preempted


def test_right_guesses_save_steps_and_wrong_ones_change_no_text():
  requests = [
    request("abcdefgh" + str(i % 2), seed=i, max_tokens=20, logprobs=i % 2) for i in range(8)
  ]
  expected, steps = [alone(r) for r in requests], []
  for shape in ({}, {"num_pages": 90, "max_rows": 8}):
    for draft in (None, Foresight(dict(enumerate(requests)))):
      device = FakeDevice(**shape)
      engine = Engine(device, TOKENIZER, draft=draft)
      assert results(engine, requests) == expected
      steps.append(device.num_steps)
  assert steps[1] < 0.8 * steps[0] and steps[3] < 0.8 * steps[2]


@pytest.mark.parametrize("guesses", [False, True])
def test_the_device_has_its_next_step_before_a_text_is_told(guesses):
  device, asked = FakeDevice(), request("abcdefgh", max_tokens=9, seed=1)
  draft = Foresight({0: asked}) if guesses else None
  engine = Engine(device, TOKENIZER, draft=draft)
  engine.submit(asked)
  assert not next(engine.events()).finished
  assert engine._handles


def test_a_prompt_that_came_before_is_read_from_its_last_page_on():
  device = FakeDevice()
  engine = Engine(device, TOKENIZER)
  first = request("abcdefghijk", max_tokens=1)  # 12 tokens with bos: three pages
  assert results(engine, [first]) == [alone(first)]
  assert device.num_read == 12
  again = request("abcdefghijk", seed=1, max_tokens=1)
  assert results(engine, [again]) == [alone(again)]
  assert device.num_read == 12 + 4  # the last token must be read, so its page is not shared


def test_stops_across_tokens_ends_and_lengths():
  texts = (alone(request(seed=seed, ignore_end=True))[1] for seed in itertools.count())
  seed, free = next((i, text) for i, text in enumerate(texts) if len(text) == 12)  # no end drawn
  middle = free[4:6]
  requests = [
    request(seed=seed, ignore_end=True, stop=(middle,)),
    request(seed=seed, ignore_end=True, stop=(middle + "#",)),  # held back until the end
    request(seed=seed, ignore_end=True, stop_ids=(ord(free[3]),)),
    request(seed=seed, ignore_end=True, max_tokens=1),
    request(seed=seed, ignore_end=True, stop=(free[-1] + "#", "#"), max_tokens=12),
  ]
  found = results(Engine(FakeDevice(), TOKENIZER), requests)
  assert found == [alone(r) for r in requests]
  assert [reason for *_, reason in found] == ["stop", "length", "end", "length", "length"]
  assert [text for _, text, _ in found] == [
    free[: free.index(middle)], free, free[: free.index(free[3])], free[:1], free
  ]  # fmt: skip


def test_characters_of_several_tokens_come_whole():
  class Spells(FakeDevice):
    """Draws the bytes of a text in turn, whatever it has read."""

    def _draw(self, entry, length):
      return "\u00e9\u20ac!".encode()[length - len(entry.request.prompt)]

  engine = Engine(Spells(), TOKENIZER)
  engine.submit(request(max_tokens=6))
  assert [e.text for e in engine.events()] == ["", "\u00e9", "", "", "\u20ac", "!"]
  engine.submit(request(max_tokens=3))  # ends inside a character
  assert [e.text for e in engine.events()] == ["", "\u00e9", "\ufffd"]


@pytest.mark.parametrize("guesses", [False, True])
def test_logprobs_are_of_their_own_row_and_as_many_as_asked(guesses):
  requests = [request(seed=i, logprobs=n, max_tokens=9) for i, n in enumerate((0, 1, 2))]
  draft = Foresight(dict(enumerate(requests))) if guesses else None
  engine = Engine(FakeDevice(), TOKENIZER, draft=draft)
  asks = [engine.submit(asked) for asked in requests]
  for event in engine.events():
    number = asks.index(event.id)
    assert len(event.logprobs) == (len(event.ids) if number else 0)
    for token, (logprob, likeliest) in zip(event.ids, event.logprobs, strict=False):
      assert logprob == -0.5 * token
      assert likeliest == tuple((token + i, -0.5 * (token + i)) for i in range(number))


def test_requests_that_cannot_be_done_say_so_and_disturb_no_other():
  engine = Engine(FakeDevice(), TOKENIZER)  # 9 pages of 4
  good = request("good")
  refused = {
    engine.submit(r): text
    for r, text in [
      (Request((), Sampling()), "the prompt is empty"),
      (request("x" * 36), "the prompt has 37 tokens, but prompt and answer have room for 36"),
      (request("x" * 24, max_tokens=12), r"max_tokens=12 and a prompt of 25 .* Use max_tokens=11"),
      (Request((BOS, 259), Sampling()), "prompt: 259 is no id of a token: they are 0 to 258"),
      (request(stop_ids=(300,)), "stop_ids: 300 is no id of a token"),
    ]
  }
  number = engine.submit(good)
  events = list(engine.events())
  assert joined([e for e in events if e.id == number]) == alone(good)
  messages = {e.id: e.message for e in events if e.finished is Finished.REFUSED}
  assert messages.keys() == refused.keys()
  for i, message in messages.items():
    assert re.search(refused[i], message) and "\n" not in message
  assert not engine.busy


def test_the_largest_request_has_all_pages_to_itself():
  device = FakeDevice(num_pages=9)
  requests = [request("x" * n, max_tokens=35 - n, ignore_end=True) for n in (20, 3, 30)]
  assert results(Engine(device, TOKENIZER), requests) == [alone(r) for r in requests]


@pytest.mark.parametrize(
  ("sampling", "message"),
  [
    ({"temperature": float("nan")}, r"temperature=nan is not a number from 0.0 to 100.0 \("),
    ({"temperature": "hot"}, "temperature='hot' is not a number"),
    ({"top_k": 1.5}, "top_k=1.5 is not a whole number from 0"),
    ({"top_p": 1.1}, "top_p=1.1 is not a number from 0.0 to 1.0"),
    ({"min_p": -1}, "min_p=-1 is not"),
    ({"repetition_penalty": 0}, "repetition_penalty=0 is not a number from 0.1 to 10.0"),
    ({"presence_penalty": 3}, "presence_penalty=3 is not a number from -2.0 to 2.0"),
    ({"seed": 2**32}, "seed=4294967296 is not a whole number"),
    ({"max_tokens": 0}, "max_tokens=0 is not a whole number from 1"),
    ({"max_tokens": True}, "max_tokens=True is not"),
    ({"logprobs": 21}, "logprobs=21 is not a whole number from 0 to 20"),
    ({"stop": ("",)}, "stop='' is not a text of at least one character"),
    ({"stop": ("\ud800",)}, "is not UTF-8"),
    ({"stop_ids": (-1,)}, "stop_ids: -1 is not the id of a token"),
  ],
)
def test_sampling_that_means_nothing_is_refused(sampling, message):
  with pytest.raises(ValueError, match=message) as error:
    Sampling(**sampling)
  assert "\n" not in str(error.value)
