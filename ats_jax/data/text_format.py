"""What the documents of a text are: `format_of` alone chooses by `data.format`."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.text_format import Chat
from ats_jax.data.corpus.corpus import Corpus, open_corpus
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.text.formats.text import Piece
from ats_jax.data.text.holdout import Split, plan_split
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile, read_pieces
from ats_jax.data.tokens.base import Tokenizer


class TextFormat(Protocol):
  """How files are read as documents, and what of a document becomes rows."""

  @property
  def key(self) -> str | list[str]:
    """What is read of the files, in keys of the cache."""
    ...

  @property
  def weights(self) -> np.ndarray | None:
    """[codes] float32, the weight in the loss of a token by its code (`Corpus.codes`).

    None if tokens have no codes: then each counts 1.
    """
    ...

  @property
  def cuts(self) -> bool:
    """Whether a document that is longer than a row is cut; else it is left out."""
    ...

  @property
  def reads_ids(self) -> bool:
    """Whether files of token ids hold documents too."""
    ...

  def pieces(self, file: SourceFile, report: Report) -> Iterator[Piece]:
    """The text of a file's documents; what is malformed goes to `report`, which counts them."""
    ...

  def judged_pieces(self, file: SourceFile, report: Report) -> Iterator[Piece]:
    """The same as filters judge it."""
    ...

  def plan_split(
    self, fraction: float, files: list[SourceFile], fingerprint: str, tokenizer: Tokenizer | None
  ) -> Split:
    """What is held out of the documents of `files`; arguments as of `text.holdout.plan_split`."""
    ...

  def with_template(self, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of the documents, of that of the text in them.

    Raises:
      ValueError: if it does not go with the template of the documents.
    """
    ...

  def open_corpus(
    self,
    files: list[SourceFile],
    fingerprint: str,
    tokenizer: Tokenizer,
    split: Split,
    options: TokeniseOptions,
  ) -> Corpus:
    """The tokenised documents of `files`; arguments as of `corpus.corpus.open_corpus`."""
    ...

  def fitting(
    self, corpus: Corpus, documents: np.ndarray, seq_len: int
  ) -> tuple[np.ndarray, dict[str, int]]:
    """Those of `documents` that become rows of `seq_len`, and counts of the others by reason."""
    ...

  def count_roles(self, corpus: Corpus) -> dict[str, tuple[int, int]]:
    """Role -> (tokens, those of them that are said and not heading); {} = nobody speaks."""
    ...


class PlainFormat:
  """Documents of text or of token ids; see `TextFormat`."""

  weights = None
  cuts = True
  reads_ids = True

  def __init__(self, cfg: DataConfig):
    self._cfg = cfg

  @property
  def key(self) -> str:
    """The field that holds the text."""
    return self._cfg.format.text_field

  def pieces(self, file: SourceFile, report: Report) -> Iterator[Piece]:
    """Return the documents of a file in pieces of bounded length."""
    return read_pieces(file, self.key, report)

  judged_pieces = pieces

  def plan_split(
    self, fraction: float, files: list[SourceFile], fingerprint: str, tokenizer: Tokenizer | None
  ) -> Split:
    """Return what is held out: whole documents, or blocks inside of few."""
    return plan_split(self._cfg, fraction, files, fingerprint, tokenizer)

  def with_template(self, tokenizer: Tokenizer) -> Tokenizer:
    """Return `tokenizer` itself."""
    return tokenizer

  def open_corpus(
    self,
    files: list[SourceFile],
    fingerprint: str,
    tokenizer: Tokenizer,
    split: Split,
    options: TokeniseOptions,
  ) -> Corpus:
    """Return the documents, which the split may cut."""
    return open_corpus(self._cfg, files, fingerprint, tokenizer, split, options)

  def fitting(
    self, corpus: Corpus, documents: np.ndarray, seq_len: int
  ) -> tuple[np.ndarray, dict[str, int]]:
    """Return all of them: a long one is cut at the ends of rows."""
    del corpus, seq_len
    return documents, {}

  def count_roles(self, corpus: Corpus) -> dict[str, tuple[int, int]]:
    """Return no role."""
    del corpus
    return {}


def format_of(cfg: DataConfig) -> TextFormat:
  """The format of the text of `cfg`, which is of one source."""
  if isinstance(cfg.format, Chat):
    from ats_jax.data.chat.format import ChatFormat  # here: few runs are on conversations

    return ChatFormat(cfg, cfg.format)
  return PlainFormat(cfg)
