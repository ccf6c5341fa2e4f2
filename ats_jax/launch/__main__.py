"""`ats-jax launch`: train with several processes, here or by a cluster's own scheduler."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from absl import flags

from ats_jax import cli
from ats_jax.exits import DONE, FAULT
from ats_jax.launch import templates
from ats_jax.launch.local import Job

NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # Kubernetes' rule; it adds to a name
PORT = 12355
CLAIMED = "/runs"  # where a volume claim is mounted
HERE = (sys.executable, "-m", "ats_jax")  # of Slurm too: its nodes share the file system


class Asked(NamedTuple):
  """A job that is to be submitted.

  Attributes:
    name: of the job.
    flags: of `train`.
    options: of the scheduler's own command.
    value: of the verb's other flags, by name.
  """

  name: str
  flags: list[str]
  options: list[str]
  value: Mapping[str, Any]


class Scheduler(NamedTuple):
  """How one scheduler is asked.

  Attributes:
    template: file of `launch/`.
    command: that takes the file, with a place for its options.
    values: of the template's marks.
    devices: how many devices the job has; 0 = that is known there only.
  """

  template: str
  command: str
  values: Callable[[Asked], dict[str, str | int | None]]
  devices: Callable[[Mapping[str, Any]], int]


def _count(name: str, default: int | None, text: str, low: int = 1) -> Callable:
  define = lambda to: flags.DEFINE_integer(name, default, text, lower_bound=low, flag_values=to)
  return define


def _text(name: str, default: str | None, text: str) -> Callable:
  return lambda to: flags.DEFINE_string(name, default, text, flag_values=to)


_DRY_RUN = lambda to: flags.DEFINE_bool(
  "dry_run", False, "Print what would be submitted, and submit nothing.", flag_values=to
)
_NAME = _text("name", None, "Of the job; default: the last part of the workdir.")
_OPTIONS = _text("options", "", "More options of the scheduler's own command, in quotes.")
_NODES = _count("nodes", 2, "Machines.")
_GPUS = _count("gpus", 8, "GPUs of a machine; 0 = train on CPUs.", low=0)
_RESTARTS = _count("restarts", 5, "Start again so many times at most.", low=0)
_IMAGE = _text("image", None, "Container with ats_jax and its data.")
_QUEUE = _text("queue", None, "Kueue's queue.")
_CLAIM = _text("claim", None, f"Volume claim that all machines can write; mounted at {CLAIMED}.")


def _flags(*define: Callable) -> flags.FlagValues:
  values = flags.FlagValues()
  for one in define:
    one(values)
  return values


LOCAL = _flags(_count("processes", None, "How many, e.g. 2."), _RESTARTS, _DRY_RUN)


def local(argv: list[str]) -> int:
  """Run the job on this machine, or print a script that does."""
  size = cli.require(LOCAL["processes"].value, "processes", "2")
  if LOCAL["dry_run"].value:
    values = {"program": _array(HERE), "flags": _array(argv), "processes": size}
    print(templates.render("local.sh", values), end="")
    return DONE
  return Job([*HERE[:2], "ats_jax.train", *argv], size).run(LOCAL["restarts"].value)


def _slurm(job: Asked) -> dict[str, str | int | None]:
  return {
    "name": job.name,
    "nodes": job.value["nodes"],
    "processes_per_node": job.value["processes_per_node"],
    "gpus": job.value["gpus"] or None,
    "program": _array(HERE),
    "flags": _array(job.flags),
    "restarts": job.value["restarts"],
  }


def _jobset(job: Asked) -> dict[str, str | int | None]:
  return _pod(job) | {
    "restarts": job.value["restarts"],
    "address": json.dumps(f"{job.name}-node-0-0.{job.name}:{PORT}"),
    "processes": json.dumps(str(job.value["nodes"])),
  }


def _pod(job: Asked) -> dict[str, str | int | None]:
  """What the two kinds of Kubernetes have in common."""
  volumes: list[dict] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
  mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
  if claim := job.value["claim"]:
    volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
    mounts.append({"name": "runs", "mountPath": CLAIMED})
  gpus, queue = job.value["gpus"], job.value["queue"]
  return {
    "name": job.name,
    "labels": json.dumps({"kueue.x-k8s.io/queue-name": queue}) if queue else None,
    "nodes": job.value["nodes"],
    "image": json.dumps(cli.require(job.value["image"], "image", "registry.example/ats_jax:1")),
    "command": json.dumps(["ats-jax", "train", *job.flags]),
    "resources": json.dumps({"limits": {"nvidia.com/gpu": gpus}}) if gpus else None,
    "mounts": json.dumps(mounts),
    "volumes": json.dumps(volumes),
  }


def _skypilot(job: Asked) -> dict[str, str | int | None]:
  gpus = job.value["gpus"]
  return {
    "name": job.name,
    "nodes": job.value["nodes"],
    "accelerators": json.dumps({job.value["accelerator"]: gpus}) if gpus else None,
    "restarts": job.value["restarts"],
    "flags": _array(job.flags),
  }


def _tpu(job: Asked) -> dict[str, str | int | None]:
  return {"name": job.name, "options": _array(job.options), "flags": _array(job.flags)}


def _devices(value: Mapping[str, Any]) -> int:
  """One process a machine, or as many as are asked for; each has the same part of its GPUs."""
  processes, gpus = value.get("processes_per_node", 1), value["gpus"]
  if gpus % processes:
    raise ValueError(
      f"--processes_per_node={processes} does not divide --gpus={gpus}: each process would have "
      "another number of GPUs."
    )
  return value["nodes"] * (gpus or processes)


SCHEDULERS = {
  "slurm": Scheduler("slurm.sbatch", "sbatch OPTIONS FILE", _slurm, _devices),
  "jobset": Scheduler("jobset.yaml", "kubectl apply OPTIONS -f FILE", _jobset, _devices),
  "trainjob": Scheduler("trainjob.yaml", "kubectl apply OPTIONS -f FILE", _pod, _devices),
  "skypilot": Scheduler("skypilot.yaml", "sky jobs launch --yes OPTIONS FILE", _skypilot, _devices),
  "tpu": Scheduler("tpu_pod.sh", "bash FILE", _tpu, lambda value: 0),
}
NEEDS = {"tpu": ("gcloud",)}  # commands that a template runs
_SUBMIT = (_NAME, _OPTIONS, _DRY_RUN)
OWN_FLAGS = {
  "slurm": _flags(
    *_SUBMIT, _NODES, _GPUS, _RESTARTS, _count("processes_per_node", 1, "Processes of a machine.")
  ),
  "jobset": _flags(
    *_SUBMIT, _NODES, _GPUS, _IMAGE, _QUEUE, _CLAIM,
    _count("restarts", 100, "Start again so many times at most, evictions included.", low=0),
  ),
  "trainjob": _flags(*_SUBMIT, _NODES, _GPUS, _IMAGE, _QUEUE, _CLAIM),
  "skypilot": _flags(
    *_SUBMIT, _NODES, _GPUS, _RESTARTS, _text("accelerator", "H100", "Kind of GPU.")
  ),
  "tpu": _flags(*_SUBMIT),
}  # fmt: skip
ABOUT = {
  "local": """\
Train with several processes on this machine; when one dies, all start again.

  ats-jax launch local --processes=2 --config=debug --workdir=runs/debug

Each is `ats-jax train` with the other flags as they are, and on a machine with GPUs each
has one of its own. What one process loses, all lose: they are ended and started together, and go
on from the newest good checkpoint. A run that ended by itself, well or with an error that starting
again does not mend, is not started again; its exit code is passed on. SIGINT and SIGTERM are
passed to all processes, which save and end with 75. --dry_run prints a script that does the same
without starting again.""",
  "slurm": """\
Train on nodes of a Slurm cluster: `sbatch` gets `launch/slurm.sbatch`, set for this job.

  ats-jax launch slurm --nodes=2 --gpus=8 --config=llama_7b --workdir=/shared/runs/a --dry_run
  ats-jax launch slurm --nodes=2 --options="--partition=gpu --time=24:00:00" --workdir=/shared/runs/a

One process a node has all of its GPUs. Before the time limit, and when the job is preempted, all
processes save; the job is queued again and goes on. When a process dies, all start again at once.""",
  "jobset": """\
Train on a Kubernetes cluster that has JobSet: `kubectl apply` gets `launch/jobset.yaml`.

  ats-jax launch jobset --image=registry.example/ats_jax:1 --claim=runs --workdir=/runs/a --dry_run
  ats-jax launch jobset --image=registry.example/ats_jax:1 --queue=team --workdir=gs://bucket/a \\
    --dry_run

One pod a node, in which the command is the same `ats-jax train`. When a pod fails or is evicted,
all start again; after exit code 2 the set fails. With --queue, Kueue admits all pods or none.""",
  "trainjob": """\
Train by Kubeflow Trainer: `kubectl apply` gets `launch/trainjob.yaml`.

  ats-jax launch trainjob --image=registry.example/ats_jax:1 --claim=runs --workdir=/runs/a --dry_run

As `launch jobset`, by the runtime `jax-distributed` of the cluster, whose administrator says how
often all start again.""",
  "skypilot": """\
Train on machines of a cloud, by SkyPilot: `sky jobs launch` gets `launch/skypilot.yaml`.

  ats-jax launch skypilot --nodes=2 --gpus=8 --accelerator=H100 --workdir=s3://bucket/a --dry_run

To be run from a checkout, which SkyPilot copies to the machines. When they are taken away, the job
goes on on others.""",
  "tpu": """\
Train on all hosts of a Cloud TPU that is there: `launch/tpu_pod.sh` runs `gcloud`.

  ats-jax launch tpu --name=my-tpu --options=--zone=us-central2-b --workdir=gs://bucket/a --dry_run

--name is that of the TPU. When it is taken away, make a new one and run this again.""",
}


def submit(word: str, argv: list[str]) -> int:
  """Set a template for a job, and print it or give it to the scheduler.

  Raises:
    ValueError: for settings that would be refused there, and for a scheduler that is not here.
  """
  scheduler, own = SCHEDULERS[word], OWN_FLAGS[word]
  value = {name: own[name].value for name in own}
  _check_settings(argv, scheduler.devices(value))
  workdir = _check_workdir(word, argv, value.get("claim"))
  asked = Asked(_check_name(value["name"], workdir), argv, shlex.split(value["options"]), value)
  text = templates.render(scheduler.template, scheduler.values(asked))
  command = scheduler.command.replace("OPTIONS", shlex.join(asked.options))
  if value["dry_run"]:
    print(text, end="")
    print(f"submit it by: {' '.join(command.split())}", file=sys.stderr)
    return DONE
  for program in (command.split()[0], *NEEDS.get(word, ())):
    if shutil.which(program) is None:
      raise ValueError(
        f"there is no command {program!r} here, which takes the job. Run this where it is, or take "
        "the file that --dry_run prints there."
      )
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, scheduler.template)
    path.write_text(text, encoding="utf-8")
    words = [str(path) if w == "FILE" else w for w in shlex.split(command)]
    code = subprocess.run(words, check=False).returncode
  if code:
    print(f"error: {words[0]} ended with {code}; it says why above.", file=sys.stderr)
  return FAULT if code else DONE


def _check_settings(argv: list[str], devices: int) -> None:
  """Refuse here what `train` would refuse there.

  Raises:
    ValueError: as `train`, and for a mesh that does not fit the devices.
  """
  from ats_jax import train  # here: it takes seconds, and `launch local` starts at once
  from ats_jax.sharding.mesh import mesh_sizes

  train.COMMANDS[""].parse("train", argv)
  cfg = train.CONFIG.value
  if devices:
    mesh_sizes(cfg, devices)


def _check_workdir(word: str, argv: list[str], claim: str | None) -> str:
  """The workdir, which all machines must share."""
  given = [w.partition("=")[2] for w in argv if re.match("--?workdir=", w)]
  workdir = given[-1] if given else ""
  cli.require(workdir, "workdir", "/shared/runs/a")
  on_store = "://" in workdir
  if word == "slurm" or on_store:
    return workdir
  if claim and PurePath(workdir).is_relative_to(CLAIMED):
    return workdir
  raise ValueError(
    f"--workdir={workdir} would be lost with its machine. Use one on a store, gs://... or s3://..."
    + (f", or --claim and a folder in {CLAIMED}/." if word in ("jobset", "trainjob") else ".")
  )


def _check_name(name: str | None, workdir: str) -> str:
  """The name of the job; that of the workdir as far as it can be one."""
  if name is None:
    name = re.sub("[^a-z0-9]+", "-", PurePath(workdir).name.lower()).strip("-")
  if not NAME.fullmatch(name):
    raise ValueError(
      f"--name={name} cannot be a job's: it has 1 to 40 small letters, digits and hyphens, begins "
      "with a letter and ends with no hyphen."
    )
  return name


def _array(words: Sequence[str]) -> str:
  """Words as an array of bash."""
  return f"({shlex.join(words)})"


COMMANDS = {"local": cli.Command(local, LOCAL, ABOUT["local"], passes_on=True)} | {
  word: cli.Command(
    lambda argv, word=word: submit(word, argv), OWN_FLAGS[word], ABOUT[word], passes_on=True
  )
  for word in SCHEDULERS
}
if __name__ == "__main__":
  cli.main("launch", COMMANDS)
