"""The twelve dialogues, what `transformers` writes for them, and which parts are answers.

`dialogues.json` and `answers.json` are written by hand. `texts.json` is what
`PreTrainedTokenizerFast.apply_chat_template` made of the dialogues, whole and up to the last
answer, with the templates that are published for OpenHermes 2.5 (chatml), Llama 3, Qwen 2.5,
Mistral 7B Instruct 0.3 and Gemma 3. Those of the last four are in trl's `chat_templates/`.
"""

import json
from itertools import groupby
from pathlib import Path

import numpy as np

from ats_jax.data.chat.conversation import Conversation, read_conversation
from ats_jax.data.chat.tokenizer import ChatTokenizer

_HERE = Path(__file__).parent
DIALOGUES = json.loads((_HERE / "dialogues.json").read_text(encoding="utf-8"))
NAMES = [d["name"] for d in DIALOGUES]
TEXTS = json.loads((_HERE / "texts.json").read_text(encoding="utf-8"))
ANSWERS = json.loads((_HERE / "answers.json").read_text(encoding="utf-8"))
FAMILIES = tuple(ANSWERS)


def conversation(number: int) -> Conversation:
  return read_conversation(DIALOGUES[number])


def text_of(ids: np.ndarray, tokenizer: ChatTokenizer, bos: str, eos: str) -> str:
  """The text of ids of bytes and special tokens, those with their names."""
  own = {tokenizer.bos_id: bos, tokenizer.eos_id: eos}
  names = own | {i: name for name, i in tokenizer.special.items()}
  raw = b"".join(names[i].encode() if i in names else bytes([i]) for i in map(int, ids))
  return raw.decode()


def in_loss(
  ids: np.ndarray, weights: np.ndarray, tokenizer: ChatTokenizer, bos: str, eos: str
) -> list[str]:
  """The text of each run of tokens with a weight."""
  runs = [list(run) for counts, run in groupby(range(len(ids)), lambda i: weights[i] > 0) if counts]
  return [text_of(ids[run], tokenizer, bos, eos) for run in runs]
