"""What happened in a run, or in several, as one page that opens anywhere.

ats-jax report runs/debug
ats-jax report runs/a runs/b runs/c --by=tokens --out=compared.html
ats-jax report runs/debug --card > card.md

Runs may be live, finished, stopped or killed, here or on an object store. Of several, those that
differ only in their seed are one line with an interval. Nothing of a run is changed.
"""

import json

import jax
from absl import flags

from ats_jax import exits
from ats_jax.config.build import from_config_dict
from ats_jax.config.file import load_file
from ats_jax.config.names import flatten
from ats_jax.planner.curve import MIN_POINTS
from ats_jax.report.card import card
from ats_jax.report.compare import BY
from ats_jax.report.page import html_page
from ats_jax.report.read import RunRecord, read_run
from ats_jax.report.report import DEFAULTS, Forecast, Report, make_report
from ats_jax.store import paths
from ats_jax.verbs import cli, forecast

FLAGS = flags.FlagValues()
_OUT = flags.DEFINE_string(
  "out", None, "Page to write; default: report.html in the folder of the first run.",
  flag_values=FLAGS,
)  # fmt: skip
_JSON = flags.DEFINE_string(
  "json", None, "File for the same as JSON: what each figure shows.", flag_values=FLAGS
)
_BY = flags.DEFINE_enum("by", "steps", list(BY), "What runs are compared by.", flag_values=FLAGS)
_PRESET = flags.DEFINE_string(
  "preset",
  None,
  "Config that settings are compared with, e.g. debug:moe; default: the program's defaults.",
  flag_values=FLAGS,
)
_CARD = flags.DEFINE_bool(
  "card", False, "Print Markdown for an issue tracker, and write no page.", flag_values=FLAGS
)


_SERVE = flags.DEFINE_integer(
  "serve",
  None,
  "Show the page at this port of this machine, made anew at each load; no file is written.",
  lower_bound=1,
  upper_bound=65535,
  flag_values=FLAGS,
)
METRICS = ("eval/loss", "train/loss")  # the first of which has rows enough is forecast


def report_on(names: list[str]) -> Report:
  """Read the runs and judge them, by the flags."""
  preset = None
  if _PRESET.value is not None:
    preset = flatten(from_config_dict(load_file(_PRESET.value)))
  runs = [read_run(name) for name in names]
  forecasts = {run.name: known for run in runs if (known := _forecast(run)) is not None}
  return make_report(runs, _BY.value, preset, _PRESET.value or DEFAULTS, forecasts)


def _forecast(run: RunRecord) -> Forecast | None:
  """The forecast of a run that has not ended, as soon as it has rows enough."""
  counts = {metric: len(run.column(metric).values) for metric in METRICS}
  known = [metric for metric, count in counts.items() if count >= MIN_POINTS]
  if run.state.word == "finished" or not known:
    return None
  try:
    found = forecast.report(paths.parse(run.name), None, known[0])
  except ValueError as error:
    return None, [str(error)]
  return found, forecast.advise(found, 0.0, forecast.WORTH)


def main(argv: list[str]) -> int:
  """Write the page, or print the card, or serve the page."""
  jax.config.update("jax_platforms", "cpu")  # leave a GPU to the run
  for flag, others in (("serve", ("out", "json", "card")), ("card", ("out",))):
    for other in others:
      if FLAGS[flag].value and FLAGS[other].present:
        raise ValueError(f"--{flag} writes no page to a file, so --{other} has no effect.")
  if _SERVE.value is not None:
    from ats_jax.report.serve import serve  # here: only this needs a server

    serve(lambda refresh: html_page(report_on(argv), refresh), _SERVE.value)
    return exits.DONE
  out = paths.parse(argv[0]) / "report.html" if _OUT.value is None else _target(_OUT.value, "out")
  also = None if _JSON.value is None else _target(_JSON.value, "json")
  report = report_on(argv)
  if also is not None:
    paths.write(also, json.dumps(report.to_json(), allow_nan=False) + "\n")
  if _CARD.value:
    print(card(report), end="")
    return exits.DONE
  page = html_page(report)
  paths.write(out, page)
  for run in report.runs:
    print(f"{run.name}: {' '.join(run.verdict[:2])}")
  print("\n".join([*report.verdict, f"{len(page) / 1e3:,.0f} kB: {out}"]))
  return exits.DONE


def _target(text: str, flag: str) -> paths.Path:
  """The file that a flag names."""
  path = paths.parse(text)
  if not paths.is_remote(path):
    if path.is_dir():
      raise ValueError(f"--{flag}={text} is a folder. Name a file, e.g. {path / 'report.html'}.")
    if not path.parent.is_dir():
      raise ValueError(f"--{flag}={text}: there is no folder {path.parent}. Name another.")
  return path


COMMANDS = {"": cli.Command(main, FLAGS, __doc__, operand="workdir ...")}
