"""The engine on several devices: its texts, and what each device has and sends."""

import dataclasses
import math

import canonical
import jax
import numpy as np
import pytest
from collectives import collectives
from helpers import EVALUATION, make_decoder, thorough_but

from ats_jax.checkpoint import abstract_like
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.inference.engine import ahead
from ats_jax.inference.engine.compiled import compiled
from ats_jax.inference.engine.engine import Engine
from ats_jax.inference.engine.lookup import PromptLookup
from ats_jax.inference.engine.request import Finished, Request, Sampling
from ats_jax.inference.engine.runner import ModelRunner, Size, served
from ats_jax.inference.engine.score import Scorer, Text
from ats_jax.inference.forward import logprobs_of
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.sharding.rules import for_serving
from ats_jax.step.program import make_program

TOKENIZER = ByteTokenizer()
LOUD = {"model.vocab_size": 384, "model.init_std": 0.3}  # logits differ, and depend on the context
SIZE = Size(context=64, rows=3, page=8, chunk=16)
RULES = dataclasses.replace(EVALUATION, capacity=0.5, horizon=SIZE.context)
PROMPTS = ["seven c", "a", "0123456789 " * 3, "seven cups of tea"]
FOUR = {"tensor": 2, "expert": 2}


def texts(kind, mesh, *, narrow="", guess=0, look=lambda runner: None):
  """Greedy texts of an engine on a mesh, of a model that was sharded as for training."""
  cfg = canonical.config(kind, LOUD | {f"mesh.{axis}": size for axis, size in mesh.items()})
  size = dataclasses.replace(SIZE, narrow=narrow, guess=guess)
  number = math.prod(mesh.values())
  with on_mesh(cfg, on := make_mesh(cfg, jax.devices()[:number])):
    assert on.size == number
    program = make_program(cfg)
    runner = ModelRunner(served(make_decoder(cfg), program), program, TOKENIZER, RULES, size)
    draft = PromptLookup(guess) if guess else None
    engine = Engine(runner, TOKENIZER, share=not runner.skips, draft=draft)
    asked = Sampling(max_tokens=14, temperature=0.0, ignore_end=True)
    found = {}
    for text in PROMPTS:
      request = Request([TOKENIZER.bos_id, *TOKENIZER.encode(text)], asked)
      found[engine.submit(request)] = []
    for event in engine.events():
      found[event.id] += event.ids
      assert event.finished is not Finished.REFUSED, event.message
    look(runner)
  return list(found.values())


THOROUGH = [
  ("dense", {"tensor": 2}),
  ("experts", {"expert": 4}),
  ("depths", {"tensor": 2}),
  ("latent", {"tensor": 2}),
  ("window", {"tensor": 2}),
  ("dense", {"fsdp": 2}),
]


@pytest.mark.parametrize("case", thorough_but([("hybrid", FOUR), *THOROUGH], 0), ids=str)
def test_texts_are_those_of_one_device(case):
  kind, mesh = case
  alone = texts(kind, {})
  assert texts(kind, mesh) == alone
  assert len({token for text in alone for token in text}) > 5


CASES = [("experts", FOUR), *((kind, {}) for kind in canonical.KINDS), ("dense", {"fsdp": 2})]


@pytest.mark.parametrize("case", thorough_but(CASES, 0), ids=str)
def test_what_was_compiled_for_shapes_is_not_compiled_for_arrays(case, compiled_names):
  kind, mesh = case
  cfg = canonical.config(kind, LOUD | {f"mesh.{axis}": size for axis, size in mesh.items()})
  asked = Sampling(max_tokens=4, temperature=0.0, ignore_end=True)

  def draw(model):
    runner = ModelRunner(served(model, program, keep=True), program, TOKENIZER, RULES, SIZE)
    engine = Engine(runner, TOKENIZER, share=not runner.skips)
    engine.submit(Request([TOKENIZER.bos_id, *b"ab"], asked))
    return [event.ids[0] for event in engine.events()]

  with on_mesh(cfg, on := make_mesh(cfg, jax.devices()[: math.prod(mesh.values())])):
    program, model = make_program(cfg), make_decoder(cfg)
    compiled.cache_clear()  # or those of another test are known
    compiled_names.clear()
    with ahead.compiling():
      nothing = draw(abstract_like(model, on))
    assert nothing == [0] * 4 and {"jit(chunk)", "jit(decode)"} <= set(compiled_names)
    compiled_names.clear()
    found = draw(model)
    assert found != nothing and not compiled_names


@pytest.mark.thorough
def test_pages_in_8_bits_and_guesses_on_several_devices():
  options = {"narrow": "int8", "guess": 3}
  assert texts("dense", {"tensor": 2}, **options) == texts("dense", {}, **options)


@pytest.mark.thorough
def test_scores_are_those_of_the_forward_pass_of_the_training():
  cfg = canonical.config("hybrid", LOUD | {f"mesh.{axis}": size for axis, size in FOUR.items()})
  asked = [Text([TOKENIZER.bos_id], TOKENIZER.encode(text)) for text in PROMPTS]
  with on_mesh(cfg, make_mesh(cfg, jax.devices()[:4])):
    program, model = make_program(cfg), make_decoder(cfg)
    wanted = [logprobs_of(model, RULES, *text) for text in asked]
    runner = ModelRunner(served(model, program), program, TOKENIZER, RULES, SIZE)
    found = Scorer(runner, TOKENIZER.vocab_size, share=False).score(asked)
  for score, of_training in zip(found, wanted, strict=True):
    np.testing.assert_allclose(score.logprobs, of_training, atol=1e-4)


def test_devices_share_weights_and_pages_and_send_activations_alone():
  """Of weights that training had gathered for each step, nothing is sent."""
  sizes, programs, rows = {}, [], []

  def look(runner):
    found = jax.tree.leaves((runner._weights, runner._state.layers))
    of_one = sum(array.addressable_shards[0].data.nbytes for array in found)
    sizes[len(found[0].sharding.device_set)] = of_one
    last = runner._last
    with for_serving():
      lowered = runner._programs.decode.jitted.lower(
        runner._weights, runner._state, last.of_rows, last.drawn, last.settings, runner._allowed_V,
        which=last.which,
      )  # fmt: skip
    rows.append(len(last.of_rows))
    programs.append(lowered.compile().as_text())

  for mesh in ({}, FOUR):
    texts("experts", mesh, look=look)
  of_experts = 2 * 3 * 4 * 32 * 16 * 4  # layers, matrices, experts, inputs, outputs, bytes
  shared = (sizes[1] - of_experts) / 2 + of_experts / 4
  assert sizes[4] == pytest.approx(shared, rel=0.01)  # vectors and the router are on all
  assert not collectives(programs[0])
  sent = collectives(programs[1])
  assert {one.kind for one in sent} == {"all-reduce", "all-gather"}
  # Sums of each layer's shares, and the logits, for the draw.
  assert {array.size // rows[1] for one in sent for array in one.arrays} == {32, 384}
