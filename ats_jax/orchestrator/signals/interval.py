"""What the supervisor looks at: an interval of steps, summed up in a few replicated numbers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from ats_jax.model.mod import Pass
from ats_jax.step.reflex import SURPRISE

RECENT = 8  # last steps of an interval, which tell how things stand now


class Reading(NamedTuple):
  """An interval of steps. Counts are of steps; losses are nats per token.

  Attributes:
    first: first step.
    step: last step.
    loss: median over the steps in which it was finite; NaN if in none.
    recent_z: median sigmas of the loss in the last steps.
    probe: loss on the probe batch with the weights after `step`; NaN if there is no probe batch.
    sound: whether weights and the probe's loss are finite after `step`.
    nonfinite: with a loss or gradient that was not finite.
    broken: of them in a row at the end.
    skipped: whose update was left out.
    surprising: whose loss was far above what is usual.
    shrunk: in which a tensor's gradient was.
    held: in a row at the end whose learning rate was held.
    bucket: the reflex's, at the end.
    cusum: the reflex's, at the end.
    learning_rate: of the schedule, at the end: what the policy itself made of it is no rise.
    applied: learning rate, at the end.
    means: of every metric of the step, over the steps where it was finite.
    starved: (layer, expert) of experts that got next to no tokens, the idlest first.
    rules: by which the probe was scored, the fields of a `Pass`; () if it was not.
    wrong: numbers of the state that no update can have left, see `Optimizer.check` and
      `Reflex.written`.
    tensor: of the first of them, as `step.tensors` counts.
    miscounted: by how much the optimizer's count of updates was off, at most.
  """

  first: int
  step: int
  loss: float
  recent_z: float
  probe: float
  sound: bool
  nonfinite: int
  broken: int
  skipped: int
  surprising: int
  shrunk: int
  held: int
  bucket: float
  cusum: float
  learning_rate: float
  applied: float
  means: Mapping[str, float]
  starved: tuple[tuple[int, int], ...] = ()
  rules: tuple[float, ...] = ()
  wrong: int = 0
  tensor: int = 0
  miscounted: int = 0


class Pending(NamedTuple):
  """Steps that were not looked at yet.

  Attributes:
    step: the last of them.
    rows: `StepMetrics.values` of each, on their way to the host.
    probe: what the eval step returned for the weights after the last.
    rules: by which it did.
    host: what this process's clock says of them.
    loads: moe/load of each step, if experts are watched.
  """

  step: int
  rows: list[jax.Array]
  probe: jax.Array | None
  rules: Pass
  host: dict[str, float]
  loads: list[jax.Array]


def read(
  names: Sequence[str],
  last_step: int,
  rows: np.ndarray,
  probe: float | None = None,
) -> Reading:
  """Sum up an interval.

  Args:
    names: of the columns, those of a run with a reflex (`metric_names`).
    last_step: that of the last row.
    rows: [steps, names], `StepMetrics.values` of consecutive steps.
    probe: loss on the probe batch after the last step; None if it was not measured.
  """
  column = dict(zip(names, rows.T.astype(np.float64), strict=True))
  last = {name: float(values[-1]) for name, values in column.items()}
  weights_are_finite = np.isfinite(last["train/param_norm"])
  return Reading(
    first=last_step - len(rows) + 1,
    step=last_step,
    loss=_median(column["train/loss"]),
    recent_z=_median(column["reflex/z_loss"][-RECENT:]),
    probe=float("nan") if probe is None else probe,
    sound=bool(weights_are_finite and (probe is None or np.isfinite(probe))),
    nonfinite=int(np.sum(column["reflex/broken"] > 0)),
    broken=int(last["reflex/broken"]),
    skipped=int(np.sum(column["reflex/skipped"])),
    surprising=int(np.sum(column["reflex/z_loss"] > SURPRISE)),
    shrunk=int(np.sum(column["reflex/grad_scale"] < 1.0)),
    held=int(last["reflex/held"]),
    bucket=last["reflex/bucket"],
    cusum=last["reflex/cusum"],
    learning_rate=last["train/scheduled_rate"],
    applied=last["train/learning_rate"],
    means={name: _mean(values) for name, values in column.items()},
    wrong=int(np.sum(column["reflex/wrong"])),
    tensor=int(column["reflex/wrong_tensor"][np.argmax(column["reflex/wrong"] > 0)]),
    miscounted=int(np.max(column["reflex/miscounted"])),
  )


def probe_loss(sums: np.ndarray) -> float:
  """Nats per token, of what an eval step returns."""
  cross_entropy, _, tokens = sums.tolist()
  return cross_entropy / tokens


def check_probe(sums: np.ndarray) -> None:
  """Does the probe batch hold a token to predict? Takes what an eval step returns.

  Raises:
    ValueError: if all is padding.
  """
  if not sums[2] > 0.0:
    raise ValueError(
      "the probe batch of the orchestrator holds no token that counts in the loss. Give it rows of "
      "text that are not all padding."
    )


def _finite(values: np.ndarray) -> np.ndarray:
  return values[np.isfinite(values)]


def _median(values: np.ndarray) -> float:
  finite = _finite(values)
  return float(np.median(finite)) if finite.size else float("nan")


def _mean(values: np.ndarray) -> float:
  finite = _finite(values)
  return float(np.mean(finite)) if finite.size else float("nan")
