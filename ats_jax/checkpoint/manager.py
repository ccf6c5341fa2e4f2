"""Checkpoints of a run: written in the background, committed in one step, verified before use."""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import shutil
import time
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from absl import logging

from ats_jax.checkpoint import integrity, layout, parted, reader, stream
from ats_jax.checkpoint.integrity import MANIFEST, CheckpointError
from ats_jax.checkpoint.layout import PyTree, Stacks
from ats_jax.checkpoint.local import LocalSnapshots
from ats_jax.checkpoint.rest import Rest
from ats_jax.config.identity import RunIdentity
from ats_jax.config.schema import CheckpointConfig
from ats_jax.exits import FaultError
from ats_jax.store import paths
from ats_jax.store.paths import Path

# Orbax gives up on a write after this time; its default of 600 s is short for a slow network disk.
WRITE_TIMEOUT_SECS = 3600
# A save that waits so long for the one before it says that the folder is slow.
LONG_WAIT_SECS = 10.0
KEPT_FOR = "kept_for"  # file of a checkpoint that is not deleted; names what needs it
_ADVICE = "Look at the disk (`ats-jax check_env --workdir` measures it)."


def keep_for(checkpoint: Path, what: str) -> None:
  """Mark a checkpoint of any run, so that no manager deletes it for its age.

  Args:
    checkpoint: its folder.
    what: what needs it.
  """
  try:
    paths.write(checkpoint / KEPT_FOR, what + "\n")
  except paths.errors() as e:
    logging.warning(
      "%s cannot be marked as needed for %s: %s. If its run trains on, checkpoint.keep of that run "
      "may delete it; keep a copy.",
      checkpoint,
      what,
      paths.reason(e),
    )


class CheckpointManager:
  """Saves and restores the state of one run; a context manager whose exit waits for the last save.

  A checkpoint is the folder `directory/<step>`. It is written in a local folder, which is
  `directory/unfinished` or `paths.staging`, hashed, and committed at the end, by a rename or by
  putting its manifest last: whatever kills the process, it is complete or absent.

  In a multi-process job every process makes one and calls the same methods in the same order; the
  directory must be on a store, or on a file system that all of them share.

  Attributes:
    last_save_stall_secs: seconds that the last `save` kept its caller.
    rest: what checkpoints leave out of the state that `save` gets and `read` gives.
  """

  def __init__(
    self,
    directory: Path,
    cfg: CheckpointConfig,
    run: RunIdentity | None = None,
    stacks: Stacks | None = None,
    mesh: str = "",
  ):
    """Open a folder of checkpoints, removing what a killed process left unfinished.

    Args:
      directory: `workdir/checkpoints`.
      cfg: which checkpoints to keep, and how to write them.
      run: whose they are; checkpoints of others are refused. None = nobody's, not compared.
      stacks: layers of each stack (`layout.named_arrays`); on the disk each layer is on its own.
      mesh: description of the mesh, for snapshots in `cfg.local_dir`; those also need a `run`.

    Raises:
      CheckpointError: if the directory cannot be made or cleaned.
    """
    self.directory = paths.absolute(directory)
    self.last_save_stall_secs = 0.0
    self.rest = Rest()
    self._cfg, self._run, self._stacks = cfg, run, stacks
    self._unfinished = paths.staging(self.directory)
    self._parted = paths.is_remote(directory) and jax.process_count() > 1
    processes = ocp.options.MultiprocessingOptions()
    if self._parted:  # nor may processes of one machine share it
      self._unfinished, processes = self._unfinished / str(jax.process_index()), parted.alone()
    self._local = LocalSnapshots(cfg, run, mesh) if run and cfg.local_dir else None
    self._attempts = 0
    self._uncommitted: list[Path] = []  # folders of saves that failed since the last one
    self._held: paths.HeldFolder | None = None  # of process 0, which makes and renames folders
    self._pending: tuple[int, concurrent.futures.Future] | None = None
    self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    self._orbax = ocp.AsyncCheckpointer(
      reader.handler(processes=processes),
      multiprocessing_options=processes,
      async_options=ocp.options.AsyncOptions(
        timeout_secs=WRITE_TIMEOUT_SECS,
        # In the foreground: after a failure in the background, Orbax's threads wait for the folder.
        create_directories_asynchronously=False,
      ),
    )
    if self._parted:
      shutil.rmtree(self._unfinished, ignore_errors=True)
    if jax.process_index() == 0:
      try:
        paths.make_folder(self.directory)
        self._remove_unfinished()
        if not paths.is_remote(self.directory):
          paths.try_to_write(self.directory)
          if self._unfinished.exists():  # of a user who may not remove what another one left
            paths.try_to_write(self._unfinished)
        self._held = paths.HeldFolder(self.directory)
      except paths.errors() as e:
        raise CheckpointError(
          f"checkpoints cannot be written to {self.directory}: {paths.reason(e)}. "
          f"{paths.advice(e) or 'Choose another workdir.'}"
        ) from e

  def save(
    self,
    step: int,
    state: PyTree,
    extra: dict[str, Any],
    metric: float | None = None,
    *,
    wait: bool = False,
  ) -> None:
    """Save `state` as checkpoint `step`; returns when the arrays may be donated.

    Waits for the save before it, if that one is not finished. A step that is saved already is left
    as it is, with a line in the log.

    Args:
      step: names the checkpoint.
      state: pytree of arrays; may hold NNX modules, optax states and typed PRNG keys.
      extra: JSON values saved beside it, as they are now (tuples come back as lists).
      metric: lower is better; decides which checkpoint `keep_best` keeps.
      wait: return when the checkpoint is committed (always so with `asynchronous=false`).

    Raises:
      CheckpointError: if this save, or the one before it in the background, failed.
      FaultError: if it did because another process is gone.
      ValueError: if `state` holds something that is not an array, or `extra` is not JSON.
    """
    start = time.perf_counter()
    self.wait()
    self.check_folder()
    if (waited := time.perf_counter() - start) > LONG_WAIT_SECS:
      logging.warning(
        "training waited %.0f s until the checkpoint before %d was written: %s is slow. Raise "
        "checkpoint.every_steps, or use a faster workdir (`ats-jax check_env` measures it).",
        waited,
        step,
        self.directory,
      )
    if reader.process_0_decides(lambda: int(step in self.steps())):
      logging.info("checkpoint %d is in %s already; not saved again", step, self.directory)
      return
    parts = layout.named_arrays(self.rest.left_out(state), stacks=self._stacks)
    fields = {
      "step": step,
      "run": self._run and dataclasses.asdict(self._run),
      "metric": None if metric is None else float(metric),
      "leaves": layout.describe(parts),
    }
    try:
      extra_text = json.dumps(extra, indent=1)
    except TypeError as e:
      raise ValueError(f"`extra` of checkpoint {step} must be JSON values: {e}") from e
    # A failed save may still have writers; a new name keeps them out of the next attempt.
    self._attempts += 1
    folder = self._unfinished / f"{step}.{self._attempts}"
    try:
      if self._writes:
        # Of a run's own folders only this one: if the workdir is moved, none is made by its name.
        self._unfinished.mkdir(parents=paths.is_remote(self.directory), exist_ok=True)
        folder.mkdir()
        (folder / reader.EXTRA).write_text(extra_text, encoding="utf-8")
      arrays = stream.to_save(layout.stored(parts))
      self._orbax.save(folder / reader.STATE, args=reader.to_write(arrays))
    except (OSError, ValueError, RuntimeError) as e:
      shutil.rmtree(folder, ignore_errors=True)
      raise self._failure(step, e) from e
    self._pending = step, self._pool.submit(self._commit, step, folder, fields)
    if wait or not self._cfg.asynchronous:
      self.wait()
    self.last_save_stall_secs = time.perf_counter() - start

  def check_folder(self) -> None:
    """Look whether the folder is still where it was; nothing is written to another one.

    Raises:
      CheckpointError: if it was renamed, removed or replaced.
    """
    if self._held is not None and (moved := self._held.moved()):
      raise CheckpointError(moved)

  def save_locally(self, step: int, state: PyTree, extra: dict[str, Any]) -> None:
    """Keep a snapshot in `cfg.local_dir`; returns when the arrays may be donated."""
    assert self._local is not None, "no checkpoint.local_dir"
    start = time.perf_counter()
    self._local.save(step, self.rest.left_out(state), extra)
    self.last_save_stall_secs = time.perf_counter() - start

  def newest(self) -> tuple[int, dict[str, Any]] | None:
    """The newest intact checkpoint and its `extra`; damaged newer ones are set aside.

    A later snapshot in `cfg.local_dir`, of which every process has its part, goes before it.

    Raises:
      CheckpointError: if there are checkpoints and none is intact, or one is of another run.
    """
    self.wait()
    step = reader.process_0_decides(self._choose_latest)
    if self._local is not None and (snapshot := self._local.newest(step or 0)) is not None:
      return snapshot
    return None if step is None else (step, reader.load_extra(self.directory, step))

  def go_back_to(self, step: int) -> None:
    """Make `step` the newest checkpoint; later ones are set aside, with a line in the log for each.

    It is done once: a job that is started again by the same command goes on from its newest one.

    Raises:
      CheckpointError: if it is not there, damaged or of another run; nothing is changed.
      ValueError: if snapshots in `cfg.local_dir` may be later.
    """
    if self._local is not None:
      raise ValueError(
        "--resume_step: snapshots in checkpoint.local_dir may be later than the checkpoint. Start "
        "with --config.checkpoint.local_every=0 --config.checkpoint.local_dir= this time."
      )
    reader.process_0_decides(lambda: self._go_back_to(step))

  def _go_back_to(self, step: int) -> int:
    note = self.directory / reader.WENT_BACK
    if note.exists() and paths.read(note).decode(errors="replace").strip() == str(step):
      logging.info(
        "--resume_step=%d was done at an earlier start: going on from the newest checkpoint. "
        "Delete %s to go back again.", step, note,
      )  # fmt: skip
      return step
    reader.choose_checkpoint(self.directory, step, self._run)
    for later in reversed([s for s in self.steps() if s > step]):
      aside = self._set_aside(later, f".after_{step}")
      logging.info("going back to checkpoint %d: the later one %d is now %s", step, later, aside)
    paths.write(note, f"{step}\n")
    return step

  def read(self, step: int, abstract_state: PyTree) -> PyTree:
    """Restore the state of a step that `newest` found intact.

    Raises:
      CheckpointError: if it does not fit `abstract_state`.
      ValueError: if `rest` is not where it was.
    """
    abstract = self.rest.left_out(abstract_state)
    if self._local is not None and self._local.has(step):
      return self.rest.put_back(self._local.read(abstract))
    part = reader.read(self.directory, step, abstract, stacks=self._stacks)[1]
    return self.rest.put_back(part)

  def restore_latest(self, abstract_state: PyTree) -> tuple[int, PyTree, dict[str, Any]] | None:
    """Restore the newest intact checkpoint, setting damaged newer ones aside.

    Args:
      abstract_state: shapes, dtypes and shardings to restore, as of `reader.restore_tree`.

    Returns:
      The step, the state and `extra`; None if nothing was ever committed.

    Raises:
      CheckpointError: if there are checkpoints and none is intact, one is of another run, or the
        state does not fit.
    """
    newest = self.newest()
    if newest is None:
      return None
    step, extra = newest
    return step, self.read(step, abstract_state), extra

  def steps(self) -> list[int]:
    """Return the committed steps, oldest first."""
    return reader.committed_steps(self.directory)

  def _own_steps(self) -> list[int]:
    """Return the committed steps after a check that all are of this run."""
    for step in (steps := self.steps()):
      integrity.check_run(self.directory / str(step), self._run)
    return steps

  def wait(self) -> None:
    """Wait for the save in the background, if any.

    Raises:
      CheckpointError, FaultError: if it failed.
    """
    if self._pending is None:
      return
    step, future = self._pending
    self._pending = None
    if (error := future.exception()) is not None:
      raise self._failure(step, error) from error

  def finish(self) -> None:
    """Wait for the last save, and delete snapshots that it replaces; all processes call together.

    Raises:
      CheckpointError: if it failed.
    """
    self.wait()
    if self._local is not None:
      # The others know from process 0 that it is committed.
      newest = reader.process_0_decides(lambda: max(self.steps(), default=None))
      self._local.drop(newest or 0)

  def close(self) -> None:
    """Wait for the save in the background and free the threads; raises as `wait` does."""
    try:
      self.wait()
    finally:
      if self._local is not None:
        self._local.close()
      if self._held is not None:
        self._held.close()
      self._pool.shutdown()
      self._orbax.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def _commit(self, step: int, folder: Path, fields: dict[str, Any]) -> None:
    """Wait for Orbax, then make `folder` the checkpoint `step`. Runs in the background."""
    self._uncommitted += [folder] if self._writes else []
    try:
      self._orbax.wait_until_finished()  # ends with a barrier: all processes have written
      target = self.directory / str(step)
      self.check_folder()
      if self._parted:
        parted.commit(folder, target, fields, self._attempts, WRITE_TIMEOUT_SECS)
      elif jax.process_index() == 0:
        integrity.seal(folder, fields)
        paths.commit_folder(folder, target, MANIFEST)
      if jax.process_index() == 0:
        self._delete_old()
      # Writers of a save that failed may have put something back since its folder was removed.
      while self._uncommitted:
        shutil.rmtree(self._uncommitted.pop(), ignore_errors=True)
    finally:
      if self._writes:
        shutil.rmtree(folder, ignore_errors=True)
        self._remove_made_again()

  def _remove_made_again(self) -> None:
    """Remove the empty folders that writers of arrays make by the old name of a moved workdir."""
    if self._held is not None and self._held.moved():
      with contextlib.suppress(OSError):
        for folder in (self._unfinished, self.directory, self.directory.parent):
          os.rmdir(folder)

  @property
  def _writes(self) -> bool:
    """Whether this process makes and removes the folder that is written to."""
    return self._parted or jax.process_index() == 0

  def _delete_old(self) -> None:
    """Delete what need not be kept; the new checkpoint is good whether or not that works."""
    keep = set(self.steps()[-self._cfg.keep :])
    keep |= {step for step in self.steps() if (self.directory / str(step) / KEPT_FOR).exists()}
    if self._cfg.keep_best and (best := reader.best_step(self.directory)) is not None:
      keep.add(best)
    for step in sorted(set(self.steps()) - keep):
      try:
        # Out of the way first: a process killed in the middle leaves no half of a checkpoint.
        aside = self._unfinished / f"{step}.deleted"
        paths.delete_folder(self.directory / str(step), MANIFEST, aside)
      except paths.errors() as e:
        logging.warning(
          "the old checkpoint %d in %s was not deleted: %s. It may be deleted by hand.",
          step,
          self.directory,
          e,
        )

  def _choose_latest(self) -> int | None:
    """Return the newest intact step after renaming damaged ones; None if nothing was committed."""
    if not self._own_steps() and not reader.damaged_folders(self.directory):
      return None
    step, damaged = reader.choose_checkpoint(self.directory, "latest")
    for bad, what in damaged.items():
      aside = self._set_aside(bad, reader.SET_ASIDE)
      logging.warning(
        "checkpoint %d is damaged: %s. Using %d instead; the damaged one is now %s.",
        bad,
        what,
        step,
        aside,
      )
    return step

  def _set_aside(self, step: int, suffix: str) -> Path:
    """Rename the folder of a checkpoint, so that it is none; return its new path."""
    aside = self.directory / f"{step}{suffix}"
    count = 1
    while aside.exists():
      count += 1
      aside = self.directory / f"{step}{suffix}.{count}"
    paths.move_folder(self.directory / str(step), aside, MANIFEST)
    return aside

  def _remove_unfinished(self) -> None:
    leftovers = [*self._unfinished.glob("*"), *reader.unfinished_folders(self.directory)]
    if leftovers:
      names = sorted(p.name for p in leftovers)
      logging.warning("removing unfinished checkpoints of a stopped process: %s", names)
      for folder in (self._unfinished, *leftovers):
        paths.delete_rest(folder)

  def _failure(self, step: int, error: BaseException) -> CheckpointError | FaultError:
    if jax.process_count() > 1 and isinstance(error, (jax.errors.JaxRuntimeError, TimeoutError)):
      return FaultError(
        f"checkpoint {step} was not saved to {self.directory}, as not all processes of the job "
        f"wrote their part: {str(error).splitlines()[0]}"
      )
    if self._held is not None and (moved := self._held.moved()):
      return CheckpointError(f"checkpoint {step} was not saved: {moved}")
    reason = re.split(r" \[(?:tensorstore_spec|os_error_code)", str(error))[0]
    advice = paths.advice(error) or _ADVICE
    return CheckpointError(
      f"checkpoint {step} was not saved to {self.directory}: {type(error).__name__}: {reason}. "
      f"Older checkpoints are intact: {self.steps() or 'there are none'}. {advice} "
      "Then start the run again: it resumes from the newest."
    )
