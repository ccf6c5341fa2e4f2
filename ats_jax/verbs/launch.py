"""`ats-jax launch`: train with several processes, here or by a cluster's own scheduler."""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path, PurePath
from typing import Any

from absl import flags

from ats_jax.cluster.launch import templates
from ats_jax.cluster.launch.local import Job
from ats_jax.cluster.launch.schedulers import (
  ABOUT,
  CLAIMED,
  HERE,
  NEEDS,
  OWN_FLAGS,
  SCHEDULERS,
  Asked,
  array,
)
from ats_jax.exits import DONE, FAULT
from ats_jax.verbs import cli

NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # Kubernetes' rule; it adds to a name
NAME_IN_SLURM = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
LOCAL = flags.FlagValues()
_PROCESSES = flags.DEFINE_integer(
  "processes", None, "How many, e.g. 2.", lower_bound=1, flag_values=LOCAL
)
_RESTARTS = flags.DEFINE_integer(
  "restarts", 5, "Start again so many times at most.", lower_bound=0, flag_values=LOCAL
)
_DRY_RUN = flags.DEFINE_bool(
  "dry_run", False, "Print a script that starts the processes, and start none.", flag_values=LOCAL
)
ABOUT_LOCAL = """\
Train with several processes on this machine; when one dies, all start again.

  ats-jax launch local --processes=2 --config=debug --workdir=runs/debug

Each is `ats-jax train` with the other flags as they are, and on a machine with GPUs each
has one of its own. What one process loses, all lose: they are ended and started together, and go
on from the newest good checkpoint. A run that ended by itself, well or with an error that starting
again does not mend, is not started again; its exit code is passed on. SIGINT and SIGTERM are
passed to all processes, which save and end with 75. --dry_run prints a script that does the same
without starting again."""


def local(argv: list[str]) -> int:
  """Run the job on this machine, or print a script that does."""
  size = cli.require(_PROCESSES.value, "processes", "2")
  if _DRY_RUN.value:
    values = {"program": array(HERE), "flags": array(argv), "processes": size}
    print(templates.render("local.sh", values), end="")
    return DONE
  return Job([*HERE[:2], "ats_jax.train", *argv], size).run(_RESTARTS.value)


def submit(word: str, argv: list[str]) -> int:
  """Set a template for a job, and print it or give it to the scheduler.

  Raises:
    ValueError: for settings that would be refused there, and for a scheduler that is not here.
  """
  scheduler, own = SCHEDULERS[word], OWN_FLAGS[word]
  value: dict[str, Any] = {name: own[name].value for name in own}
  workdir = _check_settings(argv, scheduler.devices(value))
  _check_workdir(word, workdir, value.get("claim"))
  asked = Asked(
    _check_name(value["name"], workdir, word), argv, shlex.split(value["options"]), value
  )
  text = templates.render(scheduler.template, scheduler.values(asked))
  command = shlex.split(scheduler.command.replace("OPTIONS", shlex.join(asked.options)))
  if value["dry_run"]:
    print(text, end="")
    print(f"submit it by: {shlex.join(command)}", file=sys.stderr)
    return DONE
  for program in (command[0], *NEEDS.get(word, ())):
    if shutil.which(program) is None:
      raise ValueError(
        f"there is no command {program!r} here, which takes the job. Run this where it is, or take "
        "the file that --dry_run prints there."
      )
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, scheduler.template)
    path.write_text(text, encoding="utf-8")
    words = [str(path) if word == "FILE" else word for word in command]
    code = subprocess.run(words, check=False).returncode
  if code:
    print(f"error: {command[0]} ended with {code}; it says why above.", file=sys.stderr)
  return FAULT if code else DONE


def _check_settings(argv: list[str], devices: int) -> str:
  """Refuse here what `train` would refuse there; return the workdir, as `train` reads it.

  Raises:
    ValueError: as `train`, and for a mesh that does not fit the devices.
  """
  from ats_jax.sharding.mesh import mesh_sizes
  from ats_jax.verbs import train  # here: it takes seconds, and `launch local` starts at once

  train.COMMANDS[""].parse("train", argv)
  cfg = train.asked_for()
  if devices:
    mesh_sizes(cfg, devices)
  return train.FLAGS["workdir"].value or ""


def _check_workdir(word: str, workdir: str, claim: str | None) -> None:
  """Refuse a workdir that the machines do not share.

  Raises:
    ValueError: if there is none, or it is lost with its machine.
  """
  cli.require(workdir, "workdir", "/shared/runs/a")
  on_store = "://" in workdir
  if word == "slurm" or on_store or (claim and PurePath(workdir).is_relative_to(CLAIMED)):
    return
  raise ValueError(
    f"--workdir={workdir} would be lost with its machine. Use one on a store, gs://... or s3://..."
    + (f", or --claim and a folder in {CLAIMED}/." if word in ("jobset", "trainjob") else ".")
  )


def _check_name(name: str | None, workdir: str, word: str) -> str:
  """The name of the job; that of the workdir as far as it can be one."""
  of_workdir = name is None
  if name is None:
    name = re.sub("[^a-z0-9]+", "-", PurePath(workdir).name.lower()).strip("-")
  if not (NAME_IN_SLURM if word == "slurm" else NAME).fullmatch(name):
    start = "a letter or digit" if word == "slurm" else "a letter"
    begin = f"--name={name} cannot be a job's"
    if of_workdir:
      begin = f"{name!r}, made of --workdir={workdir}, cannot be a job's name. Give --name"
    raise ValueError(
      f"{begin}: it has 1 to 40 small letters, digits and hyphens, begins with {start} and ends "
      "with no hyphen."
    )
  return name


COMMANDS = {"local": cli.Command(local, LOCAL, ABOUT_LOCAL, passes_on=True)} | {
  word: cli.Command(
    lambda argv, word=word: submit(word, argv), OWN_FLAGS[word], ABOUT[word], passes_on=True
  )
  for word in SCHEDULERS
}
