"""What is in rows, as JSON values: for a run's folder, where the text itself may be gone later."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ats_jax.data.rows.contract import Rows, leaf_rows

_QUANTILES = {"least": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "greatest": 1.0}


def facts_of(rows: Rows, name: str) -> Iterator[dict[str, Any]]:
  """Counts of each part of rows that has documents, or of a text that is still being read.

  `tokens` are targets, with one eos a document. `lengths` are quantiles of the tokens of a
  document, `by_size` counts documents by powers of two: power -> number of 2**power tokens or
  more, below the next. `left_out` are records and documents by reason, `first` the first malformed
  ones in words.
  """
  for part, leaf in leaf_rows(rows, name):
    info = leaf.info
    if not info.num_rows and not info.summary:
      continue
    facts = {
      "name": part,
      "documents": info.num_documents,
      "tokens": info.num_tokens,
      "rows": info.num_rows,
      "seq_len": info.seq_len,
      "bytes_per_token": info.bytes_per_token,
      "ids_used": info.ids_used,
      "ids": info.tokenizer.vocab_size,
      "is_complete": info.is_complete,
      "left_out": {**info.report.get("malformed", {}), **info.report.get("skipped", {})},
      "first": list(info.report.get("first", ())),
    }
    if info.packed is not None and len(info.packed.documents):
      lengths = info.packed.corpus.length[info.packed.documents]
      quantiles = np.quantile(lengths, list(_QUANTILES.values()), method="nearest").tolist()
      facts["lengths"] = dict(zip(_QUANTILES, quantiles, strict=True))
      powers, counts = np.unique(np.log2(np.maximum(lengths, 1)).astype(int), return_counts=True)
      facts["by_size"] = dict(zip(map(str, powers.tolist()), counts.tolist(), strict=True))
    yield facts
