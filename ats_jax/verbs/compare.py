"""Train variants of a config with several seeds, at equal tokens or FLOPs, and report on them.

ats-jax compare --config=debug:dense,moe,mod --seeds=3 --equal=flops --out=runs/compared

The first variant is trained for its num_steps, the others for as many as cost the same. Each run is
`ats-jax train` in a process of its own, one after the other; the same command goes on where one was
stopped, and keeps what is complete. OUT/report.html compares them (see `ats-jax report`).
"""

import json
import subprocess
import sys
from collections.abc import Sequence

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
EQUAL = ("tokens", "flops")
_SEEDS = flags.DEFINE_integer(
  "seeds", 3, "Runs of each variant, with seeds from that of the config on.", lower_bound=1,
  flag_values=FLAGS,
)  # fmt: skip
_EQUAL = flags.DEFINE_enum("equal", "tokens", EQUAL, "What runs have alike.", flag_values=FLAGS)
_OUT = flags.DEFINE_string("out", None, "Folder of the runs and the report.", flag_values=FLAGS)


def num_steps(configs: Sequence[Config], equal: str) -> list[int]:
  """Steps of each config that cost as much as the steps of the first.

  Raises:
    ValueError: if something else than `num_steps` decides how long one trains.
  """
  costs = []
  for cfg in configs:
    if cfg.counts_epochs:
      raise ValueError(
        f"length={cfg.length} and num_epochs={cfg.num_epochs:g}: the text decides how long a "
        "variant trains, which --equal decides here. Set length=given, num_epochs=0 and num_steps."
      )
    cost = float(cfg.data.batch_size * cfg.data.seq_len)
    if equal == "flops":
      cost *= describe(cfg)["flops_per_token"]["training"]
    costs.append(cost)
  return [max(1, round(configs[0].num_steps * costs[0] / cost)) for cost in costs]


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
  folders = []
  for variant, cfg, steps in zip(variants, configs, num_steps(configs, _EQUAL.value), strict=True):
    for seed in range(cfg.seed, cfg.seed + _SEEDS.value):
      settings = given | {"seed": seed, "num_steps": steps}
      folders.append(out / f"{variant}-{seed}")
      logging.info("trains %s for %d steps", folders[-1], steps)
      code = subprocess.run(
        [sys.executable, "-m", "ats_jax", "train", f"--config={file}:{variant}",
         f"--workdir={folders[-1]}", *(f"--config.{n}={v}" for n, v in settings.items())],
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
