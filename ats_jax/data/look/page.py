"""An `Overview` as one HTML page that needs nothing else: no network, no script, no fonts.

`page.html.jinja` says what it looks like. Whatever comes from the data is escaped, and the page's
own policy lets no script run.
"""

from collections.abc import Mapping
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import numpy as np

from ats_jax.data.look.html import templates
from ats_jax.data.look.overview import Overview


class Bar(NamedTuple):
  """A part of a histogram's bin: its class of CSS, and documents up to its upper end and in it."""

  css: str
  bin: int
  top: int
  documents: int
  label: str


class Histogram(NamedTuple):
  """Documents by powers of two.

  Attributes:
    title: what is counted.
    num_bins: beside each other.
    highest: documents of the fullest bin; 0 = there are no documents.
    bars: parts of bins that are not empty.
    marks: (bin, its lower edge in words).
    keys: class of CSS -> what it stands for.
  """

  title: str
  num_bins: int = 0
  highest: int = 0
  bars: tuple[Bar, ...] = ()
  marks: tuple[tuple[int, str], ...] = ()
  keys: Mapping[str, str] = {}


def html_page(overview: Overview) -> str:
  """Return the report as an HTML document."""
  o = overview
  environment = templates()
  environment.filters["comma"] = "{:,}".format
  environment.filters["percent"] = _percent
  by_filters = sum(count for (kind, _), count in o.reasons.items() if kind == "filtered")
  parts = [
    ("kept", "kept", o.balance["documents"]),
    ("dropped", "dropped by filters", by_filters),
    ("other", "malformed or empty", o.balance["dropped"] - by_filters),
  ]
  histograms = [_histogram("Tokens a document, kept", {"kept": o.tokens})]
  if o.chars:
    sizes, is_kept = o.chars
    series = {"kept": sizes[is_kept], "dropped": sizes[~is_kept]}
    histograms.insert(0, _histogram("Characters a document, before filters", series))
  return environment.get_template("page.html.jinja").render(
    o=o,
    tiles=_tiles(o, by_filters),
    parts=parts,
    reasons=sorted(o.reasons.items(), key=lambda item: (-item[1], item[0])),
    histograms=histograms,
    samples=[(r, list(group)) for r, group in groupby(o.samples, key=lambda s: s["reason"])],
  )


def _tiles(o: Overview, by_filters: int) -> list[tuple[str, str]]:
  tiles = [
    (_count(o.balance["records"]), "records read"),
    (_count(o.balance["documents"]), "documents kept"),
    (_count(by_filters), "dropped by filters"),
    (f"{o.balance['dropped'] - by_filters:,}", "malformed or empty"),
    (_count(o.num_tokens), "tokens kept"),
  ]
  if o.num_bytes:
    tiles.append((f"{o.num_bytes / 1e6:,.1f} MB", "of text kept"))
  if o.changed:
    tiles.append((f"{o.changed:,}", "kept documents changed"))
  return tiles


def _count(number: int) -> str:
  for size, unit in ((10**9, "billion"), (10**6, "million")):
    if number >= 10 * size:
      return f"{number / size:,.1f} {unit}"
  return f"{number:,}"


def _percent(part: int, whole: int, digits: int = 1) -> str:
  return f"{part / max(whole, 1):.{digits}%}"


def _histogram(title: str, series: Mapping[str, np.ndarray]) -> Histogram:
  """Stacked counts of sizes, by class of CSS."""
  sizes = np.concatenate(list(series.values()))
  if not len(sizes):
    return Histogram(title)
  first, last = (int(np.log2(max(size, 1))) for size in (sizes.min(), sizes.max()))
  edges = [2**power for power in range(first, last + 2)]
  counts = {css: np.histogram(np.maximum(s, 1), edges)[0].tolist() for css, s in series.items()}
  bars = []
  for number, (low, high) in enumerate(pairwise(edges)):
    inside = {css: count[number] for css, count in counts.items()}
    label = f"{low:,} to {high - 1:,}: " + ", ".join(f"{n:,} {css}" for css, n in inside.items())
    tops = accumulate(inside.values())
    bars += [
      Bar(css, number, top, count, label)
      for (css, count), top in zip(inside.items(), tops, strict=True)
      if count
    ]
  every = -(-len(edges) // 9)
  return Histogram(
    title,
    len(edges) - 1,
    max(bar.top for bar in bars),
    tuple(bars),
    tuple((i, _short(edge)) for i, edge in enumerate(edges) if i % every == 0),
    {
      css: f"{css}: {len(s):,}, median {int(np.median(s)) if len(s) else 0:,}"
      for css, s in series.items()
    },
  )


def _short(number: int) -> str:
  """1024 -> 1k."""
  for unit in ("", "k", "M", "G"):
    if number < 1024:
      return f"{number}{unit}"
    number //= 1024
  return f"{number}T"
