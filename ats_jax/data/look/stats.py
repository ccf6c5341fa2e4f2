"""What is in a split: documents, tokens, how full its rows are, the vocabulary it uses."""

from typing import Any

import numpy as np

from ats_jax.data.rows.dataset import Dataset

_CHUNK = 2**22  # tokens counted at a time
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


def stats(ds: Dataset) -> dict[str, Any]:
  """Figures of a split by name, in the order in which they read best."""
  text_tokens = ds.num_tokens - ds.num_documents
  num_bytes = int(ds.corpus.num_bytes[ds.documents].sum())
  segments = np.diff(ds.plan.first)
  places = max(ds.num_rows * ds.seq_len, 1)
  figures = {
    "documents": ds.num_documents,
    "text tokens": text_tokens,
    "targets (with one eos a document)": ds.num_tokens,
    "bytes of text": num_bytes or "unknown (token files)",
    "bytes per token": f"{num_bytes / text_tokens:.3f}" if num_bytes else "unknown",
    "rows": f"{ds.num_rows} of {ds.seq_len}",
    "padding": f"{1 - ds.num_tokens / places:.3%}",
  }
  if ds.weights is not None:
    counted = _in_loss(ds, ds.weights)
    figures["targets in the loss"] = f"{counted} ({counted / max(ds.num_tokens, 1):.1%})"
  if ds.num_documents:
    lengths = np.quantile(ds.corpus.length[ds.documents], _QUANTILES, method="nearest")
    used = vocabulary_counts(ds)
    by_use = np.sort(used)[::-1].cumsum()
    figures |= {
      "segments a row, mean / max": f"{segments.mean():.2f} / {segments.max()}",
      "tokens a document, " + " ".join(f"{q:.0%}" for q in _QUANTILES): " ".join(map(str, lengths)),
      "vocabulary used": f"{np.count_nonzero(used)} of {ds.tokenizer.vocab_size}",
      "half of the text is made of": f"{np.searchsorted(by_use, by_use[-1] / 2) + 1} tokens",
    }
  for kind, count in (*ds.report["malformed"].items(), *ds.report["skipped"].items()):
    figures[f"left out: {kind}"] = count
  return figures


def _in_loss(ds: Dataset, weights: np.ndarray) -> int:
  """How many targets of conversations have a weight."""
  lengths = {d: int(ds.corpus.length[d]) for d in map(int, ds.documents)}
  return sum(int((weights[ds.corpus.codes(d, 0, n)] > 0).sum()) for d, n in lengths.items())


def vocabulary_counts(ds: Dataset) -> np.ndarray:
  """[vocab_size] int64, how often each id is in the text of the split."""
  counts = np.zeros(ds.tokenizer.vocab_size, np.int64)
  parts: list[np.ndarray] = []

  def flush() -> None:
    if parts:
      counts[:] += np.bincount(np.concatenate(parts), minlength=len(counts))
    parts.clear()

  for document in map(int, ds.documents):
    for begin in range(0, int(ds.corpus.length[document]), _CHUNK):
      parts.append(ds.corpus.tokens(document, begin, begin + _CHUNK))
      if sum(map(len, parts)) >= _CHUNK:
        flush()
  flush()
  return counts
