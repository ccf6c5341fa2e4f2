"""The bigram baseline against its definition, in plain dicts."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ats_jax.data.look import bigram
from ats_jax.data.look.bigram import Bigram

VOCAB = 7


class Reference:
  """Witten & Bell 1991, method C, word for word: bigram -> unigram -> uniform."""

  def __init__(self, pairs: list[tuple[int, int]]):
    self.pairs, self.targets = Counter(pairs), Counter(target for _, target in pairs)
    self.contexts = Counter(context for context, _ in pairs)
    self.successors = Counter(context for context, _ in self.pairs)

  def unigram(self, target: int) -> float:
    n, t = self.targets.total(), len(self.targets)
    return (self.targets[target] + t / VOCAB) / (n + t)

  def bigram(self, target: int, context: int) -> float:
    n, t = self.contexts[context], self.successors[context]
    if not n:
      return self.unigram(target)
    return n / (n + t) * self.pairs[context, target] / n + t / (n + t) * self.unigram(target)


def batch(rows: list[list[tuple[int, int, bool]]]) -> dict[str, np.ndarray]:
  """[rows, seq] arrays of (token, target, counted)."""
  tokens, targets, counted = np.array(rows, np.int32).transpose(2, 0, 1)
  return {"tokens": tokens, "targets": targets, "loss_mask": counted.astype(np.float32)}


def rows(context: int) -> st.SearchStrategy:
  """A batch of 1 to 3 rows of 5 tokens below `context`, some of them not counted."""
  token = st.tuples(st.integers(0, context - 1), st.integers(0, VOCAB - 1), st.booleans())
  return st.lists(st.lists(token, min_size=5, max_size=5), min_size=1, max_size=3)


# The last two words are the context of nothing that is trained on, and one pair there always is.
TRAIN = st.lists(rows(VOCAB - 2), max_size=4).map(lambda batches: [*batches, [[(0, 1, True)] * 2]])
EVERY_PAIR = np.divmod(np.arange(VOCAB * VOCAB), VOCAB)


def counted(batches) -> list[tuple[int, int]]:
  return [(a, b) for batch in batches for row in batch for a, b, counts in row if counts]


@given(train=TRAIN, valid=rows(VOCAB), limit=st.integers(0, 12))
@settings(max_examples=30)
def test_equals_the_definition_and_counts_in_chunks_alike(train, valid, limit):
  model, reference = Bigram(map(batch, train), VOCAB), Reference(counted(train))
  got = model.probability(*EVERY_PAIR)
  want = [reference.bigram(t, c) for c, t in np.transpose(EVERY_PAIR).tolist()]
  np.testing.assert_allclose(got, want, rtol=1e-9, atol=0)
  np.testing.assert_allclose(got.reshape(VOCAB, VOCAB).sum(axis=1), 1.0, rtol=1e-9)
  if tested := counted([valid]):
    want = -np.mean([np.log(reference.bigram(t, c)) for c, t in tested])
    assert model.loss([batch(valid)]) == pytest.approx(want, rel=1e-9)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(bigram, "_MERGE_PAIRS", limit)
    chunks = Bigram(map(batch, train), VOCAB).probability(*EVERY_PAIR)
  np.testing.assert_array_equal(got, chunks)


def test_a_case_by_hand():
  """After a: b, b, c; after b: a. 4 pairs, 3 kinds of target, 4 words in the vocabulary."""
  a, b, c, d = range(4)
  model = Bigram([batch([[(a, b, 1), (a, b, 1), (a, c, 1), (b, a, 1), (d, d, 0)]])], 4)
  unigram = np.array([1, 2, 1, 0]) / 7 + 3 / 7 / 4
  np.testing.assert_allclose(
    model.probability(np.array([a, a, d]), np.array([b, d, a])),
    [2 / 5 + 2 / 5 * unigram[b], 2 / 5 * unigram[d], unigram[a]],
  )


def test_a_vocabulary_whose_pairs_exceed_32_bits():
  size = 200_000
  model = Bigram([batch([[(size - 1, size - 2, 1)] * 3])], size)
  seen, unseen = model.probability(np.array([size - 1, size - 2]), np.array([size - 2, size - 1]))
  assert seen > 0.9 and unseen < 1e-5


@pytest.mark.parametrize("nothing", [[], [batch([[(1, 2, False)]])]])
def test_no_tokens_to_fit_or_to_evaluate(nothing):
  with pytest.raises(ValueError, match="bigram baseline: there are no tokens to fit"):
    Bigram(nothing, VOCAB)
  model = Bigram([batch([[(1, 2, True)]])], VOCAB)
  with pytest.raises(ValueError, match="no tokens to evaluate on"):
    model.loss(nothing)
