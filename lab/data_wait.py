r"""How long a training waits for its data: raw Parquet, the same streamed, and a mixture of eight.

Copies text files of some folders into tables (Parquet, which needs the extra `formats`, or JSON
lines), eight of them, and trains three times from an empty cache: on all tables as one text, on the
same with data.reading=streaming, and on the eight as sources with uneven weights and two phases.
Prints the time waited for batches as a share of that in which steps were made, both from
performance.json of the run; the seconds until the first step could begin, without compiling; and
tokens a second.
Command: python -m lab.data_wait --config=gpt_125m --config.num_steps=1000 \
  --text=/usr/lib/python3,.venv/lib [--megabytes=500] [--format=parquet]
"""

import importlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from ats_jax.checkpoint import workdir
from ats_jax.cluster import runtime
from ats_jax.config import from_config_dict
from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.reading import Streaming
from ats_jax.config.schema.setting import Table
from ats_jax.config.tree import edited
from ats_jax.train.loop import train
from ats_jax.verbs import cli
from lab.runs import Changes, markdown

SOURCES = 8
SUFFIXES = {".py", ".pyi", ".txt", ".md", ".rst", ".c", ".h", ".html", ".js"}
_CONFIG = cli.ConfigFlag()
_ROOTS = flags.DEFINE_list("text", None, "Folders whose text is copied.", required=True)
_SIZE = flags.DEFINE_integer("megabytes", 500, "Of text.", lower_bound=1)
_FORMAT = flags.DEFINE_enum("format", "parquet", ["parquet", "jsonl"], "Of the tables.")
_WINDOW = flags.DEFINE_float("window_mb", 64.0, "data.reading.window_mb of what is streamed.")
_WORKERS = flags.DEFINE_integer("loaders", 0, "data.num_workers.", lower_bound=0)


def texts(roots: Sequence[str], most: int) -> list[str]:
  """Text files, until there are `most` bytes."""
  found, size = [], 0
  for root in roots:
    for path in sorted(Path(root).expanduser().rglob("*")):
      if size >= most:
        return found
      if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size:
        try:
          found.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
          continue
        size += len(found[-1].encode())
  return found


def write(folder: Path, found: list[str], kind: str) -> dict[str, Path]:
  """Tables of the texts, by the name of a source; the first ones are larger."""
  paths = {}
  ends = [len(found) * (n + 1) * (2 * SOURCES - n) // (SOURCES * (SOURCES + 1)) for n in
          range(SOURCES)]  # fmt: skip
  for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
    path = folder / f"{number}.{kind}"
    if kind == "parquet":
      arrow, parquet = (importlib.import_module(f"pyarrow{m}") for m in ("", ".parquet"))
      parquet.write_table(arrow.table({"text": found[begin:end]}), path)
    else:
      lines = (json.dumps({"text": text}) + "\n" for text in found[begin:end])
      path.write_text("".join(lines), encoding="utf-8")
    paths[f"s{number}"] = path
  return paths


def cases(paths: dict[str, Path], steps: int) -> dict[str, Changes]:
  """What is trained on, by name."""
  one = tuple(map(str, paths.values()))
  rising = Table({name: n + 1.0 for n, name in enumerate(paths)})
  falling = Table({name: float(SOURCES - n) for n, name in enumerate(paths)})
  return {
    "raw": {"data.paths": one},
    "streamed": {"data.paths": one, "data.reading": Streaming(window_mb=_WINDOW.value)},
    f"mixture of {SOURCES}": {
      "data.sources": {name: (str(path),) for name, path in paths.items()},
      "data.phases": (Phase(rising, steps=steps // 2), Phase(falling)),
    },
  }


def measured(config: ConfigDict, changes: Changes, folder: Path) -> list[str]:
  """Train; a row of the table."""
  config = edited(config.to_dict())
  common: Changes = {
    "data.validation_fraction": 0.0, "data.cache_dir": str(folder / "cache"),
    "data.num_workers": _WORKERS.value, "data.validation_paths": (), "eval.bigram_baseline": False,
    "checkpoint.every_steps": config.num_steps, "log.writers": ("jsonl",), "sample.max_tokens": 0,
  }  # fmt: skip
  config.update_from_flattened_dict(common | changes)
  train(from_config_dict(config), folder / "run")
  stats = json.loads((folder / "run" / workdir.PERFORMANCE).read_text())
  waited, stepped = (stats[f"goodput/{name}_secs"] for name in ("data_wait", "step"))
  tokens = config.num_steps * config.data.batch_size * config.data.seq_len
  return [
    f"{waited:.2f}", f"{waited / (waited + stepped):.3%}", f"{stats['goodput/other_secs']:.1f}",
    f"{tokens / (waited + stepped):,.0f}", stats["device"],
  ]  # fmt: skip


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  config = edited(_CONFIG.nested())
  runtime.configure(from_config_dict(config))
  rows = []
  with tempfile.TemporaryDirectory() as root:
    found = texts(_ROOTS.value, 10**6 * _SIZE.value)
    size = sum(map(len, found)) / 1e6
    paths = write(Path(root), found, _FORMAT.value)
    for name, changes in cases(paths, config.num_steps).items():
      folder = Path(root) / name.replace(" ", "-")
      folder.mkdir()
      rows.append(
        [f"{name} ({size:.0f} MB of {_FORMAT.value})", *measured(config, changes, folder)]
      )
      print(rows[-1], flush=True)
  header = ["", "s waited", "of the steps' time", "s around the steps", "tokens/s", "device"]
  print(markdown(header, rows))


if __name__ == "__main__":
  cli.run(main)
