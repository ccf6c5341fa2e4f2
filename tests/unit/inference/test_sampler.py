"""What the sampler can draw, and how often."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ats_jax.inference.generator import sample

VOCAB = 10
DRAWS = 20_000
# 0.9999 quantiles of chi-square: with a fixed seed a right sampler passes always, and a wrong one
# (a share off by a few per cent) is far beyond.
CHI_SQUARE = {1: 15.1, 3: 21.1, 6: 27.9, 9: 33.7}


def draws(logits, seed=0, n=DRAWS, *, temperature=1.0, top_k=0, top_p=1.0):
  logits_BV = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, len(logits)))
  key = jax.random.key(seed)
  return np.asarray(sample(logits_BV, key, temperature=temperature, top_k=top_k, top_p=top_p))


def softmax(logits):
  e = np.exp(np.asarray(logits, np.float64) - np.max(logits))
  return e / e.sum()


logits_lists = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB).map(
  lambda xs: [x / 10 for x in xs]
)


@hypothesis.settings(max_examples=20)
@hypothesis.given(logits_lists)
def test_temperature_0_is_argmax(logits):
  got = draws(logits, n=3, temperature=0.0, top_k=2, top_p=0.5)
  assert got.dtype == np.int32 and np.all(got == np.argmax(logits))


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 2e-38])
def test_a_small_temperature_tends_to_argmax(temperature):
  logits = [3.0, 8.0, -50.0, 7.5, 20.0, 19.5, 0.0]
  assert np.all(draws(logits, n=50, temperature=temperature, top_p=0.9) == 4)


@hypothesis.settings(max_examples=20)
@hypothesis.given(logits_lists, st.integers(1, VOCAB + 2))
def test_top_k_draws_only_the_k_likeliest(logits, k):
  kth = sorted(logits, reverse=True)[min(k, VOCAB) - 1]
  assert set(draws(logits, n=2000, temperature=5.0, top_k=k)) <= {
    i for i, x in enumerate(logits) if x >= kth
  }


def nucleus(logits, top_p):
  """The likeliest whose probabilities first reach p; what ties with the last of them stays."""
  p = softmax(logits)
  order = np.argsort(-p, kind="stable")
  last = int(np.searchsorted(np.cumsum(p[order]), top_p - 1e-9))
  return {i for i in range(len(p)) if p[i] >= p[order[min(last, len(p) - 1)]] - 1e-12}


@hypothesis.settings(max_examples=30)
@hypothesis.given(logits_lists, st.sampled_from([0.0, 0.05, 0.3, 0.51, 0.83, 0.97]))
def test_top_p_draws_only_the_nucleus(logits, top_p):
  kept = nucleus(logits, top_p)
  found = set(draws(logits, n=4000, top_p=top_p))
  assert found <= kept
  p = softmax(logits)
  renormalised = p / sum(p[i] for i in kept)
  assert found >= {i for i in kept if renormalised[i] > 0.01}  # missed with chance e^-40


@pytest.mark.parametrize(
  ("options", "kept"),
  [
    ({}, range(VOCAB)),
    ({"temperature": 0.7}, range(VOCAB)),
    ({"temperature": 2.0, "top_k": 4}, range(6, VOCAB)),
    ({"top_p": 0.9}, range(3, VOCAB)),
    ({"top_k": 4, "top_p": 0.6}, range(8, VOCAB)),  # p of what top_k left, not of all
  ],
)
def test_frequencies(options, kept):
  logits = [0.3 * i for i in range(VOCAB)]
  p = softmax(np.array(logits) / options.get("temperature", 1.0))
  kept = list(kept)
  counts = np.bincount(draws(logits, seed=7, **options), minlength=VOCAB)
  assert counts.sum() == counts[kept].sum()
  want = DRAWS * p[kept] / p[kept].sum()
  statistic = ((counts[kept] - want) ** 2 / want).sum()
  assert statistic < CHI_SQUARE[len(kept) - 1]


def test_minus_infinity_never_comes_out():
  logits = [0.0, -np.inf, 1.0, -np.inf]
  for options in ({}, {"top_k": 4}, {"top_k": 3}, {"top_p": 0.999}, {"temperature": 50.0}):
    assert set(draws(logits, n=2000, **options)) <= {0, 2}


def test_rows_are_drawn_apart_and_the_key_decides():
  assert len(set(draws([0.0] * VOCAB, n=200))) == VOCAB
  np.testing.assert_array_equal(draws([0.0] * VOCAB, seed=3), draws([0.0] * VOCAB, seed=3))
  assert np.any(draws([0.0] * VOCAB, seed=3) != draws([0.0] * VOCAB, seed=4))
