"""Reading checkpoints. Nothing here changes the folder, so it is safe beside a running training."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from absl import logging
from jax.experimental import multihost_utils
from orbax.checkpoint._src.metadata import array_metadata_store

from ats_jax.checkpoint import integrity, layout, parted, stream
from ats_jax.checkpoint.integrity import MANIFEST, CheckpointError, DeletedError
from ats_jax.checkpoint.layout import PyTree, Stacks
from ats_jax.checkpoint.rest import Rest
from ats_jax.config.identity import RunIdentity
from ats_jax.store import paths
from ats_jax.store.paths import Path

# Parts of a checkpoint.
STATE = "state"  # folder of the arrays
EXTRA = "extra.json"  # what was saved beside them
SET_ASIDE = ".damaged"
WENT_BACK = "resume_step"  # beside the checkpoints: the step that the run went back to
# Of a file of arrays at most: each is hashed by one thread, and by default Orbax fills 2 GB.
FILE_BYTES = 2**28
MOST_TRIES = 8  # to read a newest checkpoint that a training deletes meanwhile


def committed_steps(directory: Path) -> list[int]:
  """Return the steps of the committed checkpoints in `directory`, oldest first."""
  return sorted(int(name) for name in paths.committed(directory, MANIFEST) if _is_step(name))


def unfinished_folders(directory: Path) -> list[Path]:
  """Return what a killed process left of a step on a store."""
  names = paths.unfinished_in(directory, MANIFEST)
  return [directory / name for name in names if _is_step(name)]


def _is_step(name: str) -> bool:
  """Whether a folder's name is a step as a save writes it: `100`, not `0100`."""
  return name.isascii() and name.isdecimal() and name == str(int(name))


def best_step(directory: Path) -> int | None:
  """Return the step with the lowest finite metric, the newest of equals; None if there is none."""
  metrics = {}
  for step in committed_steps(directory):
    try:
      metric = integrity.read_manifest(directory / str(step))["metric"]
    except CheckpointError as e:
      if step in committed_steps(directory):
        logging.warning("checkpoint %d in %s cannot be the best one: %s", step, directory, e)
      continue
    if metric is not None and math.isfinite(metric):
      metrics[step] = metric
  return min(metrics, key=lambda s: (metrics[s], -s), default=None)


def restore_tree(
  directory: Path,
  abstract: PyTree,
  step: int | str = "latest",
  subtree: str = "",
  run: RunIdentity | None = None,
  stacks: Stacks | None = None,
  rest_of: Callable[[Mapping[str, Any]], Rest] = lambda extra: Rest(),
) -> tuple[int, PyTree, dict[str, Any]]:
  """Verify a checkpoint and restore it, or a part of it, without changing anything on disk.

  In a multi-process job all processes must call this together; they restore the same step.

  Args:
    directory: `workdir/checkpoints`.
    abstract: what to restore, as `jax.ShapeDtypeStruct`s or arrays: shape, dtype and sharding of
      each leaf (`abstract_like`). A leaf without a sharding goes to the first local device.
    step: a step, "latest" (goes back past damaged ones, with a warning each), or "best". Where a
      training deletes the chosen one meanwhile, "latest" and "best" choose again, with a line in
      the log; in a multi-process job they do not, as the processes may be at different arrays.
    subtree: name of the part that `abstract` describes, e.g. "model"; empty = everything.
    run: whose checkpoint it must be; None = anybody's.
    stacks: layers of each stack of `abstract` (`layout.named_arrays`); None = nothing is stacked.
    rest_of: what a checkpoint with this `extra` leaves out of `abstract`.

  Returns:
    The step, the restored tree, and the `extra` dict saved with it.

  Raises:
    CheckpointError: if there is no such checkpoint, it is damaged, deleted meanwhile or of another
      run, or its arrays differ in name, shape or dtype from `abstract`.
  """

  def decide() -> int:
    chosen, damaged = choose_checkpoint(directory, step, run)
    for bad, what in damaged.items():
      logging.warning("checkpoint %d is damaged: %s. Using %d instead.", bad, what, chosen)
    return chosen

  tries = 1 if isinstance(step, int) or jax.process_count() > 1 else MOST_TRIES
  while True:
    tries -= 1
    try:
      chosen = process_0_decides(decide)
      assert chosen is not None
      with _deletion_is_told(directory, chosen):
        rest = rest_of(load_extra(directory, chosen))
      _, part, extra = read(directory, chosen, rest.left_out(abstract), subtree, stacks)
      return chosen, rest.put_back(part), extra
    except DeletedError as e:
      if not tries:
        raise
      logging.info("%s. Reading the %s one there is now.", e, step)


def load_extra(
  directory: Path, step: int | str = "latest", run: RunIdentity | None = None
) -> dict[str, Any]:
  """Return the `extra` dict of a checkpoint, after verifying its own hash but not the arrays.

  Raises:
    CheckpointError: if there is no such checkpoint, it is not of this `run` (None = anybody's), or
      its manifest or extra.json is damaged.
  """
  step = find(directory, step)
  folder = directory / str(step)
  with _deletion_is_told(directory, step):
    integrity.check_run(folder, run)
    if problems := integrity.find_damage(folder, only=[EXTRA]):
      raise CheckpointError(f"checkpoint {folder} is damaged: {problems[0]}. Choose another step.")
    extra = paths.parse_json(paths.read(folder / EXTRA))
  if not isinstance(extra, dict):
    raise CheckpointError(f"checkpoint {folder} is damaged: {EXTRA} holds no object.")
  return extra


def find(directory: Path, step: int | str) -> int:
  """Return the step that `step` means: itself if committed, or what "latest" or "best" is.

  Raises:
    CheckpointError: if there is none.
  """
  steps = committed_steps(directory)
  if not steps:
    raise CheckpointError(
      f"no checkpoint in {directory}{_set_aside_hint(directory)}. Train first, or check the path."
    )
  if step == "latest":
    return steps[-1]
  if step == "best":
    if (best := best_step(directory)) is not None:
      return best
    raise CheckpointError(f"no checkpoint in {directory} has a metric. Choose a step of {steps}.")
  if step not in steps:
    raise CheckpointError(f"no checkpoint {step!r} in {directory}; there are {steps}.")
  return step


def choose_checkpoint(
  directory: Path, step: int | str, run: RunIdentity | None = None
) -> tuple[int, dict[int, str]]:
  """Return the verified step that `step` means, and the damaged ones that "latest" went past.

  Raises:
    CheckpointError: if there is no such checkpoint, it is not of this `run`, or there is nothing
      intact to go back to; a `DeletedError` if it was deleted meanwhile.
  """
  first = find(directory, step)
  steps = committed_steps(directory) if step == "latest" else [first]
  damaged = {}
  for s in reversed(steps):
    integrity.check_run(directory / str(s), run)
    problems = integrity.find_damage(directory / str(s))
    if not problems:
      return s, damaged
    if s not in committed_steps(directory):
      raise _deleted(directory, s)
    damaged[s] = problems[0] + (f" (and {len(problems) - 1} more)" if problems[1:] else "")
  listing = "\n".join(f"  {directory / str(s)}: {what}" for s, what in damaged.items())
  raise CheckpointError(
    f"no intact checkpoint for step {step!r}:\n{listing}\n"
    "Nothing was restored and nothing was changed. Copy these folders back from a backup, choose "
    "another step, or, to begin again from step 0, use a new workdir."
  )


def read(
  directory: Path,
  step: int,
  abstract: PyTree,
  subtree: str = "",
  stacks: Stacks | None = None,
) -> tuple[int, PyTree, dict[str, Any]]:
  """Restore a step that `choose_checkpoint` returned; see `restore_tree`.

  Raises:
    CheckpointError: as `restore_tree`; a `DeletedError` if it was deleted meanwhile.
  """
  with _deletion_is_told(directory, step):
    return step, *_read(directory, step, abstract, subtree, stacks)


@contextlib.contextmanager
def _deletion_is_told(directory: Path, step: int) -> Iterator[None]:
  """Raise a `DeletedError` in place of what Orbax or this module says of a deleted checkpoint."""
  try:
    yield
  except (OSError, ValueError) as e:
    if step in committed_steps(directory):
      raise
    raise _deleted(directory, step) from e


def _deleted(directory: Path, step: int) -> DeletedError:
  return DeletedError(f"checkpoint {step} in {directory} was deleted while it was read")


def _read(
  directory: Path, step: int, abstract: PyTree, subtree: str, stacks: Stacks | None
) -> tuple[PyTree, dict[str, Any]]:
  folder = directory / str(step)
  wanted = layout.named_arrays(abstract, subtree, stacks)
  saved = integrity.read_manifest(folder)["leaves"]
  if subtree:
    saved = {n: t for n, t in saved.items() if n == subtree or n.startswith(f"{subtree}/")}
  described = layout.describe(wanted)
  anew = layout.begun_anew(saved, described)
  if anew:
    only = lambda names: {name: text for name, text in names.items() if name in anew}
    line, *_ = layout.differences(only(saved), only(described))
    done = "begins at zero" if only(described) else "is left out"
    logging.warning("`%s` of checkpoint %s %s: %s", layout.UNSENT, folder, done, line)
  fits = lambda names: {name: text for name, text in names.items() if name not in anew}
  if lines := layout.differences(fits(saved), fits(described)):
    shown = "\n  ".join(lines[:5] + ([f"and {len(lines) - 5} more"] if lines[5:] else []))
    raise CheckpointError(
      f"checkpoint {folder} does not fit: {len(lines)} of {len(wanted)} arrays differ:\n  {shown}\n"
      "Use the configuration that it was saved with, or another workdir."
    )
  with paths.fetched(folder / STATE) as local:
    parted.join(local, handler())
    restored = _read_arrays(local, abstract, wanted, anew)
  return restored, load_extra(directory, step)


def _read_arrays(
  folder: Path, abstract: PyTree, parts: dict[str, layout.StoredArray], anew: set[str]
) -> PyTree:
  """Return `abstract` with the arrays of `parts` for leaves; zeros for those named in `anew`."""
  leaves, structure = jax.tree.flatten(abstract)
  restored: list[Any] = [None] * len(leaves)
  stored = {name: part for name, part in layout.stored(parts).items() if name not in anew}
  with ocp.Checkpointer(handler()) as checkpointer:
    for group in stream.groups({name: part.target(name) for name, part in stored.items()}):
      arrays = checkpointer.restore(
        folder,
        args=ocp.args.PyTreeRestore(
          item=group,
          restore_args=ocp.checkpoint_utils.construct_restore_args(group),
          partial_restore=True,
        ),
      )
      stream.put(restored, stored, arrays)
  for name, part in parts.items():
    if name not in stored and restored[part.number] is None:
      restored[part.number] = stream.zeros(name, part.leaf)
  return structure.unflatten(restored)


class _MappedArrayHandler(ocp.type_handlers.ArrayHandler):
  """Orbax's reader and writer of arrays, which reads files through mappings of them.

  By default TensorStore reads each file into memory that is new to the process, and copies from
  there. To get that memory can take most of the time of a read.
  """

  async def deserialize(
    self,
    infos: Sequence[ocp.type_handlers.ParamInfo],
    args: Sequence[ocp.RestoreArgs] | None = None,
  ) -> Sequence[jax.Array]:
    """Read arrays.

    A mapped file that shrinks, or whose disk fails, ends the process. So this is for files that
    were hashed a moment ago, and nobody changes a committed checkpoint.
    """
    context = ts.Context({"file_io_mode": {"mode": "memmap"}}, infos[0].ts_context)
    return await super().deserialize([info.replace(ts_context=context) for info in infos], args)


def handler(
  *others: tuple[type, ocp.type_handlers.TypeHandler],
  processes: ocp.options.MultiprocessingOptions | None = None,
) -> ocp.PyTreeCheckpointHandler:
  """Return Orbax's array reader and writer: OCDBT files of zarr3 arrays, not compressed.

  Compressing float32 weights saves 8 % of the bytes and doubles the time to write
  (docs/internals/adr/0005).

  Args:
    others: writers of further types of leaves.
    processes: which processes write where; None = all into one folder.
  """
  processes = processes or ocp.options.MultiprocessingOptions()
  # Off: `stream` has copied layers to the host already, and replicas must not split them again.
  arrays = _MappedArrayHandler(
    use_replica_parallel=False,
    primary_host=processes.primary_host,
    array_metadata_store=array_metadata_store.Store(),  # which remembers what is a random key
  )
  return ocp.PyTreeCheckpointHandler(
    use_ocdbt=True,
    use_zarr3=True,
    use_compression=False,
    multiprocessing_options=processes,
    type_handler_registry=ocp.type_handlers.create_type_handler_registry(
      (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler()), *others
    ),
  )


def to_write(arrays: Mapping[str, Any]) -> ocp.args.PyTreeSave:
  """What Orbax takes to write arrays by their names."""
  return ocp.args.PyTreeSave(dict(arrays), ocdbt_target_data_file_size=FILE_BYTES)


def process_0_decides(decide: Callable[[], int | None]) -> int | None:
  """Call `decide` on process 0 only and return its answer (a step, a flag or None) on all.

  Raises:
    CheckpointError: on all processes, if `decide` raised one.
  """
  if jax.process_count() == 1:
    return decide()
  none, failed = -1, -2
  code, error = failed, None
  if jax.process_index() == 0:
    try:
      answer = decide()
      code = none if answer is None else answer
    except CheckpointError as e:
      error = e
  code = int(multihost_utils.broadcast_one_to_all(np.int32(code)))
  if code == failed:
    raise error or CheckpointError("process 0 found no usable checkpoint; its log says why.")
  return None if code == none else code


def damaged_folders(directory: Path) -> list[Path]:
  """Return the checkpoints that were set aside as damaged."""
  return sorted(directory.glob(f"*{SET_ASIDE}*"))


def _set_aside_hint(directory: Path) -> str:
  names = ", ".join(p.name for p in damaged_folders(directory))
  return f" but damaged ones ({names})" if names else ""
