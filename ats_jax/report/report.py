"""A report on runs as data: what the page, the JSON and the card are made of."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ats_jax.config import Config
from ats_jax.config.names import differences, flatten
from ats_jax.report.compare import compare, groups_of
from ats_jax.report.events import Event, events_of
from ats_jax.report.facts import events_table, facts_of, forecast_table, texts_of
from ats_jax.report.figures import Figure
from ats_jax.report.plots import BUCKETS, LEAST_BUCKETS, figures_of
from ats_jax.report.read import RunRecord
from ats_jax.report.verdict import verdict

DEFAULTS = "the defaults"
Forecast = tuple[Mapping[str, Any] | None, Sequence[str]]


@dataclasses.dataclass(frozen=True)
class RunReport:
  """What is said and shown of one run.

  Attributes:
    name: its folder.
    state: how it stands, in a word.
    verdict: sentences.
    events: of the orchestrator, to which figures refer by their place.
    figures: lines, maps, tables and texts, in order.
  """

  name: str
  state: str
  verdict: list[str]
  events: list[Event]
  figures: list[Figure]


@dataclasses.dataclass(frozen=True)
class Report:
  """A report.

  Attributes:
    made: when, in Unix seconds.
    by: what runs are compared by.
    verdict: sentences of the comparison; [] of a single run.
    comparison: its figures.
    runs: each run by itself.
  """

  made: float
  by: str
  verdict: list[str]
  comparison: list[Figure]
  runs: list[RunReport]

  def to_json(self) -> dict[str, Any]:
    """All of it as JSON values; a number that is not finite is null."""
    plain = lambda figures: [_plain(one) for one in figures]
    return {
      "version": 1,
      "made": self.made,
      "by": self.by,
      "verdict": self.verdict,
      "comparison": plain(self.comparison),
      "runs": [
        {
          "name": run.name,
          "state": run.state,
          "verdict": run.verdict,
          "events": [event._asdict() for event in run.events],
          "figures": plain(run.figures),
        }
        for run in self.runs
      ],
    }


def _plain(figure: Figure) -> dict[str, Any]:
  fields = figure._asdict()
  if "series" in fields:
    fields["series"] = [one._asdict() for one in fields["series"]]
  return fields


def make_report(
  runs: Sequence[RunRecord],
  by: str = "steps",
  preset: Mapping[str, Any] | None = None,
  preset_name: str = DEFAULTS,
  forecasts: Mapping[str, Forecast] | None = None,
) -> Report:
  """Judge runs and make their figures.

  Args:
    runs: one or several.
    by: what several are compared by, of `compare.BY`.
    preset: flat settings that theirs are compared with; None = the program's defaults.
    preset_name: what those are called.
    forecasts: of the final loss, by name of the run: what is known and advice, or None and why.

  Raises:
    ValueError: if a ledger cannot be read, or a run does not say where its steps are on the axis.
  """
  buckets = max(LEAST_BUCKETS, BUCKETS // len(runs))  # the page stays below 2 MB
  said, comparison = compare(groups_of(runs), by, buckets) if len(runs) > 1 else ([], [])
  of_runs = []
  for run in runs:
    events = events_of(run)
    before = flatten(Config()) if preset is None else preset
    changed = len(differences(before, run.settings))
    figures: list[Figure | None] = [*figures_of(run, events, buckets)]
    figures.insert(1, events_table(events))
    if forecast := (forecasts or {}).get(run.name):
      figures.append(forecast_table(*forecast))
    figures += [*texts_of(run), *facts_of(run, preset, preset_name)]
    of_runs.append(
      RunReport(
        run.name,
        run.state.word,
        verdict(run, events, changed, preset_name),
        events,
        [one for one in figures if one is not None],
      )
    )
  return Report(time.time(), by, said, comparison, of_runs)
