"""Named sources in `data.paths`, and what `data.mixture` says of them."""

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

UNITS = ("steps", "tokens", "epochs")
MOST_PARTS = 100_000  # rows after which a mixture repeats: a table of so many is held in memory
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_LENGTH = re.compile(rf"\s*(\S+?)\s*({'|'.join(UNITS)})\s*")


class Phase(NamedTuple):
  """A part of a run in which rows are drawn from sources in one ratio.

  Attributes:
    parts: by name of the source, whole numbers without a common divisor: of `sum(parts)` rows so
      many are of the source. Sources without a part are left out.
    amount: how long; 0 = to the end of the run.
    unit: of the amount, one of UNITS.
  """

  parts: dict[str, int]
  amount: Fraction = Fraction(0)
  unit: str = "steps"


def named_paths(text: str, setting: str) -> dict[str, str]:
  """`a.txt,code=b.py,code=c.py` -> {"": "a.txt", "code": "b.py,c.py"}: paths by name.

  Args:
    text: the value of the setting.
    setting: its name, for errors.

  Raises:
    ValueError: for an entry that is not a path, nor name=path.
  """
  found: dict[str, str] = {}
  for entry in filter(None, map(str.strip, text.split(","))):
    head, equals, path = entry.partition("=")
    name = head.strip()
    if not equals or "/" in head:
      name, path = "", entry
    elif not (_NAME.fullmatch(name) and path.strip()):
      raise ValueError(
        f"{setting}: {entry!r} is not name=path with a name of small letters, digits, '_' and "
        "'-'. For a path that holds '=', write ./ before it."
      )
    found[name] = ",".join(filter(None, (found.get(name, ""), path.strip())))
  return found


def sources(paths: str) -> dict[str, str]:
  """The named sources of `data.paths` in their order; {} = it names none, and is one source.

  Raises:
    ValueError: as `named_paths`, and if only some of the paths have a name.
  """
  found = named_paths(paths, "data.paths")
  bare = found.pop("", "")
  if found and bare:
    raise ValueError(
      f"data.paths: {bare!r} has no name, but others have ({', '.join(found)}). Give each a name, "
      f"as in name={bare}, or none."
    )
  return found


def phases(text: str, names: Iterable[str]) -> tuple[Phase, ...]:
  """`1000 steps: web=0.7,code=0.3; web=1,code=3` -> its phases.

  Args:
    text: `data.mixture`.
    names: of the sources.

  Raises:
    ValueError: for anything else, saying what.
  """
  names = tuple(names)
  entries = [entry for entry in map(str.strip, text.split(";")) if entry]
  found = tuple(_phase(entry, names) for entry in entries)
  for phase, entry in zip(found[:-1], entries, strict=False):
    if not phase.amount:
      raise ValueError(
        f"data.mixture: the phase {entry!r} has no length, but another follows it. Say how long it "
        f"is, e.g. '1000 steps: {entry}'."
      )
  return found


def steps_of(phase: Phase, batch_size: int, seq_len: int, rows: int) -> int:
  """How many steps a phase has, rounded up; 0 = to the end of the run.

  Args:
    phase: whose amount and unit are read.
    batch_size: rows of a step.
    seq_len: tokens of a row.
    rows: of an epoch of its sources.
  """
  rows_of = {"steps": batch_size, "tokens": Fraction(1, seq_len), "epochs": rows}
  return math.ceil(phase.amount * rows_of[phase.unit] / batch_size)


class Rate(NamedTuple):
  """The learning rate of a phase: its peak, and the steps in which it rises to that."""

  peak: float
  warmup: int


def rates(text: str) -> tuple[Rate, ...]:
  """`3e-4/100; 2e-5/20`, as `optimizer.phases`.

  Raises:
    ValueError: for anything else.
  """
  return tuple(_rate(entry) for entry in map(str.strip, text.split(";")) if entry)


def _rate(entry: str) -> Rate:
  peak, _, steps = (part.strip() for part in entry.partition("/"))
  rate, warmup = _number(peak), _number(steps)
  if rate is None or warmup is None or min(rate, warmup) < 0 or warmup.denominator != 1:
    raise ValueError(
      f"optimizer.phases: {entry!r} is not rate/steps, e.g. 3e-4/100: the peak learning rate and "
      "a whole number of steps of warm-up."
    )
  return Rate(float(rate), int(warmup))


def _phase(entry: str, names: tuple[str, ...]) -> Phase:
  length, colon, weights = entry.rpartition(":")
  parts = whole_parts(_weights(weights, names))
  if not colon:
    return Phase(parts)
  match = _LENGTH.fullmatch(length)
  amount = _number(match[1]) if match else None
  if match is None or amount is None:
    raise ValueError(
      f"data.mixture: {length!r} is no length. Write a number and one of {', '.join(UNITS)}, e.g. "
      "'1000 steps:'."
    )
  if amount <= 0:
    raise ValueError(
      f"data.mixture: {entry!r} has a length of {match[1]} {match[2]}. Give it a positive one, or "
      "leave the phase out."
    )
  if match[2] == "steps" and amount.denominator != 1:
    raise ValueError(f"data.mixture: {entry!r} ends inside a step. Use a whole number of steps.")
  return Phase(parts, amount, match[2])


def _weights(text: str, names: tuple[str, ...]) -> dict[str, Fraction]:
  found: dict[str, Fraction] = {}
  for entry in filter(None, map(str.strip, text.split(","))):
    name, equals, value = (part.strip() for part in entry.partition("="))
    if not equals:
      raise ValueError(f"data.mixture: {entry!r} is not source=weight.")
    if name not in names:
      raise ValueError(
        f"data.mixture: there is no source {name!r}. Those of data.paths are {', '.join(names)}."
      )
    if name in found:
      raise ValueError(f"data.mixture: {text.strip()!r} names {name} twice. Leave one of them.")
    weight = _number(value)
    if weight is None or weight < 0:
      raise ValueError(
        f"data.mixture: {entry!r} has no weight. Use a number from 0 on, e.g. {name}=0.7 or 2/3."
      )
    found[name] = weight
  if not sum(found.values()):
    raise ValueError(
      f"data.mixture: the weights of {text.strip()!r} sum to 0. Give a source a positive one."
    )
  return {name: found[name] for name in names if found.get(name)}


def _number(text: str) -> Fraction | None:
  try:
    return Fraction(text)
  except (ValueError, ZeroDivisionError):
    return None


def whole_parts(weights: dict[str, Fraction]) -> dict[str, int]:
  """Positive weights as whole numbers without a common divisor, in the same ratio.

  Raises:
    ValueError: if they add up to more than MOST_PARTS.
  """
  scale = math.lcm(*(weight.denominator for weight in weights.values()))
  scaled = {name: int(weight * scale) for name, weight in weights.items()}
  divisor = math.gcd(*scaled.values())
  parts = {name: number // divisor for name, number in scaled.items()}
  if sum(parts.values()) > MOST_PARTS:
    rounded = {n: max(1, round(1000 * w / sum(weights.values()))) for n, w in weights.items()}
    fewer = ",".join(f"{name}={number}" for name, number in rounded.items())
    raise ValueError(
      f"data.mixture: the smallest whole numbers in this ratio add up to {sum(parts.values()):,}, "
      f"and at most {MOST_PARTS:,} are kept. Round the weights, e.g. {fewer}."
    )
  return parts


def in_words(found: Iterable[Phase]) -> str:
  """Phases as `phases` reads them."""

  def one(phase: Phase) -> str:
    weights = ",".join(f"{name}={number}" for name, number in phase.parts.items())
    return f"{phase.amount} {phase.unit}: {weights}" if phase.amount else weights

  return "; ".join(map(one, found))
