"""The job of several processes that this one belongs to, if any: found, joined, shown."""

import functools
import json
import logging as std_logging
import os
import re
from collections.abc import Mapping, Sequence

import jax
from absl import logging

from ats_jax import __version__
from ats_jax.cluster import rendezvous
from ats_jax.cluster.rendezvous import JobMember
from ats_jax.config.names import flatten
from ats_jax.config.schema import Config

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Asks for one of jax's own ways to find a job, or for none.
CLUSTER = "ATS_CLUSTER"
METHODS = ("ompi", "mpi4py", "k8s", "gcetpu", "gketpu")
ALONE = "none"
OF_A_MACHINE = ("compilation_cache",)  # settings that may differ from machine to machine
# A job of Slurm has the port that its number chooses, as in jax.
SLURM_PORT = 61440  # the first one
SLURM_PORTS = 4096  # number of ports


def join(cfg: Config) -> None:
  """Become one of the processes that train together, if the environment says so.

  Call before any device is used. The first process alone reports; of the others, warnings are shown
  with their number.

  Raises:
    ValueError: if the environment says it halfway, or two processes were started differently.
    FaultError: if a process does not come within `join_secs`, or the port is taken.
  """
  if jax.distributed.is_initialized():  # `train` may be called more than once in a process
    return
  member, method = find_member(os.environ), os.environ.get(CLUSTER)
  connect = functools.partial(
    jax.distributed.initialize,
    initialization_timeout=cfg.join_secs,
    # After its `Watchdog`, which says a line where this one says a page. A beat comes each half of
    # this time: of a process that freezes right before one, only the other half is left.
    heartbeat_timeout_seconds=4 * cfg.heartbeat_secs,
  )
  if member is not None:
    facts = {"ats_jax": __version__, "jax": jax.__version__} | flatten(cfg)
    same = {name: value for name, value in facts.items() if name not in OF_A_MACHINE}
    same = json.loads(json.dumps(same))  # as the others get it: lists for tuples
    hosts = rendezvous.call(member, same, cfg.join_secs)
    connect(
      member.address, member.size, member.rank, list(member.devices) or None,
      cluster_detection_method="deactivate",
    )  # fmt: skip
  elif method in METHODS:
    hosts = []
    connect(cluster_detection_method=method)
  else:
    return
  rank = jax.process_index()
  if rank:
    logging.get_absl_handler().setLevel(std_logging.WARNING)  # its file has all
    line = std_logging.Formatter(f"%(asctime)s [{rank}] %(message)s", "%H:%M:%S")
    logging.get_absl_handler().setFormatter(line)
  by, count = member.by if member else method, jax.process_count()
  logging.info("job: %d processes, by %s\n%s", count, by, process_table(hosts))


def find_member(env: Mapping[str, str]) -> JobMember | None:
  """Which process of which job the environment says this is; None = it says nothing, or alone.

  In this order: `ATS_CLUSTER`; the three variables; a step of Slurm's `srun` with several tasks. A
  shell in an allocation of Slurm's, or its batch script, is no such step: what it starts is alone.

  Raises:
    ValueError: if only some of the variables are set, or they do not fit.
  """
  method = env.get(CLUSTER)
  if method is not None and method not in (ALONE, *METHODS):
    raise ValueError(f"{CLUSTER}={method} is none of {', '.join((ALONE, *METHODS))}.")
  if method is not None:
    return None
  tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))
  if tasks > 1 and not {"JAX_NUM_PROCESSES", "JAX_PROCESS_ID"} & set(env):
    member = _of_slurm(env, tasks)
  elif any(name in env for name in VARIABLES):
    member = _of_variables(env)
  else:
    return None
  nodes = int(env.get("SLURM_STEP_NUM_NODES", 1))
  host, _ = rendezvous.split_address(member.address)
  if nodes > 1 and rendezvous.is_loopback(host):
    raise ValueError(
      f"the address of process 0 is {member.address}, which is each machine itself, and this job "
      f"has {nodes} machines. Set JAX_COORDINATOR_ADDRESS to a name of the first one, or unset it."
    )
  return member


def _of_variables(env: Mapping[str, str]) -> JobMember:
  missing = ", ".join(name for name in VARIABLES if name not in env)
  if missing:
    raise ValueError(
      f"{missing} is not set, and the rest of {', '.join(VARIABLES)} is. Set all three."
    )
  address, *counts = (env[name] for name in VARIABLES)
  for name, value in zip(VARIABLES[1:], counts, strict=True):
    if not value.isdecimal():
      raise ValueError(f"{name}={value} is no whole number.")
  size, rank = map(int, counts)
  if rank >= size:
    raise ValueError(
      f"JAX_PROCESS_ID={rank} with JAX_NUM_PROCESSES={size}: numbers go from 0 to {size - 1}."
    )
  devices = filter(None, env.get("JAX_LOCAL_DEVICE_IDS", "").split(","))
  return JobMember(address, size, rank, tuple(map(int, devices)))


def _of_slurm(env: Mapping[str, str], tasks: int) -> JobMember:
  """The process that a task of `srun` is: as jax detects it, but of this step and with all GPUs.

  jax counts the tasks of the allocation and gives each the GPU of its number.
  """
  first = re.match(r"([^,\[]+)(?:\[(\d+))?", env["SLURM_STEP_NODELIST"])
  assert first, env["SLURM_STEP_NODELIST"]
  port = int(env.get("JAX_COORDINATOR_PORT") or SLURM_PORT + int(env["SLURM_JOB_ID"]) % SLURM_PORTS)
  address = env.get("JAX_COORDINATOR_ADDRESS") or f"{first[1]}{first[2] or ''}:{port}"
  return JobMember(address, tasks, int(env["SLURM_PROCID"]), _slurm_devices(env), "Slurm")


def _slurm_devices(env: Mapping[str, str]) -> tuple[int, ...]:
  """Which of the GPUs that a task sees are its own; () = all."""
  counts = re.findall(r"(\d+)(?:\(x\d+\))?", env["SLURM_STEP_TASKS_PER_NODE"])
  tasks, index = max(map(int, counts)), int(env["SLURM_LOCALID"])
  seen = env.get("CUDA_VISIBLE_DEVICES")
  count = tasks if seen is None else len(seen.split(","))
  if tasks == 1 or count < tasks:  # alone on its node, or Slurm has dealt them out
    return ()
  share = count // tasks
  return tuple(range(index * share, (index + 1) * share))


def process_table(hosts: Sequence[str]) -> str:
  """Which process runs on which host, and with which devices.

  Args:
    hosts: by number of the process; () = not known.
  """
  width = max(len("host"), *map(len, hosts)) if hosts else 0
  column = lambda host: f"  {host:<{width}}" if hosts else ""
  lines = [f"process{column('host')}  devices"]
  for rank in range(jax.process_count()):
    kinds = [d.device_kind for d in jax.devices() if d.process_index == rank]
    host = column(hosts[rank]) if hosts else ""
    lines.append(f"{rank:>7}{host}  {len(kinds)} x {kinds[0]}")
  return "\n".join(lines)
