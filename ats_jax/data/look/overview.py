"""What a text came to: kept, dropped and why, lengths, sources, roles; for `data report`."""

import json
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from ats_jax.config.schema import DataConfig
from ats_jax.data.rows import row_order
from ats_jax.data.splits import Opened, training_documents
from ats_jax.data.text_format import format_of
from ats_jax.store.secrets import masked

_SOURCES = 15  # named; the rest is one line


class SourceCounts(NamedTuple):
  """Counts of a file or a folder of the text.

  Attributes:
    name: its path, shortened.
    documents: number of documents that it holds.
    kept: number of them that the filters keep.
    chars: size of the documents: characters if there are filters, else bytes.
  """

  name: str
  documents: int
  kept: int
  chars: int


class PackedCounts(NamedTuple):
  """Counts of the training documents that are packed into rows of one length.

  Attributes:
    name: name of the group, in words.
    seq_len: positions in a row.
    documents: number of documents.
    tokens: their tokens in rows, with an end for each document.
  """

  name: str
  seq_len: int
  documents: int
  tokens: int


class Overview(NamedTuple):
  """All that the page shows.

  Attributes:
    paths: those of `data.paths`.
    filters: as `data.filters`; "" = none.
    versions: of the packages that the filters run.
    tokenizer: in words.
    balance: counts of records, documents and what was left out.
    reasons: (kind, reason) -> count of what was left out; kinds are 'filters', 'malformed',
      'skipped'.
    changed: documents that filters made another text of, and kept.
    num_tokens: number of tokens of the text.
    num_bytes: number of UTF-8 bytes of the text; 0 if token files hide them.
    chars: of each document that was judged, and whether it is kept; None = there were no filters.
    tokens: number of tokens of each document that is kept.
    sources: the largest first.
    roles: role -> (tokens, those of them that are said and not heading), of conversations.
    samples: see `filters.samples`.
    first: the first few malformed records, in words.
    packed: how `data.order` parts the documents; [] = it does not.
  """

  paths: str
  filters: str
  versions: dict[str, str]
  tokenizer: str
  balance: dict[str, int]
  reasons: dict[tuple[str, str], int]
  changed: int
  num_tokens: int
  num_bytes: int
  chars: tuple[np.ndarray, np.ndarray] | None
  tokens: np.ndarray
  sources: list[SourceCounts]
  roles: dict[str, tuple[int, int]]
  samples: list[dict[str, Any]]
  first: list[str]
  packed: list[PackedCounts]


def overview(cfg: DataConfig, opened: Opened) -> Overview:
  """Look at the documents of a run, or of a prepared folder.

  Args:
    cfg: `paths`, `tokenizer`, `format` and what `data.order` reads.
    opened: the documents of the run or the folder.
  """
  corpus, sifted = opened.corpus, opened.sifted
  report = corpus.report
  reasons = {
    (kind, reason): count
    for kind in ("filtered", "malformed", "skipped")
    for reason, count in report[kind].items()
  }
  meta = sifted.meta if sifted else {"filters": "", "versions": {}, "changed": 0}
  chars = (sifted.array("chars"), sifted.array("verdict") == 0) if sifted else None
  samples = json.loads((sifted.path / "samples.json").read_text()) if sifted else []
  tokenizer = f"{opened.tokenizer.vocab_size:,} ids of {cfg.tokenizer}"
  paths = masked(", ".join(cfg.paths)) or "the standard library of this Python"
  return Overview(
    paths, meta["filters"], meta["versions"],
    tokenizer, report["balance"], reasons, meta["changed"], int(corpus.length.sum()),
    int(corpus.num_bytes.sum()) if (corpus.num_bytes > 0).all() else 0, chars, corpus.length,
    _sources(opened), format_of(cfg).count_roles(corpus), samples, report["first"],
    _packed(cfg, opened),
  )  # fmt: skip


def _packed(cfg: DataConfig, opened: Opened) -> list[PackedCounts]:
  corpus, length = opened.corpus, opened.corpus.length
  training = np.flatnonzero(~opened.split.held_out(corpus.key, corpus.part))
  documents = training_documents(cfg, opened, training)
  return [
    PackedCounts(name, seq_len, len(group), int(length[group].sum()) + len(group))
    for name, seq_len, group in row_order(cfg).parts(cfg, documents)
  ]


def _sources(opened: Opened) -> list[SourceCounts]:
  """By the first part of the files' names."""
  if opened.sifted:
    names = opened.sifted.meta["files"]
    file, is_kept = opened.sifted.array("file"), opened.sifted.array("verdict") == 0
    size = opened.sifted.array("chars")
  else:
    corpus = opened.corpus
    names, file = corpus.file_names(), corpus.file
    is_kept, size = np.ones(len(corpus), bool), corpus.num_bytes
  documents, kept_documents, sizes = Counter(), Counter(), Counter()
  counts = np.bincount(file, minlength=len(names))
  kept_counts = np.bincount(file, is_kept, len(names)).astype(int)
  size_counts = np.bincount(file, size, len(names)).astype(int)
  columns = zip(names, counts.tolist(), kept_counts.tolist(), size_counts.tolist(), strict=True)
  for name, count, kept_count, chars in columns:
    folder, slash, _ = name.partition("/")
    documents[folder + slash] += count
    kept_documents[folder + slash] += kept_count
    sizes[folder + slash] += chars
  largest = sorted(documents, key=lambda name: (-sizes[name], name))
  by_size = [SourceCounts(n, documents[n], kept_documents[n], sizes[n]) for n in largest]
  others = by_size[_SOURCES:]
  if not others:
    return by_size
  _, *totals = zip(*others, strict=True)
  return [*by_size[:_SOURCES], SourceCounts(f"{len(others):,} others", *map(sum, totals))]
