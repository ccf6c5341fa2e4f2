"""Conversations as a format of text: whole, with a weight for each token."""

from collections.abc import Iterator

import numpy as np

from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.text_format import Chat
from ats_jax.data.chat.corpus import open_chat_corpus
from ats_jax.data.chat.records import CONVERSATIONS, Schema, message_pieces
from ats_jax.data.chat.segments import COUNTS, role_of, weight_table
from ats_jax.data.chat.tokenizer import with_template
from ats_jax.data.corpus.corpus import Corpus
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.text.formats.text import Piece
from ats_jax.data.text.holdout import Split
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile
from ats_jax.data.text_format import TextFormat
from ats_jax.data.tokens.base import Tokenizer

_CHUNK = 2**22  # tokens looked at a time


class ChatFormat(TextFormat):
  """Conversations."""

  cuts = False
  reads_ids = False
  schema: Schema = CONVERSATIONS

  def __init__(self, cfg: DataConfig):
    super().__init__(cfg)
    assert isinstance(cfg.format, Chat)
    self._chat = cfg.format

  @property
  def key(self) -> list[str]:
    """Return what no field of a text is called; the second word names how they are encoded."""
    return ["conversations", "whole"]

  @property
  def weights(self) -> np.ndarray:
    """[NUM_CODES] float32, the weight in the loss by code (`segments`)."""
    return weight_table(self._chat.weights, self._chat.answers)

  def pieces(self, file: SourceFile, report: Report) -> Iterator[Piece]:
    """Return what is said in the conversations of a file, without a template."""
    return message_pieces(file, report, self.schema)

  def judged_pieces(self, file: SourceFile, report: Report) -> Iterator[Piece]:
    """Yield the same with an empty line behind each turn."""
    for piece in message_pieces(file, report, self.schema):
      yield piece._replace(text=f"{piece.text}\n\n")

  def plan_split(
    self, fraction: float, files: list[SourceFile], fingerprint: str, tokenizer: Tokenizer | None
  ) -> Split:
    """Return whole conversations, however few there are: one is not cut."""
    del files, fingerprint, tokenizer
    return Split(fraction)

  def with_template(self, tokenizer: Tokenizer) -> Tokenizer:
    """Return `tokenizer` with the template of the conversations.

    Raises:
      ValueError: as `tokenizer.with_template`.
    """
    return with_template(tokenizer, self._chat, self._cfg.tokenizer)

  def open_corpus(
    self,
    files: list[SourceFile],
    fingerprint: str,
    tokenizer: Tokenizer,
    split: Split,
    options: TokeniseOptions,
  ) -> Corpus:
    """Return the conversations, with a code for each token."""
    del split  # it cuts nothing
    return open_chat_corpus(
      self._cfg, files, fingerprint, tokenizer, options, self.key[0], self.schema
    )

  def fitting(
    self, corpus: Corpus, documents: np.ndarray, seq_len: int
  ) -> tuple[np.ndarray, dict[str, int]]:
    """Return those that fit into a row and have a token in the loss.

    An answer without its question teaches nothing, so a conversation is not cut.
    """
    fits = corpus.length[documents] < seq_len
    codes = (corpus.codes(d, 0, int(corpus.length[d])) for d in map(int, documents))
    counts = np.fromiter(map(self._counts, codes), bool, len(documents))
    left_out = {
      f"longer than a row of data.seq_len={seq_len}": int((~fits).sum()),
      "without a token in the loss": int((fits & ~counts).sum()),
    }
    return documents[fits & counts], {kind: n for kind, n in left_out.items() if n}

  def _counts(self, codes: np.ndarray) -> bool:
    """Whether a document of these codes has something to learn."""
    return bool(self.weights[codes].any())

  def count_roles(self, corpus: Corpus) -> dict[str, tuple[int, int]]:
    """Return the tokens of each role, and those of them that are said and not heading."""
    counts = np.zeros(256, np.int64)
    for document, length in enumerate(corpus.length.tolist()):
      for begin in range(0, length, _CHUNK):
        codes = corpus.codes(document, begin, begin + _CHUNK)
        counts += np.bincount(codes, minlength=256)
    by_role: dict[str, tuple[int, int]] = {}
    for code in map(int, np.flatnonzero(counts)):
      role = role_of(code) or "none"
      tokens, counted = by_role.get(role, (0, 0))
      by_role[role] = tokens + int(counts[code]), counted + int(counts[code]) * bool(code & COUNTS)
    return by_role
