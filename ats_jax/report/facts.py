"""Tables of a run's facts: settings, tokens, spikes, data, time of devices, environment."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ats_jax.config import Config
from ats_jax.config.names import differences, flatten
from ats_jax.metrics.progress import duration
from ats_jax.metrics.spikes import SIGMAS, WINDOW, spike_score
from ats_jax.report.events import Event
from ats_jax.report.figures import Table, Texts, number
from ats_jax.report.read import RunRecord, started

MOST_EVENTS = 200  # rows of the table of events; all decisions are among them
_OF_DATA = re.compile(r"^\S+ \S+ (?:INFO|WARNING) +((?:Text|Train|Validation|Tokenizer)\b.*)$")
SHOWN_FACTS = ("FLOPs a token", "mesh", "formats", "optimizer", "length by", "learning rate",
               "trains", "frozen", "peak of a device")  # fmt: skip


def facts_of(run: RunRecord, preset: Mapping[str, Any] | None, preset_name: str) -> list[Table]:
  """The tables of a run that it has something for.

  Args:
    run: the run.
    preset: flat settings that its own are compared with; None = the program's defaults.
    preset_name: what those are called.
  """
  known = [
    budget(run),
    spikes(run),
    data(run),
    *parts_of_data(run),
    settings(run, preset, preset_name),
  ]
  return [one for one in (*known, environment(run), kernels(run)) if one is not None]


def device_seconds(run: RunRecord) -> tuple[float, str]:
  """Wall seconds of a run that are known, and what is not among them."""
  secs = float(run.column("goodput/wall_secs").values.sum())
  ended, wall = len(run.column("goodput/wall_secs").values), run.column("wall_time").values
  counted = ended
  if run.state.word not in ("finished", "stopped") and len(wall) and started(run.metadata):
    secs += max(0.0, float(wall[-1]) - started(run.metadata))
    counted += 1
  missing = max(0, run.starts - counted)
  return secs, f"; {missing} earlier starts, which were killed, are not counted" if missing else ""


def device_hours(run: RunRecord) -> str:
  """What a run took of its devices, in words."""
  secs, missing = device_seconds(run)
  hours = secs * run.devices / 3600
  kind = "GPU" if run.metadata.get("backend") == "gpu" else "device"
  return f"{hours:,.3g} {kind} hours ({run.devices} x {run.kind} for {duration(secs)}{missing})"


def budget(run: RunRecord) -> Table:
  """Tokens read and to come, in total and for each parameter."""
  tokens, share = run.column("progress/tokens").values, run.column("progress/share").values
  known = run.metadata.get("run", {})
  rows: list[tuple[str, str]] = []
  if parameters := known.get("parameters"):
    rows.append(("parameters", f"{parameters:,}"))
  if active := known.get("active parameters a token"):
    rows.append(("active parameters a token", str(active)))
  if len(tokens):
    rows.append(("tokens read, padding included", f"{tokens[-1]:,.0f}"))
  if len(tokens) and len(share) and share[-1]:
    total = tokens[-1] / share[-1]
    rows.append(("tokens of the whole run", f"{total:,.0f}"))
    if parameters:
      rows.append(("tokens of the whole run for each parameter", f"{total / parameters:,.3g}"))
    speed = run.column("train/tokens_per_sec").values
    if run.state.word == "live" and len(speed):
      rows.append(("time left at the last speed", duration((total - tokens[-1]) / speed[-1])))
  for name, column in run.columns.items():
    if name.startswith("train/") and name.endswith("/epochs"):
      rows.append((f"epochs of {name.split('/')[1]}", f"{column.values[-1]:.3f}"))
  rows.append(("time of devices", device_hours(run)))
  rows += [(name, str(known[name])) for name in SHOWN_FACTS if name in known]
  return Table("Budget", "Parameters, tokens and time.", ("fact", "value"), tuple(rows))


def spikes(run: RunRecord) -> Table | None:
  """How often the loss and the norm of the gradient spike."""
  rows = []
  for name in ("train/loss", "train/grad_norm"):
    values = run.column(name).values
    if math.isfinite(score := spike_score(values)):
      rows.append((name, f"{len(values):,}", f"{score:.2%}"))
  if not rows:
    return None
  about = (
    f"The share of rows that are {SIGMAS:g} standard deviations or more away from the mean of up "
    f"to {WINDOW:,} rows before (OLMo 2)."
  )
  return Table("Spikes", about, ("metric", "rows", "spike score"), tuple(rows))


def data(run: RunRecord) -> Table | None:
  """What the run says of its text."""
  rows = [("in words", str(text)) for text in [run.metadata.get("run", {}).get("training text")]
          if text]  # fmt: skip
  newest = {}
  for line in run.log:
    if found := _OF_DATA.match(line):
      newest[found[1].partition(":")[0]] = found[1]
  rows += [("log", text) for text in newest.values()]
  names = ("paths", "sources", "mixture", "filters", "tokenizer", "validation_paths")
  for name in names:
    if value := run.settings.get(f"data.{name}"):
      rows.append((f"data.{name}", str(value)))
  if not rows:
    return None
  about = "Where it is from. `ats-jax data report` shows the text itself."
  return Table("Data", about, ("from", "fact"), tuple(rows))


def parts_of_data(run: RunRecord) -> list[Table]:
  """What is in the rows of each split and source: sizes, what was left out, lengths."""
  if not run.data:
    return []
  ends = ("least", "10%", "median", "90%", "greatest")
  rows, left_out, sizes = [], [], []
  for part in run.data:
    name = part["name"] + ("" if part["is_complete"] else ", its first window")
    of_bytes = number(part["bytes_per_token"]) if part["bytes_per_token"] else ""
    lengths = ", ".join(f"{part['lengths'][word]:,}" for word in ends if "lengths" in part)
    rows.append(
      (name, part["documents"], part["tokens"], part["rows"], part["seq_len"], of_bytes,
       part["ids_used"], lengths)
    )  # fmt: skip
    left_out += [(name, reason, count) for reason, count in part["left_out"].items()]
    left_out += [(name, f"for example {line}", "") for line in part["first"]]
    for power, count in part.get("by_size", {}).items():
      low = 2 ** int(power)
      share = number(count / part["documents"])
      sizes.append((name, f"{low:,} to {2 * low - 1:,}", count, share))
  about = "As the run began. Targets are tokens, with one end for each document."
  columns = ("part", "#documents", "#targets", "#rows", "#positions of a row", "#bytes a target",
             "#ids in the text", f"tokens of a document: {', '.join(ends)}")  # fmt: skip
  found = [Table("What the run reads", about, columns, tuple(rows))]
  if left_out:
    about = "Records that hold no document, documents that filters drop, and the first of them."
    # Splits of one text have its counts in common.
    kept = dict.fromkeys((what, count) for _, what, count in left_out)
    names = {each: {name for name, *rest in left_out if tuple(rest) == each} for each in kept}
    found.append(
      Table("Left out of the text", about, ("part", "what", "#count"),
            tuple((", ".join(sorted(names[each])), *each) for each in kept))
    )  # fmt: skip
  if sizes:
    columns = ("part", "tokens of a document", "#documents", "#share")
    found.append(Table("Lengths of documents", "", columns, tuple(sizes), share="#share"))
  return found


def settings(run: RunRecord, preset: Mapping[str, Any] | None, preset_name: str) -> Table:
  """Where the run differs from a preset."""
  before = flatten(Config()) if preset is None else preset
  changed = differences(before, run.settings)
  rows = tuple((name, str(was), str(now)) for name, (was, now, _) in sorted(changed.items()))
  about = (
    "The run's settings as they were resolved: sizes that follow from the text are among them."
  )
  return Table(f"Settings that differ from {preset_name}", about,
               ("setting", preset_name, "this run"), rows)  # fmt: skip


def environment(run: RunRecord) -> Table | None:
  """Versions and devices."""
  known = run.metadata
  if not known:
    return None
  git = known.get("git") or {}
  rows = [(name, str(version)) for name, version in known.get("packages", {}).items() if version]
  rows += [
    ("python", str(known.get("python", "")).partition(" ")[0]),
    ("platform", str(known.get("platform", ""))),
    ("devices", f"{run.devices} x {run.kind} in {known.get('process_count', 1)} processes"),
    ("backend", f"{known.get('backend')} {known.get('backend_version') or ''}"),
  ]
  if driver := known.get("nvidia_driver"):
    rows.append(("driver", str(driver)))
  if git:
    rows.append(("commit", git["commit"] + (", and changes" if git.get("dirty") else "")))
  rows += [(f"variable {name}", str(value)) for name, value in known.get("variables", {}).items()]
  return Table("Environment", "Of the newest start.", ("what", "value"), tuple(rows))


def kernels(run: RunRecord) -> Table | None:
  """Which implementation of each op ran, and why."""
  chosen = run.performance.get("kernels", {})
  if not chosen:
    return None
  facts = run.metadata.get("run", {})
  said = lambda op, name: str(facts.get(op, "")).removeprefix(f"{name} (").removesuffix(")")
  why = {op: said(op, name) for op, name in chosen.items()}
  fallbacks = sum(reason.startswith("reference") for reason in why.values())
  about = f"{fallbacks} of {len(chosen)} ops fall back to what XLA makes of their definition."
  rows = tuple((op, str(name), why[op]) for op, name in chosen.items())
  return Table("Kernels", about, ("op", "implementation", "why"), rows)


def events_table(events: Sequence[Event]) -> Table | None:
  """The orchestrator's events; where there are too many, limits and findings are left out."""
  numbered = list(enumerate(events, 1))
  shown = numbered
  if len(numbered) > MOST_EVENTS:
    kinds = ("done", "not done", "compared", "resumed")
    shown = [each for each in numbered if each[1].kind in kinds][-MOST_EVENTS:]
  if not shown:
    return None
  about = "What it found and did, why, and what the loss did about then."
  if len(shown) < len(numbered):
    about += f" {len(shown)} of {len(numbered)} are shown."
  texts = [
    name for name in Event._fields[1:] if any(getattr(event, name) for _, event in shown)
  ]  # without columns that are empty
  rows = tuple((n, e.step, *(getattr(e, name) for name in texts)) for n, e in shown)
  return Table("The orchestrator", about, ("#number", "#step", *texts), rows)


def forecast_table(known: Mapping[str, Any] | None, advice: Sequence[str]) -> Table:
  """A forecast of the final loss, as `verbs.forecast.report` gives it; None = why there is none."""
  if known is None:
    rows = tuple(("no forecast", text) for text in advice)
    return Table("Forecast", "Of the final loss, by the curve so far.", ("fact", "value"), rows)
  run, end = known["run"], known["forecast"]
  low = "unknown" if end["low"] is None else f"{end['low']:.4f}"
  rows = [
    (f"{run['metric']} at step {run['step']:,}", f"{run['last']:.4f}"),
    ("at the end", f"{end['loss']:.4f}, {end['coverage']:.0%} within {low} to {end['high']:.4f}"),
    *(("advice", text) for text in advice),
  ]
  return Table(
    "Forecast", "Of the final loss, by the curve so far.", ("fact", "value"), tuple(rows)
  )


def texts_of(run: RunRecord) -> list[Table | Texts]:
  """What the run generated and answered."""
  found: list[Table | Texts] = []
  if run.samples:
    texts = tuple((f"step {step:,}", text) for step, text in run.samples)
    about = "What the run generated, by step; long texts are cut."
    found.append(Texts("Samples", about, texts))
  if run.answers:
    words = ("text", "answer", "before", "after")
    rows = tuple(tuple(str(each.get(word, "")) for word in words) for each in run.answers)
    about = "Held-out questions: the text's own answer, and the model's before and after."
    found.append(Table("Answers", about, ("question", *words[1:]), rows))
  return found
