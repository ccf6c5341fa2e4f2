"""A ledger in plain words."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.influence import tell_bounded, tell_scale
from ats_jax.orchestrator.signals.health import LEVELS
from ats_jax.orchestrator.trials.arms import Compared
from ats_jax.store.paths import Path


def tell(path: Path) -> list[str]:
  """Lines that say what the orchestrator saw, what it compared, and what it did.

  Raises:
    ValueError: if a line of the ledger cannot be read; names it.
  """
  lines, level, look = [], LEVELS[0], ""
  levels, carried_out = Counter[str](), Counter[bool]()
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
        case "decision":
          lines.append(_line(row, f"{deed(row)} because of {because(row)}"))
          if advice := row["fields"].get("advice"):
            lines.append(_line(row, f"what to do: {advice}"))
          carried_out[bool(row["applied"])] += 1
        case _:
          lines.append(_line(row, event(row)))
  return [*lines, *_summary(levels, carried_out, look)]


def event(row: Mapping[str, Any]) -> str:
  """What a line says that is neither a look nor a decision."""
  match row["kind"]:
    case "bounded":
      return tell_bounded(row)
    case "loss_scale":
      return tell_scale(row)
    case "start":
      settings = row["settings"]
      does = {"act": "acts", "observe": "only observes"}[settings["mode"]]
      looks = f"looks every {settings['check_interval']} steps, {does}"
      return f"begins: {looks}; {row['accum_steps']} micro-batches an update"
    case "resumed_from":
      return "resumed from here; what came after is not part of the run"
    case "comparison":
      return comparison(row)
    case "given_up":
      return f"drops the comparison since step {row['first']:,}: {row['reason']}"
    case "waits":
      return f"does not yet do what a hook asked for, {ledger.action_of(row)}: {row['reason']}"
    case "weighed":
      return f"held-out loss {row['before']:.6g} before it, {row['after']:.6g} after"
    case "refused":
      return f"does not do what a hook asked for: {row['reason']}"
    case kind:
      raise AssertionError(f"{kind} is not in ledger.KINDS")


def _line(row: Mapping[str, Any], text: str) -> str:
  return f"step {row['step']:>7,}  {text}"


def deed(row: Mapping[str, Any]) -> str:
  """What a decision did, or would have done."""
  what = ledger.action_of(row).narrate(row)
  return f"decision {row['id']}: {what if row['applied'] else f'would do, but did not: {what}'}"


def because(row: Mapping[str, Any]) -> str:
  """What led to a decision."""
  if row["cause"] in ("recovery", "request"):
    return f"{row['cause']}: {row['reason']}"
  return f"the {row['cause']}: {row['reason']}"


def comparison(row: Mapping[str, Any]) -> str:
  """Where each arm ended, in held-out loss."""
  proposal, waiting, scores, made = compared = Compared.from_json(row)
  where = lambda score: score if isinstance(score, str) else f"{score.loss(proposal.domains):.4g}"
  names = [" and ".join(action.narrate({}) for action in arm.actions) for arm in proposal.arms]
  ends = [f"{name}: {where(score)}" for name, score in zip(names, scores, strict=False)]
  best = "going on" if compared.winner is None else f"what {names[compared.winner]}"
  return (
    f"compared since step {row['first']:,}, as {proposal.reason}: going on: {where(waiting)}; "
    f"{'; '.join([*ends, f'{made} more steps'])}. Best: {best}"
  )


def _summary(levels: Counter[str], carried_out: Counter[bool], look: str) -> list[str]:
  if not levels:
    return ["no look yet"]
  count = lambda counter: ", ".join(f"{n} {name}" for name, n in counter.most_common())
  return [
    f"{levels.total()} looks: {count(levels)}",
    f"{carried_out.total()} decisions, {carried_out[True]} carried out",
    f"last look: {look}",
  ]
