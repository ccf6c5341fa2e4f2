"""Who speaks in a conversation, and how conversations are written."""

ROLES = ("system", "user", "assistant", "tool")
# Templates by name (data.chat.templates), and the word for the tokenizer's own.
TEMPLATES = ("chatml", "llama3", "qwen", "mistral", "gemma", "plain")
OWN_TEMPLATE = "tokenizer"


def packing_of(packing: str, chat_template: str) -> str:
  """`data.packing`, or what that chooses: a conversation is never cut."""
  if packing != "auto":
    return packing
  return "best_fit" if chat_template else "concat"
