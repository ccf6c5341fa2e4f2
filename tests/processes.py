"""Jobs of several processes on this machine, for tests."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

PROLOGUE = """
import functools, sys
import jax
rank, port, said, *argv = sys.argv[1:]
rank = int(rank)
# Not standard output: Gloo writes there too, in pieces.
say = functools.partial(print, file=open(said, "w"), flush=True)
"""
JOIN = 'jax.distributed.initialize(f"localhost:{port}", 2, rank)\n'


def free_port() -> str:
  """A port that nothing listens on now."""
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return str(s.getsockname()[1])


def run_job(
  code: str,
  folder: Path,
  *argv: object,
  devices: int = 1,
  flags: str = "",
  path: tuple = (),
  timeout: float = 600,
  joins: bool = True,
) -> list[list[str]]:
  """Run `code` in two processes of one job, and return the lines that each gave to `say`.

  Args:
    code: Python; finds `rank`, `argv` (strings) and `say`, with jax started.
    folder: for the lines and the logs.
    argv: what `code` needs.
    devices: per process.
    flags: more of XLA.
    path: more folders to import from.
    timeout: seconds; the first process that fails ends the job before.
    joins: jax is started; else `code` does that, at `port`.
  """
  port, prologue = free_port(), PROLOGUE + (JOIN if joins else "")
  env = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {flags}",
    "PYTHONPATH": os.pathsep.join([*map(str, path), *sys.path]),
  }
  said, logs = ([folder / f"{kind}.{rank}" for rank in (0, 1)] for kind in ("said", "log"))
  processes = []
  for rank in (0, 1):
    command = [sys.executable, "-c", prologue + code, str(rank), port, str(said[rank])]
    with logs[rank].open("w") as log:
      processes.append(
        subprocess.Popen([*command, *map(str, argv)], stdout=log, stderr=log, env=env)
      )
  end = time.monotonic() + timeout
  while (codes := [p.poll() for p in processes]) != [0, 0]:
    if any(codes) or time.monotonic() > end:
      for p in processes:
        p.kill()
        p.wait()
      text = "\n".join(f"-- process {r}\n{logs[r].read_text()}" for r in (0, 1))
      raise AssertionError(f"exit codes {codes} (None: did not end)\n{text}")
    time.sleep(0.05)
  return [file.read_text().splitlines() for file in said]
