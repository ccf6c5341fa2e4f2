"""Text files -> the training and the validation split of one source: found, packed, cached."""

import dataclasses
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from ats_jax.config.schema import DataConfig
from ats_jax.data.corpus import cache, prepared
from ats_jax.data.corpus.corpus import NO_RECORD, Corpus, nothing_left, train_texts
from ats_jax.data.corpus.shards import DEFAULT_OPTIONS, TokeniseOptions
from ats_jax.data.rows import row_order
from ats_jax.data.rows.contract import TrainingDocuments, TrainRows
from ats_jax.data.rows.dataset import Dataset
from ats_jax.data.rows.packed import Packed
from ats_jax.data.rows.packing import make_layout
from ats_jax.data.text.holdout import Split
from ats_jax.data.text.hub_dataset import TRAIN, VALIDATION
from ats_jax.data.text.report import Report, in_words
from ats_jax.data.text.source import SourceFile, content_fingerprint, find_files
from ats_jax.data.text_format import format_of
from ats_jax.data.tokens.tokenizer import Tokenizer, build_tokenizer


@dataclasses.dataclass(frozen=True)
class Opened:
  """The tokenised documents of some paths.

  Attributes:
    corpus: the documents.
    tokenizer: the tokenizer that made their ids.
    split: which of them are held out.
    content: a hash of the documents.
    passed_over: counts of the files that were not read, in the form of `Corpus.report`.
    sifted: the verdicts of the filters on the documents; None = there are no filters.
  """

  corpus: Corpus
  tokenizer: Tokenizer
  split: Split
  content: str
  passed_over: dict[str, Any]
  sifted: cache.Folder | None = None


class TextFiles(NamedTuple):
  """The files of some paths, before they are tokenised.

  Attributes:
    cfg: says how they are read.
    files: the files to read.
    fingerprint: a hash of their names and contents.
    passed_over: counts of the files that are not read, in the form of `Corpus.report`.
    split: which of their documents are held out.
    sifted: the verdicts of the filters on the documents; None = there are no filters.
  """

  cfg: DataConfig
  files: list[SourceFile]
  fingerprint: str
  passed_over: dict[str, Any]
  split: Split
  sifted: cache.Folder | None = None

  @property
  def content(self) -> str:
    """A hash of the documents."""
    return self.split.content(self.fingerprint)

  @property
  def bpe_key(self) -> str:
    """Names the training text, in the cache's key of a BPE."""
    return cache.digest(self.content, self.split.fraction, format_of(self.cfg).key)

  def train_texts(self) -> Iterator[str]:
    """Training text for a BPE; raises as `corpus.train_texts`."""
    read, strict = format_of(self.cfg).pieces, self.cfg.strict
    return train_texts(self.files, read, self.split, strict=strict)


def find_documents(
  cfg: DataConfig,
  fraction: float,
  tokenizer: Tokenizer | None,
  options: TokeniseOptions = DEFAULT_OPTIONS,
) -> TextFiles:
  """The files of `cfg.paths`, and what of them is held out.

  Args:
    cfg: everything but `num_workers` and `prefetch` is read.
    fraction: share of the documents to hold out, from 0 to 1.
    tokenizer: the tokenizer of the ids, if it exists already.
    options: processes and progress of tokenising, which filters follow too.

  Raises:
    ValueError: as `open_datasets`.
  """
  files, fingerprint, passed_over = _find(cfg.paths, cfg, TRAIN)
  sifted = None
  if cfg.filters:
    from ats_jax.data.filters.sift import sift  # here: few texts are filtered

    files, fingerprint, sifted = sift(cfg, files, fingerprint, options)
  split = format_of(cfg).plan_split(fraction, files, fingerprint, tokenizer)
  return TextFiles(cfg, files, fingerprint, passed_over, split, sifted)


def open_documents(
  cfg: DataConfig,
  fraction: float,
  options: TokeniseOptions = DEFAULT_OPTIONS,
  tokenizer: Tokenizer | None = None,
) -> Opened:
  """The documents of `cfg.paths`, and the tokenizer that they ask for.

  Args:
    cfg: everything but `num_workers` and `prefetch` is read.
    fraction: share of the documents to hold out, from 0 to 1.
    options: processes and progress of tokenising.
    tokenizer: in place of what `cfg.tokenizer` says, without a template.

  Raises:
    ValueError: as `open_datasets`.
  """
  given, text_format = tokenizer or given_tokenizer(cfg), format_of(cfg)
  if folder := prepared.folder_of(cfg.paths):
    opened = _open_prepared(cfg, folder, fraction)
    asked = text_format.with_template(given or opened.tokenizer.of_text)
    prepared.check_tokenizer(folder, opened.tokenizer, asked)
    _say_counts(opened.corpus)
    return opened
  texts = find_documents(cfg, fraction, given, options)
  of_text = given or build_tokenizer(cfg, texts.train_texts, corpus_fingerprint=texts.bpe_key)
  tokenizer = text_format.with_template(of_text)
  corpus = text_format.open_corpus(texts.files, texts.fingerprint, tokenizer, texts.split, options)
  _say_counts(corpus)
  return Opened(corpus, tokenizer, texts.split, texts.content, texts.passed_over, texts.sifted)


def given_tokenizer(cfg: DataConfig) -> Tokenizer | None:
  """The tokenizer that `cfg` names; None = it is to be made of the text.

  Raises:
    ValueError: as `build_tokenizer`.
  """
  return None if cfg.tokenizer == "bpe" else build_tokenizer(cfg, lambda: ())


def _say_counts(corpus: Corpus) -> None:
  logging.info("Text: %s.", in_words(corpus.report["balance"]))


def _open_prepared(cfg: DataConfig, folder: Path, fraction: float) -> Opened:
  made = prepared.load(folder, cfg)
  split = made.split_for(fraction)
  if split.why:
    logging.warning("%s", split.why)
  nothing = prepared.NOTHING_PASSED_OVER
  return Opened(made.corpus, made.tokenizer, split, made.content, nothing, made.sifted)


def prepare(cfg: DataConfig, out: Path, options: TokeniseOptions) -> Opened:
  """Tokenise `cfg.paths` into the folder `out`, which then serves as `data.paths` itself.

  What was done before the process was killed is kept.

  Args:
    cfg: everything but `num_workers` and `prefetch` is read.
    out: the folder, made if need be.
    options: processes and progress of tokenising.

  Raises:
    ValueError: as `open_datasets`, and for paths that were prepared before.
  """
  if folder := prepared.folder_of(cfg.paths):
    raise ValueError(f"{folder} is prepared already: train on it by --config.data.paths={folder}.")
  cfg = dataclasses.replace(cfg, cache_dir=str(out))
  if cfg.sources:
    raise ValueError(
      f"data.sources names {', '.join(cfg.sources)}. Prepare each of them apart, with the same "
      "tokenizer.json as data.tokenizer, and give the folders to the training: name=folder."
    )
  fraction = 0.0 if cfg.validation_paths else cfg.validation_fraction
  opened = open_documents(cfg, fraction, options._replace(copies_ids=True))
  if not len(opened.corpus):
    raise ValueError(nothing_left(counts_of(opened.corpus.report)))
  made = prepared.Prepared(
    opened.corpus, opened.tokenizer, opened.split, opened.content, opened.sifted
  )
  prepared.save(out, cfg, made)
  return opened


def open_datasets(
  cfg: DataConfig, seed: int, tokenizer: Tokenizer | None = None
) -> tuple[TrainRows, Dataset]:
  """The training and the validation split; tokenised, packed and cached on first use.

  The validation split is packed with seed 0 whatever `seed` is, so that runs compare. It is empty
  where it was asked to be, and where there is too little text for one, which is logged.

  Args:
    cfg: everything but `num_workers` and `prefetch` is read.
    seed: seed of the order of training documents and of rows.
    tokenizer: the tokenizer to use in place of `cfg.tokenizer`, without a template.

  Raises:
    ValueError: for paths that hold nothing, malformed input if `cfg.strict`, or a training text
      shorter than one row.
  """
  fraction = 0.0 if cfg.validation_paths else cfg.validation_fraction
  opened = open_documents(cfg, fraction, tokenizer=tokenizer)
  split, corpus = opened.split, opened.corpus
  out = split.held_out(corpus.key, corpus.part)
  train = row_order(cfg).rows(cfg, training_documents(cfg, opened, np.flatnonzero(~out)), seed)
  num_tokens, num_documents = train.info.num_tokens, train.info.num_documents
  if not num_documents:
    raise ValueError(nothing_left(counts_of(train.info.report)))
  if num_tokens < cfg.seq_len and split.block:
    logging.warning(
      "Without what is held out the text would be shorter than one row of data.seq_len=%d. "
      "Nothing is held out: the run has no validation loss.",
      cfg.seq_len,
    )
    return open_datasets(dataclasses.replace(cfg, validation_fraction=0.0), seed, tokenizer)
  if num_tokens < cfg.seq_len:
    raise ValueError(
      f"The training text has {num_tokens} tokens in {num_documents} documents, less than one row "
      f"of data.seq_len={cfg.seq_len}. Give more text or set data.seq_len to at most {num_tokens}."
    )
  if cfg.validation_paths:
    return train, open_split(cfg, 0, cfg.validation_paths, opened.tokenizer)
  validation = pack(cfg, 0, opened, np.flatnonzero(out), "validation")
  if split.fraction and not validation.info.num_documents:
    raise ValueError(
      f"The validation split is empty: of {num_documents} documents none falls into "
      f"data.validation_fraction={split.fraction}. Raise it, give data.validation_paths, or set it "
      "to 0 to train without validation."
    )
  return train, validation


def training_documents(cfg: DataConfig, opened: Opened, indices: np.ndarray) -> TrainingDocuments:
  """What an order makes rows of: the documents to train on, by their indices."""
  text_format = format_of(cfg)
  return TrainingDocuments(
    opened.corpus,
    indices,
    opened.tokenizer,
    key=(opened.content, opened.split.fraction, opened.tokenizer.fingerprint, text_format.key),
    cuts=text_format.cuts,
    pack=lambda cfg, seed, documents, part: pack(cfg, seed, opened, documents, part),
  )


def open_split(cfg: DataConfig, seed: int, paths: Sequence[str], tokenizer: Tokenizer) -> Dataset:
  """All documents of `paths`, with a tokenizer that is there already.

  Args:
    cfg: says how to read, pack and cache.
    seed: seed of the order of documents and rows.
    paths: paths in the form of `data.paths`.
    tokenizer: makes the ids.

  Raises:
    ValueError: if the paths hold no document, or something malformed and `cfg.strict`.
  """
  if folder := prepared.folder_of(paths):
    opened = _open_prepared(cfg, folder, 0.0)
    prepared.check_tokenizer(folder, opened.tokenizer, tokenizer)
  else:
    files, content, passed_over = _find(paths, cfg, VALIDATION)
    corpus = format_of(cfg).open_corpus(files, content, tokenizer, Split(0.0), DEFAULT_OPTIONS)
    opened = Opened(corpus, tokenizer, Split(0.0), content, passed_over)
  dataset = pack(cfg, seed, opened, np.arange(len(opened.corpus)), "all")
  if not dataset.info.num_documents:
    raise ValueError(
      f"paths={','.join(paths)!r} holds no document: {counts_of(dataset.info.report)}."
    )
  return dataset


def _find(
  paths: Sequence[str], cfg: DataConfig, split: str
) -> tuple[list[SourceFile], str, dict[str, Any]]:
  """The files of a split of `paths`, the hash of their contents, and what was passed over."""
  root = cache.cache_root(cfg.cache_dir)
  lines = io.StringIO()
  report = Report(strict=cfg.strict, file=lines)
  files = find_files(paths, report, root, split=split)
  passed_over = {**report.summary(), "files": []}
  if lines.getvalue():
    path = root / f"paths-{cache.digest(lines.getvalue())}.txt"
    cache.write_atomically(path, lines.getvalue())
    passed_over["files"].append(str(path))
    logging.warning("Some of the files in paths are passed over: %s. See %s.", report, path)
  return files, content_fingerprint(files, root), passed_over


def counts_of(report: Mapping[str, Any]) -> str:
  """What was left out, of a corpus's report, with the first of it."""
  counts = {**report["malformed"], **report["skipped"], **report.get("filtered", {})}
  return "; ".join([*(f"{n} {kind}" for kind, n in counts.items()), *report["first"]]) or NO_RECORD


def pack(
  cfg: DataConfig, seed: int, opened: Opened, documents: np.ndarray, part: str, *, says: bool = True
) -> Dataset:
  """Rows of these documents: of the `part` "train", "validation" or "all"; `says`: in the log."""
  corpus, tokenizer, passed_over = opened.corpus, opened.tokenizer, opened.passed_over
  split = [opened.content, part, opened.split.fraction]
  packing, text_format = cfg.packing_kind, format_of(cfg)
  weights = text_format.weights
  max_documents = cfg.max_segments // (2 if text_format.second_code else 1)
  shape = [cfg.seq_len, packing, max_documents, *([cfg.overlap] if cfg.overlap else [])]
  fingerprint = cache.digest("rows", split, tokenizer.fingerprint, text_format.key, shape)
  if weights is not None:
    fingerprint = cache.digest(fingerprint, weights.tolist())

  def build(folder: Path) -> dict[str, Any]:
    fitting, left_out = text_format.fitting(corpus, documents, cfg.seq_len)
    lengths = corpus.length[fitting] + 1
    plan = make_layout(
      lengths, _order(corpus.key[fitting], seed), seq_len=cfg.seq_len, packing=packing,
      max_segments=max_documents, overlap=cfg.overlap,
    )  # fmt: skip
    for name, values in plan._replace(document=fitting[plan.document])._asdict().items():
      np.save(folder / f"{name}.npy", values)
    np.save(folder / "documents.npy", fitting)
    # A loss of answers alone is not one of the bytes of all that was said.
    num_bytes = corpus.num_bytes[fitting] * (weights is None)
    return {
      "num_documents": len(fitting),
      "num_tokens": int(lengths.sum()),
      "num_bytes": int(num_bytes.sum()) if (num_bytes > 0).all() else 0,
      "left_out": left_out,
    }

  root = cache.cache_root(cfg.cache_dir)
  plan = cache.cached(root, "plan-" + cache.digest("plan", fingerprint, seed), build)
  left_out = plan.meta["left_out"]
  if left_out:
    logging.warning(
      "Of %s documents these are left out: %s. A larger data.seq_len has room for longer ones.",
      f"{len(documents):,}", ", ".join(f"{count:,} {kind}" for kind, count in left_out.items()),
    )  # fmt: skip
  report = {
    "malformed": Counter(passed_over["malformed"]) + Counter(corpus.report["malformed"]),
    "skipped": Counter(passed_over["skipped"])
    + Counter(corpus.report["skipped"])
    + Counter(left_out)
    + Counter(corpus.report["filtered"]),
    "first": passed_over["first"] + corpus.report["first"],
    "files": [*passed_over["files"], corpus.report["file"]],
  }
  packed = Packed(
    corpus,
    plan,
    tokenizer,
    seq_len=cfg.seq_len,
    weights=weights,
    overlap=cfg.overlap,
    second_code=text_format.second_code,
  )
  dataset = Dataset(packed, fingerprint=fingerprint, seed=seed, report=report)
  if says:
    logging.info("%s: %s, packed by %s.", part.capitalize(), dataset.info.in_words(), packing)
  return dataset


def _order(key: np.ndarray, seed: int) -> np.ndarray:
  """A permutation that depends on names and seed only, not on a library's generator."""
  mixed = key ^ np.uint64(int(cache.digest("order", seed)[:16], 16))
  mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
  return np.argsort(mixed ^ (mixed >> np.uint64(29)), kind="stable")
