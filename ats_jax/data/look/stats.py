"""What is in rows of packed documents: tokens, padding, the vocabulary that they use."""

from typing import Any

import numpy as np

from ats_jax.data.rows.contract import Info
from ats_jax.data.rows.packed import Packed
from ats_jax.data.rows.packing import context

_CHUNK = 2**22  # tokens counted at a time
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


def stats(info: Info) -> dict[str, Any]:
  """Figures by name, in the order in which they read best.

  Args:
    info: of rows that have no parts.

  Raises:
    ValueError: for rows without packed documents.
  """
  packed = info.packed
  if packed is None:
    raise ValueError("Statistics are of documents, and these rows have none.")
  text_tokens = info.num_tokens - info.num_documents
  lengths = packed.corpus.length[packed.documents]
  num_bytes = int(packed.corpus.num_bytes[packed.documents].sum())
  segments = np.diff(packed.plan.first)
  places = max(info.num_rows * info.seq_len, 1)
  repeated = int(context(packed.plan.begin, packed.overlap).sum())
  figures = {
    "documents": info.num_documents,
    "text tokens": text_tokens,
    "targets (with one eos a document)": info.num_tokens,
    "bytes of text": num_bytes or "unknown (token files)",
    "bytes per token": f"{num_bytes / text_tokens:.3f}" if num_bytes else "unknown",
    "rows": f"{info.num_rows} of {info.seq_len}",
    "padding": f"{1 - (info.num_tokens + repeated) / places:.3%}",
  }
  if packed.weights is not None:
    counted = _in_loss(packed, packed.weights)
    figures["targets in the loss"] = f"{counted} ({counted / max(info.num_tokens, 1):.1%})"
  if info.num_documents:
    sizes = np.quantile(lengths, _QUANTILES, method="nearest")
    used = vocabulary_counts(packed)
    by_use = np.sort(used)[::-1].cumsum()
    figures |= {
      "segments a row, mean / max": f"{segments.mean():.2f} / {segments.max()}",
      "tokens a document, " + " ".join(f"{q:.0%}" for q in _QUANTILES): " ".join(map(str, sizes)),
      "vocabulary used": f"{np.count_nonzero(used)} of {info.tokenizer.vocab_size}",
      "half of the text is made of": f"{np.searchsorted(by_use, by_use[-1] / 2) + 1} tokens",
    }
  for kind, count in (*info.report["malformed"].items(), *info.report["skipped"].items()):
    figures[f"left out: {kind}"] = count
  return figures


def _in_loss(packed: Packed, weights: np.ndarray) -> int:
  """How many targets of conversations have a weight."""
  lengths = {d: int(packed.corpus.length[d]) for d in map(int, packed.documents)}
  return sum(int((weights[packed.corpus.codes(d, 0, n)] > 0).sum()) for d, n in lengths.items())


def vocabulary_counts(packed: Packed) -> np.ndarray:
  """[vocab_size] int64, how often each id is in the text of the documents."""
  counts = np.zeros(packed.tokenizer.vocab_size, np.int64)
  parts: list[np.ndarray] = []
  waiting = 0

  def flush() -> None:
    if parts:
      counts[:] += np.bincount(np.concatenate(parts), minlength=len(counts))
    parts.clear()

  for document in map(int, packed.documents):
    for begin in range(0, int(packed.corpus.length[document]), _CHUNK):
      parts.append(packed.corpus.tokens(document, begin, begin + _CHUNK))
      waiting += len(parts[-1])
      if waiting >= _CHUNK:
        flush()
        waiting = 0
  flush()
  return counts
