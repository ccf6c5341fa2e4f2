"""Continue a text: fill the cache with the prompt, then one token at a time."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.config.schema import SampleConfig
from ats_jax.data.tokens.tokenizer import Tokenizer
from ats_jax.inference.text import stream_text, until_stop
from ats_jax.model.decoder import Cache, Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.sharding.apply import num_shards, reshard
from ats_jax.sharding.rules import whole_rows


def generate(
  model: Decoder,
  tokenizer: Tokenizer,
  cfg: SampleConfig,
  *,
  rules: Pass,
  prompt: str | Sequence[int],
  seed: int,
) -> Iterator[str]:
  """Yield the continuation of `prompt`, piece by piece, as it is drawn.

  Ends at the end-of-document token, with a tokenizer of conversations also at the end of an answer,
  at one of `cfg.stop` (which is not yielded), or after `cfg.max_tokens`. Runs on the current mesh;
  the same seed gives the same text.

  Args:
    model: the decoder.
    tokenizer: the one it was trained with.
    cfg: temperature, limits and stops of sampling.
    rules: how sparse layers choose (`Program.rules`).
    prompt: text to continue; empty = the beginning of a document. Or the ids of one, bos first
      (`ChatTokenizer.prompt`).
    seed: seed of the draws.
  """
  ids = prompt_ids(tokenizer, prompt)
  tokens = generate_tokens(model, tokenizer, cfg, rules=rules, prompt=ids, seed=seed)
  return until_stop(stream_text(tokens, tokenizer, ids), cfg.stop)


def prompt_ids(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
  """The tokens of a prompt, bos first."""
  if not isinstance(prompt, str):
    return list(prompt)
  return [tokenizer.of_text.bos_id, *tokenizer.encode(prompt)]


def generate_tokens(
  model: Decoder,
  tokenizer: Tokenizer,
  cfg: SampleConfig,
  *,
  rules: Pass,
  prompt: str | Sequence[int],
  seed: int,
) -> Iterator[int]:
  """Yield the ids that continue `prompt`, up to and without the one that ends them."""
  if not model.predicts:
    raise ValueError("generate: this model rates texts and writes none. `evaluate` takes it.")
  ids = prompt_ids(tokenizer, prompt)
  # Lengths are rounded up so that prompts of similar length share a compiled program.
  padded = max(16, 1 << (len(ids) - 1).bit_length())
  length = -(-(padded + cfg.max_tokens) // 64) * 64
  rows = num_shards("batch")  # every device needs a row; all rows are alike
  with whole_rows():
    cache = model.empty_cache(rows, length, rules, model.num.compute_dtype)

  allowed = np.arange(model.cfg.vocab_size) < tokenizer.vocab_size
  allowed[list(tokenizer.special_ids)] = False
  ends = tokenizer.end_ids
  allowed[list(ends)] = True
  drawing = {"temperature": cfg.temperature, "top_k": cfg.top_k, "top_p": cfg.top_p}
  drawing |= {"min_p": cfg.min_p}
  penalties = (cfg.repetition_penalty, cfg.presence_penalty, cfg.frequency_penalty)
  counts = None if penalties == (1.0, 0.0, 0.0) else np.zeros(model.cfg.vocab_size, np.int32)
  if counts is not None:
    counts[ids] = 1

  def step(*args: Any) -> tuple[jax.Array, Cache]:
    with whole_rows():  # not around the loop: a generator would leave it set for its caller
      return _extend(*args, counts, penalties, rules=rules, **drawing)

  key = jax.random.key(seed)
  # The padding's keys sit in slots that are overwritten before a later token sees them.
  filled = np.full(padded, tokenizer.eos_id, np.int32)
  filled[: len(ids)] = ids
  token, cache = step(model, cache, filled, np.arange(padded), len(ids) - 1, key, allowed)
  for position in range(len(ids), len(ids) + cfg.max_tokens):
    token_id = int(token)
    if token_id in ends:
      return
    yield token_id
    if counts is not None:
      counts = counts.copy()  # the last program may still read it
      counts[token_id] += 2
    if position + 1 < len(ids) + cfg.max_tokens:
      here = np.array([position])
      token, cache = step(model, cache, token[None], here, 0, key, allowed)


@functools.partial(
  jax.jit,
  donate_argnames="cache",
  static_argnames=("rules", "temperature", "top_k", "top_p", "min_p"),
)
def _extend(
  model: Decoder,
  cache: Cache,
  tokens_T: jax.Array,
  index_T: jax.Array,
  last: jax.Array,
  key: jax.Array,
  allowed_V: jax.Array,
  counts_V: jax.Array | None,
  penalties: tuple[float, float, float],
  *,
  rules: Pass,
  temperature: float,
  top_k: int,
  top_p: float,
  min_p: float,
) -> tuple[jax.Array, Cache]:
  """Run tokens at cache slots `index_T`, padding after `last`; draw the one that follows."""
  rows = num_shards("batch")
  spread = lambda x: reshard(
    jnp.broadcast_to(jnp.asarray(x, jnp.int32), (rows, x.size)), "batch", "seq"
  )
  is_real_T = jnp.arange(tokens_T.size) <= last
  x_BTD, cache = model.extend(
    spread(tokens_T), spread(index_T), spread(is_real_T) > 0, cache, rules
  )
  x_B1D = jax.lax.dynamic_slice_in_dim(x_BTD, last, 1, axis=1)
  logits_V = reshard(model.logits(x_B1D), None, None, None)[0, 0]
  logits_V = jnp.where(allowed_V, logits_V, -jnp.inf)
  if counts_V is not None:
    logits_V = penalised(logits_V, counts_V, *penalties)
  draw = jax.random.fold_in(key, index_T[last])
  narrow = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
  token_B = sample(logits_V[None], draw, temperature=temperature, **narrow)
  return token_B[0], cache


def penalised(
  logits: jax.Array, counts: jax.Array, repetition: Any, presence: Any, frequency: Any
) -> jax.Array:
  """Logits against tokens that came before.

  Args:
    logits: float32 [..., vocab].
    counts: int32 like them: twice how often a token was drawn, and 1 more if it is in the prompt.
    repetition: divides positive logits of tokens that came, and multiplies negative ones.
    presence: is taken off those of tokens that were drawn.
    frequency: the same for each time that one was drawn.
  """
  drawn = counts // 2
  scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
  logits = jnp.where(counts > 0, scaled, logits)
  return logits - (presence * (drawn > 0) + frequency * drawn)


def narrowed(
  logits_BV: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
  """Logits of the likeliest tokens, -inf for the others.

  Args:
    logits_BV: float32 [batch, vocab], the largest of a row 0.
    top_k: as of `sample`, as the others; each for all rows, or [batch, 1].
    top_p: share of the probability that is kept.
    min_p: share of the likeliest's probability that a token must have.
  """
  (rows, size), at_least_one = logits_BV.shape, lambda place: jnp.maximum(place, 0)
  sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
  at = lambda place: jnp.take_along_axis(sorted_BV, jnp.broadcast_to(place, (rows, 1)), axis=1)
  kth_B1 = at(jnp.where(top_k == 0, size, jnp.minimum(top_k, size)) - 1)
  share_BV = jax.nn.softmax(jnp.where(sorted_BV < kth_B1, -jnp.inf, sorted_BV))
  before_BV = jnp.cumsum(share_BV, axis=-1) - share_BV
  last_B1 = jnp.sum(before_BV < top_p, axis=-1, keepdims=True) - 1
  floor_B1 = jnp.where(top_p < 1, at(at_least_one(last_B1)), -jnp.inf)
  floor_B1 = jnp.maximum(jnp.maximum(floor_B1, kth_B1), jnp.log(min_p))
  return jnp.where(logits_BV < floor_B1, -jnp.inf, logits_BV)


def sample(
  logits_BV: jax.Array,
  key: jax.Array,
  *,
  temperature: float,
  top_k: int,
  top_p: float,
  min_p: float = 0.0,
) -> jax.Array:
  """Draw one token a row.

  Args:
    logits_BV: float32 [batch, vocab]; -inf never comes out.
    key: random key of this draw.
    temperature: divides the logits; 0 = the likeliest token, and the rest is ignored.
    top_k: keep the k likeliest (ties with the k-th stay); 0 = all.
    top_p: then keep the likeliest whose probabilities first reach p (Holtzman et al. 2020,
      arXiv:1904.09751), at least one; 1 = all.
    min_p: then keep those at least p times as likely as the likeliest; 0 = all.

  Returns:
    int32 [batch].
  """
  if temperature == 0.0:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  # Subtract the maximum first: a low temperature must not make two of them infinite.
  logits_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / temperature
  if top_k or top_p < 1.0 or min_p:
    logits_BV = narrowed(logits_BV, *map(jnp.asarray, (top_k, top_p, min_p)))
  return jax.random.categorical(key, logits_BV).astype(jnp.int32)
