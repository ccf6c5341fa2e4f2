"""Train variants of a config with several seeds at equal tokens, FLOPs or time, and report on them.

ats-jax compare --config=debug:dense,moe,mod --seeds=3 --equal=flops --out=runs/compared

The first variant is trained for its num_steps, the others for as many as cost the same. Time is
that of steps alone: --equal=time measures the step of each with `ats-jax bench`, in turns, and
keeps the result in OUT/step_secs.json. Each run is `ats-jax train` in a process of its own, one
after the other; the same command goes on where one was stopped, and keeps what is complete.
OUT/report.html compares them (see `ats-jax report`).
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

import jax
from absl import flags, logging

from ats_jax import exits
from ats_jax.config import Config
from ats_jax.config.extend import build
from ats_jax.config.file import load_file
from ats_jax.config.validate import check_given
from ats_jax.planner.describe import describe
from ats_jax.report.card import table
from ats_jax.report.figures import Table
from ats_jax.report.page import html_page
from ats_jax.report.read import read_run
from ats_jax.report.report import make_report
from ats_jax.store import paths
from ats_jax.verbs import cli

FLAGS = flags.FlagValues()
CONFIG = cli.ConfigFlag(FLAGS)
PROGRAM = (sys.executable, "-m", "ats_jax")
EQUAL = ("tokens", "flops", "time")
MEASURED = "step_secs.json"
ROUNDS = 2  # measurements of each variant, of which the shorter one counts
TIMED_STEPS = 20
_SEEDS = flags.DEFINE_integer(
  "seeds", 3, "Runs of each variant, with seeds from that of the config on.", lower_bound=1,
  flag_values=FLAGS,
)  # fmt: skip
_EQUAL = flags.DEFINE_enum("equal", "tokens", EQUAL, "What runs have alike.", flag_values=FLAGS)
_OUT = flags.DEFINE_string("out", None, "Folder of the runs and the report.", flag_values=FLAGS)


def num_steps(configs: Sequence[Config], equal: str, step_secs: Sequence[float] = ()) -> list[int]:
  """Steps of each config that cost as much as the steps of the first.

  Args:
    configs: the variants.
    equal: of `EQUAL`.
    step_secs: seconds of a step of each, for "time".

  Raises:
    ValueError: if something else than `num_steps` decides how long one trains.
  """
  costs = list(step_secs)
  for cfg in configs:
    if cfg.counts_epochs:
      raise ValueError(
        f"length={cfg.length} and num_epochs={cfg.num_epochs:g} decide how long a variant trains, "
        "which --equal decides here. Set length=given, num_epochs=0 and num_steps."
      )
    if equal != "time":
      per_token = describe(cfg)["flops_per_token"]["training"] if equal == "flops" else 1.0
      costs.append(cfg.data.batch_size * cfg.data.seq_len * per_token)
  return [max(1, round(configs[0].num_steps * costs[0] / cost)) for cost in costs]


def measured(out: paths.Path, commands: Mapping[str, list[str]]) -> list[float]:
  """Seconds of a step of each variant; those of an earlier call with the same flags, if any.

  Args:
    out: folder that keeps them.
    commands: flags of each variant, by its name.

  Raises:
    ValueError: if a step cannot be measured, or the file of an earlier call cannot be read.
  """
  path = out / MEASURED
  if path.exists():
    try:
      known = paths.parse_json(paths.read(path))
    except ValueError as error:
      raise ValueError(f"{path} cannot be read: {error}. Remove it.") from error
    if known["flags"] == commands:
      return list(known["step_secs"].values())
  out.mkdir(parents=True, exist_ok=True)
  found: dict[str, float] = {}
  for variant, words in [*commands.items()] * ROUNDS:
    result = subprocess.run(
      [*PROGRAM, "bench", f"--steps={TIMED_STEPS}", *words], stdout=subprocess.PIPE, check=False
    )
    if result.returncode:
      raise ValueError(f"The step of {variant} cannot be measured. Use --equal=flops or tokens.")
    secs = json.loads(result.stdout.splitlines()[-1])["queued_step_secs"]
    found[variant] = min(secs, found.get(variant, secs))
  paths.write(path, json.dumps({"flags": commands, "step_secs": found}) + "\n")
  return list(found.values())


def main(argv: list[str]) -> int:
  """Train, and write the report."""
  del argv
  jax.config.update("jax_platforms", "cpu")  # the devices are for the processes that train
  out = paths.parse(cli.require(_OUT.value, "out", "runs/compared"))
  file, _, words = CONFIG.file.partition(":")
  variants = words.split(",")
  if len(variants) < 2:
    raise ValueError(
      f"--config={CONFIG.file}: expected several variants of one config, e.g. debug:dense,moe"
    )
  configs = []
  for variant in variants:
    configs.append(build(CONFIG.applied(load_file(f"{file}:{variant}").to_dict())))
    check_given(configs[-1], CONFIG.given())
  given = {n: v for n, v in CONFIG.given().items() if n not in ("seed", "num_steps")}
  words = [f"--config.{name}={value}" for name, value in given.items()]
  commands = {variant: [f"--config={file}:{variant}", *words] for variant in variants}
  secs = []
  if _EQUAL.value == "time":
    num_steps(configs, "tokens")  # a length that is refused is refused before anything is measured
    secs = measured(out, commands)
  folders = []
  counts = num_steps(configs, _EQUAL.value, secs)
  for (variant, words), cfg, steps in zip(commands.items(), configs, counts, strict=True):
    for seed in range(cfg.seed, cfg.seed + _SEEDS.value):
      folders.append(out / f"{variant}-{seed}")
      logging.info("trains %s for %d steps", folders[-1], steps)
      code = subprocess.run(
        [*PROGRAM, "train", *words, f"--workdir={folders[-1]}", f"--config.seed={seed}",
         f"--config.num_steps={steps}"],
        check=False,
      ).returncode  # fmt: skip
      if code:
        logging.error("%s ended with code %d. The same command goes on.", folders[-1], code)
        return code if code > 0 else exits.FAULT
  report = make_report([read_run(str(folder)) for folder in folders], _EQUAL.value)
  paths.write(out / "report.json", json.dumps(report.to_json(), allow_nan=False) + "\n")
  paths.write(out / "report.html", html_page(report))
  for one in report.comparison[:1]:
    assert isinstance(one, Table)
    print("\n".join([table(one), "", *report.verdict, f"see {out / 'report.html'}"]))
  return exits.DONE


COMMANDS = {"": cli.Command(main, FLAGS, __doc__)}
