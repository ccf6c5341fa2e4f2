"""Micro-batches that fit: where memory ran out, and on another number of devices.

An update is made of the same rows in each case: only the order of its sums changes.
"""

import dataclasses
import json
from collections.abc import Mapping

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from ats_jax.config import Config
from ats_jax.sharding.mesh import mesh_sizes
from ats_jax.sharding.rules import MESH_AXES
from ats_jax.store import paths
from ats_jax.store.paths import Path

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # how XLA's message begins
DEVICES = "devices"  # where a checkpoint keeps what `resize_to_devices` gives
RELIEF = "relief.json"  # of a job, in its workdir: a process can tell its successors only


def smaller_micro_batch(cfg: Config, folder: Path, error: RuntimeError) -> Config:
  """`cfg` with half the micro-batch, for a run whose devices are out of memory.

  The step's arguments were donated: what it was working on is gone. Only an orchestrator that acts
  goes on. In a job, one process cannot: the others wait for it. It leaves a note in the workdir,
  which `with_smaller_micro_batch` reads when the job is started again.

  Raises:
    RuntimeError: `error`, if it is another one, nothing can be done, or the process is of a job.
  """
  smaller = with_accum_steps(cfg, 2 * cfg.step.accum_steps)
  if OUT_OF_MEMORY not in str(error) or cfg.orchestrator.mode != "act" or not _fits(smaller):
    raise error
  number, line = smaller.step.accum_steps, str(error).splitlines()[0]
  if jax.process_count() > 1:
    paths.write(folder / RELIEF, json.dumps({"accum_steps": number}))
    logging.warning(
      "orchestrator: the device is out of memory. The job goes on with step.accum_steps=%d instead "
      "of %d when it is started again; the updates are the same. (%s)",
      number, cfg.step.accum_steps, line,
    )  # fmt: skip
    raise error
  logging.warning(
    "orchestrator: the device is out of memory. Going on from the newest good state with "
    "step.accum_steps=%d instead of %d; the updates are the same. (%s)",
    number, cfg.step.accum_steps, line,
  )  # fmt: skip
  return smaller


def _relief(path: paths.Path) -> int:
  """The number of micro-batches in the file of a process that ran out of memory."""
  try:
    return int(paths.parse_json(paths.read(path))["accum_steps"])
  except (OSError, ValueError, TypeError, KeyError) as e:
    raise ValueError(f"{path} cannot be read: {e!r}. Delete it: it only saves memory.") from e


def with_smaller_micro_batch(cfg: Config, folder: Path) -> Config:
  """Return `cfg` with the micro-batch that a process without memory asked for; all call it."""
  number = 0
  if jax.process_index() == 0 and (folder / RELIEF).exists():
    number = _relief(folder / RELIEF)
  if jax.process_count() > 1:
    number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
  if number <= cfg.step.accum_steps or not _fits(relieved := with_accum_steps(cfg, number)):
    return cfg
  logging.info(
    "step.accum_steps=%d instead of %d: memory ran out with less. Delete %s to try again.",
    number, cfg.step.accum_steps, folder / RELIEF,
  )  # fmt: skip
  return relieved


def resize_to_devices(
  cfg: Config, before: Mapping[str, int] | None, count: int | None = None
) -> tuple[Config, dict[str, int]]:
  """`cfg` for a run that goes on on another number of devices: the same batch in other parts.

  It takes the fewest parts of which a device holds no more rows than before. Where the user has
  changed their number since, that stands.

  Args:
    cfg: resolved.
    before: the second result, of the run that made the checkpoint; None at the beginning.
    count: devices now.

  Returns:
    Also what the next checkpoints must hold: devices, parts that the user wants, and the most rows
    that a device has held at a time.

  Raises:
    ValueError: if the batch cannot be shared by so many devices.
  """
  count, wanted = count or jax.device_count(), cfg.step.accum_steps
  most = 0
  if before is not None and before["accum_steps"] == wanted:
    most = before["rows"]
    if before["count"] != count:
      cfg = _in_other_parts(cfg, before, count)
  return cfg, {"count": count, "accum_steps": wanted, "rows": max(most, _rows(cfg, count))}


def _in_other_parts(cfg: Config, before: Mapping[str, int], count: int) -> Config:
  own, batch = cfg.step.accum_steps, cfg.data.batch_size
  parts = [n for n in range(1, batch + 1) if _fits(with_accum_steps(cfg, n), count)]
  if not parts:
    most = 2 * max(count, before["count"])
    good = [n for n in range(1, most + 1) if _fits(with_accum_steps(cfg, 1), n)]
    raise ValueError(
      f"this run was on {before['count']} devices and cannot go on on {count}: its mesh and its "
      f"{batch} rows of data.batch_size, which stay the same, do not divide over them. Use "
      f"{' or '.join(map(str, good))} devices, or another mesh.{{{','.join(MESH_AXES)}}}."
    )
  rows = {n: _rows(with_accum_steps(cfg, n), count) for n in parts}
  light = [n for n in parts if rows[n] <= before["rows"]] or parts[-1:]
  number = own if own in light else light[0]
  if number == own:
    return cfg
  logging.info(
    "%d devices instead of %d: step.accum_steps=%d in place of %d, %d rows on a device at a time "
    "instead of %d; the updates are the same",
    count, before["count"], number, own, rows[number], before["rows"],
  )  # fmt: skip
  return with_accum_steps(cfg, number)


def with_accum_steps(cfg: Config, number: int) -> Config:
  """`cfg` with a batch in so many parts."""
  return dataclasses.replace(cfg, step=dataclasses.replace(cfg.step, accum_steps=number))


def _fits(cfg: Config, count: int | None = None) -> bool:
  """Whether a batch divides into its parts, and these over the devices."""
  if cfg.data.batch_size % cfg.step.accum_steps:
    return False
  try:
    mesh_sizes(cfg, count or jax.device_count())
  except ValueError:
    return False
  return True


def _rows(cfg: Config, count: int) -> int:
  """Of a micro-batch, those that are on one device at a time."""
  sizes = mesh_sizes(cfg, count)
  shards = sizes["data"] * sizes["fsdp"] * sizes["expert"]
  return cfg.data.batch_size // cfg.step.accum_steps // shards
