"""A checkpoint of arrays that are made when their turn comes: no more than one is in memory."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from ats_jax.checkpoint import integrity, reader
from ats_jax.checkpoint.integrity import MANIFEST, CheckpointError
from ats_jax.checkpoint.stream import UncopiedArray
from ats_jax.config.identity import RunIdentity
from ats_jax.store import paths
from ats_jax.store.paths import Path

PROGRESS = "progress.json"


@dataclasses.dataclass(frozen=True)
class Deferred:
  """An array that `make` gives.

  Attributes:
    shape: shape of the array.
    dtype: dtype of the array.
    make: reads or computes it; called once.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  make: Callable[[], np.ndarray]

  @property
  def nbytes(self) -> int:
    """Bytes of the array."""
    return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write(
  directory: Path,
  step: int,
  arrays: Mapping[str, Deferred],
  *,
  run: RunIdentity,
  source: str,
  extra: Mapping[str, Any],
) -> int:
  """Write a checkpoint one array after the other; after a kill the same call goes on.

  Args:
    directory: `workdir/checkpoints`. One process writes.
    step: names the checkpoint.
    arrays: all of its arrays, by name.
    run: whose it is.
    source: a hash of what the arrays are made from: with another one, it begins again.
    extra: JSON values saved beside them.

  Returns:
    How many arrays an earlier, unfinished call had written.

  Raises:
    CheckpointError: if the folder cannot be written.
  """
  directory = paths.absolute(directory)
  folder = paths.staging(directory) / f"{step}.deferred"
  state = folder / reader.STATE
  try:
    paths.make_folder(state)
    done = _done(folder / PROGRESS, source)
    resumed = len(done)

    def wrote(name: str) -> None:
      done.add(name)
      paths.write(folder / PROGRESS, json.dumps({"source": source, "done": sorted(done)}))

    with contextlib.closing(reader.handler((Deferred, _DeferredHandler(done, wrote)))) as handler:
      handler.save(state, args=reader.to_write(arrays))
      handler.finalize(state)
    (folder / reader.EXTRA).write_text(json.dumps(extra, indent=1), encoding="utf-8")
    (folder / PROGRESS).unlink()
    describe = lambda a: f"{a.dtype}[{','.join(map(str, a.shape))}]"
    leaves = {name: describe(array) for name, array in arrays.items()}
    run_fields = dataclasses.asdict(run)
    integrity.seal(folder, {"step": step, "run": run_fields, "metric": None, "leaves": leaves})
    paths.commit_folder(folder, directory / str(step), MANIFEST)
    paths.delete_rest(folder)
  except paths.errors() as e:
    advice = paths.advice(e) or "Look at the disk."
    raise CheckpointError(
      f"checkpoint {step} was not written to {directory}: {paths.reason(e)}. {advice} Then start "
      "the same command again: it goes on."
    ) from e
  return resumed


def _done(progress: Path, source: str) -> set[str]:
  """Names of the arrays that an unfinished call wrote; it is removed if it had another source."""
  try:
    progress_fields = json.loads(paths.read(progress))
  except FileNotFoundError:
    progress_fields = None
  if progress_fields and progress_fields["source"] == source:
    return set(progress_fields["done"])
  state = progress.parent / reader.STATE
  paths.delete_rest(state)
  paths.make_folder(state)
  return set()


class _DeferredHandler(ocp.type_handlers.NumpyHandler):
  """Orbax's writer of numpy arrays, each made, written and let go before the next one."""

  def __init__(self, done: set[str], wrote: Callable[[str], None]):
    super().__init__()
    self._already, self._wrote = frozenset(done), wrote

  async def serialize(
    self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
  ) -> Sequence[Any]:
    """Write the arrays one after the other. Everything is written when it returns."""
    args = args or [ocp.SaveArgs()] * len(values)
    for value, info, arg in zip(values, infos, args, strict=True):
      if info.name in self._already:
        continue
      array = value.make()
      assert array.shape == value.shape and array.dtype == value.dtype, info.name
      for commit in await super().serialize([array.view(UncopiedArray)], [info], [arg]):
        await asyncio.to_thread(commit.result)
      self._wrote(info.name)
    return []
