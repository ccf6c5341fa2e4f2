"""How well weights predict held-out text."""

import dataclasses
import math
from collections.abc import Iterable

import jax
import numpy as np
from absl import logging

from ats_jax.data.rows.contract import Rows
from ats_jax.data.sources import EvalSet
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.sharding.mesh import to_global
from ats_jax.step.program import Program
from ats_jax.train.feed import eval_feed


def score(program: Program, model: Decoder, dataset: Rows, step: int) -> dict[str, float]:
  """Run the model without dropout over `dataset`, or over `eval.num_batches` batches of it.

  Args:
    program: the program whose eval step is run, on the current mesh.
    model: the weights.
    dataset: tokenised rows.
    step: updates that made the weights (layers that skip tokens may change over a run).

  Returns:
    eval/loss (nats per token), eval/perplexity, eval/accuracy, eval/tokens, and
    eval/bits_per_byte where the bytes of the text are known; with layers in 8 bits eval/fp8_gap,
    how much higher the loss is than without them; for each layer that skips tokens
    eval/mod/layer_routed/layer_NN, the share that went through it by the causal rule. Means are
    over tokens, not batches.
  """
  rules = program.rules(step)
  loss_sum, correct, tokens, *further = _sums(program, model, dataset, rules)
  items, names = program.objective.ITEMS, program.objective.SCORES
  metrics = eval_metrics(loss_sum, correct, tokens, dataset, items)
  for name, total in zip(names, further, strict=False):
    metrics[f"eval/{name}"] = total / tokens
  by_layer = further[len(names) :]
  layers = len(by_layer) // 2
  for number, (routed, of) in enumerate(zip(by_layer[:layers], by_layer[layers:], strict=True)):
    metrics[f"eval/mod/layer_routed/layer_{number:02d}"] = routed / of
  if program.cfg.precision.fp8 and program.fp8:
    wider, *_ = _sums(program, model, dataset, dataclasses.replace(rules, fp8=False))
    metrics["eval/fp8_gap"] = (loss_sum - wider) / tokens
  return metrics


def eval_metrics(
  loss_sum: float, correct: float, counted: float, dataset: Rows, items: str = "tokens"
) -> dict[str, float]:
  """The metrics of `score`, of sums over the `items` of `dataset` (`Objective.ITEMS`).

  Raises:
    ValueError: if there are none.
  """
  if not counted:
    raise ValueError(
      "evaluation: the validation split is empty. Train with data.validation_fraction or "
      "data.validation_paths, or evaluate on other text with --paths."
    )
  loss = loss_sum / counted
  metrics = {"eval/loss": loss}
  if items == "tokens":
    metrics["eval/perplexity"] = math.exp(min(loss, 700.0))
  metrics |= {"eval/accuracy": correct / counted, f"eval/{items}": counted}
  if items == "tokens" and dataset.info.bytes_per_token:
    metrics["eval/bits_per_byte"] = loss / math.log(2.0) / dataset.info.bytes_per_token
  return metrics


def score_all(
  program: Program, model: Decoder, sets: Iterable[EvalSet], step: int
) -> dict[str, float]:
  """`score` of each set: the main one's under `eval/`, those of others under `eval/NAME/`."""
  return {
    name.replace("eval/", held_out.prefix, 1): value
    for held_out in sets
    for name, value in score(program, model, held_out.dataset, step).items()
  }


def _sums(program: Program, model: Decoder, dataset: Rows, rules: Pass) -> list[float]:
  """What the eval step returns, summed over one evaluation."""
  mesh = jax.sharding.get_mesh()
  with eval_feed(program.cfg, dataset) as batches:
    sums = [
      program.eval_step(model, to_global(batch, mesh), rules, layers=True) for batch in batches
    ]
  none = np.zeros(3 + len(program.objective.SCORES))
  return np.sum(jax.device_get(sums) or [none], axis=0, dtype=np.float64).tolist()


def check_fp8(program: Program, scores: dict[str, float]) -> Program:
  """The program to go on with: without 8 bits if they cost more than `precision.fp8_band`."""
  gap = scores.get("eval/fp8_gap", 0.0)  # of the main set; without one nobody watches
  band = program.cfg.precision.fp8_band * scores.get("eval/loss", 0.0)
  if gap <= band:
    return program
  logging.warning(
    "8 bits are switched off for the rest of the run: they raise the validation loss by %.4f, more "
    "than precision.fp8_band=%g of it (%.4f)", gap, program.cfg.precision.fp8_band, band,
  )  # fmt: skip
  return dataclasses.replace(program, fp8=False)
