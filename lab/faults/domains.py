"""Other text than the corpus, made of the documentation that `help()` shows.

A run may legitimately hold a little of each: nothing of it is a fault.
"""

import base64
import json
import tempfile
import zlib
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


def script(text: str) -> str:
  """The same prose in the letters of another script."""
  return text.translate(_CYRILLIC)


def encoded(text: str) -> str:
  """A document that is a compressed file in base64, as they are found among code."""
  return base64.encodebytes(zlib.compress(text.encode(), 9)).decode()


DOMAINS: dict[str, Callable[[str], str]] = {"script": script, "base64": encoded}


def topics() -> list[str]:
  """The documents, in the order of their names."""
  from pydoc_data.topics import topics

  return [text for _, text in sorted(topics.items())]


def open_domain(name: str, cfg: DataConfig, tokenizer: Tokenizer) -> tuple[Dataset, Dataset]:
  """What is trained on and what is held out of the domain `name` of `DOMAINS`."""
  documents = [DOMAINS[name](text) for text in topics()]
  held_out = documents[::EVERY]
  training = [text for i, text in enumerate(documents) if i % EVERY]
  with tempfile.TemporaryDirectory() as folder:
    return (
      _dataset(Path(folder) / f"{name}-training.jsonl", training, cfg, tokenizer),
      _dataset(Path(folder) / f"{name}-held-out.jsonl", held_out, cfg, tokenizer),
    )


def _dataset(path: Path, documents: list[str], cfg: DataConfig, tokenizer: Tokenizer) -> Dataset:
  lines = (json.dumps({cfg.format.text_field: text}) for text in documents)
  path.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return open_split(cfg, 0, (str(path),), tokenizer)  # the cache has a copy of it


def prose() -> str:
  """The path of the documentation as it is."""
  import pydoc_data.topics

  return str(pydoc_data.topics.__file__)
