"""A row of training as a table: each target with its token, role, weight and segment."""

from collections.abc import Iterator

import numpy as np

from ats_jax.data.chat.segments import role_of
from ats_jax.data.chat.tokenizer import ChatTokenizer
from ats_jax.data.rows.dataset import Dataset
from ats_jax.data.tokens.tokenizer import Tokenizer

_COLUMNS = "{:>7} {:>7} {:>6} {:<9} {:>7}  {}".format
# Of terminals (ECMA-48): a colour a role, bold for what is in the loss.
_COLOURS = {"": "90", "system": "35", "user": "34", "assistant": "32", "tool": "33"}
_IN_LOSS = ";1"


def explain(ds: Dataset, global_row: int, *, coloured: bool, of: str = "training") -> Iterator[str]:
  """Lines that show row `global_row` of training.

  Args:
    ds: the training split.
    global_row: which row; an epoch has `ds.num_rows`.
    coloured: write escape sequences of a terminal.
    of: what the row is one of, in words.
  """
  row = ds.row_index(global_row)
  batch = {name: x[0] for name, x in ds.rows(np.array([row])).items()}
  codes = np.zeros(ds.seq_len, int) if ds.weights is None else ds.codes(np.array([row]))[0]
  used = np.flatnonzero(batch["segment_ids"])
  counted = np.count_nonzero(batch["loss_mask"])
  yield (
    f"row {global_row} of {of}: {len(used)} targets in {batch['segment_ids'].max()} documents, "
    f"{counted} of them in the loss; {ds.seq_len - len(used)} places of padding"
  )
  yield _COLUMNS("place", "segment", "weight", "role", "id", "token")
  for place in map(int, used):
    token, role = int(batch["targets"][place]), role_of(int(codes[place]))
    weight = float(batch["loss_mask"][place])
    segment = int(batch["segment_ids"][place])
    line = _COLUMNS(place, segment, f"{weight:g}", role, token, _shown(token, ds.tokenizer))
    style = _COLOURS[role] + (_IN_LOSS if weight else "")
    yield f"\x1b[{style}m{line}\x1b[0m" if coloured else line


def _shown(token: int, tokenizer: Tokenizer) -> str:
  """A special token by its name, any other as a Python string."""
  if token not in tokenizer.special_ids:
    return repr(tokenizer.decode([token]))
  names = {tokenizer.bos_id: "(bos)", tokenizer.pad_id: "(pad)", tokenizer.eos_id: "(eos)"}
  if isinstance(tokenizer, ChatTokenizer):
    names |= {i: name for name, i in tokenizer.special.items()}
  return names[token]
