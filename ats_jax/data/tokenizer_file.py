"""A tokenizer as one file in the workdir, so that generation needs no training data."""

import json

from ats_jax import paths
from ats_jax.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, of_workdir
from ats_jax.paths import Path


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
  """Write everything `load_tokenizer` needs to `path` (JSON)."""
  fields: dict[str, object] = {"kind": "bytes"}
  if isinstance(tokenizer, JsonTokenizer):
    ids = {name: getattr(tokenizer, name) for name in ("bos_id", "eos_id", "pad_id", "vocab_size")}
    fields = {"kind": "tokenizers", **ids, "tokenizer": json.loads(tokenizer.to_json())}
  paths.write(path, json.dumps(fields, ensure_ascii=False))


def load_tokenizer(path: Path) -> Tokenizer:
  """Read what `save_tokenizer` wrote.

  Raises:
    ValueError: if the file is missing or damaged.
  """
  try:
    fields = json.loads(paths.read(path))
    if not isinstance(fields, dict):
      raise ValueError(f"expected a JSON object, got {fields!r:.40}")
    if fields["kind"] == "bytes":
      return ByteTokenizer()
    return of_workdir(fields)
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise ValueError(
      f"the tokenizer of this run, {path}, cannot be read: {e!r}. Training writes it at its start."
    ) from e
