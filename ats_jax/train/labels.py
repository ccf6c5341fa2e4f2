"""The labels of answers as a field of rows, beside what the reference says of them."""

import numpy as np

from ats_jax.data.chat.segments import GOOD
from ats_jax.data.rows.contract import Rows, with_documents
from ats_jax.data.rows.packed import Packed
from ats_jax.model.decoder import Decoder
from ats_jax.step.labelled import LABEL
from ats_jax.step.program import Program
from ats_jax.store.paths import Path
from ats_jax.train.reference import with_reference


def with_labels[R: Rows](program: Program, folder: Path, model: Decoder | None, rows: R) -> R:
  """The rows of a run with the fields `reference` and `label`; arguments of `with_reference`."""
  return with_documents(
    with_reference(program, folder, model, rows),
    lambda packed: packed.with_beside(**{LABEL: _labels(packed)}),
  )


def _labels(packed: Packed) -> np.ndarray:
  """1 or -1 for both answers of each document of the corpus, [documents, 2] float32."""
  lengths = packed.corpus.length.tolist()
  last = (packed.corpus.codes(i, n - 1, n) for i, n in enumerate(lengths))
  is_good = np.array([bool(code[0] & GOOD) for code in last])
  return np.where(is_good, 1.0, -1.0).astype(np.float32)[:, None].repeat(2, axis=1)
