"""The results of the checks of a machine, each with its verdict and advice, and their table."""

import dataclasses
import enum
import shutil
import textwrap
from collections.abc import Sequence

_NAME_WIDTH = 16


class CheckVerdict(enum.StrEnum):
  """What the result of a check means for a run."""

  OK = "ok"
  ADVICE = "advice"  # it runs, and could run better
  BAD = "bad"  # it would not run, or lose work
  NONE = "-"  # not there, or not known


@dataclasses.dataclass(frozen=True)
class CheckResult:
  """The result of one check; a row of the table.

  Attributes:
    name: what was checked, in a word or two.
    found: what the check saw, in words.
    verdict: what that means for a run.
    advice: what to do about it, in full sentences; "" = nothing.
  """

  name: str
  found: str
  verdict: CheckVerdict = CheckVerdict.OK
  advice: str = ""


def check_result(name: str, found: str, problems: Sequence[str], bad: bool = False) -> CheckResult:
  """Make the result of a check, which is fine if there are no problems.

  Args:
    name: what was checked.
    found: what the check saw.
    problems: sentences that say what to do; they become the advice.
    bad: whether a problem is BAD, not mere advice.
  """
  if not problems:
    return CheckResult(name, found)
  return CheckResult(
    name, found, CheckVerdict.BAD if bad else CheckVerdict.ADVICE, " ".join(problems)
  )


def render_table(rows: Sequence[CheckResult]) -> str:
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
