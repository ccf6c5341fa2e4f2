"""Text files -> the training and the validation split: found, tokenised, packed, cached."""

import dataclasses
import io
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from ats_jax.config.chat import role_weights
from ats_jax.config.schema import DataConfig
from ats_jax.data import cache
from ats_jax.data.chat.corpus import open_chat_corpus
from ats_jax.data.chat.segments import weight_table
from ats_jax.data.chat.tokenizer import ChatTokenizer, with_template
from ats_jax.data.corpus import Corpus, held_out, nothing_left, open_corpus, train_texts
from ats_jax.data.dataset import Dataset
from ats_jax.data.packing import make_layout
from ats_jax.data.source import Report, SourceFile, content_fingerprint, find_files
from ats_jax.data.tokenizer import Tokenizer, build_tokenizer


@dataclasses.dataclass(frozen=True)
class EvalSet:
  """Held-out rows to be scored.

  Attributes:
    name: what its metrics are called after; "" = the main set, whose loss decides which checkpoint
      is best.
    dataset: its rows.
  """

  name: str
  dataset: Dataset

  @property
  def prefix(self) -> str:
    """Of its metrics' names."""
    return f"eval/{self.name}/" if self.name else "eval/"


def open_eval_sets(cfg: DataConfig, main: Dataset) -> tuple[EvalSet, ...]:
  """The validation split, if it has rows, and the named sets of `data.validation_paths`.

  Args:
    cfg: as for `open_datasets`.
    main: the validation split that `open_datasets` gave.

  Raises:
    ValueError: as `open_split`, and for a name that is none.
  """
  named = (
    EvalSet(name, open_split(cfg, 0, paths, main.tokenizer))
    for name, paths in _validation_paths(cfg).items()
    if name
  )
  return (*([EvalSet("", main)] if main.num_rows else []), *named)


def _validation_paths(cfg: DataConfig) -> dict[str, str]:
  """`a.txt,code=b.py,code=c.py` -> {"": "a.txt", "code": "b.py,c.py"}: paths by name of the set."""
  found: dict[str, str] = {}
  for entry in filter(None, map(str.strip, cfg.validation_paths.split(","))):
    head, equals, path = entry.partition("=")
    name = head.strip()
    if not equals or "/" in head:
      name, path = "", entry
    elif not (re.fullmatch(r"[a-z][a-z0-9_-]*", name) and path.strip()):
      raise ValueError(
        f"data.validation_paths: {entry!r} is not name=path with a name of small letters, digits, "
        "'_' and '-'. For a path that holds '=', write ./ before it."
      )
    found[name] = ",".join(filter(None, (found.get(name, ""), path.strip())))
  return found


def open_datasets(cfg: DataConfig, seed: int) -> tuple[Dataset, Dataset]:
  """The training and the validation split; tokenised, packed and cached on first use.

  The validation split is packed with seed 0 whatever `seed` is, so that runs compare.

  Args:
    cfg: everything but `batch_size`, `num_workers` and `prefetch` is read.
    seed: of the order of training documents and rows.

  Raises:
    ValueError: for paths that hold nothing, malformed input if `cfg.strict`, a training text
      shorter than one row, or a validation split that came out empty.
  """
  validation_paths = _validation_paths(cfg).get("", "")
  fraction = 0.0 if validation_paths else cfg.validation_fraction
  files, content, found = _find(cfg.paths, cfg)
  of_text = build_tokenizer(
    cfg,
    lambda: train_texts(files, cfg, fraction),
    corpus_fingerprint=cache.digest(content, fraction, _kind(cfg)),
  )
  tokenizer = with_template(of_text, cfg)
  corpus = _open(cfg, files, content, tokenizer)
  out = held_out(corpus.key, fraction)
  split = [content, "train", fraction]
  train = _pack(cfg, seed, corpus, np.flatnonzero(~out), tokenizer, split, found)
  if not train.num_documents:
    raise ValueError(nothing_left(int(out.sum()), _counts(train.report)))
  if train.num_tokens < cfg.seq_len:
    raise ValueError(
      f"The training text has {train.num_tokens} tokens in {train.num_documents} documents, less "
      f"than one row of data.seq_len={cfg.seq_len}. Give more text or set data.seq_len to at most "
      f"{train.num_tokens}."
    )
  if validation_paths:
    return train, open_split(cfg, 0, validation_paths, tokenizer)
  split = [content, "validation", fraction]
  validation = _pack(cfg, 0, corpus, np.flatnonzero(out), tokenizer, split, found)
  if fraction and not validation.num_documents:
    raise ValueError(
      f"The validation split is empty: of {train.num_documents} documents none falls into "
      f"data.validation_fraction={fraction} (documents are held out whole). Raise it, e.g. to 0.2, "
      "give data.validation_paths, or set it to 0 to train without validation."
    )
  return train, validation


def open_split(cfg: DataConfig, seed: int, paths: str, tokenizer: Tokenizer) -> Dataset:
  """All documents of `paths`, with a tokenizer that is there already.

  Args:
    cfg: says how to read, pack and cache.
    seed: of the order of documents and rows.
    paths: as `DataConfig.paths`.
    tokenizer: makes the ids.

  Raises:
    ValueError: if the paths hold no document, or something malformed and `cfg.strict`.
  """
  files, content, found = _find(paths, cfg)
  corpus = _open(cfg, files, content, tokenizer)
  documents = np.arange(len(corpus))
  dataset = _pack(cfg, seed, corpus, documents, tokenizer, [content, "all", 0.0], found)
  if not dataset.num_documents:
    raise ValueError(f"paths={paths!r} holds no document: {_counts(dataset.report)}.")
  return dataset


def _kind(cfg: DataConfig) -> str | list[str]:
  """What is read of the files, in a key of the cache."""
  return ["conversations"] if cfg.chat_template else cfg.text_field


def _open(cfg: DataConfig, files: list[SourceFile], content: str, tokenizer: Tokenizer) -> Corpus:
  if not cfg.chat_template:
    return open_corpus(cfg, files, content, tokenizer)
  assert isinstance(tokenizer, ChatTokenizer), "of a run on conversations"
  return open_chat_corpus(cfg, files, content, tokenizer)


def _find(paths: str, cfg: DataConfig) -> tuple[list[SourceFile], str, dict[str, Any]]:
  """The files of `paths`, the hash of their contents, and what was passed over."""
  root = cache.cache_root(cfg.cache_dir)
  lines = io.StringIO()
  report = Report(strict=cfg.strict, file=lines)
  files = find_files(paths, report)
  passed_over = {**report.summary(), "files": []}
  if lines.getvalue():
    path = root / f"paths-{cache.digest(lines.getvalue())}.txt"
    cache.write_atomically(path, lines.getvalue())
    passed_over["files"].append(str(path))
    logging.warning("Some of the files in paths are passed over: %s. See %s.", report, path)
  return files, content_fingerprint(files, root), passed_over


def _counts(report: dict[str, Any]) -> str:
  counts = {**report["malformed"], **report["skipped"]}
  return (
    "; ".join([*(f"{n} {kind}" for kind, n in counts.items()), *report["first"]])
    or "nothing malformed"
  )


def _pack(
  cfg: DataConfig,
  seed: int,
  corpus: Corpus,
  documents: np.ndarray,
  tokenizer: Tokenizer,
  split: list,
  found: dict[str, Any],
) -> Dataset:
  packing = [cfg.seq_len, cfg.packing, cfg.max_segments]
  fingerprint = cache.digest("rows", split, tokenizer.fingerprint, _kind(cfg), packing)
  weights = None
  if cfg.chat_template:
    weights = weight_table(role_weights(cfg.chat_weights), cfg.chat_answers)
    fingerprint = cache.digest(fingerprint, weights.tolist())

  def build(folder: Path) -> dict[str, Any]:
    kept, left_out = documents, {}
    if weights is not None:
      kept, left_out = _whole_conversations(corpus, documents, weights, cfg.seq_len)
    lengths = corpus.length[kept] + 1
    plan = make_layout(
      lengths, _order(corpus.key[kept], seed), seq_len=cfg.seq_len, packing=cfg.packing,
      max_segments=cfg.max_segments,
    )  # fmt: skip
    for name, values in plan._replace(document=kept[plan.document])._asdict().items():
      np.save(folder / f"{name}.npy", values)
    np.save(folder / "documents.npy", kept)
    # A loss of answers alone is not one of the bytes of all that was said.
    num_bytes = corpus.num_bytes[kept] * (weights is None)
    return {
      "num_documents": len(kept),
      "num_tokens": int(lengths.sum()),
      "num_bytes": int(num_bytes.sum()) if (num_bytes > 0).all() else 0,
      "left_out": left_out,
    }

  root = cache.cache_root(cfg.cache_dir)
  plan = cache.cached(root, "plan-" + cache.digest("plan", fingerprint, seed), build)
  left_out = plan.meta["left_out"]
  if left_out:
    logging.warning(
      "Of %s conversations these are left out: %s. A larger data.seq_len has room for longer ones.",
      f"{len(documents):,}", ", ".join(f"{count:,} {kind}" for kind, count in left_out.items()),
    )  # fmt: skip
  report = {
    "malformed": Counter(found["malformed"]) + Counter(corpus.report["malformed"]),
    "skipped": Counter(found["skipped"]) + Counter(corpus.report["skipped"]) + Counter(left_out),
    "first": found["first"] + corpus.report["first"],
    "files": [*found["files"], corpus.report["file"]],
  }
  dataset = Dataset(
    corpus, plan, tokenizer, fingerprint=fingerprint, seed=seed, seq_len=cfg.seq_len, report=report,
    weights=weights,
  )  # fmt: skip
  logging.info(
    "%s: %s documents, %s targets in %s rows of %d.",
    split[1].capitalize(), f"{dataset.num_documents:,}", f"{dataset.num_tokens:,}",
    f"{dataset.num_rows:,}", cfg.seq_len,
  )  # fmt: skip
  return dataset


def _whole_conversations(
  corpus: Corpus, documents: np.ndarray, weights: np.ndarray, seq_len: int
) -> tuple[np.ndarray, dict[str, int]]:
  """Those of `documents` that fit into a row and have a token in the loss; how many others why.

  An answer without its question teaches nothing, so a conversation is not cut.
  """
  fits = corpus.length[documents] < seq_len
  codes = (corpus.codes(d, 0, int(corpus.length[d])) for d in map(int, documents))
  counts = np.fromiter((weights[c].any() for c in codes), bool, len(documents))
  left_out = {
    f"longer than a row of data.seq_len={seq_len}": int((~fits).sum()),
    "without a token in the loss": int((fits & ~counts).sum()),
  }
  return documents[fits & counts], {kind: n for kind, n in left_out.items() if n}


def _order(key: np.ndarray, seed: int) -> np.ndarray:
  """A permutation that depends on names and seed only, not on a library's generator."""
  mixed = key ^ np.uint64(int(cache.digest("order", seed)[:16], 16))
  mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
  return np.argsort(mixed ^ (mixed >> np.uint64(29)), kind="stable")
