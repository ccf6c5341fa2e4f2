"""The files of `launch/` as they stand, and set for a job; what is refused at once."""

import os
import shlex
import signal
import stat
import subprocess
import sys

import pytest
from commands import REPOSITORY, called, forked

from ats_jax.cluster.launch import templates
from ats_jax.cluster.launch.schedulers import SCHEDULERS
from ats_jax.exits import REFUSED, STOPPED
from ats_jax.verbs.launch import COMMANDS

SLURM = {
  "name": "a",
  "nodes": 4,
  "processes_per_node": 1,
  "gpus": None,
  "program": "(ats-jax)",
  "flags": "(--config=x '--config.sample.prompt=a b')",
  "restarts": 7,
}


def test_a_marked_line_gets_its_value_and_the_rest_stays():
  text = templates.render("slurm.sbatch", SLURM)
  assert "#SBATCH --nodes=4\n" in text and "gpus-per-node" not in text and "# <" not in text
  assert "flags=(--config=x '--config.sample.prompt=a b')\nrestarts=7\n" in text
  example = (templates.folder() / "slurm.sbatch").read_text()
  unmarked = [line for line in example.splitlines() if "# <" not in line]
  assert [line for line in text.splitlines() if line in unmarked] == unmarked
  with pytest.raises(AssertionError, match="port"):
    templates.render("slurm.sbatch", SLURM | {"port": 1})
  with pytest.raises(KeyError, match="nodes"):
    templates.render("slurm.sbatch", {k: v for k, v in SLURM.items() if k != "nodes"})


def test_a_script_can_be_run_as_it_stands():
  for name in ("local.sh", "slurm.sbatch", "tpu_pod.sh"):
    path = templates.folder() / name
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    assert path.stat().st_mode & stat.S_IXUSR


def test_each_file_is_in_the_list_of_its_folder():
  files = {path.name for path in templates.folder().iterdir()}
  assert files == {"README.md", "local.sh", *(s.template for s in SCHEDULERS.values())}
  listed = (templates.folder() / "README.md").read_text()
  assert all(f"| `{name}` |" in listed for name in files - {"README.md"})
  assert all(f"`{word}`" in listed for word in COMMANDS)


def test_what_would_be_refused_there_is_refused_here():
  offenders = []
  for command, message in (
    ("slurm", "--workdir is missing. Example: --workdir=/shared/runs/a"),
    ("slurm --workdir=/x --config.num_stps=3", "Did you mean --config.num_steps?"),
    ("slurm --workdir=/x --partition=gpu", "--partition: there is no such flag"),
    ("slurm --workdir=/x --nodes=0", "--nodes=0: 0 is not a positive integer"),
    ("slurm --workdir=/x --nodes=3", "16 rows a micro-batch do not divide over mesh.data=24"),
    ("slurm --workdir=/x --config.mesh.fsdp=32", "does not divide the 16 devices"),
    ("slurm --workdir=/x --processes_per_node=3", "does not divide --gpus=8"),
    ("slurm --workdir=/x --name=My_Run", "--name=My_Run cannot be a job's"),
    ("slurm --workdir /x/-_-", "'', made of --workdir=/x/-_-, cannot be a job's name. Give --name"),
    ("jobset --workdir gs://b/9 --image=i", "'9', made of --workdir=gs://b/9, cannot be a job's"),
    ("jobset --workdir=gs://b/a", "--image is missing"),
    ("jobset --workdir=/x --image=i", "--workdir=/x would be lost with its machine"),
    ("trainjob --workdir=/x --image=i --claim=c", "or --claim and a folder in /runs/."),
    ("skypilot --workdir=runs/a", "Use one on a store, gs://... or s3://...."),
  ):
    result = called("launch", *shlex.split(command), "--dry_run")
    if result.code != REFUSED or message not in result.err or result.out:
      offenders.append((command, result))
  assert not offenders


@pytest.mark.parametrize(
  ("command", "name"),
  [
    ("slurm --workdir /shared/runs/a", "a"),
    ("slurm -workdir /shared/runs/a --config=debug", "a"),
    ("slurm --workdir=/shared/runs/b --workdir /shared/runs/a", "a"),
    ("slurm --workdir=/shared/runs/2024-11-26", "2024-11-26"),
    ("jobset --image=i --workdir gs://b/a", "a"),
    ("skypilot --workdir gs://b/a", "a"),
  ],
)
def test_a_workdir_is_read_as_train_reads_it(command, name):
  result = called("launch", *shlex.split(command), "--dry_run")
  assert result.code == 0 and "submit it by" in result.err
  assert name in result.out


def test_a_scheduler_that_is_not_here_is_said():
  result = forked("ats_jax", "launch", "slurm", "--workdir=/x", PATH="/nowhere")
  assert "there is no command 'sbatch' here, which takes the job" in result.error()


SUBMIT = """#!/bin/sh
for word in "$@"; do file=$word; done
echo "$# $1 $2"; cat "$file"; exit $CODE
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_schedulers_own_command_gets_the_options_and_the_file(code, tmp_path):
  command = tmp_path / "sbatch"
  command.write_text(SUBMIT)
  command.chmod(0o755)
  path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
  options = "--options=--partition=gpu '--comment=a b'"
  result = forked(
    "ats_jax", "launch", "slurm", "--workdir=/x/run", options, PATH=path, CODE=str(code)
  )
  first, *lines = result.out.splitlines()
  assert first == "3 --partition=gpu --comment=a b" and "#SBATCH --job-name=run" in lines
  assert result.code == bool(code)
  assert ("error: sbatch ended with 3; it says why above." in result.err) == bool(code)


def test_the_hosts_of_a_tpu_get_the_flags_as_they_are(tmp_path):
  for name, body in (("gcloud", 'printf "%s\\n" "$@"'), ("ats-jax", 'printf "%s\\n" "$@"')):
    (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
    (tmp_path / name).chmod(0o755)
  path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
  flags = (
    "--name=tpu",
    "--options=--zone=z",
    "--workdir=gs://b/a",
    "--config.sample.prompt=it's a $b",
  )
  result = forked("ats_jax", "launch", "tpu", *flags, PATH=path)
  *words, last = result.out.splitlines()
  assert words == ["compute", "tpus", "tpu-vm", "ssh", "tpu", "--worker=all", "--zone=z"]
  variable, _, command = last.removeprefix("--command=").partition(" ")
  assert variable == "ATS_CLUSTER=gcetpu"
  env = os.environ | {"PATH": path}
  done = subprocess.run(
    ["bash", "-c", command], env=env, capture_output=True, text=True, check=True
  )
  assert done.stdout.splitlines() == ["train", *flags[2:]]


PROGRAM = """
import os, signal, sys
rank = os.environ["JAX_PROCESS_ID"]
assert os.environ["JAX_LOCAL_DEVICE_IDS"] == rank and os.environ["JAX_NUM_PROCESSES"] == "2"
assert sys.argv[1] == "train" and sys.argv[-1] == "--more=a b"
def stop(*_):
  if rank == "1":
    alive.read()  # until process 0 has ended
  open(f"saved_{rank}", "w").close()
  sys.exit(75)
if "--waits" in sys.argv:
  woken, wake = os.pipe()
  os.set_blocking(wake, False)
  signal.set_wakeup_fd(wake)
  signal.signal(signal.SIGTERM, stop)
  alive = os.open("alive", os.O_RDWR) if rank == "0" else open("alive")
  os.write(1, b"ready\\n")
  while True:
    os.read(woken, 1)
sys.exit(int(rank) * 7)
"""


def local_script(folder, *flags):
  """`launch/local.sh` with a program of its own, started."""
  (folder / "program.py").write_text(PROGRAM)
  program = f"({sys.executable} program.py)"
  values = {"program": program, "flags": f"({shlex.join(flags)})", "processes": 2}
  (folder / "local.sh").write_text(templates.render("local.sh", values))
  os.mkfifo(folder / "alive")
  command = ["bash", "local.sh", "--more=a b"]
  return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)


def test_the_script_for_this_machine_ends_with_the_worst_code(tmp_path):
  with local_script(tmp_path) as script:
    assert script.wait(60) == 7


def test_the_script_for_this_machine_waits_until_all_have_saved(tmp_path):
  with local_script(tmp_path, "--waits") as script:
    assert [script.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    script.send_signal(signal.SIGTERM)
    assert script.wait(60) == STOPPED
  assert (tmp_path / "saved_0").exists() and (tmp_path / "saved_1").exists()


def test_the_script_that_local_prints_is_that_of_the_command():
  flags = "--config=configs/debug.py", "--workdir=runs/a"
  result = called("launch", "local", "--processes=3", "--dry_run", *flags)
  assert "processes=3\n" in result.out and f"flags=({shlex.join(flags)})\n" in result.out
  assert f"program=({sys.executable} -m ats_jax)\n" in result.out
  assert called("launch", "local", "--dry_run").code == REFUSED
  assert templates.folder() == REPOSITORY / "launch"
