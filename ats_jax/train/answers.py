"""Answers to held-out questions, before and after a training."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from ats_jax.config.schema import SampleConfig
from ats_jax.data.rows.contract import Rows
from ats_jax.data.tokens.tokenizer import Tokenizer
from ats_jax.inference.generator import generate
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass

ROWS = 16  # that are searched for questions


@dataclasses.dataclass(frozen=True)
class Question:
  """A held-out conversation up to its first answer.

  Attributes:
    ids: all that stands before the answer, bos first.
    text: the same as text.
    answer: what the conversation says.
    before: what the weights answered that the training began with.
    after: what those answer that it made.
  """

  ids: tuple[int, ...]
  text: str
  answer: str
  before: str = ""
  after: str = ""


def questions(rows: Rows, number: int) -> list[Question]:
  """The first `number` questions of some rows; each row may hold several conversations."""
  tokenizer = rows.info.tokenizer
  read = rows.read_once(range(min(ROWS, rows.info.num_rows)))
  return list(itertools.islice(_questions(read, tokenizer), number))


def _questions(rows: dict[str, np.ndarray], tokenizer: Tokenizer) -> Iterator[Question]:
  for tokens, targets, weights, segments in zip(
    *(rows[name] for name in ("tokens", "targets", "loss_mask", "segment_ids")), strict=True
  ):
    for segment in range(1, int(segments.max()) + 1):
      here = np.flatnonzero(segments == segment)
      said = weights[here] > 0
      first = int(said.argmax()) if said.any() else 0
      if not first:
        continue
      length = int((~said[first:]).argmax()) if not said[first:].all() else len(said) - first
      ids = tokens[here][: first + 1]
      answer = targets[here][first : first + length]
      own = [i for i in map(int, answer) if i not in tokenizer.end_ids]
      yield Question(
        tuple(map(int, ids)), tokenizer.decode(map(int, ids[1:])), tokenizer.decode(own)
      )


def answer(
  model: Decoder,
  tokenizer: Tokenizer,
  cfg: SampleConfig,
  rules: Pass,
  asked: Sequence[Question],
  name: str,
) -> list[Question]:
  """The questions with the likeliest answers of a model.

  Args:
    model: the decoder, on the current mesh.
    tokenizer: of the run.
    cfg: says how long answers are.
    rules: how sparse layers choose.
    asked: the questions.
    name: of the field that gets the answers.
  """
  greedy = dataclasses.replace(cfg, temperature=0.0)
  answers: list[dict[str, Any]] = []
  for question in asked:
    pieces = generate(model, tokenizer, greedy, rules=rules, prompt=question.ids, seed=0)
    answers.append({name: "".join(pieces)})
  logging.info("%d held-out questions were answered", len(answers))
  return [dataclasses.replace(q, **a) for q, a in zip(asked, answers, strict=True)]
