"""Snapshots on each machine's own disk or memory, between checkpoints; peers replace a lost one.

Each process keeps the shards of its own devices, with hashes. Where the mesh holds a shard twice
(data parallel replicas), two processes keep it. When a job starts again, a process whose snapshot
is gone gets that of a peer through the collectives of the job: no server listens, and the bytes go
where gradients go. If a shard is nowhere, the newest checkpoint is used. Orbax's own manager of
such snapshots serves them on all network addresses without authentication, and verifies no hash.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from ats_jax.checkpoint import integrity, layout, stream
from ats_jax.checkpoint.integrity import MANIFEST, CheckpointError
from ats_jax.checkpoint.layout import PyTree, StoredArray
from ats_jax.config.identity import RunIdentity
from ats_jax.config.schema import CheckpointConfig
from ats_jax.store import paths, shared_folder
from ats_jax.store.paths import Path

# Files of a snapshot.
DATA = "data.bin"  # the bytes of all pieces of arrays
INDEX = "index.json"  # where each piece is in them
EXTRA = "extra.json"
KEEP = 2  # of a process: the newest may be missing at a peer that was killed before it was whole
_CHUNK = 2**26


class Offer(NamedTuple):
  """An intact snapshot that a process sees on its machine.

  Attributes:
    step: updates done.
    owner: the process that wrote it.
    holds: a hash of what each process held then; equal ones held the same shards.
  """

  step: int
  owner: int
  holds: list[str]


class SnapshotSource(NamedTuple):
  """Where a process gets its part of a snapshot from.

  Attributes:
    process: the process on whose machine the files are.
    owner: the process that wrote them, whose folder they are in.
  """

  process: int
  owner: int


class LocalSnapshots:
  """Saves and restores this process's part of the state; all processes call `newest` together."""

  def __init__(self, cfg: CheckpointConfig, run: RunIdentity, mesh: str):
    """Open the folder of a run.

    Args:
      cfg: `local_dir` is where; variables of the environment are filled in.
      run: whose snapshots they are.
      mesh: description of the mesh: snapshots of another one are not used.

    Raises:
      ValueError: if `local_dir` names a variable that is not set.
    """
    self._root = folder_of(cfg.local_dir) / run.run
    self._own = self._root / f"process_{jax.process_index()}"
    self._run = dataclasses.asdict(run)
    self._mesh = f"{mesh}, {jax.process_count()} processes of {jax.device_count()} devices"
    self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="snapshot")
    self._pending: concurrent.futures.Future[None] | None = None
    self._holds: tuple[dict[str, str], list[str]] = {}, []
    self._chosen: tuple[int, Path] | None = None

  def save(self, step: int, state: PyTree, extra: Mapping[str, Any]) -> None:
    """Keep this process's part of `state`; returns when the arrays may be donated.

    A snapshot that cannot be written is a warning: checkpoints are there.
    """
    self.wait()
    parts = layout.named_arrays(state)
    leaves = layout.describe(parts)
    if leaves != self._holds[0]:
      self._holds = leaves, _holds(parts)
    index, arrays = _own_pieces(parts)
    fields = {"step": step, "run": self._run, "metric": None, "leaves": leaves}
    fields |= {"mesh": self._mesh, "holds": self._holds[1]}
    text = json.dumps(extra)
    self._pending = self._pool.submit(self._write, step, index, arrays, text, fields)

  def newest(self, after: int) -> tuple[int, dict[str, Any]] | None:
    """The newest snapshot of which all processes have, or get, their parts; and its `extra`.

    Args:
      after: only later ones than this step.
    """
    offers = [
      [Offer(*offer) for offer in json.loads(text)]
      for text in shared_folder.gather(json.dumps(self._offers(after)))
    ]
    chosen = choose_snapshot(offers)
    if chosen is None:
      if any(offers):
        logging.warning("no snapshot in %s is whole: using a checkpoint", self._root)
      return None
    step, sources = chosen
    if not self._fetch(step, sources):
      return None
    own = sources[jax.process_index()]
    owner = own.owner if own.process == jax.process_index() else jax.process_index()
    folder = self._root / f"process_{owner}" / str(step)
    self._chosen = step, folder
    extra = shared_folder.gather((folder / EXTRA).read_text())[0]
    logging.info("going on from snapshot %d of %s, later than any checkpoint", step, self._root)
    return step, json.loads(extra)

  def has(self, step: int) -> bool:
    """Whether `newest` has chosen this step."""
    return self._chosen is not None and self._chosen[0] == step

  def read(self, abstract: PyTree) -> PyTree:
    """The state that `newest` chose; once.

    Raises:
      CheckpointError: if it does not fit `abstract`.
    """
    assert self._chosen is not None
    (_, folder), self._chosen = self._chosen, None
    parts = layout.named_arrays(abstract)
    saved = integrity.read_manifest(folder)["leaves"]
    if lines := layout.differences(saved, layout.describe(parts)):
      raise CheckpointError(
        f"snapshot {folder} does not fit: {lines[0]}. Delete {self._root} on each machine to go on "
        "from a checkpoint."
      )
    index = json.loads((folder / INDEX).read_text())
    data = np.memmap(folder / DATA, np.uint8, "r") if (folder / DATA).stat().length else None
    leaves, structure = jax.tree.flatten(abstract)
    for name, part in parts.items():
      leaves[part.number] = _array(layout.restore_target(name, part.leaf), index[name], data)
    return structure.unflatten(leaves)

  def wait(self) -> None:
    """Wait until the last one is written."""
    if self._pending is not None:
      self._pending.result()
      self._pending = None

  def close(self) -> None:
    """Wait, and free the thread."""
    self.wait()
    self._pool.shutdown()

  def drop(self, newest_checkpoint: int) -> None:
    """Delete those that a checkpoint replaces."""
    self.wait()
    for step in self._steps(self._own):
      if step <= newest_checkpoint:
        shutil.rmtree(self._own / str(step), ignore_errors=True)
    for folder in (self._own, self._root):
      with contextlib.suppress(OSError):  # it holds others, or a neighbour was first
        os.rmdir(folder)

  def _write(
    self,
    step: int,
    index: dict[str, Any],
    arrays: Sequence[np.ndarray],
    extra: str,
    fields: dict[str, Any],
  ) -> None:
    unfinished, target = self._own / f"unfinished.{step}", self._own / str(step)
    try:
      shutil.rmtree(unfinished, ignore_errors=True)
      paths.make_folder(unfinished)
      with open(unfinished / DATA, "wb") as file:
        for array in arrays:
          file.write(_as_bytes(array))
      (unfinished / INDEX).write_text(json.dumps(index))
      (unfinished / EXTRA).write_text(extra)
      integrity.seal(unfinished, fields)
      shutil.rmtree(target, ignore_errors=True)
      paths.commit_folder(unfinished, target, MANIFEST)
      # Later ones are of steps that are made again; earlier ones are replaced.
      earlier = [s for s in self._steps(self._own) if s <= step]
      for other in set(self._steps(self._own)) - set(earlier[-KEEP:]):
        shutil.rmtree(self._own / str(other))
    except OSError as e:
      shutil.rmtree(unfinished, ignore_errors=True)
      logging.warning(
        "snapshot %d was not kept in %s: %s. The run goes on; its checkpoints are written.",
        step,
        self._own,
        paths.reason(e),
      )

  @staticmethod
  def _steps(folder: Path) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())

  def _offers(self, after: int) -> list[Offer]:
    """Those that this process answers for: its own, and those of processes that are elsewhere."""
    me, nodes = jax.process_index(), shared_folder.gather(platform.node())
    here = {rank for rank, node in enumerate(nodes) if node == nodes[me]}
    offers = []
    for folder in sorted(self._root.glob("process_*")):
      owner = int(folder.name.removeprefix("process_"))
      if owner == me or (owner not in here and me == min(here)):
        for step in self._steps(folder):
          if step > after and (holds := self._intact(folder / str(step))):
            offers.append(Offer(step, owner, holds))
    return offers

  def _intact(self, folder: Path) -> list[str]:
    """What each process held, of an intact snapshot of this run and mesh; else []."""
    if problems := integrity.find_damage(folder):
      logging.warning("snapshot %s is damaged: %s", folder, problems[0])
      return []
    manifest = integrity.read_manifest(folder)
    if manifest["run"] != self._run or manifest["mesh"] != self._mesh:
      logging.warning("snapshot %s is of another mesh or of other settings; not used", folder)
      return []
    return manifest["holds"]

  def _fetch(self, step: int, sources: Sequence[SnapshotSource]) -> bool:
    """Give each process that has not its part what a peer has; whether all have theirs now."""
    me, problem = jax.process_index(), ""
    staged = self._own / "fetched" / str(step)
    for source in sorted({s for rank, s in enumerate(sources) if s.process != rank}):
      takes = sources[me] == source and me != source.process
      start = time.perf_counter()
      size, why = _broadcast(
        self._root / f"process_{source.owner}" / str(step) if me == source.process else None,
        source.process,
        staged if takes else None,
      )
      if takes:
        shutil.rmtree(self._own / str(step), ignore_errors=True)
        problem = why or "; ".join(integrity.find_damage(staged))
        if not problem:
          os.rename(staged, self._own / str(step))
        logging.warning(
          "snapshot %d of this process is gone: got %.1f MiB of it from process %d in %.1f s",
          step, size / 2**20, source.process, time.perf_counter() - start,
        )  # fmt: skip
    shutil.rmtree(staged.parent, ignore_errors=True)
    problems = [text for text in shared_folder.gather(problem) if text]
    if problems:
      logging.warning("a peer's snapshot did not arrive whole: %s. Using a checkpoint", problems[0])
    return not problems


def folder_of(text: str) -> Path:
  """The folder that `checkpoint.local_dir` means.

  Raises:
    ValueError: if it names a variable that is not set.
  """
  expanded = os.path.expanduser(os.path.expandvars(text))
  if "$" in expanded:
    raise ValueError(f"checkpoint.local_dir={text}: a variable in it is not set.")
  return paths.absolute(Path(expanded))


def choose_snapshot(offers: Sequence[Sequence[Offer]]) -> tuple[int, list[SnapshotSource]] | None:
  """The newest step that is whole, and where each process finds its part; None if there is none.

  Args:
    offers: the snapshots that each process sees, by number of the process.
  """
  for step in sorted({offer.step for of_one in offers for offer in of_one}, reverse=True):
    at_step = [
      (SnapshotSource(process, offer.owner), offer.holds)
      for process, of_one in enumerate(offers)
      for offer in of_one
      if offer.step == step
    ]
    holds = at_step[0][1]
    if any(other != holds for _, other in at_step) or len(holds) != len(offers):
      continue
    sources = []
    for rank in range(len(offers)):
      fit = [source for source, _ in at_step if holds[source.owner] == holds[rank]]
      sources += sorted(fit, key=lambda s: (s.process != rank, s))[:1]
    if len(sources) == len(offers):
      return step, sources
  return None


def _broadcast(folder: Path | None, source: int, target: Path | None) -> tuple[int, str]:
  """Send the files of a folder from one process to all; those with a `target` write them there.

  Returns:
    How many bytes that were, and why they could not be written, if so: all stay to the end.
  """
  names = paths.files(folder) if folder is not None else []
  sizes = {name: os.stat(folder / name).st_size for name in names} if folder is not None else {}
  sizes = json.loads(shared_folder.gather(json.dumps(sizes))[source])
  problem = ""
  for name, size in sizes.items():
    content = np.memmap(folder / name, np.uint8, "r") if folder is not None and size else None
    for start in range(0, size, _CHUNK):
      end = min(size, start + _CHUNK)
      chunk = shared_folder.from_one(
        source, None if content is None else content[start:end], end - start
      )
      if target is not None and not problem:
        try:
          paths.make_folder(target)
          with open(target / name, "ab" if start else "wb") as file:
            file.write(chunk)
        except OSError as e:
          problem = paths.reason(e)
  return sum(sizes.values()), problem


def _raw(leaf: Any) -> jax.Array:
  """The array that a leaf is made of: a random key has no bytes that one could write."""
  assert isinstance(leaf, jax.Array), type(leaf)
  return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _place(index: tuple[slice, ...], shape: Sequence[int]) -> str:
  """A part of an array as text: "0:4,8:16"."""
  bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
  return ",".join(f"{start}:{end}" for start, end in bounds)


def _holds(parts: Mapping[str, StoredArray]) -> list[str]:
  """A hash of the names and places of what each process holds."""
  digests = [hashlib.sha256() for _ in range(jax.process_count())]
  for name, part in parts.items():
    raw = _raw(part.leaf)
    places: dict[int, set[str]] = {}
    for device, index in raw.sharding.devices_indices_map(raw.shape).items():
      places.setdefault(device.process_index, set()).add(_place(index, raw.shape))
    for process, held in places.items():
      digests[process].update(f"{name} {sorted(held)}\n".encode())
  return [digest.hexdigest() for digest in digests]


def _own_pieces(parts: Mapping[str, StoredArray]) -> tuple[dict[str, Any], list[np.ndarray]]:
  """What this process holds, each piece once: where it goes in a file, and copies of it."""
  index, pieces, offset = {}, dict[str, StoredArray](), 0
  for name, part in parts.items():
    raw = _raw(part.leaf)
    places = {}
    for shard in raw.addressable_shards:
      place = _place(shard.index, raw.shape)
      if place not in places:
        places[place] = offset
        pieces[f"{name} {place}"] = StoredArray(shard.data, len(pieces))
        offset += shard.data.nbytes
    impl = str(jax.random.key_impl(part.leaf)) if _is_key(part.leaf) else None
    index[name] = {
      "dtype": str(raw.dtype), "shape": raw.shape, "impl": impl, "places": places
    }  # fmt: skip
  if jax.local_devices()[0].platform == "cpu":  # a view keeps JAX from writing to the buffer
    return index, [np.asarray(piece.leaf) for piece in pieces.values()]
  full = {key: piece for key, piece in pieces.items() if piece.leaf.size}
  copies = stream.fetch(full)
  empty = np.empty(0, np.uint8)
  return index, [copies.get(key, empty) for key in pieces]


def _as_bytes(array: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _array(
  target: jax.ShapeDtypeStruct, entry: Mapping[str, Any], data: np.ndarray | None
) -> jax.Array:
  """An array of the pieces in a file."""
  shape, dtype, sharding = tuple(entry["shape"]), jnp.dtype(entry["dtype"]), target.sharding
  assert sharding is not None
  arrays = []
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    place = _place(index or (), shape)
    if place not in entry["places"]:
      raise CheckpointError(f"a snapshot has no part {place} of an array {list(shape)}")
    extent = [part.indices(size) for part, size in zip(index or (), shape, strict=True)]
    size = [end - start for start, end, _ in extent]
    start, length = entry["places"][place], int(np.prod(size)) * dtype.itemsize
    piece = np.empty(0, np.uint8) if data is None else np.array(data[start : start + length])
    arrays.append(jax.device_put(piece.view(dtype).reshape(size), device))
  array = jax.make_array_from_single_device_arrays(shape, sharding, arrays)
  return jax.random.wrap_key_data(array, impl=entry["impl"]) if entry["impl"] else array
