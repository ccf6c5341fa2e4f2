"""Look at the data before training on it."""

import os
import sys
from collections.abc import Callable

from absl import flags

from ats_jax import cli, exits
from ats_jax.data.audit import BATCH_SIZE, audit
from ats_jax.data.dataset import Dataset
from ats_jax.data.explain import explain
from ats_jax.data.splits import open_datasets
from ats_jax.data.stats import stats

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
    --config.data.chat_template=chatml --config.data.packing=best_fit

In colours on a terminal (not if NO_COLOR is set): one a role, bold for what is in the loss.
"""
FLAGS = flags.FlagValues()
_CONFIG = cli.ConfigFlag(FLAGS)
EXPLAIN_FLAGS = flags.FlagValues()
_EXPLAIN_CONFIG = cli.ConfigFlag(EXPLAIN_FLAGS)
_ROW = flags.DEFINE_integer(
  "row", 0, "Which row, in the order of training.", lower_bound=0, flag_values=EXPLAIN_FLAGS
)


def _audit(train: Dataset, validation: Dataset) -> bool:
  """Prints a line for each scenario; whether all of them are without a fault."""
  del validation
  print(
    f"{train.num_tokens:,} targets of {train.num_documents:,} documents in {train.num_rows:,} "
    f"rows; {BATCH_SIZE} rows a batch, one epoch each"
  )
  line = "{:<42} {:>8} {:>9} {:>12} {:>8} {:>9}  {}".format
  print(line("", "batches", "rows", "targets", "lost", "repeated", ""))
  good = True
  for result in audit(train):
    *columns, difference = result
    print(line(*columns, f"FAULT: {difference}" if difference else "exactly once"))
    good = good and not difference
  return good


def _stats(train: Dataset, validation: Dataset) -> bool:
  """Prints the figures of both splits."""
  for name, split in (("train", train), ("validation", validation)):
    print(f"{name}: {split.fingerprint}")
    for what, value in stats(split).items():
      print(f"  {what:<48} {value:,}" if isinstance(value, int) else f"  {what:<48} {value}")
  return True


def _command(look: Callable[[Dataset, Dataset], bool], about: str) -> cli.Command:
  def main(argv: list[str]) -> int:
    del argv
    cfg = _CONFIG.value
    return exits.DONE if look(*open_datasets(cfg.data, cfg.seed)) else exits.FAULT

  return cli.Command(main, FLAGS, about)


def _explain(argv: list[str]) -> None:
  """Prints a row."""
  del argv
  cfg = _EXPLAIN_CONFIG.value
  train, _ = open_datasets(cfg.data, cfg.seed)
  coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
  for line in explain(train, _ROW.value, coloured=coloured):
    print(line)


COMMANDS = {
  "stats": _command(_stats, STATS),
  "audit": _command(_audit, AUDIT),
  "explain": cli.Command(_explain, EXPLAIN_FLAGS, EXPLAIN),
}
if __name__ == "__main__":
  cli.main("data", COMMANDS)
