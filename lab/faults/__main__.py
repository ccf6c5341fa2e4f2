"""Faults on purpose, against several ways to guard a run.

python -m lab.faults run --suite=smoke|tune|held_out --results=runs/faults.jsonl [--processes=2]
  [--arms=clip,ours] [--guard=my_guards:Mine] [--faults='flip_*,clean'] [--seeds=0,1]
python -m lab.faults table --results=runs/tune.jsonl[,'runs/held_out*.jsonl']
"""

import fnmatch
import glob
from collections.abc import Iterable
from pathlib import Path

from absl import flags

from ats_jax.cluster import runtime
from ats_jax.config import base_config, from_config_dict
from ats_jax.verbs import cli
from lab.faults import guards
from lab.faults.arms import ARMS
from lab.faults.bench import Suite
from lab.faults.results import mend, merged
from lab.faults.suite import SUITES, run_suite, spread
from lab.faults.table import tables

_SUITE = flags.DEFINE_enum("suite", "smoke", list(SUITES), "What is run.")
_ARMS = flags.DEFINE_list("arms", None, "Only these arms.")
_GUARDS = flags.DEFINE_multi_string("guard", [], "A further arm, module:Class; repeatable.")
_FAULTS = flags.DEFINE_list("faults", None, "Only these scenarios; may be patterns.")
_SEEDS = flags.DEFINE_list("seeds", None, "Only these seeds of the suite.")
_RESULTS = flags.DEFINE_list("results", None, "File of JSON lines; for `table` several, patterns.")
_PROCESSES = flags.DEFINE_integer("processes", 0, "Spread the runs over so many; 0 = none.")
_PART = flags.DEFINE_string("part", "", "Only part I of N, I/N: for `processes`.")


def chosen(suite: Suite) -> Suite:
  """The part of the suite that the flags ask for."""
  for name in _GUARDS.value:
    guards.load(name)
  return suite._replace(
    arms=(*_only(_ARMS.value, "arms", suite.arms, ARMS), *_GUARDS.value),
    scenarios=_only(_FAULTS.value, "faults", suite.scenarios, suite.scenarios),
    seeds=tuple(map(int, _only(_SEEDS.value, "seeds", suite.seeds, map(str, suite.seeds)))),
  )


def _only(patterns: list[str] | None, flag: str, usual: tuple, known: Iterable[str]) -> tuple:
  found, known = [], list(known)
  for pattern in patterns or ():
    matching = fnmatch.filter(known, pattern)
    if not matching:
      raise ValueError(
        f"--{flag}={pattern} is unknown to --suite={_SUITE.value}. Choose of: {', '.join(known)}."
      )
    found += matching
  return usual if patterns is None else tuple(dict.fromkeys(found))


def main(argv: list[str]) -> None:
  """Run a suite and print its table, or only print it."""
  names = cli.require(_RESULTS.value, "results", "runs/faults.jsonl")
  paths = [Path(path) for name in names for path in sorted(glob.glob(name)) or [name]]
  if argv[0] == "run":
    (path,), suite = paths, chosen(SUITES[_SUITE.value])
    if not _PART.value:
      mend(path)
    if _PROCESSES.value:
      spread(path, _PROCESSES.value)
    else:
      runtime.configure(from_config_dict(base_config()))
      run_suite(suite, path, *map(int, (_PART.value or "0/1").split("/")))
    if _PART.value:
      return
  print(tables(merged(paths)))


if __name__ == "__main__":
  cli.run(main, commands=("run", "table"))
