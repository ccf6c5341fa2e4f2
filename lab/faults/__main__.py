"""Faults on purpose, against several ways to guard a run.

python -m lab.faults run --suite=smoke|tune|full|large|experts|plateau|audit|audit_long \
  --results=runs/faults.jsonl [--arms=clip,reflex] [--faults='rate_*,clean'] [--seeds=0,1,2] \
  [--processes=16]
python -m lab.faults table --results=runs/faults.jsonl[,'runs/more*.jsonl']

`run` goes on where an earlier call was stopped.
"""

import dataclasses
import fnmatch
import glob
from collections.abc import Iterable
from pathlib import Path

from absl import flags

from ats_jax.cluster import runtime
from ats_jax.config import base_config, from_config_dict
from ats_jax.verbs import cli
from lab.faults.arms import ARMS, OTHER_ARMS
from lab.faults.audit import KNOWN
from lab.faults.bench import Suite
from lab.faults.results import merged
from lab.faults.spread import spread
from lab.faults.suite import SUITES, run_suite
from lab.faults.suite_tables import tables

_SUITE = flags.DEFINE_enum("suite", "smoke", list(SUITES), "What is run.")
_ARMS = flags.DEFINE_list("arms", None, "Only these arms.")
_FAULTS = flags.DEFINE_list("faults", None, "Only these scenarios; may be patterns.")
_SEEDS = flags.DEFINE_list("seeds", None, "Only these seeds of the suite.")
_RESULTS = flags.DEFINE_list(
  "results", None, "File of JSON lines, e.g. runs/faults.jsonl; for `table`, several or patterns."
)
_PROCESSES = flags.DEFINE_integer(
  "processes", 0, "Spread the runs over so many processes of one core each; 0 = make them here."
)
_PART = flags.DEFINE_string(
  "part", "", "Only part I of N of what is missing, I/N: for `processes`."
)

JUDGED = "ours"  # the arm that the thresholds are for


def chosen(suite: Suite) -> Suite:
  """The part of the suite that the flags ask for."""
  seeds = _SEEDS.value and [int(s) if s.isdecimal() else s for s in _SEEDS.value]
  return dataclasses.replace(
    suite,
    arms=_only(_ARMS.value, "arms", suite.arms, ARMS | OTHER_ARMS),
    scenarios=_only(_FAULTS.value and _matching(suite), "faults", suite.scenarios, KNOWN),
    seeds=_only(seeds, "seeds", suite.seeds, suite.seeds),
  )


def _only(wanted: list | None, flag: str, usual: tuple, known: Iterable) -> tuple:
  known = list(known)
  for name in wanted or ():
    if name not in known:
      raise ValueError(
        f"--{flag}={name} is unknown to --suite={_SUITE.value}. "
        f"Choose of: {', '.join(map(str, known))}."
      )
  return usual if wanted is None else tuple(wanted)


def _matching(suite: Suite) -> list[str]:
  """Scenarios by name or pattern: a pattern is of the suite's, a name of all."""
  found = []
  for pattern in _FAULTS.value or ():
    found += fnmatch.filter(suite.scenarios, pattern) or [pattern]
  return list(dict.fromkeys(found))


def files() -> list[Path]:
  """What `--results` names."""
  names = cli.require(_RESULTS.value, "results", "runs/faults.jsonl")
  return [Path(path) for name in names for path in sorted(glob.glob(name)) or [name]]


def main(argv: list[str]) -> None:
  """Run a suite and print its table, or only print it."""
  paths = files()
  if argv[0] == "run":
    (path,) = paths
    suite = chosen(SUITES[_SUITE.value])
    if _PROCESSES.value:
      spread(path, _PROCESSES.value)
    else:
      runtime.configure(from_config_dict(base_config()))
      run_suite(suite, path, _part())
    if _part() is not None:
      return
  print(tables(merged(paths), JUDGED))


def _part() -> tuple[int, int] | None:
  if not _PART.value:
    return None
  part, _, parts = _PART.value.partition("/")
  return int(part), int(parts)


if __name__ == "__main__":
  cli.run(main, commands=("run", "table"))
