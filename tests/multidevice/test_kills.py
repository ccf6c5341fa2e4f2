"""`kill -9` in every phase of a job, which goes on with as many processes or with another number.

Each run is compared with an undisturbed one of two processes: the same rows in every batch, by
their checksums, and the same losses, bit for bit where the mesh is the same.
"""

import os

import jobs
import numpy as np
import pytest
import runs

STEPS = 16
SETTINGS = (
  *jobs.TINY,
  f"num_steps={STEPS}",
  "checkpoint.every_steps=4",
  "step.accum_steps=2",  # 6 rows at a time, which four processes cannot share
)
SAME_MESH = ("start:1", "compile:0", "step:1", "save:0", "save:1", "commit:0", "committed:0")
# From one number of processes to another; where one of them dies. The first leaves a checkpoint.
CHAIN = (
  (1, "committed:0"), (2, "start:1"), (4, "compile:3"), (3, "save:1"), (1, "step:0"),
  (4, "commit:0"), (2, "save:0"), (3, "step:2"), (2, ""),
)  # fmt: skip


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
def test_a_job_goes_on_after_a_kill_while_it_saves(settings, tmp_path):
  """What it repeats, it makes of the same rows: `rows` compares them."""
  run = jobs.Kills(tmp_path, settings, ("save:1",))
  code, output = run.launch(2, restarts=1)
  assert code == 0, output
  assert "launch: process 1 was killed by SIGKILL" in output and run.killed() == 1
  assert "Traceback" not in output and "coordination_service" not in output
  rows = run.rows()
  assert sorted(rows) == list(range(1, STEPS + 1)) and len(runs.losses(run.workdir)) == STEPS
  assert all(len(of_step) == jobs.BATCH for of_step in rows.values())


@pytest.mark.thorough
def test_a_kill_in_every_phase(settings, undisturbed, tmp_path):
  run = jobs.Kills(tmp_path, settings, SAME_MESH)
  code, output = run.launch(2, restarts=len(SAME_MESH))
  assert code == 0, output
  assert run.killed() == len(SAME_MESH) == output.count("launch: process")
  assert run.rows() == undisturbed.rows()
  assert runs.losses(run.workdir) == runs.losses(undisturbed.workdir)
  assert runs.rows(run.workdir) == runs.rows(undisturbed.workdir)  # norms of gradients and all


@pytest.mark.thorough
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
