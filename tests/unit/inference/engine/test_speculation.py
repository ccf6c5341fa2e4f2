"""Texts with guessed tokens beside those without, on a real model."""

import dataclasses
import subprocess
import sys

import canonical
import numpy as np
import pytest
from helpers import thorough_but
from test_runner import LOUD, RULES, SIZE, TOKENIZER, answers, engine_of, ids_of

from ats_jax.inference.engine.engine import Engine
from ats_jax.inference.engine.lookup import PromptLookup
from ats_jax.inference.engine.request import Request, Sampling
from ats_jax.inference.engine.runner import ModelRunner, Size, served

GUESSING = dataclasses.replace(SIZE, guess=3)
PROMPTS = ["seven cups of tea", "a", "def main(argv):\n  return"]
CHI_SQUARE_3 = 21.1  # its 0.9999 quantile with three degrees of freedom: the seeds are fixed


class Recalls:
  """A draft that knows texts, and errs in every third token of an answer (`schedule.Draft`)."""

  most = 3

  def __init__(self, texts):
    self.texts, self.num_right, self.num_steps = texts, 0, 0
    self._before = {}

  def guess(self, texts):
    found = {}
    for number, ids in texts.items():
      self.num_steps += 1
      self.num_right += len(ids) - self._before.get(number, len(ids) - 1) - 1
      self._before[number] = len(ids)
      prompt, drawn = self.texts[number % len(self.texts)]
      at = len(ids) - len(prompt)
      found[number] = [t + ((at + i) % 3 == 2) for i, t in enumerate(drawn[at : at + self.most])]
    return found


def guessed(cfg, requests, size=GUESSING):
  """Texts without guesses, and again with some right and some wrong ones."""
  without = answers(engine_of(cfg, dataclasses.replace(size, guess=0)), requests)
  draft = Recalls([(r.prompt, drawn) for r, drawn in zip(requests, without, strict=True)])
  engine = engine_of(cfg, size, draft=draft)
  found = answers(engine, requests)
  assert answers(engine, requests) == found  # their beginnings are kept now
  assert draft.num_right > 0.3 * sum(map(len, without))
  return without, found


@pytest.mark.parametrize("kind", thorough_but(["dense", "experts", "latent", "window"], 3))
def test_greedy_texts_are_the_same(kind, mesh):
  cfg = canonical.config(kind, LOUD)
  sampling = Sampling(max_tokens=14, temperature=0.0, ignore_end=True)
  without, found = guessed(cfg, [Request(ids_of(text), sampling) for text in PROMPTS])
  assert found == without


@pytest.mark.thorough
@pytest.mark.parametrize("narrow", ["int8", "fp8"])
def test_greedy_texts_by_pages_in_8_bits_are_the_same(narrow, mesh):
  cfg = canonical.config("dense", LOUD)
  sampling = Sampling(max_tokens=14, temperature=0.0, ignore_end=True)
  requests = [Request(ids_of(text), sampling) for text in PROMPTS]
  without, found = guessed(cfg, requests, dataclasses.replace(GUESSING, narrow=narrow))
  assert found == without


def test_draws_of_a_seed_are_the_same_with_all_that_shapes_them_and_lost_rows(mesh):
  cfg = canonical.config("dense", LOUD)
  requests = [
    Request(ids_of("0123456789" * 2 + text), Sampling(
      max_tokens=20, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.5,
      presence_penalty=0.5, frequency_penalty=0.5, seed=seed, ignore_end=True,
    ))
    for seed, text in enumerate(("", "ab", "abcdefgh"))
  ]  # fmt: skip
  without, found = guessed(cfg, requests)
  assert found == without
  without, found = guessed(cfg, requests, dataclasses.replace(GUESSING, pages=9))
  assert found == without


def test_logprobs_are_the_same(mesh):
  cfg = canonical.config("dense", LOUD)
  asked = Request(ids_of("seven"), Sampling(max_tokens=9, seed=3, logprobs=4, ignore_end=True))
  draft, found = None, []
  for size in (SIZE, GUESSING):
    engine = engine_of(cfg, size, draft=draft)
    engine.submit(asked)
    found.append([event for event in engine.events() if event.ids])
    draft = Recalls([(asked.prompt, [event.ids[0] for event in found[0]])])
  assert draft.num_right == 0  # of the one that nobody used
  for one, other in zip(*found, strict=True):
    assert one.ids == other.ids
    (one,), (other,) = one.logprobs, other.logprobs
    np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-5)
    assert [i for i, _ in one.likeliest] == [i for i, _ in other.likeliest]


class Always:
  """A draft that guesses the same whatever was drawn (`schedule.Draft`)."""

  most = 2

  def __init__(self, ids):
    self.ids = ids

  def guess(self, texts):
    return dict.fromkeys(texts, self.ids)


def test_each_token_comes_as_often_as_its_probability_behind_right_and_wrong_guesses(mesh):
  cfg = canonical.config("dense", {"model.vocab_size": 384})
  prompt, number = ids_of("seven"), 1500
  narrow = Sampling(max_tokens=3, temperature=1.0, top_k=4, ignore_end=True)
  runner = ModelRunner(
    served(canonical.model(cfg), program := canonical.program(cfg)), program, TOKENIZER, RULES,
    Size(context=16, rows=64, page=8, chunk=16, guess=2),
  )  # fmt: skip

  def pairs(draft):
    requests = [Request(prompt, dataclasses.replace(narrow, seed=i)) for i in range(number)]
    return answers(Engine(runner, TOKENIZER, draft=draft), requests)

  plain = pairs(None)
  first, counts = np.unique([a for a, *_ in plain], return_counts=True)
  assert len(first) == 4
  usual = int(first[np.argmax(counts)])
  behind = [b for a, b, _ in plain if a == usual]
  second, counts = np.unique(behind, return_counts=True)
  likely = dict(zip(second.tolist(), counts / len(behind), strict=True))
  with_guesses = pairs(Always([int(second[0])]))
  assert with_guesses == plain  # so what follows is about both
  # Against the probabilities of the model itself.
  engine = Engine(runner, TOKENIZER)
  engine.submit(Request([*prompt, usual], Sampling(max_tokens=1, temperature=0.0, logprobs=4)))
  (event,) = [e for e in engine.events() if e.ids]
  p = np.exp([logprob for _, logprob in event.logprobs[0].likeliest])
  want = len(behind) * p / p.sum()
  got = np.array([likely.get(i, 0) for i, _ in event.logprobs[0].likeliest]) * len(behind)
  assert ((got - want) ** 2 / want).sum() < CHI_SQUARE_3


def test_lookup_continues_the_longest_run_that_came_before():
  draft = PromptLookup(4)
  text = [1, 2, 3, 4, 5, 6, 7, 9, 3, 4, 5]
  assert draft.guess({0: text}) == {0: [6, 7, 9, 3]}
  text += [8, 1, 2, 3, 4, 5]  # three tokens came twice before: the last time counts
  assert draft.guess({0: text}) == {0: [8, 1, 2, 3]}
  text += [6]
  assert draft.guess({0: text, 1: [1, 2], 2: []}) == {0: [7, 9, 3, 4], 1: [], 2: []}
  assert draft.guess({0: [*text, 1, 9]}) == {0: [3, 4, 5, 8]}  # one token suffices
  assert draft.guess({3: [7, 8, 7, 8, 7, 8]}) == {3: [7, 8, 7, 8]}  # goes on repeating itself
  assert list(draft._known) == [3]


def test_a_text_that_repeats_itself_takes_fewer_steps(mesh):
  cfg = canonical.config("dense", {"model.vocab_size": 384})
  asked = Request(ids_of("ab" * 8), Sampling(max_tokens=40, temperature=0.0, ignore_end=True))
  found, steps = [], []
  for draft in (None, PromptLookup(3)):
    engine = engine_of(cfg, GUESSING, draft=draft)
    run, count = engine._runner.run, []
    engine._runner.run = lambda step, run=run, count=count: count.append(step) or run(step)
    found.append(answers(engine, [asked]))
    steps.append(len(count))
  assert found[0] == found[1]
  assert steps[1] < 0.6 * steps[0]


def test_layers_that_skip_tokens_are_refused(mesh):
  with pytest.raises(ValueError, match="layers of this model skip tokens"):
    engine_of(canonical.config("depths", LOUD), GUESSING)


def test_without_guesses_nothing_of_them_is_imported():
  script = (
    "import sys, ats_jax.api, ats_jax.inference.engine.runner\n"
    "names = 'lookup', 'draft_model', 'verify'\n"
    "print([n for n in names if f'ats_jax.inference.engine.{n}' in sys.modules])"
  )
  printed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
  assert printed.stdout.split() == [b"[]"]
