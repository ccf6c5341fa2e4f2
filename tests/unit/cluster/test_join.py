"""Which job the environment names, and two real processes that join one."""

import re
import socket
import threading

import jax
import pytest
from commands import forked
from processes import free_port, run_job

from ats_jax import __version__
from ats_jax.cluster import job, rendezvous
from ats_jax.cluster.rendezvous import JobMember
from ats_jax.config import Config

VARIABLES = {
  "JAX_COORDINATOR_ADDRESS": "node0:1234",
  "JAX_NUM_PROCESSES": "4",
  "JAX_PROCESS_ID": "1",
}
# As Slurm 22.05 sets them for the second task of `srun --nodes=2 --ntasks=4`.
STEP = {
  "SLURM_JOB_ID": "4099",
  "SLURM_STEP_NODELIST": "node[07-08],other3",
  "SLURM_STEP_NUM_NODES": "2",
  "SLURM_STEP_NUM_TASKS": "4",
  "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
  "SLURM_NTASKS": "4",
  "SLURM_PROCID": "3",
  "SLURM_LOCALID": "1",
}
STEP_OF_TWO = STEP | {
  "SLURM_STEP_NUM_NODES": "1",
  "SLURM_STEP_NUM_TASKS": "2",
  "SLURM_STEP_TASKS_PER_NODE": "2",
  "SLURM_PROCID": "0",
  "SLURM_LOCALID": "0",
}
# Of a batch script, which is no step though it has tasks to start.
SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def test_the_three_variables_name_a_job():
  assert job.find_member(VARIABLES) == JobMember("node0:1234", 4, 1)
  assert job.find_member(VARIABLES | {"JAX_LOCAL_DEVICE_IDS": "2,3"}).devices == (2, 3)
  assert job.find_member({}) is None


def test_half_of_what_names_a_job_is_refused():
  for changes, message in (
    ({"JAX_NUM_PROCESSES": None}, "JAX_NUM_PROCESSES is not set, and the rest of"),
    ({"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID=one is no whole number"),
    ({"JAX_PROCESS_ID": "4"}, "=4 with JAX_NUM_PROCESSES=4: numbers go from 0 to 3"),
    ({"JAX_COORDINATOR_ADDRESS": "node0"}, "a host and a port were expected, e.g. node0:1234"),
    ({"ATS_CLUSTER": "slrm"}, "ATS_CLUSTER=slrm is none of none, ompi, mpi4py, k8s"),
  ):
    env = {k: v for k, v in (VARIABLES | changes).items() if v is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
      job.find_member(env)


def test_a_step_of_slurm_names_a_job():
  assert job.find_member(STEP) == JobMember("node07:61443", 4, 3, (1,), "Slurm")
  assert job.find_member(STEP | {"JAX_COORDINATOR_PORT": "999"}).address == "node07:999"
  assert job.find_member(STEP | {"JAX_COORDINATOR_ADDRESS": "ib7:1"}).address == "ib7:1"
  one = {"SLURM_STEP_NODELIST": "vm", "SLURM_STEP_NUM_NODES": "1"}
  assert job.find_member(STEP | one).address == "vm:61443"


def test_in_an_allocation_a_process_that_srun_did_not_start_is_alone():
  assert job.find_member(SCRIPT) is None
  assert job.find_member(STEP | {"SLURM_STEP_NUM_TASKS": "1"}) is None  # a shell that srun started
  assert job.find_member(STEP | {"ATS_CLUSTER": "none"}) is None
  assert job.find_member(SCRIPT | VARIABLES) == job.find_member(VARIABLES)


@pytest.mark.parametrize(
  ("tasks_per_node", "index", "seen", "devices"),
  [
    ("1(x2)", "0", "0,1,2,3", ()),  # one process a node has all of it
    ("1(x2)", "0", None, ()),
    ("4(x2),1", "3", "0,1,2,3", (3,)),
    ("4(x2)", "3", None, (3,)),  # Slurm does not know of GPUs: each the one of its number
    ("2(x2)", "1", "0,1,2,3", (2, 3)),
    ("4(x2)", "3", "0", ()),  # --gpus-per-task: each sees its own
  ],
)
def test_tasks_of_a_node_share_its_gpus(tasks_per_node, index, seen, devices):
  env = STEP | {"SLURM_STEP_TASKS_PER_NODE": tasks_per_node, "SLURM_LOCALID": index}
  env |= {"CUDA_VISIBLE_DEVICES": seen} if seen is not None else {}
  assert job.find_member(env).devices == devices


def test_loopback_is_refused_for_several_nodes():
  for address in ("localhost:1", "[::1]:1"):
    changes = {"JAX_COORDINATOR_ADDRESS": address}
    with pytest.raises(ValueError, match="is each machine itself, and this job has 2 machines"):
      job.find_member(STEP | changes)
    assert job.find_member(STEP | changes | {"SLURM_STEP_NUM_NODES": "1"}).address == address


def test_a_process_joins_its_job_once(monkeypatch):
  for name in VARIABLES:
    monkeypatch.setenv(name, "nobody reads this")
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  job.join(Config())


JOIN = """
import os
from absl import logging
logging.use_absl_handler()
logging.set_verbosity(logging.INFO)
os.environ.update(ENVIRONMENT)
from ats_jax.cluster import job
from ats_jax.config import Config
job.join(Config())
say(jax.process_count())
"""


def joined(folder, environment):
  """Two processes join; the lines of the table that the first logs, as words."""
  said = run_job(JOIN.replace("ENVIRONMENT", environment), folder, devices=2, joins=False)
  assert said == [["2"], ["2"]]
  assert "job: " not in (folder / "log.1").read_text()
  log = (folder / "log.0").read_text()
  first, *table = log[log.index("job: ") :].splitlines()[:4]
  return first, [line.split() for line in table]


def test_two_processes_join_and_say_who_is_where(tmp_path):
  variables = 'JAX_COORDINATOR_ADDRESS=f"localhost:{port}", JAX_NUM_PROCESSES="2"'
  first, table = joined(tmp_path, f"{variables}, JAX_PROCESS_ID=str(rank)")
  assert first == "job: 2 processes, by JAX_PROCESS_ID"
  rows = [[rank, socket.gethostname(), "2", "x", "cpu"] for rank in "01"]
  assert table == [["process", "host", "devices"], *rows]


@pytest.mark.thorough
def test_jax_finds_an_mpi_job_when_it_is_asked_to(tmp_path):
  uri = 'OMPI_MCA_orte_hnp_uri="4096.0;tcp://127.0.0.1:1", JAX_COORDINATOR_PORT=port'
  ranks = "OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_LOCAL_RANK=str(rank)"
  size = 'ATS_CLUSTER="ompi", OMPI_COMM_WORLD_SIZE="2"'
  first, table = joined(tmp_path, f"{size}, {uri}, {ranks}")
  assert first == "job: 2 processes, by ompi"
  assert table == [["process", "devices"], *([rank, "2", "x", "cpu"] for rank in "01")]


def test_a_start_that_fails_is_a_message_and_may_be_tried_again(tmp_path):
  """jax alone would abort, or crash when the port is taken."""
  env = VARIABLES | {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_PROCESS_ID": "0"}
  flags = "--config=configs/debug.py", f"--workdir={tmp_path}", "--config.join_secs=1"
  result = forked("ats_jax.train", *flags, **env)
  assert result.code == 1 and "Traceback" not in result.err
  assert "error: processes 1, 2, 3 of 4 did not come within 1 s (join_secs)." in result.err


def test_processes_with_other_settings_do_not_train_together(tmp_path):
  port, said = free_port(), []

  def other():
    facts = {"ats_jax": __version__, "jax": jax.__version__, "seed": 7}
    with pytest.raises(ValueError, match="were started differently") as caught:
      rendezvous.call(JobMember(f"localhost:{port}", 2, 1), facts, 60)
    said.append(str(caught.value))

  second = threading.Thread(target=other)
  second.start()
  address = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}"}
  flags = "--config=configs/debug.py", f"--workdir={tmp_path}", "--config.join_secs=60"
  result = forked("ats_jax.train", *flags, **STEP_OF_TWO | address)
  second.join(30)
  assert said and said[0] in result.error()
  assert "seed is 0 and 7" in said[0] and "jax is" not in said[0]
