"""Files of conversations -> one tokenised, cached corpus, with a code for each token."""

import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from ats_jax.config.schema import DataConfig
from ats_jax.data import cache
from ats_jax.data.chat.conversation import MalformedError
from ats_jax.data.chat.records import conversations
from ats_jax.data.chat.segments import Segment
from ats_jax.data.chat.tokenizer import ChatTokenizer
from ats_jax.data.corpus import CODES, Corpus, warn_of_malformed
from ats_jax.data.formats.token_files import token_dtype
from ats_jax.data.report import Report
from ats_jax.data.source import SourceFile, document_name, name_hash
from ats_jax.data.tokenise import COLUMNS, REPORT, shard

_LAYOUT = 2  # of a corpus in the cache: raise it when its files change
_BATCH_CHARS = 2**23  # text encoded at a time


class _Rendered(NamedTuple):
  """One conversation, not yet tokenised: the number of its file, its place there, its text."""

  file: int
  place: int
  segments: list[Segment]
  num_bytes: int

  @property
  def num_chars(self) -> int:
    return sum(len(s.text) for s in self.segments)


def open_chat_corpus(
  cfg: DataConfig, files: list[SourceFile], fingerprint: str, tokenizer: ChatTokenizer
) -> Corpus:
  """The tokenised conversations of `files`, from the cache or made now.

  A document is a conversation; its bytes are those of what was said. Weights are no part of it:
  the codes say what the weights are of.

  Args:
    cfg: `strict` and `cache_dir` are read.
    files: from `find_files`.
    fingerprint: of their names and contents.
    tokenizer: with the template.

  Raises:
    ValueError: if `cfg.strict` and something is malformed, or as `Template.render`.
  """

  def build(folder: Path) -> dict[str, Any]:
    return _tokenise(folder, files, cfg, tokenizer)

  key = cache.digest("conversations", _LAYOUT, fingerprint, tokenizer.fingerprint)
  folder = cache.cached(cache.cache_root(cfg.cache_dir), f"corpus-{key}", build)
  warn_of_malformed(folder, cfg.strict)
  return Corpus(folder, files)


def _tokenise(
  folder: Path, files: list[SourceFile], cfg: DataConfig, tokenizer: ChatTokenizer
) -> dict[str, Any]:
  began = time.monotonic()
  dtype = token_dtype(tokenizer.vocab_size)
  columns = {name: array(code) for name, code in COLUMNS.items()}
  num_tokens, used = 0, np.zeros(tokenizer.vocab_size, bool)
  used[[tokenizer.bos_id, tokenizer.eos_id]] = True
  with (
    open(folder / REPORT, "w") as report_file,
    open(shard(folder, 0), "wb") as tokens,
    open(folder / CODES, "wb") as codes,
  ):
    report = Report(strict=cfg.strict, file=report_file)
    for batch in _batches(_rendered(files, tokenizer, report)):
      encoded = tokenizer.encode_segments([c.segments for c in batch])
      for (number, place, _, num_bytes), document in zip(batch, encoded, strict=True):
        length, key = len(document.ids), name_hash(document_name(files[number], place))
        values = number, place, 0, num_tokens, length, num_bytes, key
        for name, value in zip(COLUMNS, values, strict=True):
          columns[name].append(value)
        num_tokens += length
        used[document.ids] = True
        tokens.write(document.ids.astype(dtype).tobytes())
        codes.write(document.codes.tobytes())
  for name, values in columns.items():
    np.save(folder / f"{name}.npy", np.array(values))
  logging.info(
    "Read %s conversations, %s tokens, from %s files in %.1f s.",
    f"{len(columns['length']):,}", f"{num_tokens:,}", f"{len(files):,}", time.monotonic() - began,
  )  # fmt: skip
  return {
    "vocab_size": tokenizer.vocab_size, "report": report.summary(), "balance": report.balance(),
    "shards": 1, "ids_used": int(used.sum()), "copied": False,
    "files": [[file.name, file.kind] for file in files],
  }  # fmt: skip


def _rendered(
  files: Sequence[SourceFile], tokenizer: ChatTokenizer, report: Report
) -> Iterator[_Rendered]:
  """The conversations in the words of the template; those it has no place for go to `report`."""
  for number, file in enumerate(files):
    for place, conversation in conversations(file, report):
      where = f"{file.path}:{place}"
      try:
        segments = tokenizer.template.render(conversation)
      except MalformedError as e:
        report.bad(e.kind, where, str(e))
        continue
      except ValueError as e:  # the template is at fault
        raise ValueError(f"{where}: {e}") from e
      report.documents += 1
      said = sum(len(m.content.encode()) for m in conversation.messages)
      yield _Rendered(number, place, segments, said)


def _batches(rendered: Iterator[_Rendered]) -> Iterator[list[_Rendered]]:
  """Lists of about `_BATCH_CHARS` characters."""
  batch: list[_Rendered] = []
  num_chars = 0
  for conversation in rendered:
    batch.append(conversation)
    num_chars += conversation.num_chars
    if num_chars >= _BATCH_CHARS:
      yield batch
      batch, num_chars = [], 0
  if batch:
    yield batch
