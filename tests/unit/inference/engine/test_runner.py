"""The engine's texts beside the full forward pass, of every kind of model."""

import dataclasses

import canonical
import jax
import numpy as np
import pytest
from helpers import EVALUATION, pack

from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.inference.engine.engine import Engine
from ats_jax.inference.engine.request import Finished, Request, Sampling
from ats_jax.inference.engine.runner import ModelRunner, Size, served

TOKENIZER = ByteTokenizer()
LOUD = {"model.vocab_size": 384, "model.init_std": 0.3}  # logits differ, and depend on the context
PROMPTS = ["seven c", "a", "def main(argv):\n  return", "0123456789 " * 3, "seven cups of tea"]
SIZE = Size(context=64, rows=3, page=8, chunk=16)


RULES = dataclasses.replace(EVALUATION, capacity=0.5, horizon=SIZE.context)


@jax.jit
def forward(model, tokens, segments, positions):
  x, _ = model(tokens, positions_BT=positions, segment_ids_BT=segments, rules=RULES)
  return model.logits(x)


def ids_of(text):
  return [TOKENIZER.bos_id, *TOKENIZER.encode(text)]


def engine_of(cfg, size=SIZE, **options):
  program = canonical.program(cfg)
  runner = ModelRunner(served(canonical.model(cfg), program), program, TOKENIZER, RULES, size)
  return Engine(runner, TOKENIZER, **options)


def answers(engine, requests):
  """The tokens of each request, in order."""
  jobs = {engine.submit(request): [] for request in requests}
  for event in engine.events():
    jobs[event.id] += event.ids
    assert event.finished is not Finished.REFUSED, event.message
  return list(jobs.values())


def greedy(cfg, prompt, drawn):
  """What the full forward pass calls likeliest at each place of a text."""
  ids = [*prompt, *drawn]
  tokens = np.zeros((1, SIZE.context), np.int32)
  tokens[0, : len(ids)] = ids
  logits = np.asarray(forward(canonical.model(cfg), tokens, *pack([[len(ids)]], SIZE.context)))[
    0, len(prompt) - 1 : len(ids) - 1
  ]
  ok = np.array([*range(256), TOKENIZER.eos_id])
  return ok[np.argmax(logits[:, ok], axis=-1)].tolist()


@pytest.mark.parametrize("kind", canonical.KINDS)
def test_texts_of_ragged_prompts_are_those_of_the_full_forward_pass(kind, mesh):
  cfg = canonical.config(kind, LOUD)
  sampling = Sampling(max_tokens=14, temperature=0.0, ignore_end=True)
  requests = [Request(ids_of(text), sampling) for text in PROMPTS]
  found = answers(engine_of(cfg, share=kind not in ("depths", "hybrid")), requests)
  for request, drawn in zip(requests, found, strict=True):
    assert len(drawn) == 14
    assert drawn == greedy(cfg, request.prompt, drawn)
  assert len({token for drawn in found for token in drawn}) > 5
