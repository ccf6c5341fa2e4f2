"""A checkpoint that several processes put on a store: each its part, and process 0 the manifest.

There is no folder that all see while they write, so no file joins their arrays yet: each process
writes as if it were alone. What a reader fetches, it joins on its own disk.
"""

import contextlib
import json
import time
from typing import Any

import jax
import orbax.checkpoint as ocp

from ats_jax.checkpoint import integrity
from ats_jax.checkpoint.integrity import MANIFEST
from ats_jax.store import paths
from ats_jax.store.paths import Path

POLL_SECS = 0.5
_STATE = "state"
_JOINS = f"{_STATE}/manifest.ocdbt", f"{_STATE}/d/"  # what Orbax joins the processes with


def alone() -> ocp.options.MultiprocessingOptions:
  """Orbax's options for a process that writes to a disk of its own."""
  return ocp.options.MultiprocessingOptions(primary_host=None)


def commit(folder: Path, target: Path, fields: dict[str, Any], attempt: int, secs: float) -> None:
  """Put this process's part of a checkpoint; process 0 waits for the others and commits.

  Args:
    folder: a local one that holds the files; nobody writes to it any more.
    target: the checkpoint on the store.
    fields: fields of the manifest, as of `integrity.seal`.
    attempt: number of the save, the same in all processes.
    secs: seconds that process 0 waits for the others.

  Raises:
    TimeoutError: if another process has not put its part by then.
  """
  rank = jax.process_index()
  names = [name for name in paths.files(folder) if _is_own(name, rank)]
  files = integrity.digests(folder, names)
  paths.put(folder, target, names)
  if rank:
    paths.write(_note_path(target, attempt, rank), json.dumps(files))
    return
  deadline = time.monotonic() + secs
  for other in range(1, jax.process_count()):
    files |= _wait_for(_note_path(target, attempt, other), deadline)
  paths.write(target / MANIFEST, integrity.manifest(fields, files))


def join(folder: Path, handler: ocp.PyTreeCheckpointHandler) -> None:
  """Join the parts of several processes in a local copy of a checkpoint's arrays."""
  if not (folder / "manifest.ocdbt").exists():
    with contextlib.closing(handler):
      handler.finalize(folder)


def _is_own(name: str, rank: int) -> bool:
  if rank == 0:
    return not name.startswith(_JOINS)
  return name.startswith(
    (f"{_STATE}/ocdbt.process_{rank}/", f"{_STATE}/array_metadatas/process_{rank}")
  )


def _note_path(target: Path, attempt: int, rank: int) -> Path:
  """Return the path of the note that lists the files which a process has put."""
  return target / f"part.{attempt}.{rank}.json"


def _wait_for(note: Path, deadline: float) -> dict[str, Any]:
  while True:
    try:
      return json.loads(paths.read(note))
    except FileNotFoundError:
      if time.monotonic() > deadline:
        raise TimeoutError(f"{note} did not come: its process is gone, or its network") from None
      time.sleep(POLL_SECS)
