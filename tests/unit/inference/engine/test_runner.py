"""The engine's texts beside the full forward pass, of every kind of model."""

import dataclasses
import types

import canonical
import jax
import numpy as np
import pytest
from helpers import EVALUATION, pack

from ats_jax.config.schema import SampleConfig
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.inference import generator
from ats_jax.inference.engine import layout
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


# The others share most of their code with these, and each takes half a minute.
@pytest.mark.parametrize(
  "kind",
  [
    kind if kind in ("window", "hybrid") else pytest.param(kind, marks=pytest.mark.thorough)
    for kind in canonical.KINDS
  ],
)
def test_texts_of_ragged_prompts_are_those_of_the_full_forward_pass(kind, mesh):
  cfg = canonical.config(kind, LOUD)
  sampling = Sampling(max_tokens=14, temperature=0.0, ignore_end=True)
  requests = [Request(ids_of(text), sampling) for text in PROMPTS]
  found = answers(engine_of(cfg, share=kind not in ("depths", "hybrid")), requests)
  for request, drawn in zip(requests, found, strict=True):
    assert len(drawn) == 14
    assert drawn == greedy(cfg, request.prompt, drawn)
  assert len({token for drawn in found for token in drawn}) > 5


def test_a_single_key_value_head_is_packed_with_the_queries(mesh):
  cfg = canonical.config("dense", {"model.num_kv_heads": 1})
  attn = served(canonical.model(cfg), canonical.program(cfg)).layers[0].attn
  assert attn.q.weight.matrix.shape == ((4 + 1 + 1) * 8, 32) and attn.k.weight is None


def test_packing_needs_no_second_copy_of_the_model(mesh, monkeypatch):
  cfg = canonical.config("dense", {"model.num_layers": 12})
  program, model = canonical.program(cfg), canonical.model(cfg)
  names = lambda: {array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}
  weights, before, seen = jax.tree.leaves(model), names(), []
  pack_turn = layout._pack

  def pack(*args):
    packed = pack_turn(*args)
    seen.append(sum(names().values()) - sum(before.values()))
    return packed

  monkeypatch.setattr(layout, "_pack", pack)
  served(model, program)
  assert len(seen) == 12 and all(weight.is_deleted() for weight in weights if weight.ndim > 2)
  assert max(seen) < 0.25 * sum(weight.nbytes for weight in weights)


@pytest.mark.parametrize("logprobs", [0, 2])
def test_a_step_of_the_same_rows_writes_to_the_same_addresses(mesh, logprobs):
  """Or a graph of its kernels would be updated at each step."""
  engine = engine_of(canonical.config("dense", LOUD))
  runner, seen = engine._runner, []
  decode_program = runner._programs.decode

  def decode(*args, which):
    places = lambda args: [x.unsafe_buffer_pointer() for x in jax.tree.leaves(args[:4])]
    taken = places(args)
    result = decode_program(*args, which=which)
    seen.append((args[2].shape, taken, places((args[0], *result))))
    return result

  runner._programs = runner._programs._replace(decode=decode)
  sampling = Sampling(max_tokens=13, temperature=0.0, ignore_end=True, logprobs=logprobs)
  answers(engine, [Request(ids_of(PROMPTS[4]), sampling)])  # with a new page, which the host sends
  (_, _, first), *others = seen
  assert len(others) == 11 and len({shape for shape, *_ in seen}) == 1
  assert all(taken == given == first for _, taken, given in others)


def test_a_layer_that_tokens_skip_has_fewer_pages(mesh, caplog):
  cfg = canonical.config("depths", LOUD)
  with caplog.at_level("INFO"):
    runner = engine_of(cfg)._runner
  every, skipped = (pages[0].shape[0] for pages in runner._state.layers)
  assert every == runner.num_pages == 3 * 8  # of three rows
  assert skipped == 4 * 5  # of these and nobody's, which have 1.25 * 0.5 * 64 places each
  (line,) = [line for line in caplog.messages if "that tokens skip" in line]
  token = 2 * 2 * 8 * 4  # keys and values of two heads
  assert f"{token} bytes a token in 1 layers; 1 that tokens skip have places for 40 of 64" in line
  assert f"saves {(24 - 20) * 8 * token / 1e6:.3g} MB" in line


def test_where_all_layers_have_a_window_a_long_text_keeps_few_pages(mesh):
  cfg = canonical.config("window", LOUD | {"model.full_every": 0, "model.window": 12})
  asked = Sampling(max_tokens=38, temperature=0.0, ignore_end=True)
  requests = [Request(ids_of(text), asked) for text in PROMPTS[1:3]]
  found, most = [], []
  for keeps in (True, False):
    engine = engine_of(cfg, dataclasses.replace(SIZE, page=4))
    assert engine._runner.window == 12
    if keeps:
      engine._runner.window = 0
    runner, pages, run, used = engine._runner, engine._scheduler._pages, engine._runner.run, []

    def counted(step, runner=runner, pages=pages, run=run, used=used):
      used.append(runner.num_pages - pages.available)
      return run(step)

    engine._runner.run = counted
    found.append(answers(engine, requests))
    most.append(max(used))
  assert found[0] == found[1]
  # 12 tokens are in at most four pages of four, and a step in flight may read one before them.
  assert most == [10 + 16, 2 * 4 + 1]
  assert engine_of(canonical.config("window", LOUD))._runner.window == 0  # one layer sees all
  assert engine_of(canonical.config("dense", LOUD))._runner.window == 0


def test_twice_the_texts_fit_in_the_memory_of_pages_in_8_bits(mesh, monkeypatch):
  cfg = canonical.config(
    "dense", LOUD | {"model.head_dim": 64, "precision.compute_dtype": "bfloat16"}
  )
  stats = {"bytes_limit": 3_000_000, "bytes_in_use": 1_000_000}
  device = types.SimpleNamespace(memory_stats=lambda: stats)
  program, fit = canonical.program(cfg), {}
  for narrow in ("", "int8", "fp8"):
    model = served(canonical.model(cfg), program)
    size = dataclasses.replace(SIZE, rows=1000, narrow=narrow)
    with monkeypatch.context() as patch:
      patch.setattr(jax, "devices", lambda: [device])
      runner = ModelRunner(model, program, TOKENIZER, RULES, size)
    used = sum(array.nbytes for array in jax.tree.leaves(runner._state.layers))
    assert used == pytest.approx(0.85 * 2_000_000, rel=0.01)
    fit[narrow] = runner.num_pages
  assert fit["int8"] == fit["fp8"] == pytest.approx(256 / 132 * fit[""], rel=0.01)


def test_draws_of_a_seed_are_those_of_one_text_after_the_other(mesh):
  cfg = canonical.config("dense", LOUD)
  drawing = SampleConfig(
    max_tokens=12, temperature=1.3, top_k=40, top_p=0.9, min_p=0.02,
    repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5,
  )  # fmt: skip
  found = answers(
    engine_of(cfg),
    [Request(ids_of(text), Sampling.of(drawing, seed)) for seed, text in enumerate(PROMPTS)],
  )
  for seed, (text, drawn) in enumerate(zip(PROMPTS, found, strict=True)):
    one = generator.generate_tokens(
      canonical.model(cfg), TOKENIZER, drawing, rules=RULES, prompt=text, seed=seed
    )
    assert drawn == list(one)


@pytest.mark.parametrize("narrow", ["", "int8", pytest.param("fp8", marks=pytest.mark.thorough)])
def test_a_shared_beginning_and_a_lost_row_change_no_text(narrow, mesh):
  size = dataclasses.replace(SIZE, narrow=narrow)
  cfg = canonical.config("dense", LOUD)
  asked = Sampling(
    max_tokens=20, temperature=0.5, top_p=1.0, repetition_penalty=3.0, frequency_penalty=1.0,
    ignore_end=True,
  )  # fmt: skip
  requests = [Request(ids_of("0123456789" * 2 + end), asked) for end in ("", "ab", "abcdefgh")]
  alone = [answers(engine_of(cfg, size, share=False), [request])[0] for request in requests]
  engine = engine_of(cfg, size)
  assert answers(engine, requests) == alone
  assert answers(engine, requests) == alone  # their beginnings are kept now
  tight = dataclasses.replace(size, pages=9)  # too few for three texts: some begin again
  assert answers(engine_of(cfg, tight), requests) == alone
  without = dataclasses.replace(asked, repetition_penalty=1.0, frequency_penalty=0.0)
  plain = answers(engine_of(cfg, size), [Request(r.prompt, without) for r in requests])
  assert plain != alone


def test_the_likeliest_tokens_come_with_their_logarithms(mesh):
  cfg = canonical.config("dense", LOUD)
  asked = Sampling(max_tokens=3, temperature=0.0, logprobs=4, ignore_end=True)
  engine = engine_of(cfg)
  engine.submit(Request(ids_of("seven"), asked))
  events = [event for event in engine.events() if event.ids]
  drawn = [token for event in events for token in event.ids]
  ids = [*ids_of("seven"), *drawn]
  tokens = np.zeros((1, SIZE.context), np.int32)
  tokens[0, : len(ids)] = ids
  logits = np.array(forward(canonical.model(cfg), tokens, *pack([[len(ids)]], SIZE.context)))[0]
  logits[:, [*range(256, TOKENIZER.eos_id), *range(TOKENIZER.eos_id + 1, 384)]] = -np.inf
  for place, event in enumerate(events):
    want = jax.nn.log_softmax(logits[len(ids) - len(drawn) - 1 + place])
    (one,) = event.logprobs
    assert one.likeliest[0][0] == event.ids[0] and len(one.likeliest) == 4
    np.testing.assert_allclose(one.logprob, want[event.ids[0]], atol=1e-4)
    for token, logprob in one.likeliest:
      np.testing.assert_allclose(logprob, want[token], atol=1e-4)
