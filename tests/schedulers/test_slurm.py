"""A real Slurm of one node runs what `ats-jax launch slurm` submits: signal, requeue, resume."""

import os
import re
import shlex
import subprocess
import sys
import time

import jobs
import pytest
import runs
import slurm_here
from xla_flags import QUICK

from ats_jax.cluster.launch import templates

pytestmark = [
  pytest.mark.slurm,
  pytest.mark.skipif(not slurm_here.is_installed(), reason="needs slurmctld, slurmd, slurm-client"),
]
STEPS = 60
QUIET = re.compile(r"coordination|Traceback|^[EWF]\d{4} |Gloo.*error", re.MULTILINE)


def settings(folder, steps):
  text = folder / "text"
  text.mkdir()
  return (*jobs.TINY, f"num_steps={steps}", "checkpoint.every_steps=20", jobs.text(text))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
  with slurm_here.running(tmp_path_factory.mktemp("slurm")) as cluster:
    yield cluster


def submit(slurm, workdir, *flags):
  """`ats-jax launch slurm` of two processes on CPUs; the number of the job."""
  own = "--nodes=1", "--processes_per_node=2", "--gpus=0", f"--options=--output={workdir}.log"
  command = [sys.executable, "-m", "ats_jax", "launch", "slurm", *own, f"--workdir={workdir}"]
  done = subprocess.run(
    [*command, "--config=configs/debug.py", *(f"--config.{f}" for f in flags)],
    env=slurm.env | {"XLA_FLAGS": QUICK, "JAX_PLATFORMS": "cpu"},
    cwd=runs.REPOSITORY, capture_output=True, text=True, check=False, timeout=60,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  return re.search(r"Submitted batch job (\d+)", done.stdout)[1]


def wait_for_step(workdir, step, log):
  end = time.monotonic() + runs.TIMEOUT_SECS
  while not (workdir / "metrics.jsonl").exists() or len(runs.rows(workdir, "train/loss")) < step:
    assert time.monotonic() < end, log.read_text()
    time.sleep(0.05)


def test_signal_requeue_resume_is_the_undisturbed_run(slurm, tmp_path):
  flags, disturbed, other = settings(tmp_path, STEPS), tmp_path / "disturbed", tmp_path / "other"
  number, log = submit(slurm, disturbed, *flags), tmp_path / "disturbed.log"
  wait_for_step(disturbed, 20, log)
  slurm.tell("scancel", "--signal=TERM", number)
  slurm.wait_for_requeue(number)
  job = slurm.wait(number, "COMPLETED", "FAILED", "CANCELLED")
  text = log.read_text()
  assert job["JobState"] == "COMPLETED" and job["Restarts"] == "1", text
  assert text.count("job: 2 processes, by Slurm") == 2
  assert text.count("SIGTERM: finishing the step and saving") == 1
  assert re.search(r"^ +1  \S+ +1 x cpu$", text, re.MULTILINE)
  saved = int(re.search(r"SIGTERM: saved step (\d+)", text)[1])
  assert 20 <= saved < STEPS and f"from step {saved} of {STEPS}" in text
  assert not QUIET.search(text), text

  undisturbed = runs.start(other, *flags, launch=("--processes=2",))
  assert not QUIET.search(runs.finish(undisturbed))
  runs.assert_same_run(disturbed, other, STEPS)


def test_in_an_allocation_a_process_without_srun_is_alone(slurm, tmp_path):
  """It would wait for the second task for ever."""
  flags = [f"--config.{flag}" for flag in settings(tmp_path, 6)]
  train = [sys.executable, "-m", "ats_jax", "train", f"--workdir={tmp_path}/run", *flags]
  env = f"cd {runs.REPOSITORY}; XLA_FLAGS={QUICK} JAX_PLATFORMS=cpu"
  script = f"--wrap={env} {shlex.join([*train, '--config=configs/debug.py'])}"
  said = slurm.tell("sbatch", "--ntasks=2", f"--output={tmp_path}/log", script)
  job = slurm.wait(said.split()[-1], "COMPLETED", "FAILED")
  text = (tmp_path / "log").read_text()
  assert job["JobState"] == "COMPLETED" and "job: " not in text, text
  assert "devices: 1 x cpu" in text


# The signal may end `sleep` before bash has it.
UNTIL_TOLD = "while true; do sleep 1 & wait; done"
PROGRAM = """
echo x >> starts
codes=($CODES)
exit ${codes[$(wc -l < starts) - 1]}
"""


def begin(slurm, folder, program, *options, before=""):
  """Submit the script with a program of a few lines of bash; the number of the job.

  `before` is bash that the script runs before anything else.
  """
  (folder / "program.sh").write_text(program)
  values = {"program": "(bash program.sh)", "flags": "()", "restarts": 2, "gpus": None}
  values |= {"name": "codes", "nodes": 1, "processes_per_node": 1}
  script = folder / "slurm.sbatch"
  script.write_text(
    templates.render("slurm.sbatch", values).replace("program=", f"{before}program=", 1)
  )
  where = f"--chdir={folder}", f"--output={folder}/log"
  return slurm.tell("sbatch", *where, *options, str(script)).split()[-1]


@pytest.mark.parametrize(
  ("codes", "state", "code", "starts"),
  [
    ("9 137 0", "COMPLETED", "0:0", 3),  # what may pass is tried again at once
    ("2 0", "FAILED", "2:0", 1),  # what was refused is not
    ("9 9 9 9", "FAILED", "9:0", 3),
  ],
)
def test_what_the_script_does_after_each_exit_code(slurm, codes, state, code, starts, tmp_path):
  number = begin(slurm, tmp_path, PROGRAM, f"--export=ALL,CODES={codes}")
  job = slurm.wait(number, "COMPLETED", "FAILED", "CANCELLED")
  text = (tmp_path / "log").read_text()
  assert (job["JobState"], job["ExitCode"]) == (state, code), text
  assert len((tmp_path / "starts").read_text().split()) == starts, text


def test_when_one_process_dies_srun_ends_the_other_and_both_start_again(slurm, tmp_path):
  first = "file=first_$SLURM_PROCID; [ -e $file ] && exit 0; touch $file; "
  program = f"{first} [ $SLURM_PROCID = 1 ] && exit 9; sleep 200"
  number = begin(slurm, tmp_path, program, "--ntasks-per-node=2")
  job = slurm.wait(number, "COMPLETED", "FAILED")
  text = (tmp_path / "log").read_text()
  assert job["JobState"] == "COMPLETED" and "restart 1 of 2" in text, text
  assert "First task exited 30s ago" in text, text


def test_the_file_is_run_by_hand_as_it_stands(slurm, tmp_path):
  program = tmp_path / "ats-jax"
  program.write_text('#!/bin/sh\necho "task $SLURM_PROCID: $@"\n')
  program.chmod(0o755)
  own = "--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0"  # it is for two nodes with GPUs
  where = f"--output={tmp_path}/log", f"--export=ALL,PATH={tmp_path}:{os.environ['PATH']}"
  file = str(runs.REPOSITORY / "launch" / "slurm.sbatch")
  number = slurm.tell("sbatch", *own, *where, file, "--workdir=/x", "--config.seed=1").split()[-1]
  job = slurm.wait(number, "COMPLETED", "FAILED")
  text = (tmp_path / "log").read_text()
  assert job["JobState"] == "COMPLETED", text
  said = "train --config=debug --workdir=runs/debug --workdir=/x --config.seed=1"
  tasks = sorted(line for line in text.splitlines() if line.startswith("task"))
  assert tasks == [f"task {rank}: {said}" for rank in (0, 1)]


def test_before_its_time_is_up_a_job_is_told_and_queued_again(slurm, tmp_path):
  program = f"[ -e told ] && exit 0; trap 'touch told; exit 75' TERM; {UNTIL_TOLD}"
  number = begin(slurm, tmp_path, program, "--time=1", "--signal=TERM@55")
  slurm.wait_for_requeue(number)
  job = slurm.wait(number, "COMPLETED", "FAILED", "TIMEOUT")
  assert job["JobState"] == "COMPLETED", (tmp_path / "log").read_text()


@pytest.mark.parametrize("script_lives", [False, True])
def test_a_users_scancel_ends_the_job_saved(slurm, script_lives, tmp_path):
  """Slurm sends SIGTERM to all; whether srun or the script ends first, nothing is queued again."""
  program = "[ -e saved ] && exit 0; trap 'echo saved > saved; exit 75' TERM; touch ready; "
  before = "trap : TERM\n" if script_lives else ""
  number = begin(slurm, tmp_path, program + UNTIL_TOLD, before=before)
  while not (tmp_path / "ready").exists():
    assert slurm.job(number)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING")
    time.sleep(0.1)
  slurm.tell("scancel", number)
  job = slurm.wait(number, "CANCELLED", "COMPLETED", "FAILED")
  assert job["JobState"] == "CANCELLED" and job["Restarts"] == "0"
  assert (tmp_path / "saved").exists()
