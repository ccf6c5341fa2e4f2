"""Texts with special tokens between them, encoded as one text by the library `tokenizers`."""

import functools
import json
import secrets
from collections.abc import Sequence

import numpy as np
import tokenizers

from ats_jax.data.tokens.base import Parts, part_of

_FLAGS = ("lstrip", "rstrip")  # whether a token takes the blanks beside it


class WholeTexts:
  """A tokenizer.json in which special tokens have names that no text can hold.

  So the library itself finds them, with the blanks that they take and those that it puts behind
  them, while their usual names in a text stay text.
  """

  def __init__(self, inner: str):
    """Read the text of a tokenizer.json."""
    spec = json.loads(inner)
    spec["post_processor"] = None  # it may cut the blanks off the places of tokens
    self._inner = tokenizers.Tokenizer.from_str(json.dumps(spec))
    self._inner.no_padding()
    self._inner.no_truncation()
    self._inner.encode_special_tokens = True  # as ordinary text
    self._added = {token["id"]: token for token in spec.get("added_tokens") or []}
    self._secret = secrets.token_hex(8)
    self._name = functools.cache(self._new_name)  # of a special token

  def _new_name(self, token_id: int) -> str:
    name = f"\ufdd0{self._secret}:{token_id}\ufdd1"  # between noncharacters (Unicode 23.7)
    flags = {flag: self._added.get(token_id, {}).get(flag, False) for flag in _FLAGS}
    # A normaliser that puts a blank in front would hide a normalised name behind other tokens.
    self._inner.add_tokens([tokenizers.AddedToken(name, normalized=False, special=False, **flags)])
    return name

  def encode(self, documents: Sequence[Sequence[str | int]]) -> list[Parts]:
    """`Tokenizer.encode_parts`."""
    named = [[p if isinstance(p, str) else self._name(p) for p in parts] for parts in documents]
    encodings = self._inner.encode_batch(list(map("".join, named)), add_special_tokens=False)
    return [self._parts(*each) for each in zip(documents, named, encodings, strict=True)]

  def _parts(
    self, document: Sequence[str | int], named: Sequence[str], encoding: tokenizers.Encoding
  ) -> Parts:
    ids = np.array(encoding.ids, np.uint32)
    begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    starts = np.cumsum([0, *map(len, named)])[:-1]
    part = part_of(np.maximum(begins, ends - 1), starts)
    for number, token_id in enumerate(document):
      if isinstance(token_id, int):  # one that takes blanks begins before its name
        at = np.searchsorted(begins, starts[number], side="right") - 1
        assert encoding.tokens[at].strip() == named[number], (token_id, encoding.tokens[at])
        ids[at], part[at] = token_id, number
    return Parts(ids, part)
