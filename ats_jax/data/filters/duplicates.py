"""Documents that are there more than once, alike to the letter or nearly so.

Of a group of duplicates that with the lowest key is kept, whatever order they are read in.
"""

import hashlib
import unicodedata
from collections.abc import Sequence

import numpy as np

from ats_jax.data.filters.rules import WORD
from ats_jax.data.text.formats import extra

NUM_HASHES = 128  # of a MinHash signature; the estimated similarity is off by 0.035 at 0.8
_SHINGLE = 5  # words
_SEED = 42
_CHUNK = 2**14  # pairs compared at a time: 16 MiB
_RECALL = 0.95  # of pairs at the threshold that a band must bring together


def exact_hash(text: str, rest: bytes) -> bytes:
  """16 bytes that are the same for texts that differ in case and spaces only.

  Args:
    text: of the document, or of its beginning.
    rest: a hash of what follows.
  """
  normal = " ".join(unicodedata.normalize("NFC", text).casefold().split())
  return hashlib.blake2b(normal.encode() + b"\0" + rest, digest_size=16).digest()


def signatures(texts: Sequence[str]) -> np.ndarray:
  """[texts, NUM_HASHES] uint32, MinHash over sequences of five words.

  Raises:
    ValueError: if rensa is not installed.
  """
  rensa = extra.import_extra("rensa", "data.filters=near", "filters")
  if not texts:
    return np.empty((0, NUM_HASHES), np.uint32)
  matrix = rensa.RMinHash.digest_matrix_from_token_sets(
    [shingles(text) for text in texts], num_perm=NUM_HASHES, seed=_SEED
  )
  return np.array(matrix.to_rows(), np.uint32)


def shingles(text: str) -> list[str]:
  """The sequences of five words of a text, which is what is compared."""
  words = WORD.findall(text.casefold())
  if not words:
    return [" ".join(text.split())]
  return [" ".join(words[i : i + _SHINGLE]) for i in range(max(1, len(words) - _SHINGLE + 1))]


def check_packages() -> None:
  """Refuse `near` where a package of it is missing.

  Raises:
    ValueError: naming the package, and how to install it.
  """
  signatures([""])
  extra.import_extra("scipy.sparse.csgraph", "data.filters=near", "filters")


def group_equal(hashes: np.ndarray, keys: np.ndarray) -> np.ndarray:
  """For each document the one that is kept of those with the same hash.

  Args:
    hashes: [n, 2] uint64.
    keys: [n] uint64.

  Returns:
    [n] int64, indices; a document that is kept has its own.
  """
  survivors = np.arange(len(keys))
  order = np.lexsort((keys, hashes[:, 1], hashes[:, 0]))
  starts = np.ones(len(keys), bool)
  starts[1:] = (hashes[order][1:] != hashes[order][:-1]).any(1)
  survivors[order] = order[starts][np.cumsum(starts) - 1]
  return survivors


def group_similar(
  signatures: np.ndarray, members: np.ndarray, keys: np.ndarray, threshold: float
) -> np.ndarray:
  """Return for each document the one that is kept of those similar to it, by `threshold` at least.

  Pairs are proposed by bands of a signature that agree, and compared by all of it.

  Args:
    signatures: [documents, NUM_HASHES] uint32; may be on disk.
    members: [n], the documents to compare.
    keys: [n] uint64, of those.
    threshold: from 0.3 to 1.
  """
  csgraph = extra.import_extra("scipy.sparse.csgraph", "data.filters=near", "filters")
  sparse = extra.import_extra("scipy.sparse", "data.filters=near", "filters")
  size = len(keys)
  order = np.argsort(keys, kind="stable")  # a document is known by its rank among the keys
  place = members[order]
  leader = np.arange(size)
  rows = rows_of_a_band(threshold)
  for band in range(NUM_HASHES // rows):
    a, b = _proposed(signatures[:, band * rows : (band + 1) * rows][place])
    new = leader[a] != leader[b]
    a, b = a[new], b[new]
    alike = _similarity(signatures, place[a], place[b]) >= threshold
    ends = leader[a[alike]], leader[b[alike]]
    graph = sparse.coo_array((np.ones(len(ends[0]), bool), ends), shape=(size, size))
    _, group = csgraph.connected_components(graph, directed=False)
    _, first = np.unique(group, return_index=True)
    leader = first[group][leader]
  survivors = np.empty(size, np.int64)
  survivors[order] = order[leader]
  return survivors


def rows_of_a_band(threshold: float) -> int:
  """Return how many rows of a band leave a pair at the threshold a chance of `_RECALL` to agree."""
  chance = lambda rows: 1 - (1 - threshold**rows) ** (NUM_HASHES // rows)
  return max(rows for rows in range(1, 17) if chance(rows) >= _RECALL)


def _proposed(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Pairs that agree in all columns: each with the first of its group, and with the one before."""
  mixed = np.zeros(len(columns), np.uint64)
  for column in columns.T:
    mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(31)
  by = np.argsort(mixed, kind="stable")
  starts = np.ones(len(by), bool)
  starts[1:] = mixed[by][1:] != mixed[by][:-1]
  first = by[starts][np.cumsum(starts) - 1]
  later = ~starts
  before = np.roll(by, 1)
  return np.concatenate([first[later], before[later]]), np.concatenate([by[later], by[later]])


def _similarity(signatures: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
  parts = [
    (signatures[a[i : i + _CHUNK]] == signatures[b[i : i + _CHUNK]]).mean(1)
    for i in range(0, len(a), _CHUNK)
  ]
  return np.concatenate(parts) if parts else np.empty(0)
