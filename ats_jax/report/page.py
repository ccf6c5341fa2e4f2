"""A `Report` as one HTML page that needs nothing else: no network, no other file.

`page.html.jinja` says what it looks like, `page.js` draws with uPlot, which is in `vendor/`. Each
text is escaped, and the page's own policy lets no script run but these two, which it knows by their
hashes.
"""

import base64
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from ats_jax.data.look.html import templates
from ats_jax.report.figures import Heat, Lines, Table
from ats_jax.report.report import Report, RunReport

_HERE = Path(__file__).parent
VENDOR = _HERE / "vendor"
TABLE_ROWS, TABLE_COLUMNS = 12, 8  # of a plot's values that its table shows
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def html_page(report: Report, refresh: int = 0) -> str:
  """Return the report as an HTML document.

  Args:
    report: what it shows.
    refresh: seconds after which a browser loads it again; 0 = never.
  """
  environment = templates(_HERE)
  environment.filters |= {"shown": shown, "in_words": in_words, "tables": tables, "tiles": tiles}
  scripts = [(VENDOR / "uPlot.iife.min.js").read_text(), (_HERE / "page.js").read_text()]
  return environment.get_template("page.html.jinja").render(
    report=report,
    made=time.strftime("Made on %Y-%m-%d at %H:%M UTC", time.gmtime(report.made)),
    refresh=refresh,
    hashes=[Markup(f"'sha256-{_hash(script)}'") for script in scripts],
    uplot_css=Markup((VENDOR / "uPlot.min.css").read_text()),
    uplot=Markup(scripts[0]),
    script=Markup(scripts[1]),
    data=Markup(embedded(report.to_json())),
  )


def embedded(value: Any) -> str:
  """JSON that can stand in an HTML page: no character of it can end the element."""
  text = json.dumps(value, allow_nan=False, separators=(",", ":"))
  for character, escape in _ESCAPES.items():
    text = text.replace(character, escape)
  return text


def _hash(script: str) -> str:
  return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def shown(cell: Any) -> str:
  """A cell of a table; numbers in few digits."""
  if cell is None:
    return "not finite"
  if isinstance(cell, float):
    return f"{cell:,.5g}" if abs(cell) < 1e5 else f"{cell:,.0f}"
  return f"{cell:,}" if isinstance(cell, int) else str(cell)


def in_words(figure: Lines | Heat) -> str:
  """What a plot shows, for those who do not see it."""
  if isinstance(figure, Heat):
    known = [value for row in figure.values for value in row if value is not None]
    ends = f"from {min(known):.3g} to {max(known):.3g} {figure.unit}" if known else "no value"
    return (
      f"{figure.title}: a map of {len(figure.rows)} rows and {len(figure.x)} columns, {ends}. "
      "The table below has its values."
    )
  parts = [
    f"{one.name} from {one.facts['first'][1]:.4g} to {one.facts['last'][1]:.4g}"
    for one in figure.series
    if "first" in one.facts
  ]
  return f"{figure.title} by {figure.x_name}: {'; '.join(parts)}. The table below has values."


def tables(figure: Lines | Heat) -> list[Table]:
  """A plot as tables: of lines their facts, and some of their points."""
  if isinstance(figure, Heat):
    at = _spread(len(figure.x), TABLE_COLUMNS)
    columns = ("row", *(f"#{figure.x_name} {figure.x[i]:,.0f}" for i in at))
    rows = tuple(
      (name, *(row[i] for i in at)) for name, row in zip(figure.rows, figure.values, strict=True)
    )
    return [Table(figure.title, figure.about, columns, rows)]
  words = ("first", "last", "least", "greatest")
  at = lambda place: f"{shown(place[1])} at {shown(place[0])}"
  facts = tuple(
    (
      one.name,
      one.facts["count"],
      *(at(one.facts[word]) if word in one.facts else "" for word in words),
      one.facts["nonfinite"],
    )
    for one in figure.series
  )
  columns = ("line", "#values", *words, "#not finite")
  longest = max(figure.series, key=lambda one: len(one.x))
  grid = [longest.x[i] for i in _spread(len(longest.x), TABLE_ROWS)]
  points = tuple((x, *(_value(one.x, one.y, x) for one in figure.series)) for x in grid)
  names = (f"#{figure.x_name}", *(f"#{one.name}" for one in figure.series))
  return [
    Table(f"{figure.title}: in short", "", columns, facts),
    Table(f"{figure.title}: some points", "", names, points),
  ]


def _spread(count: int, most: int) -> list[int]:
  """At most so many places of a sequence, evenly spaced."""
  return np.unique(np.linspace(0, count - 1, most).round().astype(int)).tolist() if count else []


def _value(xs: tuple[float, ...], ys: tuple[float | None, ...], x: float) -> float | str | None:
  """The value at `x`, or the last one before; "" = there is none yet."""
  place = int(np.searchsorted(xs, x, side="right")) - 1
  return ys[place] if place >= 0 else ""


def tiles(run: RunReport) -> list[tuple[str, str]]:
  """The numbers that are asked for first."""
  found = [(run.state, "state")]
  for figure in run.figures:
    if isinstance(figure, Lines) and figure.title == "Loss":
      for one in figure.series:
        if "last" in one.facts:
          which = "" if one.level else "last "
          found.append((f"{one.facts['last'][1]:.4g}", f"{which}{one.name} loss"))
      found.append((f"{figure.series[0].x[-1]:,.0f}", "last step of a row"))
  applied = sum(event.kind == "done" for event in run.events)
  return [*found, (str(applied), "times the orchestrator acted")] if run.events else found
