"""An `Overview` as one HTML page that needs nothing else: no network, no script, no fonts.

Whatever comes from the data is escaped, and the page's own policy lets no script run.
"""

import html
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

from ats_jax.data.look.overview import Overview

_STYLE = """
:root{color-scheme:light dark;--text:#1c2128;--soft:#57606a;--page:#ffffff;--box:#f4f6f8;
--line:#d5dae0;--kept:#1f7a5c;--dropped:#c4572b;--other:#8a94a0}
@media(prefers-color-scheme:dark){:root{--text:#e4e8ec;--soft:#9aa5b1;--page:#14181d;--box:#1d232a;
--line:#343c46;--kept:#4cb391;--dropped:#e8845a;--other:#7d8894}}
*{box-sizing:border-box}
body{margin:0 auto;padding:2rem 1.25rem 4rem;max-width:64rem;background:var(--page);
color:var(--text);font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem;margin:0 0 .25rem}h2{font-size:1.15rem;margin:2.5rem 0 .75rem}
h3{font-size:1rem;margin:0 0 .5rem;font-weight:600}
p{margin:.25rem 0;color:var(--soft);overflow-wrap:anywhere}
code,pre{font:13px/1.45 ui-monospace,monospace}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(7.9rem,1fr));gap:.75rem;
margin:1.5rem 0}
.tile{background:var(--box);border-radius:6px;padding:.75rem}
.tile b{display:block;font-size:1.25rem;font-weight:600;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.85rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.35rem .75rem .35rem 0;border-bottom:1px solid var(--line);
vertical-align:baseline}
th{color:var(--soft);font-weight:500;font-size:.85rem}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.wide{width:34%}td.kind{white-space:nowrap}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font:12px system-ui,sans-serif}
.kept{fill:var(--kept)}.dropped{fill:var(--dropped)}.other{fill:var(--other)}
.axis{stroke:var(--line)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1.5rem}
.key{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;font-size:.85rem;color:var(--soft);
margin:.5rem 0}
.key i{display:inline-block;width:.75rem;height:.75rem;border-radius:2px;margin-right:.4rem;
vertical-align:-1px}
i.kept{background:var(--kept)}i.dropped{background:var(--dropped)}i.other{background:var(--other)}
details{border-bottom:1px solid var(--line);padding:.5rem 0}
summary{cursor:pointer}summary span{color:var(--soft)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:0 1rem}
pre{background:var(--box);border-radius:6px;padding:.75rem;margin:.25rem 0 1rem;max-height:18rem;
overflow:auto;white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate}
.name{font-size:.85rem;margin-top:.75rem}
@media(max-width:40rem){td.wide,th:last-child{display:none}}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_WIDTH, _HEIGHT = 460, 190  # of a histogram, in units of its own


def page(overview: Overview) -> str:
  """The whole document."""
  parts = [
    _head(overview), _tiles(overview), _bar(overview), _reasons(overview), _lengths(overview),
    _packed(overview), _sources(overview), _roles(overview), _samples(overview),
    _malformed(overview),
  ]  # fmt: skip
  return (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
    '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
    f"<title>Data report</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    + "\n".join(filter(None, parts))
    + "\n</body>\n</html>\n"
  )


def escaped(text: str) -> str:
  """Text for HTML in which what cannot be seen is seen: controls, and what turns text around."""
  shown = "".join(
    c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else f"[U+{ord(c):04X}]"
    for c in text
  )
  return html.escape(shown, quote=True)


def _head(o: Overview) -> str:
  packages = ", ".join(f"{name} {version}" for name, version in o.versions.items())
  filters = f"<code>{escaped(o.filters)}</code>" if o.filters else "none"
  return (
    f"<h1>Data report</h1>\n<p>Text: <code>{escaped(o.paths)}</code></p>\n"
    f"<p>Filters: {filters}{f' ({escaped(packages)})' if packages else ''}</p>\n"
    f"<p>Tokenizer: {escaped(o.tokenizer)}</p>"
  )


def _tiles(o: Overview) -> str:
  by_filters = _total(o, "filtered")
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
  inner = "".join(f'<div class="tile"><b>{n}</b><span>{what}</span></div>' for n, what in tiles)
  return f'<div class="tiles">{inner}</div>'


def _count(number: int) -> str:
  for size, unit in ((10**9, "billion"), (10**6, "million")):
    if number >= 10 * size:
      return f"{number / size:,.1f} {unit}"
  return f"{number:,}"


def _total(o: Overview, kind: str) -> int:
  return sum(count for (its, _), count in o.reasons.items() if its == kind)


def _bar(o: Overview) -> str:
  """Records as one bar: kept, dropped by filters, left out for other reasons."""
  by_filters = _total(o, "filtered")
  counts = [
    ("kept", "kept", o.balance["documents"]),
    ("dropped", "dropped by filters", by_filters),
    ("other", "malformed or empty", o.balance["dropped"] - by_filters),
  ]
  all_of_it = max(o.balance["records"], 1)
  at, shapes, keys = 0.0, [], []
  for css, what, count in counts:
    width = 1000 * count / all_of_it
    label = f"{what}: {count:,} ({count / all_of_it:.1%})"
    if count:
      shapes.append(
        f'<rect class="{css}" x="{at:.2f}" y="0" width="{width:.2f}" height="22">'
        f"<title>{label}</title></rect>"
      )
      keys.append(f'<span><i class="{css}"></i>{label}</span>')
    at += width
  return (
    '<svg viewBox="0 0 1000 22" preserveAspectRatio="none" style="height:22px" role="img" '
    f'aria-label="records kept and left out">{"".join(shapes)}</svg>'
    f'<div class="key">{"".join(keys)}</div>'
  )


def _reasons(o: Overview) -> str:
  if not o.reasons:
    return "<h2>Left out</h2>\n<p>Nothing.</p>"
  records = max(o.balance["records"], 1)
  words = {"filtered": "filter", "malformed": "malformed", "skipped": "no document"}
  most = max(o.reasons.values())
  rows = [
    f'<tr><td>{escaped(reason)}</td><td class="kind">{words[kind]}</td>'
    f'<td class="n">{count:,}</td><td class="n">{count / records:.2%}</td>'
    f'<td class="wide">{_share(count / most, "dropped" if kind == "filtered" else "other")}</td>'
    "</tr>"
    for (kind, reason), count in sorted(o.reasons.items(), key=lambda item: (-item[1], item[0]))
  ]
  head = (
    '<th>reason</th><th>kind</th><th class="n">records</th><th class="n">share</th>'
    '<th aria-label="share"></th>'
  )
  return f"<h2>Left out</h2>\n{_table(head, rows)}"


def _table(head: str, rows: Iterable[str]) -> str:
  return (
    f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
    f"<tbody>{''.join(rows)}</tbody></table></div>"
  )


def _share(share: float, css: str) -> str:
  return (
    '<svg viewBox="0 0 100 8" preserveAspectRatio="none" style="height:8px">'
    f'<rect class="{css}" width="{100 * share:.2f}" height="8" rx="1"/></svg>'
  )


def _lengths(o: Overview) -> str:
  charts = []
  if o.chars:
    sizes, kept = o.chars
    series = [("kept", sizes[kept]), ("dropped", sizes[~kept])]
    charts.append(_histogram("Characters a document, before filters", series))
  charts.append(_histogram("Tokens a document, kept", [("kept", o.tokens)]))
  return f'<h2>Lengths</h2>\n<div class="charts">{"".join(charts)}</div>'


def _packed(o: Overview) -> str:
  if not o.packed:
    return ""
  total = sum(part.tokens for part in o.packed)
  rows = [
    f'<tr><td>{escaped(part.name)}</td><td class="n">{part.seq_len:,}</td>'
    f'<td class="n">{part.documents:,}</td><td class="n">{part.tokens:,}</td>'
    f'<td class="wide">{_share(part.tokens / max(total, 1), "kept")}</td></tr>'
    for part in o.packed
  ]
  head = (
    '<th>training documents</th><th class="n">tokens a row</th><th class="n">documents</th>'
    '<th class="n">tokens</th><th aria-label="share"></th>'
  )
  return f"<h2>Rows of training</h2>\n{_table(head, rows)}"


def _histogram(title: str, series: Sequence[tuple[str, np.ndarray]]) -> str:
  """Stacked counts by powers of two."""
  sizes = np.concatenate([values for _, values in series])
  if not len(sizes):
    return f"<figure><h3>{title}</h3><p>No document.</p></figure>"
  last = int(np.log2(max(sizes.max(), 1))) + 1
  first = int(np.log2(max(sizes.min(), 1)))
  edges = np.exp2(np.arange(first, last + 1))
  counts = [np.histogram(np.maximum(values, 1), edges)[0] for _, values in series]
  highest = max(int(np.sum(counts, 0).max()), 1)
  left, bottom, top = 18, _HEIGHT - 22, 18
  step = (_WIDTH - 2 * left) / len(edges[:-1])
  shapes = []
  for i in range(len(edges) - 1):
    y = bottom
    said = ", ".join(f"{n[i]:,} {css}" for (css, _), n in zip(series, counts, strict=True))
    about = f"<title>{int(edges[i]):,} to {int(edges[i + 1]) - 1:,}: {said}</title>"
    for (css, _), found in zip(series, counts, strict=True):
      height = (bottom - top) * found[i] / highest
      y -= height
      if height:
        shapes.append(
          f'<rect class="{css}" x="{left + i * step + 1:.1f}" y="{y:.1f}" '
          f'width="{max(step - 2, 1):.1f}" height="{height:.1f}">{about}</rect>'
        )
  every = max(1, -(-len(edges) // 9))
  marks = "".join(
    f'<text x="{left + i * step:.1f}" y="{_HEIGHT - 5}" text-anchor="middle">'
    f"{_short(int(edges[i]))}</text>"
    for i in range(0, len(edges), every)
  )
  keys = "".join(
    f'<span><i class="{css}"></i>{css}: {len(values):,}, median '
    f"{int(np.median(values)) if len(values) else 0:,}</span>"
    for css, values in series
  )
  return (
    f"<div><h3>{title}</h3>"
    f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
    f'<text x="{left}" y="12">{highest:,} documents</text>'
    f'<line class="axis" x1="{left}" x2="{_WIDTH - left}" y1="{bottom}" y2="{bottom}"/>'
    f'{"".join(shapes)}{marks}</svg><div class="key">{keys}</div></div>'
  )


def _short(number: int) -> str:
  """1024 -> 1k."""
  for unit in ("", "k", "M", "G"):
    if number < 1024:
      return f"{number}{unit}"
    number //= 1024
  return f"{number}T"


def _sources(o: Overview) -> str:
  rows = [
    f'<tr><td>{escaped(s.name)}</td><td class="n">{s.documents:,}</td><td class="n">{s.kept:,}</td>'
    f'<td class="n">{s.kept / max(s.documents, 1):.1%}</td>'
    f'<td class="n">{s.chars / 1e6:,.2f}</td>'
    f'<td class="wide">{_share(s.kept / max(s.documents, 1), "kept")}</td></tr>'
    for s in o.sources
  ]
  size = "million characters" if o.chars else "MB"
  head = (
    '<th>file or folder</th><th class="n">documents</th><th class="n">kept</th>'
    f'<th class="n">share</th><th class="n">{size}</th><th aria-label="share"></th>'
  )
  return f"<h2>Where it is from</h2>\n{_table(head, rows)}"


def _roles(o: Overview) -> str:
  if not o.roles:
    return ""
  total = sum(tokens for tokens, _ in o.roles.values())
  rows = [
    f'<tr><td>{escaped(role)}</td><td class="n">{tokens:,}</td>'
    f'<td class="n">{tokens / max(total, 1):.1%}</td><td class="n">{said:,}</td>'
    f'<td class="wide">{_share(tokens / max(total, 1), "kept")}</td></tr>'
    for role, (tokens, said) in o.roles.items()
  ]
  head = (
    '<th>role</th><th class="n">tokens</th><th class="n">share</th>'
    '<th class="n">of them said, not heading</th><th aria-label="share"></th>'
  )
  return f"<h2>Who speaks</h2>\n{_table(head, rows)}"


def _samples(o: Overview) -> str:
  if not o.samples:
    return ""
  parts = []
  for reason, group in groupby(o.samples, key=lambda sample: sample["reason"]):
    samples = list(group)
    count = o.reasons.get(("filtered", reason), o.balance["documents"])
    inner = "".join(map(_sample, samples))
    parts.append(
      f"<details><summary>{escaped(reason) or 'kept'} <span>({len(samples)} of {count:,})</span>"
      f"</summary>{inner}</details>"
    )
  return (
    "<h2>Samples</h2>\n<p>Beginnings of documents as they were read, chosen by a hash of their "
    f"names. Open a reason to see some.</p>\n{''.join(parts)}"
  )


def _sample(sample: dict[str, str]) -> str:
  one = (
    f'<div><p class="name">{escaped(sample["name"])}</p><pre>{escaped(sample["text"])}</pre></div>'
  )
  if "kept" not in sample:
    return one
  return (
    f'<div class="pair">{one}<div><p class="name">kept: {escaped(sample["kept"])}</p>'
    f"<pre>{escaped(sample['kept_text'])}</pre></div></div>"
  )


def _malformed(o: Overview) -> str:
  if not o.first:
    return ""
  lines = "".join(f"<li><code>{escaped(line)}</code></li>" for line in o.first)
  return f"<h2>Malformed, the first few</h2>\n<ul>{lines}</ul>"
