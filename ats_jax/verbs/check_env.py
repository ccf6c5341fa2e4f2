"""What this machine is, and whether a run would do well on it: one table with advice.

  ats-jax check_env --workdir=/shared/runs
  ats-jax check_env --measure
  ats-jax plan --config=b1 --hardware=~/.cache/ats_jax/hardware.json

A row is `ok`, `advice` (it runs, and could run better) or `bad` (it would not run, or could lose
work). --measure times matmuls, memory and collectives of the devices, and writes what `plan` reads.
The code is 1 if a row is bad. Run it on each machine of a job.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

from absl import flags

from ats_jax import exits
from ats_jax.cluster import job
from ats_jax.cluster.preflight import folder, gpus, host, measure, network
from ats_jax.cluster.preflight.results import CheckResult, CheckVerdict, render_table
from ats_jax.store import paths
from ats_jax.verbs import cli

FLAGS = flags.FlagValues()
_WORKDIR = flags.DEFINE_string(
  "workdir", "runs", "Folder of runs, or one on a store.", flag_values=FLAGS
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator",
  None,
  "HOST:PORT at which processes meet; default: what the job says.",
  flag_values=FLAGS,
)
_MEASURE = flags.DEFINE_bool(
  "measure", False, "Time matmuls, memory and collectives too.", flag_values=FLAGS
)
_HARDWARE = flags.DEFINE_string(
  "hardware",
  None,
  "Where --measure writes; default: hardware.json in ~/.cache/ats_jax.",
  flag_values=FLAGS,
)
_JSON = flags.DEFINE_bool("json", False, "Print JSON.", flag_values=FLAGS)


def main(argv: list[str]) -> int:
  """Print the table; FAULT if a row is bad."""
  del argv
  if FLAGS["hardware"].present and not _MEASURE.value:
    raise ValueError("--hardware says where --measure writes; that is missing.")
  workdir, environ = paths.parse(_WORKDIR.value), dict(os.environ)
  # A look at the devices must not take their memory from a run.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  place = job.find_member(environ)
  address = _COORDINATOR.value or (place.address if place else None)
  nodes = int(environ.get("SLURM_STEP_NUM_NODES", 1))
  meeting = [network.address_row(), *network.coordinator_rows(address, nodes)]
  found = [*machine_rows(environ), *folder.folder_rows(workdir), *meeting]
  if _MEASURE.value:
    found += measure_rows(Path(_HARDWARE.value) if _HARDWARE.value else default_hardware())
  print(
    json.dumps([dataclasses.asdict(row) for row in found]) if _JSON.value else render_table(found)
  )
  return exits.FAULT if any(row.verdict is CheckVerdict.BAD for row in found) else exits.DONE


def machine_rows(environ: Mapping[str, str]) -> list[CheckResult]:
  """Versions, GPUs, links, NCCL, memory and limits; `environ` as the user set it."""
  text = gpus.output_of(gpus.QUERY)
  cards = gpus.parse_gpus(text) if text else []
  found = host.version_rows()
  found.append(host.device_row(cards[0].driver if cards else None, len(cards)))
  found += gpus.gpu_rows(cards) or [gpus.no_gpu_row()]
  if len(cards) > 1:
    links = gpus.parse_topology(gpus.output_of(gpus.TOPOLOGY) or "")
    nothing = CheckResult("links", "nvidia-smi topo -m shows none", CheckVerdict.NONE)
    found.append(gpus.topology_row(links) if links else nothing)
  found += host.nccl_rows(environ, len(cards))
  found += [host.memory_row(), host.shared_memory_row(len(cards))]
  found.append(host.limit_row(host.current_limits(), len(cards)))
  return found


def measure_rows(path: Path) -> list[CheckResult]:
  """Measure, and write what was found to `path`."""
  hardware = measure.measure()
  path = path.expanduser()
  hardware.save(path)
  how = f"{path}; ats-jax plan --hardware={path} reads it"
  return [*measure.rows(hardware), CheckResult("hardware", how)]


def default_hardware() -> Path:
  """Where `--measure` writes."""
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return Path(base).expanduser() / "ats_jax" / "hardware.json"


COMMANDS = {"": cli.Command(main, FLAGS, __doc__)}
