"""The bigram baseline against its definition, in plain dicts."""

from collections import Counter

import numpy as np
import pytest

from ats_jax.data.look import bigram
from ats_jax.data.look.bigram import Bigram

VOCAB = 7


def reference(pairs: list[tuple[int, int]]) -> np.ndarray:
  """Witten & Bell 1991, method C, word for word: bigram -> unigram -> uniform."""
  counts, targets = Counter(pairs), Counter(target for _, target in pairs)
  contexts, successors = Counter(a for a, _ in pairs), Counter(a for a, _ in counts)
  n, t = targets.total(), len(targets)
  unigram = np.array([(targets[b] + t / VOCAB) / (n + t) for b in range(VOCAB)])
  found = np.tile(unigram, (VOCAB, 1))
  for a in contexts:
    n, t = contexts[a], successors[a]
    seen = np.array([counts[a, b] for b in range(VOCAB)])
    found[a] = n / (n + t) * seen / n + t / (n + t) * unigram
  return found


def batch(rows: list[list[tuple[int, int, bool]]]) -> dict[str, np.ndarray]:
  """[rows, seq] arrays of (token, target, counted)."""
  tokens, targets, counted = np.array(rows, np.int32).transpose(2, 0, 1)
  return {"tokens": tokens, "targets": targets, "loss_mask": counted.astype(np.float32)}


def drawn(rng, contexts: int) -> list[list[tuple[int, int, bool]]]:
  """Three rows of five tokens below `contexts`, some of them not counted."""
  shape = (3, 5)
  values = rng.integers(0, contexts, shape), rng.integers(0, VOCAB, shape), rng.random(shape) < 0.7
  return np.stack(values, axis=-1).tolist()


def counted(batches) -> list[tuple[int, int]]:
  return [(a, b) for batch in batches for row in batch for a, b, counts in row if counts]


@pytest.mark.parametrize("limit", [0, 5, 12, None])
def test_equals_the_definition_and_counts_in_chunks_alike(monkeypatch, limit):
  if limit is not None:
    monkeypatch.setattr(bigram, "_MERGE_PAIRS", limit)
  for seed in range(8):
    rng = np.random.default_rng(seed)
    train = [drawn(rng, VOCAB - 2) for _ in range(1 + seed % 4)]  # no context has the last words
    valid, want = drawn(rng, VOCAB), reference(counted(train))
    model = Bigram(map(batch, train), VOCAB)
    got = model.probability(*np.divmod(np.arange(VOCAB * VOCAB), VOCAB)).reshape(VOCAB, VOCAB)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=0)
    np.testing.assert_allclose(got.sum(axis=1), 1.0, rtol=1e-9)
    loss = -np.mean([np.log(want[pair]) for pair in counted([valid])])
    targets = Counter(target for _, target in counted(train))
    mass = targets.total() + len(targets)
    share = [(targets[b] + len(targets) / VOCAB) / mass for _, b in counted([valid])]
    assert model.losses([batch(valid)]) == pytest.approx((loss, -np.log(share).mean()), rel=1e-9)


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
    model.losses(nothing)
