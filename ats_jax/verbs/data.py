"""Look at the data before training on it, or tokenise it ahead."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from absl import flags

from ats_jax import exits
from ats_jax.config import Config
from ats_jax.config.schema import DataConfig
from ats_jax.data.corpus import cache, prepared
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.look.audit import audit, batch_size
from ats_jax.data.look.checks import check_files
from ats_jax.data.look.explain import explain
from ats_jax.data.look.overview import overview
from ats_jax.data.look.page import html_page
from ats_jax.data.look.stats import stats
from ats_jax.data.rows.contract import Rows, TrainRows, leaf_rows
from ats_jax.data.sources import open_data
from ats_jax.data.splits import open_documents, prepare
from ats_jax.data.text.report import Report, in_words
from ats_jax.data.text.source import find_files
from ats_jax.data.tokens.tokenizer import build_tokenizer
from ats_jax.verbs import cli

STATS = """documents, tokens, bytes and lengths of both splits

  ats-jax data stats
  ats-jax data stats --config.data.paths=/path/to/text
"""
AUDIT = """is each token seen exactly once, on any number of hosts and workers, resumed or not?

  ats-jax data audit
  ats-jax data audit --config.data.paths=/path/to/text --config.data.seq_len=1024

Exit code 1 if it finds a fault.
"""
EXPLAIN = """one row of training: each target with its token, role, weight and segment

  ats-jax data explain --config.data.paths=/path/to/text
  ats-jax data explain --row=7 --config.data.paths=chats.jsonl \\
    --config.data.format=chat

In colours on a terminal (not if NO_COLOR is set): one a role, bold for what is in the loss.
"""
PREPARE = """tokenise ahead, in several processes, into a folder to train on

  ats-jax data prepare --out=prepared --config.data.paths=/path/to/text
  ats-jax train --workdir=runs/mine --config.data.paths=prepared

The same command goes on where it was killed. The folder holds all that a training needs: the text
may be moved away. Rows are those of a training on the text itself.
"""
VALIDATE = """each record that is malformed, by file and line, with what is wrong

  ats-jax data validate --config.data.paths=/path/to/text
  ats-jax data validate --config.data.paths=/path/to/text --config.data.format.text_field=content

Exit code 1 if there is one.
"""
REPORT = """a page of what is kept, what is dropped and why, with samples and lengths

  ats-jax data report --out=report.html --config.data.paths=prepared
  ats-jax data report --out=report.html --config.data.paths=/path/to/text \\
    --config.data.filters=exact

One HTML file that needs no network and runs no script. Text is tokenised first, as for a training.
"""
FLAGS = flags.FlagValues()
_CONFIG = cli.ConfigFlag(FLAGS)
_PREPARE_FLAGS = flags.FlagValues()
_PREPARE_CONFIG = cli.ConfigFlag(_PREPARE_FLAGS)
_OUT = flags.DEFINE_string("out", None, "Folder to write.", flag_values=_PREPARE_FLAGS)
_WORKERS = flags.DEFINE_integer(
  "workers", None, "Processes that filter and tokenise; default: one for each core.", lower_bound=0,
  flag_values=_PREPARE_FLAGS,
)  # fmt: skip
REPORT_FLAGS = flags.FlagValues()
_REPORT_CONFIG = cli.ConfigFlag(REPORT_FLAGS)
_PAGE = flags.DEFINE_string("out", None, "HTML file to write.", flag_values=REPORT_FLAGS)
EXPLAIN_FLAGS = flags.FlagValues()
_EXPLAIN_CONFIG = cli.ConfigFlag(EXPLAIN_FLAGS)
_ROW = flags.DEFINE_integer(
  "row", 0, "Which row, in the order of training.", lower_bound=0, flag_values=EXPLAIN_FLAGS
)


def _audit(train: TrainRows, validation: Rows) -> bool:
  """Prints a line for each scenario; whether all of them are without a fault."""
  del validation
  info = train.info
  print(
    f"{info.num_tokens:,} targets of {info.num_documents:,} documents in {info.num_rows:,} rows; "
    f"{batch_size(train)} rows a batch, one epoch each"
  )
  line = "{:<42} {:>8} {:>9} {:>12} {:>8} {:>9}  {}".format
  print(line("", "batches", "rows", "targets", "lost", "repeated", ""))
  good = True
  for result in audit(train):
    *columns, difference = result
    print(line(*columns, f"FAULT: {difference}" if difference else "exactly once"))
    good = good and not difference
  return good


def _stats(train: TrainRows, validation: Rows) -> bool:
  """Prints the figures of both splits, of each part."""
  for name, rows in (*leaf_rows(train, "train"), *leaf_rows(validation, "validation")):
    print(f"{name}: {rows.info.fingerprint}")
    for what, value in stats(rows.info).items():
      print(f"  {what:<48} {value:,}" if isinstance(value, int) else f"  {what:<48} {value}")
  return True


def _command(look: Callable[[TrainRows, Rows], bool], about: str) -> cli.Command:
  def main(argv: list[str]) -> int:
    del argv
    cfg = _CONFIG.value
    return exits.DONE if look(*_open_whole(cfg)) else exits.FAULT

  return cli.Command(main, FLAGS, about)


def _open_whole(cfg: Config) -> tuple[TrainRows, Rows]:
  if cfg.data.reading.is_streamed:
    raise ValueError(
      f"data.reading={cfg.data.reading.name} reads a window of the text at a time, and this looks "
      "at all of it. Set data.reading=whole."
    )
  return open_data(cfg.data, cfg.seed)


def _explain(argv: list[str]) -> None:
  """Prints a row."""
  del argv
  cfg = _EXPLAIN_CONFIG.value
  train, _ = _open_whole(cfg)
  coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
  for line in explain(train, _ROW.value, coloured=coloured):
    print(line)


def _prepare(argv: list[str]) -> int:
  """Tokenise into a folder; show how far it is, and the counts."""
  del argv
  out = Path(cli.require(_OUT.value, "out", "prepared")).expanduser()
  cfg = _PREPARE_CONFIG.value
  workers = len(os.sched_getaffinity(0)) if _WORKERS.value is None else _WORKERS.value
  began = time.monotonic()
  how = (
    TokeniseOptions(workers, say=_show, every_secs=0.5)
    if sys.stderr.isatty()
    else TokeniseOptions(workers)
  )
  opened = prepare(cfg.data, out, how)
  corpus = opened.corpus
  print(f"{in_words(corpus.report['balance'])} (see {corpus.report['file']})")
  print(
    f"{int(corpus.length.sum()):,} tokens of {int(corpus.num_bytes.sum()) / 1e6:,.1f} MB in "
    f"{time.monotonic() - began:.1f} s. To train: --config.data.paths={out}"
  )
  return exits.DONE


def _report(argv: list[str]) -> None:
  """Write the page."""
  del argv
  out = Path(cli.require(_PAGE.value, "out", "report.html")).expanduser()
  if out.is_dir():
    raise ValueError(f"--out={out} is a folder. Name a file, e.g. {out / 'report.html'}.")
  if not out.parent.is_dir():
    raise ValueError(f"--out={out}: there is no folder {out.parent}. Make it, or name another.")
  cfg = _REPORT_CONFIG.value.data
  cfg = dataclasses.replace(cfg, paths=_all_paths(cfg))
  fraction = 0.0 if prepared.folder_of(cfg.paths) else cfg.validation_fraction
  shown = overview(cfg, open_documents(cfg, fraction))
  out.write_text(html_page(shown), encoding="utf-8")
  print(f"{in_words(shown.balance)}: {out}")


def _all_paths(cfg: DataConfig) -> tuple[str, ...]:
  """The paths of all sources, as of one text."""
  return (*cfg.paths, *(path for paths in cfg.sources.values() for path in paths))


def _show(text: str) -> None:
  print(f"\r\033[K{text[: os.get_terminal_size(2).columns - 1]}", end="", file=sys.stderr)


def _validate(argv: list[str]) -> int:
  """Name what is malformed; count all."""
  del argv
  cfg = _CONFIG.value.data
  found, report = Report(strict=False, file=sys.stdout), Report(strict=False, file=sys.stdout)
  files = find_files(_all_paths(cfg), found, cache.cache_root(cfg.cache_dir))
  tokenizer = None if cfg.tokenizer == "bpe" else build_tokenizer(cfg, lambda: ())
  check_files(files, cfg, tokenizer, report)
  for kind, count in (*report.malformed.items(), *report.skipped.items()):
    print(f"  {kind:<30} {count:,}")
  print(f"{in_words(report.balance())}; {len(files):,} files, {found.dropped:,} passed over")
  return exits.FAULT if report.malformed or found.malformed else exits.DONE


COMMANDS = {
  "stats": _command(_stats, STATS),
  "audit": _command(_audit, AUDIT),
  "explain": cli.Command(_explain, EXPLAIN_FLAGS, EXPLAIN),
  "validate": cli.Command(_validate, FLAGS, VALIDATE),
  "prepare": cli.Command(_prepare, _PREPARE_FLAGS, PREPARE),
  "report": cli.Command(_report, REPORT_FLAGS, REPORT),
}
