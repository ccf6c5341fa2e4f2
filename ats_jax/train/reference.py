"""Log-probabilities of answers by the weights that a run begins with, stored in its workdir.

They are found once, before the first step. So the reference of a preference loss is no second model
in memory, and a run that goes on has the same.
"""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from ats_jax.data.batch import Batch
from ats_jax.data.rows.contract import Rows, with_documents
from ats_jax.model.decoder import Decoder
from ats_jax.sharding.apply import replicate
from ats_jax.sharding.mesh import to_global
from ats_jax.step.objective import target_logprobs
from ats_jax.step.preference import REFERENCE, sums_of_answers
from ats_jax.step.program import Program
from ats_jax.store import paths
from ats_jax.store.paths import Path
from ats_jax.train.feed import eval_feed

FOLDER = "reference"  # in a workdir


def with_reference[R: Rows](program: Program, folder: Path, model: Decoder | None, rows: R) -> R:
  """The rows of a run with the field `reference`.

  Args:
    program: the program of the run, on the current mesh.
    folder: its workdir.
    model: the weights that the run begins with; None = it has begun, and the files are there.
    rows: rows of pairs.

  Raises:
    ValueError: if the run has begun and does not know these pairs.
  """
  path = folder / FOLDER / f"{rows.info.fingerprint}.npy"
  if model is None:
    reference = _read(path)
  else:
    reference = _scores(program, model, rows)
    if jax.process_index() == 0:
      content = io.BytesIO()
      np.save(content, reference)
      paths.make_folder(path.parent)
      paths.write(path, content.getvalue())
  return with_documents(rows, lambda packed: packed.with_beside(**{REFERENCE: reference}))


def _read(path: Path) -> np.ndarray:
  """What a run has stored."""
  try:
    return np.load(io.BytesIO(paths.read(path)), allow_pickle=False)
  except (*paths.errors(), ValueError) as e:
    raise ValueError(
      f"{path} cannot be read ({e}). A run stores there what the weights that it began with say of "
      "the pairs that it trains on or holds out, and knows it of no others. Restore it, or take "
      "those pairs."
    ) from e


def _scores(program: Program, model: Decoder, rows: Rows) -> np.ndarray:
  """Log-probabilities of both answers of each document of the corpus, [documents, 2] float32."""
  cfg, packed = program.cfg, rows.info.packed
  assert packed is not None, "pairs are packed"
  most = cfg.data.max_segments // 2
  rules = program.rules(0)

  @jax.jit
  def sums(model: Decoder, batch: Batch) -> jax.Array:
    logprobs_BT, _ = target_logprobs(model, batch, cfg.step, rules)
    weighted_BT = jnp.where(batch["loss_mask"] > 0, logprobs_BT * batch["loss_mask"], 0.0)
    answers = sums_of_answers(weighted_BT, batch["segment_ids"], most)
    return replicate(jnp.stack(answers, axis=-1))

  whole = dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, num_batches=0))
  mesh, found = jax.sharding.get_mesh(), []
  with eval_feed(whole, rows) as batches:
    found = [np.asarray(sums(model, to_global(batch, mesh))) for batch in batches]
  out = np.zeros((len(packed.corpus), 2), np.float32)
  for row, of_row in enumerate(np.concatenate(found)[: packed.num_rows] if found else ()):
    documents = packed.documents_in(row)
    out[documents] = of_row[: len(documents)]
  logging.info("Reference: the log-probabilities of %s pairs.", f"{len(packed.documents):,}")
  return out
