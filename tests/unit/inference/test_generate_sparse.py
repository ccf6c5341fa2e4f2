"""Sparse layers token by token, with what a cache remembers, against one pass over whole rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_decoder, pack, thorough_but, tiny_config

from ats_jax.config.schema import SampleConfig
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.inference.generator import generate_tokens
from ats_jax.model.forward_pass import Pass, rules_at
from ats_jax.sharding.apply import reshard
from ats_jax.step.parts.sparse import with_buffers

# float32; keys are added up over a cache of another length.
RTOL, ATOL = 1e-5, 2e-5
SEQ, ROWS = 24, 4
PROMPTS = np.array([12, 5, 9, 1])  # tokens of each row before generation; the rest is padding
LENGTHS = PROMPTS + np.array([12, 9, 12, 7])  # where each row ends
MOE = {"moe.num_experts": 4}
LATENT = {"model.num_kv_heads": 4, "model.kv_latent_dim": 6, "model.latent_rope_dim": 2}
MOD = {"mod.every": 1, "mod.capacity": 0.25}
mod = lambda routing, scope="block", decision="threshold": MOD | {
  "mod.routing": routing, "mod.scope": scope, "mod.decision": decision
}  # fmt: skip
# Settings, and the size of the parts in which the prompts are read.
VARIANTS = {
  "hybrid": (MOE | LATENT | mod("learned"), 4),
  "predictor": (mod("learned", "ffn", "predictor") | {"mod.every": 2, "model.num_layers": 4}, 6),
  "random": (MOE | {"moe.dispatch": "capacity", "moe.num_shared": 1} | mod("random", "ffn"), 1),
  "static": (mod("static"), 3),
}


@functools.cache
def config(name):
  # Weights larger than at initialisation, so that tokens differ clearly.
  small = {"model.d_model": 16, "model.d_ff": 32, "model.init_std": 0.3, "data.seq_len": SEQ}
  return tiny_config(small | {"model.vocab_size": 384} | VARIANTS[name][0])


def rules_of(cfg) -> Pass:
  return rules_at(cfg, cfg.num_steps, training=False)


@functools.partial(jax.jit, static_argnames="rules")
def forward(model, tokens, segments, positions, rules):
  around = dict(positions_BT=positions, segment_ids_BT=segments, rules=rules)
  x, stats = model(tokens, **around)
  return model.logits(x), stats


@functools.partial(jax.jit, static_argnames="rules")
def extend(model, tokens, index, valid, cache, rules):
  on = lambda a: reshard(a, "batch", "seq")
  x, cache = model.extend(on(tokens), on(index), on(valid), cache, rules)
  return model.logits(x), cache


def depths(model):
  layers = [layer for segment in model.segments for layer in segment.layers]
  return [layer.depth for layer in layers if layer.depth is not None]


def rows_of(lengths, seq, seed=0):
  tokens = np.random.default_rng(seed).integers(0, 256, (len(lengths), seq)).astype(np.int32)
  return tokens, *pack([[n] for n in lengths], seq)


@functools.cache
def settled(name):
  """A model whose thresholds are quantiles of the scores of some rows."""
  cfg = config(name)
  model = jax.jit(lambda: make_decoder(cfg))()
  if cfg.mod.routing == "learned":
    rules = rules_of(cfg)
    _, stats = forward(model, *rows_of([SEQ] * ROWS, SEQ, seed=5), rules)
    model = with_buffers(cfg, model, stats, np.int32(0), rules)
  return model


def decode(model, tokens, part, rules):
  """Logits of every token: prompts in parts, then one token of each row at a time; the cache."""
  cache = model.empty_cache(ROWS, SEQ, rules, jnp.dtype("float32"))
  logits = np.zeros((*tokens.shape, 384), np.float32)

  def read(index, valid, cache):
    given = np.take_along_axis(tokens, index, axis=1)
    given = np.where(valid, given, 7)  # padding has some id
    got, cache = extend(model, given, index, valid, cache, rules)
    row, at = np.nonzero(valid)
    logits[row, index[row, at]] = np.asarray(got)[row, at]
    return cache

  for start in range(0, PROMPTS.max(), part):
    index = np.broadcast_to(np.arange(start, start + part, dtype=np.int32), (ROWS, part))
    cache = read(index, index < PROMPTS[:, None], cache)
  for n in range((LENGTHS - PROMPTS).max()):
    index = np.minimum(PROMPTS + n, SEQ - 1).astype(np.int32)[:, None]
    cache = read(index, index < LENGTHS[:, None] - (PROMPTS + n >= SEQ)[:, None], cache)
  return logits, cache


def routed(stats, cache):
  """Tokens that went through skipping layers: by the statistics, and by the caches."""
  found = [
    (of_layer.mod, of_cache)
    for of_segment, caches in zip(stats.segments, cache, strict=True)
    for of_layer, of_cache in zip(of_segment, caches, strict=True)
    if of_layer.mod is not None
  ]
  return (
    [np.asarray(m.routed) for m, _ in found],
    [np.asarray(c.taken_B).sum(1) for _, c in found],
    [np.asarray(c.taken_B) for _, c in found],
  )


@pytest.mark.parametrize("name", thorough_but([*VARIANTS], 0))
def test_token_by_token_equals_one_pass(mesh, name):
  model, rules, part = settled(name), rules_of(config(name)), VARIANTS[name][1]
  tokens, segments, positions = rows_of(LENGTHS, SEQ, seed=3)
  want, stats = forward(model, tokens, segments, positions, rules)
  got, cache = decode(model, tokens, part, rules)
  real = segments > 0
  np.testing.assert_allclose(got[real], np.asarray(want)[real], RTOL, ATOL)
  by_stats, by_cache, _ = routed(stats, cache)
  np.testing.assert_array_equal(by_stats, by_cache)
  # The choice is none of the trivial ones.
  assert all((n > 0).all() and (n < real.sum()).all() for n in by_cache)
  # What a skipped block keeps is as long as its places.
  block = config(name).mod.scope == "block"
  for segment, caches in zip(model.layout, cache, strict=True):
    for kind, of_layer in zip(segment.kinds, caches, strict=True):
      skips = kind.mod and block
      assert of_layer.kv[0].shape[2] == (rules.places(SEQ) if skips else SEQ)
      assert (of_layer.taken_B is not None) == kind.mod
  assert rules.places(SEQ) == 8  # of 24: ceil(1.25 * 0.25 * 24)


@pytest.mark.parametrize("name", thorough_but(["hybrid", "predictor"], 0))
def test_more_tokens_than_places(mesh, name):
  cfg, rules, part = config(name), rules_of(config(name)), VARIANTS[name][1]
  model = jax.jit(lambda: make_decoder(cfg))()
  for depth in depths(model):
    if cfg.mod.decision == "threshold":  # every token passes
      depth.threshold[...] = jnp.full_like(depth.threshold[...], -100.0)
      depth.updates[...] = jnp.ones_like(depth.updates[...])
    else:  # silu(h) >= -0.28: with large weights, nearly every token passes
      depth.predict_out[...] = jnp.full_like(depth.predict_out[...], 100.0)
  tokens, segments, positions = rows_of(LENGTHS, SEQ, seed=3)
  want, stats = forward(model, tokens, segments, positions, rules)
  got, cache = decode(model, tokens, part, rules)
  np.testing.assert_allclose(got[segments > 0], np.asarray(want)[segments > 0], RTOL, ATOL)
  by_stats, by_cache, taken = routed(stats, cache)
  np.testing.assert_array_equal(by_stats, by_cache)
  overflow = [m.overflow for s in stats.segments for m in (x.mod for x in s) if m is not None]
  for of_layer, lost in zip(taken, overflow, strict=True):
    if cfg.mod.decision == "threshold":
      np.testing.assert_array_equal(of_layer, np.tile(np.minimum(LENGTHS, 8), (len(lost), 1)))
      np.testing.assert_array_equal(lost, (LENGTHS - 8).clip(0).sum())
    assert (of_layer == 8).any() and (np.asarray(lost) > 0).all()


@pytest.mark.thorough
def test_greedy_tokens_equal_the_argmax_of_one_pass(mesh):
  model, rules, tokenizer = settled("hybrid"), rules_of(config("hybrid")), ByteTokenizer()
  greedy = SampleConfig(max_tokens=30, temperature=0.0, top_p=1.0)
  prompt = "some prompt of 23 bytes"
  tokens = list(generate_tokens(model, tokenizer, greedy, rules=rules, prompt=prompt, seed=0))
  assert len(tokens) == 30 and len(set(tokens)) > 1
  # The cache is for 64 tokens, and places are a share of it.
  ids = np.zeros((ROWS, 64), np.int32)
  text = [tokenizer.bos_id, *tokenizer.encode(prompt), *tokens]
  ids[0, : len(text)] = text
  logits, stats = forward(model, ids, *pack([[len(text)], [], [], []], 64), rules)
  logits = np.asarray(logits)[0, len(text) - 31 : len(text) - 1]
  ok = np.array([*range(256), tokenizer.eos_id])
  assert tokens == ok[np.argmax(logits[:, ok], axis=-1)].tolist()
  assert (np.asarray(stats.depth_L) > 0).sum() >= 2
