"""A tokenizer as one file in the workdir, so that generation needs no training data."""

import json
from typing import Any

from ats_jax.data.chat.tokenizer import ChatTokenizer, Form, plain
from ats_jax.data.tokens.sentencepiece_file import SentencePieceTokenizer
from ats_jax.data.tokens.tokenizer import JsonTokenizer, Tokenizer, of_workdir
from ats_jax.store import paths
from ats_jax.store.paths import Path


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
  """Write everything `load_tokenizer` needs to `path` (JSON)."""
  paths.write(path, json.dumps(_fields(tokenizer), ensure_ascii=False))


def _fields(tokenizer: Tokenizer) -> dict[str, Any]:
  if isinstance(tokenizer, ChatTokenizer):
    form = tokenizer.form._asdict()
    return {"kind": "chat", "form": form, "inner": _fields(tokenizer.inner)}
  if isinstance(tokenizer, JsonTokenizer):
    ids = {name: getattr(tokenizer, name) for name in ("bos_id", "eos_id", "pad_id", "vocab_size")}
    return {"kind": "tokenizers", **ids, "tokenizer": json.loads(tokenizer.to_json())}
  if isinstance(tokenizer, SentencePieceTokenizer):
    return tokenizer.to_fields()
  return {"kind": "bytes"}


def load_tokenizer(path: Path) -> Tokenizer:
  """Read what `save_tokenizer` wrote.

  Raises:
    ValueError: if the file is missing or damaged.
  """
  try:
    fields = json.loads(paths.read(path))
    if not isinstance(fields, dict):
      raise ValueError(f"expected a JSON object, got {fields!r:.40}")
    inner = of_workdir(fields)
    return ChatTokenizer(inner, Form.of(fields["form"])) if fields["kind"] == "chat" else inner
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise ValueError(
      f"the tokenizer of this run, {path}, cannot be read: {e!r}. Training writes it at its start."
    ) from e


def extends(tokenizer: Tokenizer, other: Tokenizer) -> bool:
  """Whether the ids of `other` mean the same to `tokenizer`, which may know a template besides."""
  return other.fingerprint in (tokenizer.fingerprint, plain(tokenizer).fingerprint)
