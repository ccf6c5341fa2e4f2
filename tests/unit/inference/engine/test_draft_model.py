"""Texts with the guesses of another model beside those without."""

import dataclasses

import canonical
import pytest
from test_runner import LOUD, RULES, SIZE, TOKENIZER, answers, engine_of, ids_of

from ats_jax.inference.engine.draft_model import DraftModel
from ats_jax.inference.engine.request import Request, Sampling
from ats_jax.inference.engine.runner import ModelRunner, served

GUESSING = dataclasses.replace(SIZE, guess=3)
# The first is longer than what is read at once, and ends where there is no room for guesses.
PROMPTS = ["0123456789 " * 3, "a", "seven cups of tea", "seven c"]
REQUESTS = [
  Request(ids_of(text), Sampling(max_tokens=30, temperature=0.0, ignore_end=True))
  for text in PROMPTS
]


def drafting(cfg, size=SIZE):
  program = canonical.program(cfg)
  runner = ModelRunner(served(canonical.model(cfg), program), program, TOKENIZER, RULES, size)
  return DraftModel(runner, 3)


def counted(engine):
  """The rows of decoding steps from now on."""
  rows, run = [], engine._runner.run
  engine._runner.run = lambda step: rows.extend(step.decode) or run(step)
  return rows


@pytest.mark.parametrize("layers", [2, 1])
def test_greedy_texts_are_the_same(layers, mesh):
  """With the same model as draft, each guess is right; with another one, some are wrong."""
  cfg = canonical.config("dense", LOUD)
  draft = drafting(canonical.config("dense", LOUD | {"model.num_layers": layers}))
  without = answers(engine_of(cfg), REQUESTS)
  engine = engine_of(cfg, GUESSING, draft=draft)
  for _ in range(2):  # then rows are of other requests, and beginnings are kept
    rows = counted(engine)
    assert answers(engine, REQUESTS) == without
    share = len(rows) / sum(map(len, without))
    assert share < 0.3 if layers == 2 else share > 0.5


def test_texts_for_which_there_is_no_room_get_no_guesses(mesh, caplog):
  cfg = canonical.config("dense", LOUD)
  of_two_rows = dataclasses.replace(SIZE, pages=2 * 8)
  draft = drafting(cfg, of_two_rows)
  assert "of 3 texts at once, 2 get guesses" in caplog.text
  texts = {number: ids_of(text) for number, text in enumerate(PROMPTS[1:])}
  found = draft.guess(texts)
  assert sorted(map(len, (found.get(number, ()) for number in texts))) == [0, 3, 3]
  assert [len(ids) for ids in draft.guess({7: ids_of("a" * 60)}).values()] == [3]
  assert [len(ids) for ids in draft.guess({7: ids_of("a" * 62)}).values()] == [1]
  assert draft.guess({7: ids_of("a" * 63)}) == {}
