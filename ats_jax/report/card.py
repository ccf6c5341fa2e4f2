"""A report as a card in Markdown, to paste into an issue tracker."""

import re
from collections.abc import Iterable

from ats_jax.report.figures import Table
from ats_jax.report.report import Report

SHOWN = ("Budget", "Environment", "A step")  # tables of a run that a card has
MOST_ROWS = 30


def card(report: Report) -> str:
  """Return the verdicts, and tables of budget, environment and settings."""
  parts = []
  if report.comparison:
    parts += ["## Comparison", bullets(report.verdict)]
    parts += [table(one) for one in report.comparison if isinstance(one, Table)]
  for run in report.runs:
    parts += [f"## Run {text(run.name)}: {run.state}", bullets(run.verdict)]
    for one in run.figures:
      is_settings = isinstance(one, Table) and one.title.startswith("Settings")
      if isinstance(one, Table) and (one.title in SHOWN or is_settings):
        parts += [f"<details><summary>{text(one.title)}</summary>\n", table(one), "\n</details>"]
  return "\n\n".join(parts) + "\n"


def bullets(sentences: Iterable[str]) -> str:
  """A list."""
  return "\n".join(f"- {text(sentence)}" for sentence in sentences)


def table(one: Table) -> str:
  """A table of Markdown; of a long one its first rows."""
  lines = ["| " + " | ".join(text(name.lstrip("#")) for name in one.columns) + " |"]
  lines.append("|" + "|".join("---:" if name[0] == "#" else "---" for name in one.columns) + "|")
  lines += [
    "| " + " | ".join(text(str(cell)) for cell in row) + " |" for row in one.rows[:MOST_ROWS]
  ]
  if len(one.rows) > MOST_ROWS:
    lines.append(f"\n{len(one.rows) - MOST_ROWS} more rows.")
  return "\n".join(lines)


def text(value: str) -> str:
  """A text in which Markdown and HTML have no meaning, on one line."""
  return re.sub(r"([\\`*_\[\]<>|#@&])", r"\\\1", " ".join(value.split()))
