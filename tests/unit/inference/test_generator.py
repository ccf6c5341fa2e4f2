"""Cached generation against the full forward pass; ends, stops and what is never drawn."""

import dataclasses
import functools
from itertools import pairwise

import canonical
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EVALUATION, make_decoder, make_test_mesh, pack

from ats_jax.config.schema import SampleConfig
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.inference import generator
from ats_jax.inference.text import until_stop

generate = functools.partial(generator.generate, rules=EVALUATION)
generate_tokens = functools.partial(generator.generate_tokens, rules=EVALUATION)

# float32; keys are added up over a cache of another length.
RTOL, ATOL = 1e-5, 2e-5
GREEDY = SampleConfig(max_tokens=12, temperature=0.0, top_p=1.0)
HOT = SampleConfig(max_tokens=30, temperature=50.0, top_p=1.0)  # almost uniform
TOKENIZER = ByteTokenizer()
# With windows, sinks and scaled positions. Weights larger than at initialisation: logits differ
# clearly and depend on the context.
CFG = canonical.config(
  "window",
  {
    "model.vocab_size": 384,
    "model.init_std": 0.3,
    "model.rope_scaling.name": "yarn",
    "model.rope_scaling.factor": 4.0,
    "model.rope_scaling.original_len": 8,
  },
)


@jax.jit
def forward(model, tokens, segments, positions):
  x, _ = model(tokens, positions_BT=positions, segment_ids_BT=segments, rules=EVALUATION)
  return model.logits(x)


@jax.jit
def extend(model, *args):
  x, cache = model.extend(*args, EVALUATION)
  return model.logits(x), cache


def full_logits(model, ids):
  """Logits of each of `ids` by one pass without a cache, in a row of 40."""
  tokens = np.zeros((1, 40), np.int32)
  tokens[0, : len(ids)] = ids
  return np.asarray(forward(model, tokens, *pack([[len(ids)]], 40)))[0, : len(ids)]


def allowed():
  """Every byte, and the end of the document."""
  return [*range(256), TOKENIZER.eos_id]


@pytest.mark.parametrize("prompt", ["seven c", ""])
def test_greedy_tokens_equal_the_argmax_of_the_full_forward(mesh, prompt):
  model = canonical.model(CFG)
  tokens = list(generate_tokens(model, TOKENIZER, GREEDY, prompt=prompt, seed=0))
  assert len(tokens) == GREEDY.max_tokens
  ids = [TOKENIZER.bos_id, *TOKENIZER.encode(prompt), *tokens]
  # One causal pass over the whole gives what a pass at each step would.
  logits = full_logits(model, ids)[-len(tokens) - 1 : -1]
  ok = np.array(allowed())
  assert tokens == ok[np.argmax(logits[:, ok], axis=-1)].tolist()
  assert len(set(tokens)) > 1  # not one token over and over, which would hide a wrong position


def test_extending_a_cache_gives_the_logits_of_the_full_forward(mesh):
  model, parts = canonical.model(CFG), [8, 1, 1, 8]
  ids = np.random.default_rng(0).integers(0, 256, sum(parts)).astype(np.int32)
  cache = model.empty_cache(1, 32, EVALUATION, jnp.dtype("float32"))
  cache = jax.tree.map(lambda a: a + 9.0, cache)  # slots ahead must not be read
  got, at = [], 0
  for part in parts:
    index = np.arange(at, at + part, dtype=np.int32)[None]
    real = np.ones_like(index, bool)
    logits, cache = extend(model, ids[None, at : at + part], index, real, cache)
    got.append(np.asarray(logits)[0])
    at += part
  np.testing.assert_allclose(np.concatenate(got), full_logits(model, ids), RTOL, ATOL)


@pytest.mark.thorough
def test_a_mesh_of_eight_gives_the_tokens_of_one_device():
  sampling = dataclasses.replace(GREEDY, temperature=0.9, top_p=0.9)
  results = []
  for shape in ((1, 1, 1), (2, 2, 2)):
    with jax.set_mesh(make_test_mesh(*shape)):
      model = jax.jit(lambda: make_decoder(CFG))()
      tokens = generate_tokens(model, TOKENIZER, sampling, prompt="some prompt", seed=5)
      results.append(list(tokens))
  assert results[0] == results[1] and len(results[0]) == GREEDY.max_tokens


def test_special_and_padded_ids_are_never_drawn(mesh):
  class Small:
    """Three tokens of text; 378 of the model's 384 ids mean nothing."""

    vocab_size, bos_id, eos_id, pad_id = 6, 1, 3, 4
    special_ids, end_ids = frozenset({1, 3, 4}), frozenset({3})

    @property
    def of_text(self):
      return self

    def encode(self, text):
      return [0] * len(text)

  model = canonical.model(CFG)
  hot = dataclasses.replace(HOT, max_tokens=8)
  found = [
    t for seed in range(15) for t in generate_tokens(model, Small(), hot, prompt="x", seed=seed)
  ]
  assert set(found) == {0, 2, 5} and len(found) > 30


def test_the_end_of_the_document_ends_the_text(mesh):
  model = canonical.model(CFG)
  tokens = list(generate_tokens(model, TOKENIZER, GREEDY, prompt="x", seed=0))

  class EndsEarly(ByteTokenizer):
    eos_id = tokens[4]

  ended = list(generate_tokens(model, EndsEarly(), GREEDY, prompt="x", seed=0))
  assert ended == tokens[: tokens.index(tokens[4])]


def test_max_tokens_and_seed(mesh):
  model = canonical.model(CFG)
  warm = lambda n: dataclasses.replace(HOT, max_tokens=n)
  draw = lambda n, seed: list(generate_tokens(model, TOKENIZER, warm(n), prompt="x", seed=seed))
  assert draw(0, 0) == []
  assert len(draw(1, 0)) == 1
  assert draw(9, 0) == draw(9, 0) != draw(9, 1)
  assert draw(9, 0)[:5] == draw(5, 0)  # how long the text may get does not change it


@pytest.mark.compat
def test_prompts_of_similar_length_share_a_compiled_program(mesh):
  model = canonical.model(CFG)
  of = lambda prompt: list(generate_tokens(model, TOKENIZER, GREEDY, prompt=prompt, seed=0))
  of("a")
  programs = generator._extend._cache_size()  # for the prompt and for one token
  for prompt in ("another", "fifteen letters"):
    of(prompt)
  assert generator._extend._cache_size() == programs


def test_text_is_the_decoded_tokens_up_to_a_stop(mesh):
  model = canonical.model(CFG)
  sampling = HOT
  text = TOKENIZER.decode(generate_tokens(model, TOKENIZER, sampling, prompt="p", seed=3))
  assert "".join(generate(model, TOKENIZER, sampling, prompt="p", seed=3)) == text
  stop = text[5:7]
  stopping = dataclasses.replace(sampling, stop=("never there", stop))
  got = "".join(generate(model, TOKENIZER, stopping, prompt="p", seed=3))
  assert got == text[: text.index(stop)]


def first_stop(text, stops):
  """Where the stop begins that is complete first; of two that end together, the longer."""
  for end in range(len(text) + 1):
    begins = [end - len(s) for s in stops if text[:end].endswith(s)]
    if begins:
      return min(begins)
  return len(text)


@hypothesis.settings(max_examples=200)
@hypothesis.given(
  st.text("ab\n", max_size=14),
  st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
  st.sets(st.integers(0, 14)),
)
def test_until_stop_does_not_depend_on_the_split_into_pieces(text, stops, cuts):
  borders = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
  pieces = [text[a:b] for a, b in pairwise(borders)]
  assert "".join(until_stop(pieces, tuple(stops))) == text[: first_stop(text, stops)]


@hypothesis.given(st.text("ab", max_size=12))
def test_until_stop_holds_back_only_what_may_begin_a_stop(text):
  passed = ""
  for piece in until_stop(iter(text), ("bbb",)):
    passed += piece
    assert not passed.endswith("b") or len(passed) == len(text)
