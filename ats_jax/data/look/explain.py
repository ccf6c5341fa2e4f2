"""A row of training as a table: each target with its token, role, weight and segment."""

from collections.abc import Iterator

import numpy as np

from ats_jax.data.chat.segments import role_of
from ats_jax.data.chat.tokenizer import ChatTokenizer
from ats_jax.data.rows.contract import TrainRows, with_documents
from ats_jax.data.rows.origin import in_part
from ats_jax.data.rows.packed import Packed
from ats_jax.data.tokens.tokenizer import Tokenizer

_COLUMNS = "{:>7} {:>7} {:>6} {:<9} {:>7}  {}".format
# Of terminals (ECMA-48): a colour a role, bold for what is in the loss.
_COLOURS = {"": "90", "system": "35", "user": "34", "assistant": "32", "tool": "33"}
_IN_LOSS = ";1"


def explain(dataset: TrainRows, row: int, *, coloured: bool, of: str = "training") -> Iterator[str]:
  """Lines that show row `row` of training; if it is several short ones, the first of them.

  Args:
    dataset: the training rows.
    row: which row; an epoch has `num_rows`.
    coloured: write escape sequences of a terminal.
    of: what the row is one of, in words.
  """
  if dataset.info.parts:
    name, rows = in_part(dataset, row)
    part = dataset.info.parts[name]
    yield (
      f"row {row} of {of} is of {name}: {len(rows)} of its rows of {part.info.seq_len}, from row "
      f"{rows[0]} on"
    )
    yield from explain(part, rows[0], coloured=coloured, of=name)
    return
  batch = _read(dataset, row)
  codes = _read(with_documents(dataset, _codes_for_tokens), row)["targets"]
  used = np.flatnonzero(batch["segment_ids"])
  counted = np.count_nonzero(batch["loss_mask"])
  yield (
    f"row {row} of {of}: {len(used)} targets in {batch['segment_ids'].max()} documents, "
    f"{counted} of them in the loss; {len(batch['segment_ids']) - len(used)} places of padding"
  )
  yield _COLUMNS("place", "segment", "weight", "role", "id", "token")
  for place in map(int, used):
    token, role = int(batch["targets"][place]), role_of(int(codes[place]))
    weight = float(batch["loss_mask"][place])
    segment = int(batch["segment_ids"][place])
    line = _COLUMNS(
      place, segment, f"{weight:g}", role, token, _shown(token, dataset.info.tokenizer)
    )
    style = _COLOURS[role] + (_IN_LOSS if weight else "")
    yield f"\x1b[{style}m{line}\x1b[0m" if coloured else line


def _read(dataset: TrainRows, row: int) -> dict[str, np.ndarray]:
  return {name: x[0] for name, x in dataset.read(np.array([row])).items()}


class _Codes:
  """Looks like a Corpus, each token of which is its code; 0 for text that is no conversation."""

  def __init__(self, packed: Packed):
    self.length, self.codes = packed.corpus.length, packed.corpus.codes
    self._has_codes = packed.weights is not None

  def tokens(self, document: int, begin: int, end: int) -> np.ndarray:
    if self._has_codes:
      return self.codes(document, begin, end)
    return np.zeros(min(end, int(self.length[document])) - begin, np.int64)


class _NoCode:
  bos_id = eos_id = pad_id = 0


def _codes_for_tokens(packed: Packed) -> Packed:
  """The same rows of the codes of their tokens (`chat.segments`)."""
  return packed.with_corpus(_Codes(packed), _NoCode())


def _shown(token: int, tokenizer: Tokenizer) -> str:
  """A special token by its name, any other as a Python string: what it adds to a text."""
  if token not in tokenizer.special_ids:
    before = tokenizer.encode("a")  # at the beginning of a text it may have no blank
    return repr(tokenizer.decode([*before, token])[len(tokenizer.decode(before)) :])
  names = {tokenizer.bos_id: "(bos)", tokenizer.pad_id: "(pad)", tokenizer.eos_id: "(eos)"}
  if isinstance(tokenizer, ChatTokenizer):
    names |= {i: name for name, i in tokenizer.special.items()}
  return names[token]
