"""The section `data`."""

import dataclasses
import operator
from typing import Any

from ats_jax.config.schema import rules
from ats_jax.config.schema.filters import FILTERS, Filter
from ats_jax.config.schema.mixture import Phase, check_mixture, check_rates, check_sources
from ats_jax.config.schema.reading import READINGS, Reading
from ats_jax.config.schema.row_order import ROW_ORDERS, RowOrderConfig
from ats_jax.config.schema.setting import Condition, Table, of_flags, section, setting, when
from ats_jax.config.schema.text_format import FORMATS, Format

_MIXED = when("data.sources")


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Text to batches."""

  paths: tuple[str, ...] = setting(
    (),
    "files, folders or globs, local or gs:// s3:// hf:// https:// (.txt .jsonl "
    ".parquet .arrow .array_record .bin .npy ..., text also as .gz .zst .bz2), "
    "datasets://OWNER/NAME, or a folder of `ats-jax data prepare`; empty = this Python's own "
    "standard library sources; on resume the same text may have another path",
    resume="free",
  )
  sources: Table[tuple[str, ...]] = setting(
    Table(),
    "in place of data.paths: sources by name, each with paths as there, whose rows are mixed; on "
    "the command line web=a.txt,web=b.txt,code=src",
    resume="free",
  )
  mixture: Table[float] = setting(
    Table(),
    "how many rows of each source, in this ratio; empty = data.phases, or else by size and "
    "data.temperature",
    low=0.0,
    resume="free",
    needs=_MIXED,
  )
  phases: tuple[Phase, ...] = setting(
    (),
    "in place of data.mixture: ratios one after another, each with a length and, if wanted, a "
    "learning rate of its own; in a config file only",
    resume="free",
    needs=_MIXED,
  )
  mixture_order: str = setting(
    "even",
    "of sources: how their rows take turns: 'even' (each has its share of any number of "
    "rows, to less than one), or 'random' (it has its share of each 4,096 rows or so)",
    choices=("even", "random"),
    needs=_MIXED,
  )
  temperature: float = setting(
    1.0,
    "of sources without data.mixture or data.phases: one of n rows has the weight "
    "n^(1/temperature); above 1 small ones come more often than their size says",
    needs=_MIXED,
  )
  validation_paths: tuple[str, ...] = setting(
    (), "the same for validation; empty = hold out a fraction", resume="free"
  )
  validation_sets: Table[tuple[str, ...]] = setting(
    Table(),
    "more sets to validate on: paths by name; their metrics are eval/NAME/...",
    resume="free",
  )
  validation_fraction: float = setting(
    0.05,
    "share held out: of the documents, or where those are few of blocks inside them; by hash",
    low=0.0,
    high=0.5,
    needs=of_flags(Condition("data.validation_paths", "no data.validation_paths", operator.not_)),
  )
  format: Format = section(FORMATS, "text")
  filters: tuple[Filter, ...] = setting(
    (),
    "which documents to keep: filters in order; options are given in a config file, as in "
    "(Exact(), Near(threshold=0.7)); empty = all",
    elements=FILTERS,
  )
  reading: Reading = section(READINGS, "whole")
  strict: bool = setting(
    False, "stop at the first malformed line or file instead of counting it", resume="free"
  )
  tokenizer: str = setting(
    "bpe",
    "'bytes', 'bpe' (byte-level BPE trained on the training text), or a file: a tokenizer.json, a "
    ".model of SentencePiece, a .tiktoken file",
  )
  bpe_vocab_size: int = setting(
    2048,
    "size of the trained BPE with its 3 special tokens",
    unit="tokens",
    low=300,
    needs=of_flags(when("data.tokenizer", "bpe")),
  )
  seq_len: int = setting(256, "length of a packed row", unit="tokens", low=8, high=2**24)
  batch_size: int = setting(
    16, "packed rows per optimizer update, over all hosts", low=1, high=2**24, resume="free"
  )
  packing: str = setting(
    "auto",
    "how documents fill rows: 'concat' (cut at row ends, no padding), 'first_fit' or 'best_fit' "
    "(documents shorter than a row stay whole); auto = concat for text, best_fit for conversations",
    choices=("auto", "concat", "first_fit", "best_fit"),
  )
  overlap: int = setting(
    0,
    "tokens of a document that are repeated, as context that does not count in the loss, where it "
    "goes on in another row",
    unit="tokens",
    low=0,
    needs=when("data.format.name", "text"),
  )
  max_segments: int = setting(64, "documents in one row at most; the rest is padding", low=1)
  order: RowOrderConfig = section(ROW_ORDERS, "shuffled")
  num_workers: int = setting(
    0, "loader processes; 0 = threads of the main process", low=0, resume="free"
  )
  prefetch: int = setting(
    4, "batches made ahead by each loader process or thread pool", low=1, resume="free"
  )
  cache_dir: str = setting(
    "", "tokenised corpora and trained tokenizers; empty = ~/.cache/ats_jax/data", resume="free"
  )

  @property
  def packing_kind(self) -> str:
    """`packing`, or what the format takes for 'auto'."""
    return self.format.AUTO_PACKING if self.packing == "auto" else self.packing

  def check(self, cfg: Any) -> None:
    """Refuse a filter named twice, and sources and phases that cannot be.

    Not a `tokenizer` that is gone: a run is read with the one in its workdir.
    """
    rules.is_local(cfg, "data.cache_dir")
    if self.overlap >= self.seq_len:
      raise ValueError(
        f"data.overlap={self.overlap} leaves a row of data.seq_len={self.seq_len} no room for text "
        f"that goes on. Set it to at most {self.seq_len - 1}."
      )
    check_sources(self)
    check_mixture(cfg)
    check_rates(cfg)
    names = [one.name for one in self.filters]
    if twice := next((name for name in names if names.count(name) > 1), None):
      raise ValueError(f"data.filters names {twice} twice. Leave one of them out.")
