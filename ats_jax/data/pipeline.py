"""Packed rows -> batches. Row i of an epoch is a pure function of (fingerprint, seed, epoch, i)."""

import copy
import functools
import io
from collections import Counter
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import logging

from ats_jax.config.schema import DataConfig
from ats_jax.data import cache
from ats_jax.data.corpus import Corpus, held_out, nothing_left, open_corpus, train_texts
from ats_jax.data.loader import Batch, Batches, Source
from ats_jax.data.packing import Plan, make_plan
from ats_jax.data.source import Report, SourceFile, content_fingerprint, find_files
from ats_jax.data.tokenizer import Tokenizer, build_tokenizer

_ENDLESS = 2**48  # batches: more than any run takes
_FIELDS = ("tokens", "targets", "segment_ids", "positions")


class Dataset:
  """One split, tokenised and packed.

  Attributes:
    tokenizer: what made the ids.
    fingerprint: names the content of every row: documents, tokenizer, split, row length, packing.
    seed: of the order of documents and rows.
    seq_len: positions in a row.
    num_rows: rows of an epoch.
    num_tokens: targets with loss in an epoch: every text token and one eos a document.
    num_documents: documents of the split.
    bytes_per_token: UTF-8 bytes of the text over `num_tokens`; 0 if token files hide them.
    report: `malformed` and `skipped` (kind -> count), `first` (a few in words), `files` (all).
    corpus: the documents, of this split and of others.
    documents: [num_documents] int64, indices into the corpus.
    plan: which part of which document is where.
  """

  def __init__(
    self,
    corpus: Corpus,
    plan: cache.Folder,
    tokenizer: Tokenizer,
    *,
    fingerprint: str,
    seed: int,
    seq_len: int,
    report: dict[str, Any],
  ):
    self.corpus, self.tokenizer, self.report = corpus, tokenizer, report
    self.fingerprint, self.seed, self.seq_len = fingerprint, seed, seq_len
    self._plan_folder = plan
    self.plan = Plan(*map(plan.array, Plan._fields))
    self.documents = plan.array("documents")
    self.num_rows = len(self.plan.first) - 1
    self.num_tokens: int = plan.meta["num_tokens"]
    self.num_documents: int = plan.meta["num_documents"]
    self.bytes_per_token: float = plan.meta["num_bytes"] / max(self.num_tokens, 1)
    self._shuffle_seed = int(cache.digest("rows", fingerprint, seed)[:8], 16)

  def __reduce__(self):
    make = functools.partial(
      Dataset, fingerprint=self.fingerprint, seed=self.seed, seq_len=self.seq_len,
      report=self.report,
    )  # fmt: skip
    return make, (self.corpus, self._plan_folder, self.tokenizer)

  def with_corpus(self, corpus: Any, tokenizer: Any) -> "Dataset":
    """The same rows of other documents of the same lengths (for the audit)."""
    other = copy.copy(self)
    other.corpus, other.tokenizer = corpus, tokenizer
    return other

  def row_index(self, global_row: int) -> int:
    """Which row of the plan is row `global_row` of training; each epoch has an order of its own."""
    epoch, i = divmod(global_row, self.num_rows)
    seed = (self._shuffle_seed + epoch * 0x9E3779B9) % 2**32
    return grain.experimental.index_shuffle(i, max_index=self.num_rows - 1, seed=seed, rounds=4)

  def global_rows(self, indices: np.ndarray | range) -> Batch:
    """The rows of training with these numbers; arrays of shape [*indices.shape, seq_len]."""
    indices = np.asarray(indices)
    rows = [self.row_index(int(r)) for r in indices.flat]
    return self.rows(np.array(rows, np.int64).reshape(indices.shape))

  def rows(self, indices: np.ndarray | range) -> Batch:
    """Rows of the plan: arrays of shape [*indices.shape, seq_len].

    Returns:
      tokens, targets: int32; the pad id where there is no document.
      segment_ids: int32, 1.. for the documents of a row, 0 = padding.
      positions: int32, from 0 in each segment.
      loss_mask: float32, 1 for every position of a document.
    """
    indices = np.asarray(indices)
    stacked = np.stack([self._row(int(i)) for i in indices.flat], axis=1)
    fields = stacked.reshape(4, *indices.shape, self.seq_len)
    batch = dict(zip(_FIELDS, fields, strict=True))
    return {**batch, "loss_mask": (batch["segment_ids"] > 0).astype(np.float32)}

  def _row(self, i: int) -> np.ndarray:
    """_FIELDS of row i as [4, seq_len] int32; `i >= num_rows` gives a row of padding."""
    out = np.zeros((4, self.seq_len), np.int32)
    out[:2] = self.tokenizer.pad_id
    if i >= self.num_rows:
      return out
    first, end = self.plan.first[i], self.plan.first[i + 1]
    at = 0
    for segment, piece in enumerate(range(first, end), 1):
      document, length = int(self.plan.document[piece]), int(self.plan.length[piece])
      begin = int(self.plan.begin[piece])
      # Position p of a document is the input token p - 1 (bos before the first) with target p.
      ids = self.corpus.tokens(document, max(begin - 1, 0), begin + length)
      tokens, targets, segment_ids, positions = out[:, at : at + length]
      if begin == 0:
        tokens[0], tokens[1:], targets[: len(ids)] = self.tokenizer.bos_id, ids[: length - 1], ids
      else:
        tokens[:], targets[: len(ids) - 1] = ids[:length], ids[1:]
      if begin + length > self.corpus.length[document]:
        targets[-1] = self.tokenizer.eos_id
      segment_ids[:] = segment
      positions[:] = np.arange(length)
      at += length
    return out


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
  fraction = 0.0 if cfg.validation_paths else cfg.validation_fraction
  files, content, found = _find(cfg.paths, cfg)
  tokenizer = build_tokenizer(
    cfg,
    lambda: train_texts(files, cfg, fraction),
    corpus_fingerprint=cache.digest(content, fraction, cfg.text_field),
  )
  corpus = open_corpus(cfg, files, content, tokenizer)
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
  if cfg.validation_paths:
    return train, open_split(cfg, 0, cfg.validation_paths, tokenizer)
  split = [content, "validation", fraction]
  validation = _pack(cfg, 0, corpus, np.flatnonzero(out), tokenizer, split, found)
  if fraction and not validation.num_documents:
    raise ValueError(
      f"The validation split is empty: of {train.num_documents} documents none falls into "
      f"data.validation_fraction={fraction} (documents are held out whole). Raise it, give "
      "data.validation_paths, or set it to 0 to train without validation."
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
  corpus = open_corpus(cfg, files, content, tokenizer)
  documents = np.arange(len(corpus))
  dataset = _pack(cfg, seed, corpus, documents, tokenizer, [content, "all", 0.0], found)
  if not dataset.num_documents:
    raise ValueError(f"paths={paths!r} holds no document: {_counts(dataset.report)}.")
  return dataset


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
  fingerprint = cache.digest("rows", split, tokenizer.fingerprint, cfg.text_field, packing)

  def build(folder: Path) -> dict[str, Any]:
    lengths = corpus.length[documents] + 1
    plan = make_plan(
      lengths, _order(corpus.key[documents], seed), seq_len=cfg.seq_len, packing=cfg.packing,
      max_segments=cfg.max_segments,
    )  # fmt: skip
    for name, values in plan._replace(document=documents[plan.document])._asdict().items():
      np.save(folder / f"{name}.npy", values)
    np.save(folder / "documents.npy", documents)
    num_bytes = corpus.num_bytes[documents]
    return {
      "num_documents": len(documents),
      "num_tokens": int(lengths.sum()),
      "num_bytes": int(num_bytes.sum()) if (num_bytes > 0).all() else 0,
    }

  root = cache.cache_root(cfg.cache_dir)
  plan = cache.cached(root, "plan-" + cache.digest("plan", fingerprint, seed), build)
  report = {
    "malformed": Counter(found["malformed"]) + Counter(corpus.report["malformed"]),
    "skipped": Counter(found["skipped"]) + Counter(corpus.report["skipped"]),
    "first": found["first"] + corpus.report["first"],
    "files": [*found["files"], corpus.report["file"]],
  }
  dataset = Dataset(
    corpus, plan, tokenizer, fingerprint=fingerprint, seed=seed, seq_len=cfg.seq_len, report=report
  )
  logging.info(
    "%s: %d documents, %d targets in %d rows of %d.",
    split[1].capitalize(), dataset.num_documents, dataset.num_tokens, dataset.num_rows, cfg.seq_len,
  )  # fmt: skip
  return dataset


def _order(key: np.ndarray, seed: int) -> np.ndarray:
  """A permutation that depends on names and seed only, not on a library's generator."""
  mixed = key ^ np.uint64(int(cache.digest("order", seed)[:16], 16))
  mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
  return np.argsort(mixed ^ (mixed >> np.uint64(29)), kind="stable")


def train_batches(
  ds: Dataset,
  *,
  start_row: int,
  accum_steps: int,
  batch_size: int,
  local_rows: np.ndarray,
  num_workers: int,
  prefetch: int,
) -> Batches:
  """An endless iterator over this host's share of the training batches.

  Slot j of micro-step a of batch k holds global row `start_row + (k * accum + a) * micro + j`, so
  another host count or micro-batch gives the same rows in another arrangement. Epochs follow each
  other inside a batch; nothing is dropped.

  Args:
    ds: the training split.
    start_row: global rows already consumed, over all hosts.
    accum_steps: micro-batches per update.
    batch_size: rows per update over all hosts; a multiple of `accum_steps`.
    local_rows: sorted indices in [0, batch_size // accum_steps) that this host loads.
    num_workers: loader processes; 0 = a thread.
    prefetch: batches made ahead, by each process or by the thread.

  Returns:
    `Batches` of arrays [accum_steps, len(local_rows), seq_len].

  Raises:
    ValueError: if the arguments contradict each other or the split is empty.
  """
  if not ds.num_rows:
    raise ValueError("The dataset has no row to train on.")
  if batch_size % accum_steps:
    raise ValueError(f"batch_size={batch_size} is not a multiple of accum_steps={accum_steps}.")
  if start_row < 0:
    raise ValueError(f"start_row={start_row} is negative; expected the rows consumed so far.")
  micro = batch_size // accum_steps
  slots = np.arange(accum_steps)[:, None] * micro + _checked(local_rows, micro)
  read = functools.partial(_train_batch, ds, start_row, batch_size, slots)
  return Batches(Source(read, _ENDLESS), num_workers=num_workers, prefetch=prefetch)


def _train_batch(ds: Dataset, start_row: int, batch_size: int, slots: np.ndarray, k: int) -> Batch:
  return ds.global_rows(start_row + k * batch_size + slots)


def eval_batches(
  ds: Dataset, *, batch_size: int, local_rows: np.ndarray, num_batches: int
) -> Batches:
  """This host's share of one pass over the rows in order; the last batch is filled with padding.

  Args:
    ds: any split, also an empty one.
    batch_size: rows of a batch over all hosts.
    local_rows: sorted indices in [0, batch_size) that this host loads.
    num_batches: stop after so many; 0 = all.

  Returns:
    `Batches` of arrays [len(local_rows), seq_len].
  """
  local = _checked(local_rows, batch_size)
  length = -(-ds.num_rows // batch_size)
  length = min(length, num_batches) if num_batches else length
  source = Source(lambda k: ds.rows(k * batch_size + local), length)
  return Batches(source, num_workers=0, prefetch=2)


def _checked(local_rows: np.ndarray, micro: int) -> np.ndarray:
  local = np.asarray(local_rows)
  if local.ndim != 1 or local.dtype.kind not in "iu" or not len(local):
    raise ValueError(f"local_rows={local!r}: expected a 1-D array of at least one row index.")
  if local[0] < 0 or local[-1] >= micro or (np.diff(local) <= 0).any():
    raise ValueError(f"local_rows={local!r}: expected increasing indices in [0, {micro}).")
  return local
