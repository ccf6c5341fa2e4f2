"""Scores of texts beside those of the full forward pass, and what of them is read once."""

import dataclasses
import random
import zlib

import canonical
import jax
import numpy as np
import pytest
from fake_device import TOKENIZER
from helpers import pack, thorough_but
from test_runner import LOUD, RULES, SIZE, forward, ids_of

from ats_jax.inference.engine.runner import ModelRunner, served
from ats_jax.inference.engine.score import Scorer, Text

CONTEXTS = ["seven cups of tea", "0123456789 " * 4, "", "0123456789 " * 3 + "012"]
TEXTS = [Text(ids_of(c), TOKENIZER.encode(w)) for c in CONTEXTS for w in (" or six", "!", "")]


def scorer_of(cfg, share, size=SIZE):
  program = canonical.program(cfg)
  runner = ModelRunner(served(canonical.model(cfg), program), program, TOKENIZER, RULES, size)
  return Scorer(runner, cfg.model.vocab_size, share=share)


def full(cfg, text):
  """What the full forward pass says of a text."""
  ids, known = [*text.context, *text.continuation], len(text.context)
  tokens = np.zeros((1, SIZE.context), np.int32)
  tokens[0, : len(ids)] = ids
  logits = forward(canonical.model(cfg), tokens, *pack([[len(ids)]], SIZE.context))
  logits = np.asarray(logits)[0, known - 1 : len(ids) - 1]
  logprobs = np.asarray(jax.nn.log_softmax(logits))
  here = np.arange(len(logits))
  return logprobs[here, ids[known:]], np.argmax(logits, axis=1) == ids[known:]


@pytest.mark.parametrize(
  "kind", thorough_but(list(canonical.KINDS), list(canonical.KINDS).index("window"))
)
def test_scores_are_those_of_the_full_forward_pass(kind, mesh):
  cfg = canonical.config(kind, LOUD)
  texts = [*TEXTS, Text(ids_of("seven cups"), greedy_ids(cfg, ids_of("seven cups"), 3))]
  scorer = scorer_of(cfg, share=kind not in ("depths", "hybrid"))
  for _ in range(2):  # the second time most of it is in the pages
    scores = scorer.score(texts)
    for text, score in zip(texts, scores, strict=True):
      logprobs, likeliest = full(cfg, text)
      np.testing.assert_allclose(score.logprobs, logprobs, atol=2e-5)
      assert score.greedy == likeliest.all()
      assert score.logprob == pytest.approx(logprobs.sum(), abs=1e-4)
  assert scores[-1].greedy and not all(score.greedy for score in scores)


@pytest.mark.parametrize(("narrow", "apart"), [("int8", 0.03), ("fp8", 0.1)])
@pytest.mark.parametrize("kind", thorough_but(["dense", "latent"], 0))
def test_scores_by_pages_in_8_bits_are_close_and_the_same_again(kind, narrow, apart, mesh):
  cfg = canonical.config(kind, {"model.vocab_size": 384})
  scorer = scorer_of(cfg, share=True, size=dataclasses.replace(SIZE, narrow=narrow))
  first, second = scorer.score(TEXTS), scorer.score(TEXTS)  # most of the second is in the pages
  for text, one, other in zip(TEXTS, first, second, strict=True):
    np.testing.assert_allclose(one.logprobs, full(cfg, text)[0], atol=apart)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
  exact = np.concatenate([full(cfg, text)[0] for text in TEXTS])
  assert np.abs(np.concatenate([one.logprobs for one in first]) - exact).max() > 1e-4


def greedy_ids(cfg, ids, number):
  for _ in range(number):
    tokens = np.zeros((1, SIZE.context), np.int32)
    tokens[0, : len(ids)] = ids
    logits = forward(canonical.model(cfg), tokens, *pack([[len(ids)]], SIZE.context))
    ids = [*ids, int(np.argmax(np.asarray(logits)[0, len(ids) - 1]))]
  return ids[-number:]


class FakeDevice:
  """Says how likely a token is from the text that its pages hold.

  Attributes:
    shapes: of the steps.
    num_read: tokens of their parts.
  """

  def __init__(self, page_size=4, num_pages=24, max_rows=4, max_pages_per_row=12, chunk=64):
    self.page_size, self.num_pages, self.max_rows = page_size, num_pages, max_rows
    self.max_pages_per_row, self.chunk = max_pages_per_row, chunk
    self.shapes, self.num_read = [], 0
    self._pages = np.full((num_pages, page_size), -1, np.int32)

  def score(self, parts, shape):
    self.shapes.append(shape)
    assert len(parts) <= shape[0] and len({part.row for part in parts}) == len(parts)
    logprobs, likeliest = np.full(shape, np.nan, np.float32), np.zeros(shape, bool)
    for row, part in enumerate(parts):
      assert 0 < len(part.ids) == len(part.targets) <= shape[1]
      self.num_read += len(part.ids)
      for place, token in enumerate(part.ids, part.start):
        self._pages[part.pages[place // self.page_size], place % self.page_size] = token
      text = self._pages[list(part.pages)].ravel()
      for at, target in enumerate(part.targets):
        logprobs[row, at], likeliest[row, at] = said(text[: part.start + at + 1], target)
    return logprobs, likeliest

  def scores(self, handle):
    return handle


def said(ids, target):
  number = zlib.crc32(np.array([*ids, target], np.int32).tobytes())
  return np.float32(-(number % 1000)) / 64, number % 3 > 0


def test_many_texts_are_scored_each_by_its_own_tokens():
  rng = random.Random(0)
  begins = [[rng.randrange(4) for _ in range(length)] for length in (1, 3, 9, 20, 30)]
  texts = [
    Text(
      rng.choice(begins) + rng.choices(range(4), k=rng.randrange(8)),
      rng.choices(range(4), k=rng.randrange(6)),
    )
    for _ in range(400)
  ]
  device = FakeDevice()
  scorer = Scorer(device, 4)
  for text, score in zip(texts, scorer.score(texts), strict=True):
    ids, known = [*text.context, *text.continuation], len(text.context)
    each = [said(ids[:i], ids[i]) for i in range(known, len(ids))]
    assert score.logprobs.tolist() == [logprob for logprob, _ in each]
    assert score.greedy == all(likeliest for _, likeliest in each)
  assert scorer._pages.available == device.num_pages and len(scorer._rows) == device.max_rows
  assert not scorer._promised
  plain = FakeDevice()
  Scorer(plain, 4, share=False).score(texts)
  assert device.num_read < 0.6 * plain.num_read
  assert plain.num_read == sum(len(t.context) + len(t.continuation) - 1 for t in texts if t[1])


def test_answers_to_one_question_are_read_side_by_side_behind_it():
  question, device = list(range(40)), FakeDevice(num_pages=60)
  scores = Scorer(device, 50).score([Text(question, [i, i]) for i in (41, 42, 43, 44)])
  assert len(scores) == 4
  assert device.shapes == [(1, 64), (2, 32), (1, 32)]  # 64 tokens of a step are two rows of 32
  assert device.num_read == 41 + 3 * 5  # the last page of the question is read with each answer


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (Text([], [1]), "text 1: the context is empty"),
    (Text([1], [259]), "text 1: 259 is no id of a token: they are 0 to 258"),
    (Text([1] * 40, [2] * 10), "text 1 has 50 tokens, but there is room for 49. Shorten"),
  ],
)
def test_a_text_that_cannot_be_scored_is_refused_before_any_is(text, message):
  device = FakeDevice()
  scorer = Scorer(device, 259)
  with pytest.raises(ValueError, match=message):
    scorer.score([Text([1], [2]), text])
  assert not device.shapes
  assert len(scorer.score([Text([1] * 40, [2] * 9)])) == 1
