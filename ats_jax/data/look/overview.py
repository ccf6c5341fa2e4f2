"""What a text came to: kept, dropped and why, lengths, sources, roles; for `data report`."""

import json
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from ats_jax.config.schema import DataConfig
from ats_jax.data.chat.segments import COUNTS, role_of
from ats_jax.data.splits import Opened, training_parts

_SOURCES = 15  # named; the rest is one line
_CHUNK = 2**22  # tokens looked at a time


class Source(NamedTuple):
  """What came from a file or a folder: documents, those of them that are kept, characters."""

  name: str
  documents: int
  kept: int
  chars: int


class Packed(NamedTuple):
  """Training documents that are packed together: the length of their rows, and how many they are.

  Tokens are those of rows, with an end for each document.
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
    num_tokens: of text.
    num_bytes: of text, 0 if token files hide them.
    chars: of each document that was judged, and whether it is kept; None = there were no filters.
    tokens: of each document that is kept.
    sources: the largest first.
    roles: role -> (tokens, those of them that are said and not heading), of conversations.
    samples: see `filters.samples`.
    first: the first few malformed records, in words.
    packed: how `data.length_buckets` or `data.curriculum` part the documents; [] = they do not.
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
  sources: list[Source]
  roles: dict[str, tuple[int, int]]
  samples: list[dict[str, Any]]
  first: list[str]
  packed: list[Packed]


def overview(cfg: DataConfig, opened: Opened) -> Overview:
  """Look at the documents of a run, or of a prepared folder.

  Args:
    cfg: `paths`, `tokenizer`, `chat_template` and what `training_parts` reads.
    opened: they.
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
  paths = ", ".join(cfg.paths) or "the standard library of this Python"
  return Overview(
    paths, meta["filters"], meta["versions"],
    tokenizer, report["balance"], reasons, meta["changed"], int(corpus.length.sum()),
    int(corpus.num_bytes.sum()) if (corpus.num_bytes > 0).all() else 0, chars, corpus.length,
    _sources(opened), _roles(opened) if cfg.chat_template else {}, samples, report["first"],
    _packed(cfg, opened),
  )  # fmt: skip


def _packed(cfg: DataConfig, opened: Opened) -> list[Packed]:
  corpus = opened.corpus
  training = np.flatnonzero(~opened.split.held_out(corpus.key, corpus.part))
  return [
    Packed(name, seq_len, len(documents), int(corpus.length[documents].sum()) + len(documents))
    for name, seq_len, documents in training_parts(cfg, opened, training)
  ]


def _sources(opened: Opened) -> list[Source]:
  """By the first part of the files' names."""
  if opened.sifted:
    names = opened.sifted.meta["files"]
    file, kept = opened.sifted.array("file"), opened.sifted.array("verdict") == 0
    size = opened.sifted.array("chars")
  else:
    corpus = opened.corpus
    names, file = corpus.file_names(), corpus.file
    kept, size = np.ones(len(corpus), bool), corpus.num_bytes
  documents, kept_documents, sizes = Counter(), Counter(), Counter()
  counts = np.bincount(file, minlength=len(names))
  kept_counts = np.bincount(file, kept, len(names)).astype(int)
  size_counts = np.bincount(file, size, len(names)).astype(int)
  columns = zip(names, counts.tolist(), kept_counts.tolist(), size_counts.tolist(), strict=True)
  for name, count, kept_count, chars in columns:
    folder, slash, _ = name.partition("/")
    documents[folder + slash] += count
    kept_documents[folder + slash] += kept_count
    sizes[folder + slash] += chars
  largest = sorted(documents, key=lambda name: (-sizes[name], name))
  found = [Source(n, documents[n], kept_documents[n], sizes[n]) for n in largest]
  rest = found[_SOURCES:]
  if not rest:
    return found
  _, *totals = zip(*rest, strict=True)
  return [*found[:_SOURCES], Source(f"{len(rest):,} others", *map(sum, totals))]


def _roles(opened: Opened) -> dict[str, tuple[int, int]]:
  counts = np.zeros(256, np.int64)
  for document, length in enumerate(opened.corpus.length.tolist()):
    for begin in range(0, length, _CHUNK):
      codes = opened.corpus.codes(document, begin, begin + _CHUNK)
      counts += np.bincount(codes, minlength=256)
  found: dict[str, tuple[int, int]] = {}
  for code in map(int, np.flatnonzero(counts)):
    role = role_of(code) or "none"
    tokens, said = found.get(role, (0, 0))
    found[role] = tokens + int(counts[code]), said + int(counts[code]) * bool(code & COUNTS)
  return found
