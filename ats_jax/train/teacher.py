"""What a larger model expects at each position of a run's rows, stored in its workdir.

It is found once, before the first step, so that no second model is in memory during training.
"""

import dataclasses
import functools
import os
from typing import cast

import jax
import numpy as np
from absl import logging

from ats_jax.config.schema.loss import DistillConfig
from ats_jax.data.batch import Batch
from ats_jax.data.rows.contract import Rows
from ats_jax.data.rows.dataset import Dataset
from ats_jax.data.tokens.file import has_same_ids
from ats_jax.inference.load import load_run
from ats_jax.model.decoder import Decoder
from ats_jax.ops.likeliest import likeliest
from ats_jax.sharding.apply import replicate
from ats_jax.sharding.mesh import to_global
from ats_jax.step.distill import IDS, LOGPROBS
from ats_jax.step.objective import final_activations
from ats_jax.step.program import Program
from ats_jax.store import paths
from ats_jax.store.paths import Path
from ats_jax.train.feed import eval_feed

FOLDER = "teacher"  # in a workdir
_DTYPES = {IDS: np.int32, LOGPROBS: np.float32}


class TaughtRows(Dataset):
  """Rows with the fields of `step.distill`, which files hold by the rows of the plan."""

  def __init__(self, rows: Dataset, files: dict[str, str]):
    vars(self).update(vars(rows))
    self._files = files

  def read(self, rows: np.ndarray | range) -> dict[str, np.ndarray]:
    """Return rows as the base class does, with the further fields."""
    rows = np.asarray(rows)
    numbers = [self.row_index(int(row)) for row in rows.flat]
    further = {
      name: np.stack([_opened(file)[n] for n in numbers]).reshape(*rows.shape, -1)
      for name, file in self._files.items()
    }
    return super().read(rows) | further


@functools.cache
def _opened(file: str) -> np.ndarray:
  return np.load(file, mmap_mode="r")


def with_teacher[R: Rows](program: Program, folder: Path, model: Decoder | None, rows: R) -> R:
  """The training rows of a run with what its teacher says of them.

  Args:
    program: the program of the run, on the current mesh.
    folder: its workdir.
    model: the weights that the run begins with; None = it has begun, and the files are there.
    rows: its training rows.

  Raises:
    ValueError: if there is no teacher or it has another vocabulary, if the run has begun and the
      files are not there, for a workdir on a store, or a run of several processes.
  """
  planned = cast(Dataset, rows)  # `DistillConfig.check` asks for what gives these
  loss = program.cfg.step.loss
  assert isinstance(loss, DistillConfig)
  if paths.is_remote(folder) or jax.process_count() > 1:
    raise ValueError(
      "step.loss=distill keeps what the teacher says in the workdir, from which each process would "
      "read: it needs a workdir on a local disk, and one process."
    )
  stem = os.fspath(folder / FOLDER / rows.info.fingerprint)
  files = {name: f"{stem}.{name}.npy" for name in _DTYPES}
  if model is not None:
    _ask(program, loss, planned, files)
  elif missing := [file for file in files.values() if not os.path.exists(file)]:
    raise ValueError(
      f"{missing[0]} is not there. A run stores there what its teacher says of the rows that it "
      "trains on. Restore it, or use another --workdir."
    )
  return TaughtRows(planned, files)  # pyright: ignore[reportReturnType]


def _ask(program: Program, loss: DistillConfig, rows: Dataset, files: dict[str, str]) -> None:
  """Write what the teacher says of all rows of the plan."""
  for file in files.values():
    os.makedirs(os.path.dirname(file), exist_ok=True)
  info = rows.info
  with load_run(paths.parse(loss.teacher)) as teacher:
    if not has_same_ids(info.tokenizer, teacher.tokenizer):
      raise ValueError(
        f"step.loss.teacher={loss.teacher}: its tokenizer is not the one of this run, so its ids "
        "mean other tokens. Train with its own, or choose another teacher."
      )
    ours, theirs = program.cfg.model.vocab_size, teacher.program.cfg.model.vocab_size
    if ours != theirs or loss.top_k > ours:
      raise ValueError(
        f"step.loss.teacher={loss.teacher} has model.vocab_size={theirs}, this run {ours}, and "
        f"step.loss.top_k={loss.top_k}. The two sizes must be equal, and top_k at most as large."
      )
    cfg, rules = teacher.program.cfg, teacher.program.rules(teacher.step)
    chunk = cfg.step.loss_chunk_tokens

    @jax.jit
    def expected(model: Decoder, batch: Batch) -> tuple[jax.Array, jax.Array]:
      x_BTD, _ = final_activations(model, batch, rules, None)
      how = loss.top_k, loss.temperature, chunk, model.cfg.logit_soft_cap
      ids, logprobs = likeliest(x_BTD, model.head_weights(), *how)
      return replicate(ids), replicate(logprobs)

    shape = info.num_rows, info.seq_len * loss.top_k
    tables = {
      name: np.lib.format.open_memmap(f"{file}.new", "w+", _DTYPES[name], shape)
      for name, file in files.items()
    }
    whole = dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, num_batches=0))
    mesh, at = jax.sharding.get_mesh(), 0
    with eval_feed(whole, rows) as batches:
      for batch in batches:
        found = expected(teacher.model, to_global(batch, mesh))
        number = min(len(found[0]), info.num_rows - at)
        for table, part in zip(tables.values(), found, strict=True):
          table[at : at + number] = np.asarray(part)[:number]
        at += number
  for name, file in files.items():
    tables[name].flush()
    os.replace(f"{file}.new", file)
  logging.info("Teacher: %s rows of %s, read by %s.", f"{at:,}", info.seq_len, loss.teacher)
