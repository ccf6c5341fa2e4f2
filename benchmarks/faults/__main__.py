"""Faults on purpose, against several ways to guard a run.

python -m benchmarks.faults run --suite=smoke|tune|full|large|experts|plateau \
  --results=runs/faults.jsonl [--arms=clip,reflex] [--faults=rate_burst,clean] [--seeds=0,1,2]
python -m benchmarks.faults table --results=runs/faults.jsonl

`run` goes on where an earlier call was stopped.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from absl import flags

from ats_jax import cli, runtime
from ats_jax.config import base_config, from_config_dict
from benchmarks.faults.arms import ARMS, OTHER_ARMS
from benchmarks.faults.other_tables import tables
from benchmarks.faults.results import Results
from benchmarks.faults.scenarios import SCENARIOS
from benchmarks.faults.suite import SUITES, Suite, run_suite

_SUITE = flags.DEFINE_enum("suite", "smoke", list(SUITES), "What is run.")
_ARMS = flags.DEFINE_list("arms", None, "Only these arms.")
_FAULTS = flags.DEFINE_list("faults", None, "Only these scenarios.")
_SEEDS = flags.DEFINE_list("seeds", None, "Only these seeds of the suite.")
_RESULTS = flags.DEFINE_string("results", None, "File of JSON lines, e.g. runs/faults.jsonl.")

JUDGED = "ours"  # the arm that the thresholds are for


def chosen(suite: Suite) -> Suite:
  """The part of the suite that the flags ask for."""
  seeds = _SEEDS.value and [int(s) if s.isdecimal() else s for s in _SEEDS.value]
  return dataclasses.replace(
    suite,
    arms=_only(_ARMS.value, "arms", suite.arms, ARMS | OTHER_ARMS),
    scenarios=_only(_FAULTS.value, "faults", suite.scenarios, SCENARIOS),
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


def main(argv: list[str]) -> None:
  """Run a suite and print its table, or only print it."""
  path = Path(cli.require(_RESULTS.value, "results", "runs/faults.jsonl"))
  if argv[1] == "run":
    runtime.configure(from_config_dict(base_config()))
    results = run_suite(chosen(SUITES[_SUITE.value]), path)
  else:
    results = Results(path)
    if not results.records:
      raise ValueError(
        f"--results={path} holds no runs. Make some: python -m benchmarks.faults run."
      )
  print(tables(list(results.records.values()), JUDGED))


if __name__ == "__main__":
  cli.run(main, commands=("run", "table"))
