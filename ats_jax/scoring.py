"""How well weights predict held-out text."""

import math

import jax
import numpy as np

from ats_jax.data.pipeline import Dataset
from ats_jax.feed import eval_feed
from ats_jax.model.decoder import Decoder
from ats_jax.sharding.mesh import to_global
from ats_jax.step.plan import Plan


def score(plan: Plan, model: Decoder, dataset: Dataset, step: int) -> dict[str, float]:
  """Run the model without dropout over `dataset`, or over `eval.num_batches` batches of it.

  Args:
    plan: its eval step, on the current mesh.
    model: the weights.
    dataset: tokenised rows.
    step: updates that made the weights (layers that skip tokens may change over a run).

  Returns:
    eval/loss (nats per token), eval/perplexity, eval/accuracy, eval/tokens, and
    eval/bits_per_byte where the bytes of the text are known. Means are over tokens, not batches.
  """
  mesh, rules = jax.sharding.get_mesh(), plan.rules(step)
  with eval_feed(plan.cfg, dataset) as batches:
    sums = [plan.eval_step(model, to_global(batch, mesh), rules) for batch in batches]
  if not sums:
    raise ValueError(
      "evaluation: the validation split is empty. Train with data.validation_fraction or "
      "data.validation_paths, or evaluate on other text with --paths."
    )
  loss_sum, correct, tokens = np.sum(jax.device_get(sums), axis=0, dtype=np.float64).tolist()
  loss = loss_sum / tokens
  metrics = {
    "eval/loss": loss,
    "eval/perplexity": math.exp(min(loss, 700.0)),
    "eval/accuracy": correct / tokens,
    "eval/tokens": tokens,
  }
  if dataset.bytes_per_token:
    metrics["eval/bits_per_byte"] = loss / math.log(2.0) / dataset.bytes_per_token
  return metrics
