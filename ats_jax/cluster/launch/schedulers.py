"""What each scheduler is asked, by which command, and with which flags of ours."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

PORT = 12355
CLAIMED = "/runs"  # where a volume claim is mounted
type Values = dict[str, str | int | None]
HERE = (sys.executable, "-m", "ats_jax")  # of Slurm too: its nodes share the file system


class Asked(NamedTuple):
  """A job that is to be submitted.

  Attributes:
    name: name of the job.
    flags: flags of `train`.
    options: options of the scheduler's own command.
    value: values of the verb's other flags, by name.
  """

  name: str
  flags: list[str]
  options: list[str]
  value: Mapping[str, Any]


class Scheduler(NamedTuple):
  """How one scheduler is asked.

  Attributes:
    template: file of `launch/`.
    command: command that takes the file, with a place for its options.
    values: values of the template's marks.
    devices: how many devices the job has; 0 = that is known there only.
  """

  template: str
  command: str
  values: Callable[[Asked], Values]
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


def array(words: Sequence[str]) -> str:
  """Words as an array of bash."""
  return f"({shlex.join(words)})"


def _slurm(job: Asked) -> Values:
  return {
    "name": job.name,
    "nodes": job.value["nodes"],
    "processes_per_node": job.value["processes_per_node"],
    "gpus": job.value["gpus"] or None,
    "program": array(HERE),
    "flags": array(job.flags),
    "restarts": job.value["restarts"],
  }


def _jobset(job: Asked) -> Values:
  return _pod(job) | {
    "restarts": job.value["restarts"],
    "address": json.dumps(f"{job.name}-node-0-0.{job.name}:{PORT}"),
    "processes": json.dumps(str(job.value["nodes"])),
  }


def _pod(job: Asked) -> Values:
  """What the two kinds of Kubernetes have in common."""
  volumes: list[dict] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
  mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
  if claim := job.value["claim"]:
    volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
    mounts.append({"name": "runs", "mountPath": CLAIMED})
  gpus, queue, image = job.value["gpus"], job.value["queue"], job.value["image"]
  if not image:
    raise ValueError("--image is missing. Example: --image=registry.example/ats_jax:1")
  return {
    "name": job.name,
    "labels": json.dumps({"kueue.x-k8s.io/queue-name": queue}) if queue else None,
    "nodes": job.value["nodes"],
    "image": json.dumps(image),
    "command": json.dumps(["ats-jax", "train", *job.flags]),
    "resources": json.dumps({"limits": {"nvidia.com/gpu": gpus}}) if gpus else None,
    "mounts": json.dumps(mounts),
    "volumes": json.dumps(volumes),
  }


def _skypilot(job: Asked) -> Values:
  gpus = job.value["gpus"]
  return {
    "name": job.name,
    "nodes": job.value["nodes"],
    "accelerators": json.dumps({job.value["accelerator"]: gpus}) if gpus else None,
    "restarts": job.value["restarts"],
    "flags": array(job.flags),
  }


def _tpu(job: Asked) -> Values:
  return {"name": job.name, "options": array(job.options), "flags": array(job.flags)}


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
  "slurm": """\
Train on nodes of a Slurm cluster: `sbatch` gets `launch/slurm.sbatch`, set for this job.

  ats-jax launch slurm --nodes=2 --gpus=8 --config=llama_7b --workdir=/shared/runs/a --dry_run
  ats-jax launch slurm --options="--partition=gpu --time=24:00:00" --workdir=/shared/runs/a

One process a node has all of its GPUs. Before the time limit, and when the job is preempted, all
processes save; the job is queued again and goes on. When a process dies, all start again.""",
  "jobset": """\
Train on a Kubernetes cluster that has JobSet: `kubectl apply` gets `launch/jobset.yaml`.

  ats-jax launch jobset --image=registry.example/ats_jax:1 --claim=runs --workdir=/runs/a --dry_run
  ats-jax launch jobset --image=registry.example/ats_jax:1 --queue=team --workdir=gs://bucket/a \\
    --dry_run

One pod a node, in which the command is the same `ats-jax train`. When a pod fails or is evicted,
all start again; after exit code 2 the set fails. With --queue, Kueue admits all pods or none.""",
  "trainjob": """\
Train by Kubeflow Trainer: `kubectl apply` gets `launch/trainjob.yaml`.

  ats-jax launch trainjob --image=registry.example/ats_jax:1 --claim=runs --workdir=/runs/a \\
    --dry_run

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
