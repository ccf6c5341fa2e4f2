"""A tokenizer as one file in the workdir, so that generation needs no training data."""

import json

from ats_jax.data.tokens.tokenizer import Tokenizer, of_workdir
from ats_jax.store import paths
from ats_jax.store.paths import Path


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
  """Write everything `load_tokenizer` needs to `path` (JSON)."""
  paths.write(path, json.dumps(tokenizer.to_fields(), ensure_ascii=False))


def load_tokenizer(path: Path) -> Tokenizer:
  """Read what `save_tokenizer` wrote.

  Raises:
    ValueError: if the file is missing or damaged.
  """
  try:
    fields = paths.parse_json(paths.read(path))
    if not isinstance(fields, dict):
      raise ValueError(f"expected a JSON object, got {fields!r:.40}")
    tokenizer = of_workdir(fields)
    if fields["kind"] != "chat":
      return tokenizer
    from ats_jax.data.chat.tokenizer import ChatTokenizer, Form  # here: few runs have one

    return ChatTokenizer(tokenizer, Form.of(fields["form"]))
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise ValueError(
      f"the tokenizer of this run, {path}, cannot be read: {e!r}. Training writes it at its start."
    ) from e


def has_same_ids(tokenizer: Tokenizer, other: Tokenizer) -> bool:
  """Whether the ids of `other` mean the same in `tokenizer`, which may have a template besides."""
  return other.fingerprint in (tokenizer.fingerprint, tokenizer.of_text.fingerprint)
