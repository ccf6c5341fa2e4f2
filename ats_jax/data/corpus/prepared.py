"""A folder that `data prepare` made: a corpus, its tokenizer and what they were made of.

The corpus is one of the cache's, so that rows are those of the text it was made of, bit for bit.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.filters import spelled
from ats_jax.data.corpus import cache
from ats_jax.data.corpus.corpus import Corpus, warn_of_malformed
from ats_jax.data.text.holdout import Split
from ats_jax.data.text.source import PREPARED as INDEX
from ats_jax.data.text.source import SourceFile
from ats_jax.data.tokens.file import load_tokenizer, save_tokenizer
from ats_jax.data.tokens.tokenizer import Tokenizer
from ats_jax.store.paths import Path as StorePath

TOKENIZER = "tokenizer.json"
NOTHING_PASSED_OVER: dict[str, Any] = {"malformed": {}, "skipped": {}, "first": [], "files": []}


@dataclasses.dataclass(frozen=True)
class Prepared:
  """What such a folder holds.

  Attributes:
    corpus: the documents.
    tokenizer: the tokenizer of their ids.
    split: the split that was planned for them.
    content: a hash of the documents.
    sifted: what filters said of them; None = there were none.
  """

  corpus: Corpus
  tokenizer: Tokenizer
  split: Split
  content: str
  sifted: cache.Folder | None = None

  def split_for(self, fraction: float) -> Split:
    """What is held out if a share of `fraction` is asked for.

    Raises:
      ValueError: if other blocks would be: those are cut when the folder is made.
    """
    if not fraction:
      return Split(0.0)
    if not self.split.block:
      return self.split if self.split.why else Split(fraction)
    if fraction != self.split.fraction:
      raise ValueError(
        f"data.validation_fraction={fraction:g}, but the folder was prepared with blocks for "
        f"{self.split.fraction:g}. Use that, 0, or data.validation_paths, or prepare it again."
      )
    return self.split


def save(folder: Path, cfg: DataConfig, made: Prepared) -> None:
  """Make `folder`, in which the corpus was cached, one that `load` reads."""
  save_tokenizer(made.tokenizer, StorePath(folder / TOKENIZER))
  body = json.dumps({
    "corpus": made.corpus.folder.path.name, "tokenizer": made.tokenizer.fingerprint,
    "content": made.content, "text_field": cfg.format.text_field,
    "split": dataclasses.asdict(made.split),
    "sifted": made.sifted.path.name if made.sifted else "",
  })  # fmt: skip
  cache.write_atomically(folder / INDEX, f"{cache.digest(body)}\n{body}")


def folder_of(paths: Sequence[str]) -> Path | None:
  """The folder that `paths`, as `data.paths`, name, if it is one that was prepared.

  Raises:
    ValueError: if there are other paths beside it.
  """
  made = [entry for entry in paths if (Path(entry).expanduser() / INDEX).is_file()]
  if made and len(paths) > 1:
    raise ValueError(
      f"paths: {made[0]!r} is a prepared folder, which stands alone. Prepare all of the text "
      "together, or name the text itself."
    )
  return Path(made[0]).expanduser().resolve() if made else None


def load(folder: Path, cfg: DataConfig) -> Prepared:
  """What a prepared folder holds; its files are compared with their hashes if their times changed.

  Raises:
    ValueError: if it is damaged, or was made with another tokenizer or field than `cfg` names.
  """
  try:
    check, body = (folder / INDEX).read_text().split("\n")
    if check != cache.digest(body):
      raise ValueError("its hash is another")
    index = json.loads(body)
  except (OSError, ValueError) as e:
    raise ValueError(f"{folder / INDEX} is not what was written: {e}. Prepare it again.") from e
  path = folder / index["corpus"]
  if damage := cache.damage(path):
    raise ValueError(f"The prepared folder {folder} is damaged: {damage}. Prepare it again.")
  if (field := index["text_field"]) != (asked := cfg.format.text_field):
    raise ValueError(
      f"data.format.text_field={asked!r}, but {folder} was made with {field!r}. Use that, or "
      "prepare it again."
    )
  sifted = cache.Folder(folder / index["sifted"]) if index["sifted"] else None
  its = sifted.meta["filters"] if sifted else ""
  if cfg.filters and spelled(cfg.filters) != its:
    raise ValueError(
      f"data.filters={spelled(cfg.filters)!r}, but {folder} was prepared with {its!r}. Leave it "
      "empty, or prepare the text again."
    )
  tokenizer = load_tokenizer(StorePath(folder / TOKENIZER))
  if tokenizer.fingerprint != index["tokenizer"]:
    raise ValueError(f"{folder / TOKENIZER} is not what was written. Prepare it again.")
  corpus = cache.Folder(path)
  warn_of_malformed(corpus, cfg.strict)
  files = [SourceFile(name, name, kind) for name, kind in corpus.meta["files"]]
  return Prepared(
    Corpus(corpus, files), tokenizer, Split(**index["split"]), index["content"], sifted
  )


def check_tokenizer(folder: Path, its: Tokenizer, asked: Tokenizer) -> None:
  """Refuse a folder of ids of another tokenizer.

  Raises:
    ValueError: if the two are not the same.
  """
  if its.fingerprint != asked.fingerprint:
    raise ValueError(
      f"{folder} holds ids of another tokenizer than the run's. Prepare it again with "
      f"--config.data.tokenizer set to the tokenizer.json of the run."
    )
