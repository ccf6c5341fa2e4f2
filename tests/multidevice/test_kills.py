"""`kill -9` in the phases of a job, which goes on with as many processes or with another number.

Each run is compared with an undisturbed one of two processes: the same rows in every batch, by
their checksums, and the same losses, bit for bit where the mesh is the same.
"""

import os
import shutil
import signal

import jobs
import numpy as np
import pytest
import runs

from ats_jax.orchestrator.record import ledger

STEPS = 12
SETTINGS = (
  *jobs.TINY,
  f"num_steps={STEPS}",
  "checkpoint.every_steps=4",
  "step.accum_steps=2",  # 6 rows at a time, which four processes cannot share
  "orchestrator.mode=act",
  "orchestrator.check_interval=4",
)
SAME_MESH = ("committed:0", "save:1")
# From one number of processes to another; where one of them dies. The first leaves a checkpoint.
CHAIN = ((1, "committed:0"), (4, "commit:0"), (3, ""))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  return (*SETTINGS, jobs.text(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory):
  run = jobs.Kills(tmp_path_factory.mktemp("undisturbed"), settings)
  code, output = run.launch(2)
  assert code == 0, output
  rows = run.rows()
  assert sorted(rows) == list(range(1, STEPS + 1))
  assert all(len(of_step) == jobs.BATCH for of_step in rows.values())
  return run


@pytest.mark.thorough
def test_a_job_is_started_again_after_each_kill(settings, undisturbed, tmp_path):
  """All that it repeats, it makes of the same rows (`rows` compares them); bit for bit the same."""
  run = jobs.Kills(tmp_path, settings, SAME_MESH)
  number = len(SAME_MESH)
  code, output = run.launch(2, restarts=number)
  assert code == 0, output
  assert run.killed() == number == output.count("launch: process")
  for process in (0, 1):
    assert f"launch: process {process} was killed by SIGKILL" in output
  again = f"starting all 2 again, from the newest checkpoint: restart {number} of {number}"
  assert again in output and f"resuming {run.workdir} from step" in output
  assert "Traceback" not in output
  # Of a kill, jax's own client may be the first to tell; an attempt that nobody disturbs is quiet.
  assert "coordination_service" not in output.rpartition(again)[2]
  assert run.rows() == undisturbed.rows()
  assert runs.losses(run.workdir) == runs.losses(undisturbed.workdir)
  assert runs.rows(run.workdir) == runs.rows(undisturbed.workdir)  # norms of gradients and all
  path = run.workdir / "decisions.jsonl"
  kinds = [row["kind"] for row in ledger.read_lines(path)]
  assert "resumed_from" in kinds and kinds.count("check") >= STEPS // 4
  assert ledger.replay(path) == ledger.decisions(path) == []


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="four processes need a second core")
@pytest.mark.slow
def test_another_number_of_processes_after_each_kill(settings, undisturbed, tmp_path):
  run = jobs.Kills(tmp_path, settings, tuple(kill for _, kill in CHAIN if kill))
  for number, (size, kill) in enumerate(CHAIN):
    code, output = run.launch(size)
    if not kill:
      assert code == 0, output
      continue
    assert run.killed() == number + 1, output
    assert f"process {kill[-1]} was killed by SIGKILL" in output
    assert ("step.accum_steps=1 in place of 2" in output) == (size == 4), output
  assert run.rows() == undisturbed.rows()
  ours, theirs = runs.losses(run.workdir), runs.losses(undisturbed.workdir)
  np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.thorough
def test_a_lost_snapshot_is_that_of_its_peer(settings, undisturbed, tmp_path):
  """Each process has a folder of its own, as on two machines; that of process 1 is deleted."""
  disks, workdir = tmp_path / "disks", tmp_path / "run"
  settings = (
    *settings, "checkpoint.every_steps=1000", "checkpoint.local_every=4",
    f"checkpoint.local_dir={disks}/$JAX_PROCESS_ID",
  )  # fmt: skip
  job = jobs.launch(workdir, 2, *settings, restarts=0)
  begin = runs.read_to(job, 10)
  os.kill(jobs.pid_of(job, 0), signal.SIGKILL)
  job.communicate()
  assert job.returncode == 137, begin
  steps = lambda rank: {int(p.name) for p in disks.glob(f"{rank}/*/process_{rank}/[0-9]*")}
  # On a busy machine the one of step 8 may not be written when the process dies.
  assert {4, 8} & steps(0) & steps(1), (steps(0), steps(1))
  assert not list(workdir.glob("checkpoints/[0-9]*"))
  shutil.rmtree(disks / "1")

  said = runs.finish(jobs.launch(workdir, 2, *settings, restarts=0))
  assert "[1] snapshot " in said and "of this process is gone: got " in said, said
  assert "going on from snapshot " in said and "later than any checkpoint" in said
  assert not list(disks.glob("*/*")), "the last checkpoint has replaced all"
  assert runs.rows(workdir) == runs.rows(undisturbed.workdir)  # losses, norms of gradients and all
