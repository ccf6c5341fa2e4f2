"""What the supervisor looks at: an interval of steps, summed up in a few replicated numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ats_jax.orchestrator.constants import TURNOVER_STEPS

UNCLEAR = "unclear"  # cause of a finding that no invariant shows
SCALES = ("reflex/grad_scale", "reflex/rate_scale")  # 1 if all is well

Sums = tuple[jax.Array, ...]  # what an eval step returned for each part of the probe


class Steps(NamedTuple):
  """What consecutive steps reported.

  Attributes:
    names: of the columns of `rows`.
    last: the last step.
    rows: [steps, names], `StepMetrics.values`.
  """

  names: Sequence[str]
  last: int
  rows: np.ndarray

  @property
  def numbers(self) -> np.ndarray:
    """Of each row, which step it is of."""
    return np.arange(self.last - len(self.rows) + 1, self.last + 1)

  @property
  def columns(self) -> dict[str, np.ndarray]:
    """The values of each metric, by name."""
    return dict(zip(self.names, self.rows.T.astype(np.float64), strict=True))


class RowsRead(NamedTuple):
  """How far the loader was after some updates: `row` training rows were read up to `step`."""

  step: int
  row: int


class SourceLoss(NamedTuple):
  """A source in an interval of steps.

  Attributes:
    loss: nats per token.
    error: its standard error, by the steps.
    share: of the interval's tokens.
  """

  loss: float
  error: float
  share: float


class Finding(NamedTuple):
  """What is wrong.

  Attributes:
    cause: "state", "count", "data" or "system" where two quantities that must be equal differ;
      `UNCLEAR` where the held-out loss rose, of which a comparison may tell the reason.
    reason: in words.
    advice: what the user should do; not empty if the run cannot go on.
  """

  cause: str
  reason: str
  advice: str = ""

  @property
  def certain(self) -> bool:
    """Whether an invariant shows it, not statistics."""
    return self.cause != UNCLEAR


class Reading(NamedTuple):
  """An interval of steps. Counts are of steps; losses are nats per token.

  Attributes:
    first: first step.
    step: last step.
    loss: median over the steps in which it was finite; NaN if in none.
    held: loss on held-out text (the probe) with the weights after `step`: domain -> nats per token,
      "" is all of it; empty if it was not scored.
    sound: whether weights and the held-out loss are finite after `step`.
    nonfinite: with a loss or gradient that was not finite.
    broken: number of such steps in a row at the end of the interval.
    held_steps: in a row at the end whose learning rate was held.
    learning_rate: the schedule's rate at the end, without the policy's own factor.
    applied: learning rate, at the end.
    norm: mean norm of the weights in the first TURNOVER_STEPS steps.
    fastest: highest mean norm of as many updates in a row.
    means: mean of every metric of the step, over the steps where it was finite.
    starved: (layer, expert) of experts that got next to no tokens, the idlest first.
    rules: by which the probe is scored after `step`, the fields of a `Pass`; () if there is none.
    wrong: corrupted tensors, summed over the steps, see `Optimizer.check` and `Reflex.written`.
    tensor: the name of the first of them.
    miscounted: by how much the optimizer's count of updates was off, at most.
    faults: certain faults, the worst first.
    sources: of each source with tokens (`sources.SourceLoss`): loss, its standard error, share.
    logits: the largest logit of attention in each layer with the weights after `step`, on a row of
      the probe; not finite where a layer has none; () = not measured.
    looked: further metrics of the look, by name.
  """

  first: int
  step: int
  loss: float
  held: Mapping[str, float]
  sound: bool
  nonfinite: int
  broken: int
  held_steps: int
  learning_rate: float
  applied: float
  means: Mapping[str, float]
  norm: float = 0.0
  fastest: float = 0.0
  starved: tuple[tuple[int, int], ...] = ()
  rules: tuple[float, ...] = ()
  wrong: int = 0
  tensor: str = ""
  miscounted: int = 0
  faults: tuple[Finding, ...] = ()
  sources: Mapping[str, SourceLoss] = {}
  logits: tuple[float, ...] = ()
  looked: Mapping[str, float] = {}

  @property
  def probe(self) -> float:
    """Loss on all held-out text; NaN if it was not scored."""
    return self.held.get("", float("nan"))


def sum_up(
  steps: Steps, held: Mapping[str, float] | None = None, tensors: Sequence[str] = ()
) -> Reading:
  """Sum up an interval.

  Args:
    steps: of a run with a reflex.
    held: loss on held-out text after the last step, by domain; None if it was not measured.
    tensors: their names.
  """
  column = steps.columns
  last = {name: float(values[-1]) for name, values in column.items()}
  weights_are_finite = np.isfinite(last["train/param_norm"])
  windows = np.array_split(column["train/update_norm"], -(-len(steps.rows) // TURNOVER_STEPS))
  return Reading(
    first=steps.last - len(steps.rows) + 1,
    step=steps.last,
    loss=_of_finite(np.median, column["train/loss"]),
    held=held or {},
    sound=bool(weights_are_finite and np.isfinite([*(held or {}).values()]).all()),
    nonfinite=int(np.sum(column["reflex/broken"] > 0)),
    broken=int(last["reflex/broken"]),
    held_steps=int(last["reflex/held"]),
    learning_rate=last["train/scheduled_rate"],
    applied=last["train/learning_rate"],
    norm=_of_finite(np.mean, column["train/param_norm"][:TURNOVER_STEPS]),
    fastest=_of_finite(np.max, np.array([_of_finite(np.mean, window) for window in windows])),
    means={name: _of_finite(np.mean, values) for name, values in column.items()},
    wrong=int(np.sum(column["reflex/wrong"])),
    tensor=_first_wrong(column, tensors),
    miscounted=int(np.max(column["reflex/miscounted"])),
    sources=source_losses(column),
  )


def _first_wrong(column: Mapping[str, np.ndarray], tensors: Sequence[str]) -> str:
  hit = np.flatnonzero(column["reflex/wrong"] > 0)
  return tensors[int(column["reflex/wrong_tensor"][hit[0]])] if hit.size and tensors else ""


def source_losses(column: Mapping[str, np.ndarray]) -> dict[str, SourceLoss]:
  """What the steps of an interval report by source; sources with tokens in fewer than two are out.

  Args:
    column: name of a metric -> [steps].
  """
  found = {}
  for metric, tokens in column.items():
    name = metric.removeprefix("train/").removesuffix("/tokens")
    if metric != f"train/{name}/tokens":
      continue
    losses = column[f"train/{name}/loss"]
    here = np.isfinite(losses) & (tokens > 0.0)
    if np.sum(here) > 1:
      loss = float(np.average(losses[here], weights=tokens[here]))
      error = float(np.std(losses[here], ddof=1) / np.sqrt(np.sum(here)))
      found[name] = SourceLoss(loss, error, float(np.sum(tokens) / np.sum(column["train/tokens"])))
  return found


def probe_loss(sums: Sums | np.ndarray) -> float:
  """Nats per token, of what eval steps return; waits for it."""
  cross_entropy, tokens = probe_sums(sums)
  return cross_entropy / tokens


def probe_sums(sums: Sums | np.ndarray) -> tuple[float, float]:
  """Sum of the cross-entropy and number of tokens, of what eval steps return; waits for it."""
  parts = np.reshape(jax.device_get(sums), (-1, 3))
  cross_entropy, _, tokens = np.sum(parts, axis=0, dtype=np.float64).tolist()
  return cross_entropy, tokens


def _of_finite(reduced: Callable[[np.ndarray], Any], values: np.ndarray) -> float:
  finite = values[np.isfinite(values)]
  return float(reduced(finite)) if finite.size else float("nan")
