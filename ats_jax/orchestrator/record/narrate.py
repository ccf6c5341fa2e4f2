"""A ledger in plain words."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.influence import recurring_batches, tell_bounded
from ats_jax.orchestrator.signals.health import LEVELS
from ats_jax.store.paths import Path


def tell(path: Path) -> list[str]:
  """Lines that say what the orchestrator saw, what it did, and what that changed.

  Raises:
    ValueError: if a line of the ledger cannot be read; names it.
  """
  lines, level, look = [], LEVELS[0], ""
  levels, verdicts, carried_out = Counter[str](), Counter[str](), Counter[bool]()
  bounded: list[ledger.LedgerLine] = []
  for row in ledger.read_lines(path):
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
        case "bounded":
          lines.append(_line(row, tell_bounded(row)))
          bounded.append(row)
        case "decision":
          lines.append(_line(row, f"{_deed(row)} because of {_because(row)}"))
          if advice := row["fields"].get("advice"):
            lines.append(_line(row, f"what to do: {advice}"))
          carried_out[bool(row["applied"])] += 1
        case "outcome":
          lines.append(_line(row, _effect(row)))
          verdicts[row["verdict"]] += 1
        case _:
          lines.append(_line(row, _event(row)))
  return [*lines, *recurring_batches(bounded), *_summary(levels, verdicts, carried_out, look)]


def _event(row: Mapping[str, Any]) -> str:
  match row["kind"]:
    case "start":
      settings = row["settings"]
      does = {"act": "acts", "observe": "only observes"}[settings["mode"]]
      looks = f"looks every {settings['check_interval']} steps, {does}"
      return f"begins: {looks}; {row['accum_steps']} micro-batches an update"
    case "resumed_from":
      return "resumed from here; what came after is not part of the run"
    case "trial":
      return _trial(row)
    case "refused":
      return f"does not do what a hook asked for: {row['reason']}"
    case kind:
      raise AssertionError(f"{kind} is not in ledger.KINDS")


def _line(row: Mapping[str, Any], text: str) -> str:
  return f"step {row['step']:>7,}  {text}"


def _deed(row: Mapping[str, Any]) -> str:
  what = ledger.action_of(row).narrate(row)
  return f"decision {row['id']}: {what if row['applied'] else f'would do, but did not: {what}'}"


def _because(row: Mapping[str, Any]) -> str:
  if row["cause"] in ("recovery", "harm", "request", "branch"):
    return f"{row['cause']}: {row['reason']}"
  return f"the {row['cause']} (confidence {row['confidence']:.2f}): {row['reason']}"


def _trial(row: Mapping[str, Any]) -> str:
  effect = ledger.effect_of(row)
  if not row["again"]:
    change = f"{-effect.gain:+.3g} +- {effect.error:.2g} nats"
    return f"tries {row['action']} on a branch: held-out loss {change}"
  return (
    f"makes the steps from {row['first']:,} on again, {ledger.action_of(row).narrate(row)}: "
    f"held-out loss {effect.before:.4g}, then {effect.changed:.4g} instead of {effect.without:.4g}"
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
