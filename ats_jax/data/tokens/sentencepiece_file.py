"""SentencePiece models, encoded by the library itself.

Text never becomes a control piece there. Pieces that a user defined do match text, so those that
look like special tokens are made control pieces when a model is read.
"""

import base64
import hashlib
import itertools
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ats_jax.data.text.formats.extra import import_extra
from ats_jax.data.tokens.base import OfDocuments, Parts, known_ids, part_of

_LOOKS_SPECIAL = re.compile(r"<\|[^<>]*\|>|<(start|end)_of_\w+>|\[/?[A-Z_]+\]")
KIND = "sentencepiece"  # of module, extra and a workdir's file


class SentencePieceTokenizer(OfDocuments):
  """A SentencePiece model; ids from the number of its pieces on are those of added tokens."""

  def __init__(
    self,
    model: bytes,
    *,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    vocab_size: int,
    added: Mapping[str, int],
  ):
    self.model, self.added = model, dict(added)
    self._inner = processor(model)
    self.bos_id, self.eos_id, self.pad_id, self.vocab_size = bos_id, eos_id, pad_id, vocab_size
    self._ids = {"bos_id": bos_id, "eos_id": eos_id, "pad_id": pad_id, "vocab_size": vocab_size}
    numbers = json.dumps([self._ids, self.added], sort_keys=True)
    self.fingerprint = hashlib.sha256(f"{numbers}\n".encode() + model).hexdigest()[:32]

  def token_id(self, name: str) -> int | None:
    """Return the id of the token of this name; None = there is none."""
    if name in self.added:
      return self.added[name]
    token = self._inner.piece_to_id(name)  # of an unknown one: that of <unk>
    return token if self._inner.id_to_piece(token) == name else None

  def special_tokens(self) -> dict[str, int]:
    """Return the ids of control pieces and of added tokens, by name."""
    pieces = ((self._inner.id_to_piece(i), i) for i in range(self._inner.vocab_size()))
    return {**{name: i for name, i in pieces if self._inner.is_control(i)}, **self.added}

  def encode(self, text: str) -> list[int]:
    """Return the ids of `text`, which the model's normaliser may change before."""
    text.encode()  # a lone surrogate is a ValueError here; the library writes U+FFFD for it
    return self._inner.encode(text)

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the ids of each text, as integer arrays."""
    threads = 1 if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else -1
    encoded = self._inner.encode(list(texts), num_threads=threads)
    return [np.array(ids, np.uint32) for ids in encoded]

  def encode_parts(self, documents: Sequence[Sequence[str | int]]) -> list[Parts]:
    """Return the ids of documents of several parts; a text begins anew behind a special token."""
    return [self._in_parts(document) for document in documents]

  def _in_parts(self, document: Sequence[str | int]) -> Parts:
    ids, part = [], []
    for is_text, numbers in itertools.groupby(
      range(len(document)), lambda number: isinstance(document[number], str)
    ):
      if not is_text:
        part += (special := list(numbers))
        ids += [document[number] for number in special]
        continue
      raw = {number: str(document[number]).encode() for number in numbers}  # places count bytes
      whole = self._places.FromString(
        self._inner.encode(b"".join(raw.values()).decode(), out_type="serialized_proto")
      )
      ids += [piece.id for piece in whole.pieces]
      starts = np.cumsum([0, *map(len, raw.values())])[:-1]
      lasts = [max(piece.begin, piece.end - 1) for piece in whole.pieces]
      part += (min(raw) + part_of(np.array(lasts, np.int64), starts)).tolist()
    return Parts(np.array(ids, np.uint32), np.array(part, np.int64))

  @property
  def _places(self) -> Any:
    return import_extra(
      f"{KIND}.{KIND}_pb2", "a tokenizer of SentencePiece", KIND
    ).SentencePieceText

  def decode(self, ids: Iterable[int]) -> str:
    """Return the text of `ids`, without special tokens."""
    num_pieces = self._inner.vocab_size()
    text_ids = (i for i in known_ids(ids, self) if i not in self.special_ids)
    return self._inner.decode([i for i in text_ids if i < num_pieces])

  def parsed(self) -> Any:
    """The model as a message of the library's, `ModelProto`."""
    return _parsed(self.model)

  def to_fields(self) -> dict[str, Any]:
    """All of it as JSON has it, for `from_fields`."""
    model = base64.b64encode(self.model).decode()
    return {"kind": KIND, **self._ids, "added": self.added, "model": model}

  def __reduce__(self):
    return from_fields, (self.to_fields(),)


def from_fields(fields: Mapping[str, Any]) -> SentencePieceTokenizer:
  """The tokenizer that wrote `to_fields`.

  Raises:
    ValueError: if the library is not installed, or the model is none.
    KeyError: if a field is missing.
  """
  ids = {name: int(fields[name]) for name in ("bos_id", "eos_id", "pad_id", "vocab_size")}
  model = base64.b64decode(fields["model"])
  return SentencePieceTokenizer(model, added=fields["added"], **ids)


def library() -> ModuleType:
  """The module `sentencepiece`.

  Raises:
    ValueError: if it is not installed.
  """
  return import_extra(KIND, "a tokenizer of SentencePiece", KIND)


def _parsed(model: bytes) -> Any:
  messages = import_extra(f"{KIND}.sentencepiece_model_pb2", "a tokenizer of SentencePiece", KIND)
  return messages.ModelProto.FromString(model)


def processor(model: bytes) -> Any:
  """The library's object.

  Raises:
    ValueError: if it is not installed, or the bytes are no model.
  """
  try:
    return library().SentencePieceProcessor(model_proto=model)
  except (RuntimeError, TypeError) as e:
    raise ValueError(f"the library says: {e}") from e


def control(inner: Any) -> dict[str, str | None]:
  """Role -> the piece that a model says is for it."""
  ids = {"bos": inner.bos_id(), "eos": inner.eos_id(), "pad": inner.pad_id()}
  return {role: inner.id_to_piece(i) if i >= 0 else None for role, i in ids.items()}


def without_collisions(raw: bytes, special: Collection[str]) -> bytes:
  """A model in which text becomes no special token.

  Args:
    raw: the file.
    special: names of pieces that are special, beside those that look so.

  Raises:
    ValueError: if it is no model, or has no pieces for bytes, so that some text is lost.
  """
  inner = processor(raw)
  if not any(inner.is_byte(i) for i in range(inner.vocab_size())):
    raise ValueError(
      "it has no pieces for bytes, so characters that it does not know would be lost. Train it "
      "with --byte_fallback=true"
    )
  parsed = _parsed(raw)
  kinds = type(parsed).SentencePiece
  colliding = [
    piece
    for piece in parsed.pieces
    if piece.type == kinds.USER_DEFINED
    and (piece.piece in special or _LOOKS_SPECIAL.fullmatch(piece.piece))
  ]
  for piece in colliding:
    piece.type = kinds.CONTROL
  return parsed.SerializeToString(deterministic=True) if colliding else raw
