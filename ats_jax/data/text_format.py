"""What the documents of a text are: `format_of` alone chooses by `data.format`."""

import importlib
from collections.abc import Iterator

import numpy as np

from ats_jax.config.schema import DataConfig
from ats_jax.data.corpus.corpus import Corpus, open_corpus
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.text.formats.text import Piece
from ats_jax.data.text.holdout import Split, plan_split
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile, read_pieces
from ats_jax.data.tokens.base import Tokenizer


class TextFormat:
  """How files are read as documents, and what of a document becomes rows: here plain text.

  Others derive from it, and `PART` of their settings names them. What reads plain text for a corpus
  and for its split does not ask `pieces`, so a class with other pieces has those methods too.

  Attributes:
    weights: [codes] float32, the weight in the loss of a token by its code (`Corpus.codes`); None
      if tokens have no codes: then each counts 1.
    cuts: whether a document that is longer than a row is cut; else it is left out.
    reads_ids: whether files of token ids hold documents too.
    second_code: of pairs, the code from which on tokens are of the second segment of a document; 0
      = a document is one segment.
  """

  cuts = True
  reads_ids = True
  second_code = 0

  def __init__(self, cfg: DataConfig):
    self._cfg = cfg

  @property
  def key(self) -> str | list[str]:
    """What is read of the files, in keys of the cache: the field that holds the text."""
    return self._cfg.format.text_field

  @property
  def weights(self) -> np.ndarray | None:
    """See the class."""
    return None

  def pieces(self, file: SourceFile, report: Report) -> Iterator[Piece]:
    """The text of a file's documents, in pieces of bounded length.

    What is malformed goes to `report`, which counts the documents.
    """
    return read_pieces(file, self._cfg.format.text_field, report)

  def judged_pieces(self, file: SourceFile, report: Report) -> Iterator[Piece]:
    """The same as filters judge it."""
    return self.pieces(file, report)

  def plan_split(
    self, fraction: float, files: list[SourceFile], fingerprint: str, tokenizer: Tokenizer | None
  ) -> Split:
    """What is held out of the documents of `files`: whole documents, or blocks inside of few.

    The arguments are those of `text.holdout.plan_split`.
    """
    return plan_split(self._cfg, fraction, files, fingerprint, tokenizer)

  def with_template(self, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of the documents, of that of the text in them.

    Raises:
      ValueError: if it does not go with the template of the documents.
    """
    return tokenizer

  def open_corpus(
    self,
    files: list[SourceFile],
    fingerprint: str,
    tokenizer: Tokenizer,
    split: Split,
    options: TokeniseOptions,
  ) -> Corpus:
    """The tokenised documents of `files`; the arguments are those of `corpus.open_corpus`."""
    return open_corpus(self._cfg, files, fingerprint, tokenizer, split, options)

  def fitting(
    self, corpus: Corpus, documents: np.ndarray, seq_len: int
  ) -> tuple[np.ndarray, dict[str, int]]:
    """Those of `documents` that become rows of `seq_len`, and counts of the others by reason."""
    del corpus, seq_len
    return documents, {}

  def count_roles(self, corpus: Corpus) -> dict[str, tuple[int, int]]:
    """Role -> (tokens, those of them that are said and not heading); {} = nobody speaks."""
    del corpus
    return {}


def format_of(cfg: DataConfig) -> TextFormat:
  """The format of the text of `cfg`, which is of one source."""
  module, _, name = cfg.format.PART.partition(":")
  return getattr(importlib.import_module(module), name)(cfg)
