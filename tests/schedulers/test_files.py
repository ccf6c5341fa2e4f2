"""What `ats-jax launch` writes for Kubernetes and SkyPilot, read by their own schemas and models.

JobSet's and TrainJob's models are those that Kubeflow generates from their API; pods are checked by
Kubernetes' own schemas; a task of SkyPilot's is read by SkyPilot.
"""

import json
import os
import subprocess

import pytest
from commands import forked

pytestmark = pytest.mark.schedulers

IMAGE = "--image=registry.example/ats_jax:1"
CASES = {
  "examples": ("--claim=runs", "--queue=team", "--workdir=/runs/a-run", "--config.seed=3"),
  "plain": ("--gpus=0", "--workdir=gs://bucket/plain", "--nodes=4", "--name=other"),
}


def rendered(word, *flags):
  yaml = pytest.importorskip("yaml")
  result = forked("ats_jax", "launch", word, *flags, "--dry_run", "--config=configs/debug.py")
  assert result.code == 0, result.err
  return yaml.safe_load(result.out)


def same(model, document):
  """A generated model holds all of a document: an unknown or misspelt field would be lost."""
  read = model.from_dict(document)
  written = json.loads(json.dumps(read.to_dict(), default=str))
  assert holds(written, document)


def holds(written, part):
  """Whether all of a part is there; a model adds its defaults."""
  if isinstance(part, dict):
    return all(key in written and holds(written[key], part[key]) for key in part)
  if isinstance(part, list):
    return len(part) == len(written) and all(map(holds, written, part))
  return written == part


def check_pod(spec):
  import kubernetes_validate

  pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
  kubernetes_validate.validate(pod, "1.37", strict=True)


@pytest.mark.parametrize("case", CASES)
def test_a_job_set(case):
  import kubernetes_validate
  from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

  document = rendered("jobset", IMAGE, *CASES[case])
  same(JobsetV1alpha2JobSet, document)
  (group,) = document["spec"]["replicatedJobs"]
  template = group["template"]
  check_pod(template["spec"]["template"]["spec"])
  job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template}
  kubernetes_validate.validate(job, "1.37", strict=True)

  name = document["metadata"]["name"]
  env = {e["name"]: e for e in template["spec"]["template"]["spec"]["containers"][0]["env"]}
  nodes = template["spec"]["parallelism"]
  assert template["spec"]["completions"] == nodes
  assert env["JAX_NUM_PROCESSES"]["value"] == str(nodes)
  # <jobSet>-<replicatedJob>-<job index>-<pod index>.<subdomain>, by JobSet's description.
  address = f"{name}-{group['name']}-0-0.{name}:12355"
  assert env["JAX_COORDINATOR_ADDRESS"]["value"] == address
  if case == "examples":
    assert document["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}


@pytest.mark.parametrize("case", CASES)
def test_a_train_job(case):
  from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

  document = rendered("trainjob", IMAGE, *CASES[case])
  same(TrainerV1alpha1TrainJob, document)
  (patch,) = document["spec"]["runtimePatches"]
  (group,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
  pod = group["template"]["spec"]["template"]["spec"]
  image = document["spec"]["trainer"]["image"]
  check_pod(pod | {"containers": [c | {"image": image} for c in pod["containers"]]})


@pytest.mark.parametrize("gpus", [0, 8])
def test_a_task_of_skypilot(gpus):
  import sky

  document = rendered("skypilot", f"--gpus={gpus}", "--workdir=s3://bucket/a", "--nodes=2")
  task = sky.Task.from_yaml_config(document)
  assert task.num_nodes == 2 and task.name == "a" and "ats-jax train" in task.run
  (resources,) = task.resources
  assert resources.accelerators == ({"H100": 8} if gpus else None) and resources.use_spot
  assert resources.job_recovery["recover_on_exit_codes"] == [75]
  assert resources.job_recovery["max_restarts_on_errors"] == 5


def test_the_commands_of_skypilot_tell_each_machine_who_it_is(tmp_path):
  program = tmp_path / "ats-jax"
  program.write_text('#!/bin/sh\nenv | grep ^JAX_ | sort; echo "$@"\n')
  program.chmod(0o755)
  run = rendered("skypilot", "--workdir=s3://bucket/a", "--config.sample.prompt=a b")["run"]
  machine = {"NODE_IPS": "10.0.0.1\n10.0.0.2", "NUM_NODES": "2", "NODE_RANK": "1"}
  env = {f"SKYPILOT_{name}": value for name, value in machine.items()}
  env["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
  done = subprocess.run(["bash", "-c", run], env=env, capture_output=True, text=True, check=True)
  *variables, words = done.stdout.splitlines()
  assert variables == [
    "JAX_COORDINATOR_ADDRESS=10.0.0.1:12355",
    "JAX_NUM_PROCESSES=2",
    "JAX_PROCESS_ID=1",
  ]
  assert words.startswith("train --workdir=s3://bucket/a --config.sample.prompt=a b")


def test_a_misspelt_field_is_noticed():
  from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

  document = rendered("jobset", IMAGE, *CASES["plain"])
  document["spec"]["failurePolicy"]["maxRestart"] = 1
  with pytest.raises(AssertionError):
    same(JobsetV1alpha2JobSet, document)
