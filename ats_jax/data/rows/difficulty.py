"""The order `difficulty`: documents of frequent tokens first. It is judged by tokens alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ats_jax.config.schema import DataConfig
from ats_jax.data.corpus import cache
from ats_jax.data.corpus.corpus import Corpus
from ats_jax.data.rows.buckets import LEAST_STEPS, PartedOrder
from ats_jax.data.rows.contract import Part, TrainingDocuments

LEVELS = 8  # at most
_CHUNK = 2**22  # tokens looked at a time


class EasyFirst(PartedOrder):
  """Documents in levels of about as many tokens, random inside, the easiest first."""

  def divide(self, cfg: DataConfig, documents: TrainingDocuments) -> list[Part]:
    """Return the levels; how difficult each document is stays in the cache."""

    def build(folder: Path) -> dict[str, Any]:
      bits = rarity(documents.corpus, documents.indices, documents.tokenizer.vocab_size)
      np.save(folder / "rarity.npy", bits)
      return {}

    name = "rarity-" + cache.digest("rarity", *documents.key)
    difficulty = cache.cached(cache.cache_root(cfg.cache_dir), name, build).array("rarity")
    return by_level(
      difficulty, documents.sizes, documents.indices, seq_len=cfg.seq_len, batch_size=cfg.batch_size
    )


def by_level(
  difficulty: np.ndarray, sizes: np.ndarray, documents: np.ndarray, *, seq_len: int, batch_size: int
) -> list[Part]:
  """Documents by difficulty, in parts of about as many tokens, the easiest first.

  There are LEVELS parts, or as many as have LEAST_STEPS steps each, but at least one.

  Args:
    difficulty: [documents] of each.
    sizes: [documents] positions of each.
    documents: indices of them into the corpus.
    seq_len: positions of rows.
    batch_size: rows of a step.
  """
  levels = int(np.clip(sizes.sum() // (LEAST_STEPS * batch_size * seq_len), 1, LEVELS))
  order = np.argsort(difficulty, kind="stable")
  before = np.cumsum(sizes[order]) - sizes[order]
  level = np.empty(len(order), np.int64)
  level[order] = before * levels // sizes.sum()
  groups = [documents[level == number] for number in np.unique(level)]
  return [
    Part(f"difficulty {number} of {len(groups)}", seq_len, group)
    for number, group in enumerate(groups, 1)
  ]


def rarity(corpus: Corpus, documents: np.ndarray, vocab_size: int) -> np.ndarray:
  """How rare the tokens of each document are: mean -log2 of their share of the text, in bits.

  The sentence rarity of Platanios et al. 2019 (arXiv:1903.09848, section 2.1), but the mean over
  tokens in place of the sum: how long a text is shall not count.

  Args:
    corpus: the documents.
    documents: indices of those to judge; they are the text.
    vocab_size: ids are below it.

  Returns:
    [documents] float64; 0 for a document without a token.
  """
  counts = np.zeros(vocab_size, np.int64)
  for _, ids in _chunks(corpus, documents):
    counts += np.bincount(ids, minlength=vocab_size)
  bits = np.log2(max(counts.sum(), 1)) - np.log2(np.maximum(counts, 1))
  sums = np.zeros(len(documents))
  for which, ids in _chunks(corpus, documents):
    sums += np.bincount(which, bits[ids], minlength=len(documents))
  return sums / np.maximum(corpus.length[documents], 1)


def _chunks(corpus: Corpus, documents: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """All tokens, a chunk at a time: of each the place of its document in `documents`, and its id."""
  places: list[int] = []
  parts: list[np.ndarray] = []

  def joined() -> tuple[np.ndarray, np.ndarray]:
    chunk = np.repeat(places, list(map(len, parts))), np.concatenate(parts)
    places.clear()
    parts.clear()
    return chunk

  held = 0
  for place, document in enumerate(map(int, documents)):
    for begin in range(0, int(corpus.length[document]), _CHUNK):
      parts.append(corpus.tokens(document, begin, begin + _CHUNK))
      places.append(place)
      held += len(parts[-1])
      if held >= _CHUNK:
        yield joined()
        held = 0
  if parts:
    yield joined()
