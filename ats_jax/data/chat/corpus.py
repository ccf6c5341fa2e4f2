"""Files of conversations -> one tokenised, cached corpus, with a code for each token."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ats_jax.config.schema import DataConfig
from ats_jax.data.chat.conversation import MalformedError
from ats_jax.data.chat.records import CONVERSATIONS, Schema, conversations
from ats_jax.data.chat.tokenizer import ChatTokenizer, Encoded
from ats_jax.data.corpus import cache
from ats_jax.data.corpus.child import map_in_children
from ats_jax.data.corpus.corpus import LAYOUT, Corpus, warn_of_malformed
from ats_jax.data.corpus.shards import EncodedPiece, Shards, TokeniseOptions
from ats_jax.data.corpus.tokenise import write_corpus
from ats_jax.data.text.formats.token_files import token_dtype
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile
from ats_jax.data.tokens.base import Tokenizer

_BATCH_CHARS = 2**21  # of what is said, written and encoded at a time
_TURN_CHARS = 32  # that a template adds, about


class _Found(NamedTuple):
  """A `Conversation` or a pair in its file: the number of that, and the place in it."""

  file: int
  place: int
  conversation: Any


class _Written(NamedTuple):
  """What a process made of a batch.

  Attributes:
    ids: of all conversations that the template has a place for, one behind the other.
    codes: codes of the ids.
    lengths: tokens of each conversation; of those that were refused, 0.
    refused: (number in the batch, kind, detail).
  """

  ids: np.ndarray
  codes: np.ndarray
  lengths: np.ndarray
  refused: list[tuple[int, str, str]]


def open_chat_corpus(
  cfg: DataConfig,
  files: list[SourceFile],
  fingerprint: str,
  tokenizer: Tokenizer,
  options: TokeniseOptions,
  kind: str = "conversations",
  schema: Schema = CONVERSATIONS,
) -> Corpus:
  """The tokenised conversations of `files`, from the cache or made now.

  A document is a conversation, or a pair of them with an eos between; its bytes are those of what
  was said. Weights are no part of it: the codes say what the weights are of.

  Args:
    cfg: `strict` and `cache_dir` are read.
    files: from `find_files`.
    fingerprint: a hash of their names and contents.
    tokenizer: with the template.
    options: processes and progress of tokenising.
    kind: what the documents are, in the key of the cache.
    schema: what records are read as.

  Raises:
    ValueError: if `cfg.strict` and something is malformed, or as `Template.render`.
  """
  assert isinstance(tokenizer, ChatTokenizer), "of a run on conversations"

  def build(folder: Path) -> dict[str, Any]:
    fill = lambda shards, report: _fill(
      shards, report, files, cfg.strict, tokenizer, options.workers, schema
    )
    return write_corpus(folder, files, cfg, tokenizer, options._replace(copies_ids=False), fill)

  key = cache.digest(kind, "whole", LAYOUT, fingerprint, tokenizer.fingerprint)
  root = cache.cache_root(cfg.cache_dir)
  folder = cache.cached(root, f"corpus-{key}", build, goes_on=True)
  warn_of_malformed(folder, cfg.strict)
  return Corpus(folder, files)


def _fill(
  shards: Shards,
  report: Report,
  files: list[SourceFile],
  strict: bool,
  tokenizer: ChatTokenizer,
  workers: int,
  schema: Schema,
) -> None:
  """Give `shards` what they do not hold yet.

  What a template has no place for is known when it is written. It is reported behind what was
  malformed as it was read, so that the report does not depend on who is how far.
  """
  batches = _batches(files, report, schema)
  shards.skip_held(batches)
  sent = lambda batch: [
    (f"{files[record.file].path}:{record.place}", record.conversation) for record in batch
  ]
  with contextlib.closing(
    map_in_children(batches, tokenizer, workers, sent, _write, "tokenise")
  ) as results:
    for batch, written in results:
      refused = [
        (kind, f"{files[batch[i].file].path}:{batch[i].place}", detail)
        for i, kind, detail in written.refused
      ]
      shards.add(_entries(batch, written), written.ids, refused)
      if strict:
        break_off = Report(strict=True)
        for problem in refused:
          break_off.bad(*problem)
  for problem in shards.refused:
    report.documents -= 1
    report.bad(*problem)


def _batches(files: list[SourceFile], report: Report, schema: Schema) -> Iterator[list[_Found]]:
  """Lists of about `_BATCH_CHARS` characters; the same ones each time."""
  batch: list[_Found] = []
  num_chars = 0
  for number, file in enumerate(files):
    for place, conversation in conversations(file, report, schema):
      report.documents += 1
      batch.append(_Found(number, place, conversation))
      num_chars += sum(_TURN_CHARS + len(m.content) for m in conversation.messages)
      if num_chars >= _BATCH_CHARS:
        yield batch
        batch, num_chars = [], 0
  if batch:
    yield batch


def _write(tokenizer: Tokenizer, batch: list[tuple[str, Any]]) -> _Written:
  """Conversations, each with where it is, in the words of the template, as ids.

  Raises:
    ValueError: if the template is at fault.
  """
  assert isinstance(tokenizer, ChatTokenizer)
  rendered, refused = [], []
  for number, (where, conversation) in enumerate(batch):
    try:
      parts = [tokenizer.template.render(each) for each in conversation.written]
      rendered.append((parts, conversation))
    except MalformedError as e:
      refused.append((number, e.kind, str(e)))
    except ValueError as e:
      raise ValueError(f"{where}: {e}") from e
  parts = iter(tokenizer.encode_segments([part for parts, _ in rendered for part in parts]))
  encoded = [
    _joined([next(parts) for _ in of_one], conversation, tokenizer.eos_id)
    for of_one, conversation in rendered
  ]
  lengths = np.zeros(len(batch), np.int64)
  lengths[np.setdiff1d(np.arange(len(batch)), [n for n, *_ in refused])] = [
    len(document.ids) for document in encoded
  ]
  ids = np.concatenate([document.ids for document in encoded] or [np.empty(0, np.uint32)])
  codes = np.concatenate([document.codes for document in encoded] or [np.empty(0, np.uint8)])
  return _Written(ids.astype(token_dtype(tokenizer.vocab_size)), codes, lengths, refused)


def _joined(parts: list[Encoded], conversation: Any, eos_id: int) -> Encoded:
  """Conversations as one document, each in front of its eos but the last one."""
  if len(parts) == 1:
    return parts[0]
  first, second = parts
  eos, none = np.array([eos_id], first.ids.dtype), np.zeros(1, np.uint8)
  return Encoded(
    np.concatenate([first.ids, eos, second.ids]),
    np.concatenate([first.codes, none, second.codes | np.uint8(conversation.second_code)]),
  )


def _entries(batch: list[_Found], written: _Written) -> Iterator[EncodedPiece]:
  left_out = {number for number, *_ in written.refused}
  ends = np.cumsum(written.lengths)
  for number, (record, end, length) in enumerate(zip(batch, ends, written.lengths, strict=True)):
    if number not in left_out:
      ids, codes = written.ids[end - length : end], written.codes[end - length : end]
      num_bytes = sum(len(m.content.encode()) for m in record.conversation.messages)
      yield EncodedPiece(record.file, record.place, True, ids, num_bytes, codes=codes)
