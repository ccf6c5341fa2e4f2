"""Who speaks in a conversation, and what `data.chat_weights` says of them."""

import math

ROLES = ("system", "user", "assistant", "tool")
# Templates by name (data.chat.templates), and the word for the tokenizer's own.
TEMPLATES = ("chatml", "llama3", "qwen", "mistral", "gemma", "plain")
OWN_TEMPLATE = "tokenizer"


def packing_of(packing: str, chat_template: str) -> str:
  """`data.packing`, or what that chooses: a conversation is never cut."""
  if packing != "auto":
    return packing
  return "best_fit" if chat_template else "concat"


def role_weights(text: str) -> dict[str, float]:
  """`assistant=1,user=0.1` -> the weight of every role; one that is not named has 0.

  Raises:
    ValueError: for an entry that is not role=weight with a weight from 0 to 1, or a role that is
      named twice.
  """
  found: dict[str, float] = {}
  for entry in filter(None, map(str.strip, text.split(","))):
    role, equals, value = (part.strip() for part in entry.partition("="))
    if not equals or role not in ROLES:
      raise ValueError(
        f"data.chat_weights: {entry!r} is not role=weight with a role of {', '.join(ROLES)}."
      )
    if role in found:
      raise ValueError(f"data.chat_weights={text!r} names {role} twice. Leave one of them.")
    try:
      weight = float(value)
    except ValueError:
      weight = math.nan
    if not 0.0 <= weight <= 1.0:
      raise ValueError(f"data.chat_weights: {entry!r} has no weight from 0 to 1.")
    found[role] = weight
  return {role: found.get(role, 0.0) for role in ROLES}
