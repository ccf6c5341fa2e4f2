"""Special tokens in a tokenizer.json, the file format of the `tokenizers` library."""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

_LIKE_ALL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def with_special(text: str, special: Mapping[str, int]) -> dict[str, Any]:
  """A tokenizer.json in which special tokens have their ids.

  The library numbers what is added behind the model by itself, so ids that it would not come to are
  filled with special tokens called `<|unused_ID|>`.

  Args:
    text: the file.
    special: id by name; a name that is there already has its id.
  """
  spec = json.loads(text)
  ids = tokenizers.Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
  assert all(ids.get(name, i) == i for name, i in special.items()), special
  names = {i: name for name, i in special.items()}
  free = set(range(max([*ids.values(), *names]) + 1)) - set(ids.values())
  added = {token["id"]: token for token in spec.get("added_tokens") or []}
  for i in sorted(free | set(names)):
    name = names.get(i, f"<|unused_{i}|>")
    if isinstance(spec["model"]["vocab"], dict):
      spec["model"]["vocab"][name] = i  # so that the library does not number it
    added[i] = {"id": i, "content": name, **_LIKE_ALL, **added.get(i, {}), "special": True}
  spec["added_tokens"] = [added[i] for i in sorted(added)]
  return spec
