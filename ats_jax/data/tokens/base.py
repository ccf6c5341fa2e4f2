"""What the rest of the system knows of a tokenizer."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

# What a document's own special tokens are called where a tokenizer has no name for them.
OWN_NAMES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}


class Parts(NamedTuple):
  """A document that was encoded as a whole: arrays [tokens] of ids, and of each the part it is of.

  A token that holds characters of two parts is of the later one.
  """

  ids: np.ndarray
  part: np.ndarray


class Tokenizer(Protocol):
  """What the rest of the system knows of a tokenizer.

  Attributes:
    vocab_size: ids are in [0, vocab_size), the special ones included.
    bos_id: the input before the first token of a document.
    eos_id: the target after the last token of a document.
    pad_id: fills the places without a document; never a target with loss.
    fingerprint: a hash of everything that decides the ids.
  """

  vocab_size: int
  bos_id: int
  eos_id: int
  pad_id: int
  fingerprint: str

  @property
  def special_ids(self) -> frozenset[int]:
    """Those that no text has."""
    ...

  @property
  def end_ids(self) -> frozenset[int]:
    """Of them, those that end what a model writes."""
    ...

  @property
  def of_text(self) -> "Tokenizer":
    """The tokenizer of the text inside a conversation; itself, if it knows no conversations."""
    ...

  def to_fields(self) -> dict[str, Any]:
    """What a workdir keeps of it, as JSON; `kind` says which tokenizer reads it."""
    ...

  def token_id(self, name: str) -> int | None:
    """The id of the token that is called so; None = there is none."""
    ...

  def special_tokens(self) -> dict[str, int]:
    """Id by name, of the tokens that its file calls special."""
    ...

  def encode(self, text: str) -> list[int]:
    """Ids of `text`, never a special one, whatever the text contains.

    Raises:
      ValueError: if the text holds a lone surrogate and so has no UTF-8 form.
    """
    ...

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """`encode` of each text as an integer array; uses all cores where the tokenizer can."""
    ...

  def encode_parts(self, documents: Sequence[Sequence[str | int]]) -> list[Parts]:
    """Ids of documents, whose parts are texts that are not empty, and ids of special tokens.

    Texts that stand side by side are encoded as one. By themselves they may have other ids: many
    tokenizers put a blank before a text, and a token may reach from one into the next.
    """
    ...

  def question(self, text: str) -> str | list[int]:
    """What a model reads before it goes on: `text`, or ids, in which a template asks it."""
    ...

  def template_files(self) -> dict[str, bytes]:
    """Content by name of the files of a template, as `transformers` reads them."""
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """The text of `ids`; special ids are skipped, broken UTF-8 becomes U+FFFD.

    Raises:
      ValueError: if an id is outside [0, vocab_size).
    """
    ...


class OfDocuments:
  """The special ids of a tokenizer that knows of documents, and of nothing inside them."""

  bos_id: int
  eos_id: int
  pad_id: int

  @property
  def special_ids(self) -> frozenset[int]:
    """The ids that no text has."""
    return frozenset((self.bos_id, self.eos_id, self.pad_id))

  @property
  def end_ids(self) -> frozenset[int]:
    """The special ids that end what a model writes."""
    return frozenset((self.eos_id,))

  @property
  def of_text(self) -> Self:
    """Itself."""
    return self

  def special_tokens(self) -> dict[str, int]:
    """Return no token, as this tokenizer has no names for them."""
    return {}

  def question(self, text: str) -> str:
    """Return the text, which the model continues."""
    return text

  def template_files(self) -> dict[str, bytes]:
    """Return no file, as there is no template."""
    return {}


def known_ids(ids: Iterable[int], tokenizer: Tokenizer) -> list[int]:
  """`ids` as integers, or ValueError for one that is not of the tokenizer."""
  known, size = list(map(int, ids)), tokenizer.vocab_size
  if known and not 0 <= min(known) <= max(known) < size:
    wrong = next(i for i in known if not 0 <= i < size)
    raise ValueError(f"Token id {wrong} is outside the vocabulary [0, {size}).")
  return known


def part_of(places: np.ndarray, starts: np.ndarray) -> np.ndarray:
  """The number of the part in which each place of a text lies; part n begins at `starts[n]`."""
  return np.searchsorted(starts, places, side="right") - 1
