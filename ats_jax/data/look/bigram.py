"""A bigram language model with Witten-Bell smoothing: the baseline a trained model must beat."""

from collections.abc import Iterable, Mapping

import numpy as np

_MERGE_PAIRS = 2**22  # held before they are counted

Batches = Iterable[Mapping[str, np.ndarray]]


class Bigram:
  """P(target | input), backing off to unigrams and those to the uniform distribution.

  Witten & Bell 1991, method C: a context seen `n` times with `t` distinct successors gives the
  share `t / (n + t)` of its probability to the next lower order.
  """

  def __init__(self, rows: Batches, vocab_size: int):
    """Count the pairs of `rows` (batches with tokens, targets and loss_mask of any shape).

    Raises:
      ValueError: if no target counts.
    """
    self._vocab = vocab_size
    table, new = (np.zeros(0, np.int64), np.zeros(0, np.int64)), []
    for batch in rows:
      new.append(_pairs(batch, vocab_size))
      if sum(map(len, new)) > _MERGE_PAIRS:
        table, new = _merge(table, new), []
    self._pairs, self._counts = pairs, counts = _merge(table, new)
    if not len(pairs):
      raise ValueError("bigram baseline: there are no tokens to fit on.")
    context, target = np.divmod(pairs, vocab_size)
    self._context_count = np.bincount(context, counts, minlength=vocab_size)
    self._context_types = np.bincount(context, minlength=vocab_size)
    unigram = np.bincount(target, counts, minlength=vocab_size)
    types = np.count_nonzero(unigram)
    self._unigram = (unigram + types / vocab_size) / (unigram.sum() + types)

  def losses(self, rows: Batches) -> tuple[float, float]:
    """Mean cross-entropy of the counted targets of `rows` by bigrams and by unigrams, nats a token.

    Raises:
      ValueError: if no target counts.
    """
    total, by_unigrams, tokens = 0.0, 0.0, 0
    for batch in rows:
      pairs = _pairs(batch, self._vocab)
      context, target = np.divmod(pairs, self._vocab)
      total -= np.log(self.probability(context, target)).sum()
      by_unigrams -= np.log(self._unigram[target]).sum()
      tokens += len(pairs)
    if not tokens:
      raise ValueError("bigram baseline: there are no tokens to evaluate on.")
    return float(total / tokens), float(by_unigrams / tokens)

  def probability(self, context: np.ndarray, target: np.ndarray) -> np.ndarray:
    """P(target | context) for two integer arrays of one shape."""
    pairs = context.astype(np.int64) * self._vocab + target
    at = np.minimum(np.searchsorted(self._pairs, pairs), len(self._pairs) - 1)
    count = np.where(self._pairs[at] == pairs, self._counts[at], 0)
    types = self._context_types[context]
    mass = self._context_count[context] + types
    backed = types * self._unigram[target]
    return np.where(mass > 0, (count + backed) / np.maximum(mass, 1), self._unigram[target])


def _merge(
  table: tuple[np.ndarray, np.ndarray], new: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
  """Add pairs to (sorted distinct pairs, their counts)."""
  pairs, inverse = np.unique(np.concatenate([table[0], *new]), return_inverse=True)
  weights = np.ones(len(inverse), np.int64)
  weights[: len(table[0])] = table[1]
  return pairs, np.bincount(inverse, weights).astype(np.int64)


def _pairs(batch: Mapping[str, np.ndarray], vocab_size: int) -> np.ndarray:
  counted = batch["loss_mask"] > 0
  return batch["tokens"][counted].astype(np.int64) * vocab_size + batch["targets"][counted]
