"""A ledger in plain words."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ats_jax.orchestrator import actions
from ats_jax.orchestrator.actions.base import (
  AddExpert,
  PruneExpert,
  RecycleExpert,
  ReopenExpert,
  Rollback,
  SaveCheckpoint,
  ScaleTemperature,
  SetExpertDropout,
  SetLearningRateScale,
  SetPenalty,
  SetSkips,
  SetWeightDecay,
  Stop,
)
from ats_jax.orchestrator.actions.settings import ChangeSettings
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.signals.health import LEVELS


def tell(path: Path) -> list[str]:
  """Lines that say what the orchestrator saw, what it did, and what that changed.

  Raises:
    ValueError: if a line of the ledger cannot be read; names it.
  """
  lines, level, look = [], LEVELS[0], ""
  levels, verdicts, carried_out = Counter[str](), Counter[str](), Counter[bool]()
  for row in ledger.rows(path):
    with ledger.reading(path, row.number):
      match row["kind"]:
        case "check":
          now = row["health"]["level"]
          health = ": ".join((now, *row["health"]["causes"][:1]))
          if not row["stale"] and now != level:
            level = now
            lines.append(_line(row, health))
          look = f"training loss {float(row['reading']['loss']):.4g}, {health}"
          levels[now] += 1
        case "decision":
          lines.append(_line(row, f"{_deed(row)} because of {_because(row)}"))
          carried_out[bool(row["applied"])] += 1
        case "outcome":
          lines.append(_line(row, _effect(row)))
          verdicts[row["verdict"]] += 1
        case _:
          lines.append(_line(row, _event(row)))
  return [*lines, *_summary(levels, verdicts, carried_out, look)]


def _event(row: Mapping[str, Any]) -> str:
  match row["kind"]:
    case "start":
      settings = row["settings"]
      does = {"act": "acts", "observe": "only observes"}[settings["mode"]]
      looks = f"looks every {settings['check_interval']} steps, {does}"
      return f"begins: {looks}; {row['accum_steps']} micro-batches an update"
    case "resumed_from":
      return "resumed from here; what came after is not part of the run"
    case "rerun":
      return _rerun(row)
    case "refused":
      return f"does not do what a hook asked for: {row['reason']}"
    case "branch":
      effect = f"{float(row['mean']):+.3g} +- {float(row['error']):.2g} nats"
      return f"tries {row['action']} on a branch: held-out loss {effect}"
    case kind:
      raise AssertionError(f"{kind} is not in ledger.KINDS")


def _line(row: Mapping[str, Any], text: str) -> str:
  return f"step {row['step']:>7,}  {text}"


def _deed(row: Mapping[str, Any]) -> str:
  match actions.from_json({"action": row["action"], **row["fields"]}):
    case Rollback(undo=True):
      what = "takes the rollback back"
    case Rollback():
      what = f"rolls back to step {row['to']:,}" if "to" in row else "rolls back"
    case SetLearningRateScale(scale, before):
      what = f"learning rate times {scale:.3g} of the schedule's ({before:.3g} before)"
    case SetSkips(bucket, before):
      what = f"up to {bucket:g} batches in a row may be left out ({before:g} before)"
    case RecycleExpert(layer, expert):
      what = f"closes expert {expert} of layer {layer} and splits the busiest into its place"
    case PruneExpert(layer, expert):
      what = f"closes expert {expert} of layer {layer}"
    case ReopenExpert(layer, expert):
      what = f"opens expert {expert} of layer {layer} again"
    case AddExpert(layer, expert, slot):
      what = f"splits expert {expert} of layer {layer} in two, the other half is {slot}"
    case SetPenalty(layer, expert, penalty, before):
      what = f"penalty of expert {expert} of layer {layer} is {penalty:g} ({before:g} before)"
    case SetWeightDecay(scale, before):
      what = f"weight decay times {scale:.3g} ({before:.3g} before)"
    case SetExpertDropout(rate, before):
      what = f"experts sit out {rate:.3g} of the steps ({before:.3g} before)"
    case ScaleTemperature(by):
      what = f"temperature of the routers times {by:.3g}"
    case ChangeSettings(settings, before):
      were = dict(before)
      of_each = (f"{name}={value} ({were[name]} before)" for name, value in settings)
      what = f"goes on from here with {', '.join(of_each)}"
    case SaveCheckpoint():
      what = "saves a checkpoint"
    case Stop():
      what = "stops the run"
  return f"decision {row['id']}: {what if row['applied'] else f'would do, but did not: {what}'}"


def _because(row: Mapping[str, Any]) -> str:
  if row["cause"] in ("recovery", "harm", "request", "branch"):
    return f"{row['cause']}: {row['reason']}"
  return f"the {row['cause']} (confidence {row['confidence']:.2f}): {row['reason']}"


def _rerun(row: Mapping[str, Any]) -> str:
  before, kept, raised = (float(row[name]) for name in ("before", "kept", "raised"))
  return (
    f"makes the steps from {row['first']:,} on again with {row['factor']:g} times the learning "
    f"rate: held-out loss {before:.4g}, then {raised:.4g} instead of {kept:.4g}"
  )


def _effect(row: Mapping[str, Any]) -> str:
  before, after = float(row["before"]), float(row["after"])
  now = "cannot be compared now" if math.isnan(after) else f"is {after:+.3g}"
  return (
    f"decision {row['id']}: {row['verdict']}: held-out loss was {before:+.3g} nats from when all "
    f"was well, and {now}"
  )


def _summary(
  levels: Counter[str], verdicts: Counter[str], carried_out: Counter[bool], look: str
) -> list[str]:
  if not levels:
    return ["no look yet"]
  count = lambda counter: ", ".join(f"{n} {name}" for name, n in counter.most_common())
  return [
    f"{levels.total()} looks: {count(levels)}",
    f"{carried_out.total()} decisions, {carried_out[True]} carried out"
    + (f"; of those judged: {count(verdicts)}" if verdicts else ""),
    f"last look: {look}",
  ]
