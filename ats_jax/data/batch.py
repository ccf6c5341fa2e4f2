"""What a batch is. Loader, step and planner all take it from here.

The arrays of a batch are named and have one shape: [batch, seq] in an evaluation, [accum, batch,
seq] for an update. An objective may ask for more fields of that shape (`step.objective`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

POSITION = "position"  # in a checkpoint, the key of the position in the training data
Batch = Mapping[str, Any]  # of numpy arrays on the host, of jax arrays on the mesh


class Field(NamedTuple):
  """One array of a batch.

  Attributes:
    dtype: of its elements.
    meaning: in words.
    each: how many elements a position has, one behind the other in the last dimension.
  """

  dtype: type[np.generic]
  meaning: str
  each: int = 1


FIELDS = {
  "tokens": Field(np.int32, "what the model reads; the pad id where there is no document"),
  "targets": Field(np.int32, "the token that follows each; the pad id likewise"),
  "segment_ids": Field(np.int32, "1.. for the documents of a row, 0 = padding"),
  "positions": Field(np.int32, "from 0 in each segment"),
  "loss_mask": Field(np.float32, "weight in the loss; 0 = not counted"),
}
SOURCE = "source"  # of a mixture, a further field
SOURCE_FIELD = Field(np.int32, "the number of the row's source, in the order of data.sources")


def random_batch(
  shape: tuple[int, ...], vocab_size: int, segments: int = 1
) -> dict[str, np.ndarray]:
  """A batch [..., seq] of random tokens, all of which count.

  Args:
    shape: of each array.
    vocab_size: ids are below it.
    segments: documents in a row, of equal length.
  """
  *lead, seq = shape
  ids = np.random.default_rng(0).integers(0, vocab_size, (*lead, seq + 1), dtype=np.int32)
  index = np.arange(seq, dtype=np.int32)
  segment = index * segments // seq
  starts = np.searchsorted(segment, np.arange(segments)).astype(np.int32)
  values = {
    "tokens": ids[..., :-1],
    "targets": ids[..., 1:],
    "segment_ids": segment + 1,
    "positions": index - starts[segment],
    "loss_mask": 1.0,
  }
  return {
    name: np.broadcast_to(values[name], shape).astype(field.dtype) for name, field in FIELDS.items()
  }
