"""A table of findings, each with its verdict and what to do."""

import dataclasses
import enum
import shutil
import textwrap
from collections.abc import Sequence

_NAME_WIDTH = 16


class Verdict(enum.StrEnum):
  """What a finding means for a run."""

  OK = "ok"
  ADVICE = "advice"  # it runs, and could run better
  BAD = "bad"  # it would not run, or lose work
  NONE = "-"  # not there, or not known


@dataclasses.dataclass(frozen=True)
class Row:
  """A finding.

  Attributes:
    name: what was looked at, a word or two.
    found: what was found.
    verdict: what that means.
    advice: what to do, in words; "" = nothing.
  """

  name: str
  found: str
  verdict: Verdict = Verdict.OK
  advice: str = ""


def judged(name: str, found: str, problems: Sequence[str], bad: bool = False) -> Row:
  """A row that is fine without problems; they say what to do."""
  if not problems:
    return Row(name, found)
  return Row(name, found, Verdict.BAD if bad else Verdict.ADVICE, " ".join(problems))


def render(rows: Sequence[Row]) -> str:
  """The table as text, as wide as the terminal."""
  width = min(120, shutil.get_terminal_size((100, 24)).columns)
  indent = " " * (_NAME_WIDTH + 8)
  wrap = lambda head, text: textwrap.fill(
    text, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
  )
  lines = []
  for row in rows:
    head = f"{row.name:<{_NAME_WIDTH}}{row.verdict:<8}"
    lines.append(wrap(head, row.found))
    if row.advice:
      lines.append(wrap(f"{indent}-> ", row.advice))
  return "\n".join(lines)
