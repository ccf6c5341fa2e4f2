"""What the sampler can draw, and how often."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ats_jax.inference.generator import sample

VOCAB = 10
DRAWS = 10_000
# 0.9999 quantiles of chi-square: with a fixed seed a right sampler passes always, and a wrong one
# (a share off by a few per cent) is far beyond.
CHI_SQUARE = {1: 15.1, 3: 21.1, 6: 27.9, 9: 33.7}


@functools.partial(jax.jit, static_argnames=("temperature", "top_k", "top_p"))
def many(logits_V, key, **options):
  return sample(jnp.broadcast_to(logits_V, (DRAWS, VOCAB)), key, **options)


def draws(logits, seed=0, *, temperature=1.0, top_k=0, top_p=1.0):
  options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
  return np.asarray(many(np.float32(logits), jax.random.key(seed), **options))


def softmax(logits):
  e = np.exp(np.asarray(logits, np.float64) - np.max(logits))
  return e / e.sum()


logits_lists = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB).map(
  lambda xs: [x / 10 for x in xs]
)


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 2e-38])
def test_no_or_a_small_temperature_is_argmax(temperature):
  logits = [3.0, 8.0, -50.0, 7.5, 20.0, 19.5, 0.0, 1.0, 1.0, 1.0]
  got = draws(logits, temperature=temperature, top_k=2, top_p=0.9)
  assert got.dtype == np.int32 and np.all(got == 4)


@hypothesis.settings(max_examples=10)
@hypothesis.given(logits_lists, st.sampled_from([1, 3, VOCAB + 2]))
def test_top_k_draws_only_the_k_likeliest(logits, k):
  kth = sorted(logits, reverse=True)[min(k, VOCAB) - 1]
  likeliest = {i for i, x in enumerate(logits) if x >= kth}
  assert set(draws(logits, temperature=5.0, top_k=k)) <= likeliest


def nucleus(logits, top_p):
  """The likeliest whose probabilities first reach p; what ties with the last of them stays."""
  p = softmax(logits)
  order = np.argsort(-p, kind="stable")
  last = int(np.searchsorted(np.cumsum(p[order]), top_p - 1e-9))
  return {i for i in range(len(p)) if p[i] >= p[order[min(last, len(p) - 1)]] - 1e-12}


@hypothesis.settings(max_examples=15)
@hypothesis.given(logits_lists, st.sampled_from([0.0, 0.51, 0.9]))
def test_top_p_draws_only_the_nucleus(logits, top_p):
  kept = nucleus(logits, top_p)
  found = set(draws(logits, top_p=top_p))
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
  logits = [0.0, -np.inf, 1.0, *[-np.inf] * 7]
  for options in ({}, {"top_k": 3}, {"top_p": 0.9}):
    assert set(draws(logits, **options)) <= {0, 2}


def test_rows_are_drawn_apart_and_the_key_decides():
  assert len(set(draws([0.0] * VOCAB))) == VOCAB
  np.testing.assert_array_equal(draws([0.0] * VOCAB, seed=3), draws([0.0] * VOCAB, seed=3))
  assert np.any(draws([0.0] * VOCAB, seed=3) != draws([0.0] * VOCAB, seed=4))
