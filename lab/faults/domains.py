"""Other text than the corpus, made of the documentation that `help()` shows: none is a fault."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from ats_jax.config.schema import DataConfig
from ats_jax.data.rows.dataset import Dataset
from ats_jax.data.splits import open_split
from ats_jax.data.tokens.tokenizer import Tokenizer

EVERY = 5  # one document of so many is held out
# Each Latin letter is two other bytes in UTF-8.
_CYRILLIC = str.maketrans(
  "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
  "абцдефгхийклмнопярстувжышзАБЦДЕФГХИЙКЛМНОПЯРСТУВЖЫШЗ",
)


def table(text: str) -> str:
  """A table of the lines of a document: number, length, words, first word."""
  rows = [(len(line), line.split()) for line in text.splitlines()]
  cells = [(i, size, len(words), *words[:1]) for i, (size, words) in enumerate(rows)]
  return "".join(",".join(map(str, row)) + "\n" for row in cells)


# Prose, the same in the letters of another script, and tables.
DOMAINS: dict[str, Callable[[str], str]] = {
  "prose": str,
  "script": lambda text: text.translate(_CYRILLIC),
  "table": table,
}


def open_domain(name: str, cfg: DataConfig, tokenizer: Tokenizer) -> tuple[Dataset, Dataset]:
  """What is trained on and what is held out of the domain `name` of `DOMAINS`."""
  from pydoc_data.topics import topics

  documents = [DOMAINS[name](text) for _, text in sorted(topics.items())]
  training = [text for i, text in enumerate(documents) if i % EVERY]
  with tempfile.TemporaryDirectory() as folder:

    def dataset(part: str, texts: list[str]) -> Dataset:
      path = Path(folder) / f"{name}-{part}.jsonl"
      path.write_text("".join(json.dumps({cfg.format.text_field: t}) + "\n" for t in texts))
      return open_split(cfg, 0, (str(path),), tokenizer)  # the cache has a copy of it

    return dataset("training", training), dataset("held-out", documents[::EVERY])
