"""How difficult documents are, by their tokens alone."""

from collections.abc import Iterator

import numpy as np

from ats_jax.data.corpus.corpus import Corpus

_CHUNK = 2**22  # tokens looked at a time


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
