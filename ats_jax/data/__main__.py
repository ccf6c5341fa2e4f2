"""Look at the data before training on it.

python -m ats_jax data stats [--config=configs/debug.py [--config.data.name=value]]
python -m ats_jax data audit [--config=configs/debug.py [--config.data.name=value]]
"""

from ats_jax import cli
from ats_jax.config import Config, from_config_dict
from ats_jax.config.extend import load_extensions
from ats_jax.data.audit import BATCH_SIZE, audit
from ats_jax.data.dataset import Dataset
from ats_jax.data.splits import open_datasets
from ats_jax.data.stats import stats

_CONFIG = cli.define_config_flag()


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


_COMMANDS = {"audit": _audit, "stats": _stats}


def main(argv: list[str]) -> None:
  """Runs a command; exit code 1 if the data or the settings are at fault."""
  cfg = load_extensions(from_config_dict(_CONFIG.value)) if _CONFIG.value else Config()
  if not _COMMANDS[argv[1]](*open_datasets(cfg.data, cfg.seed)):
    raise SystemExit(1)


if __name__ == "__main__":
  cli.run(main, commands=tuple(_COMMANDS))
