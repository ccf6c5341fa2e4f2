"""What a template writes: text and special tokens in order, each with the turn that it is of.

The mask is exact by construction: whoever writes a segment knows whether it is of an answer, so
nothing is searched for in the text.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ats_jax.config.schema.text_format import ROLES

BOS, EOS = "\x00bos", "\x00eos"  # the tokenizer's own, whatever it calls them

# What the code of a token says: the role in the lowest three bits (0 = no turn), and
COUNTS = 8  # it is of what the role said, up to the end of the turn: the role's weight applies
LAST = 16  # it is of the conversation's last answer
NUM_CODES = 32  # of a conversation
REJECTED = 32  # of a pair: it is of the second answer, and of all that stands before that again
GOOD = 64  # beside REJECTED: the first answer of a labelled one is desirable


class ChatSegment(NamedTuple):
  """A piece of a conversation as its template writes it: some text, or one special token.

  Attributes:
    text: the text, or the name of the special token.
    role: whose turn it belongs to; "" = to no turn.
    special: whether it is one special token, which no text can produce.
    counts: whether it belongs to what the role says, with the end of the turn; not to a heading.
    last: whether it belongs to the last answer of the conversation.
  """

  text: str
  role: str = ""
  special: bool = False
  counts: bool = False
  last: bool = False

  @property
  def code(self) -> int:
    """All but the text, in a byte."""
    role = ROLES.index(self.role) + 1 if self.role else 0
    return role + COUNTS * self.counts + LAST * self.last


def written(segments: Iterable[ChatSegment], bos: str, eos: str) -> str:
  """The text of segments, with the names of the tokenizer's own special tokens."""
  names = {BOS: bos, EOS: eos}
  return "".join(names.get(s.text, s.text) if s.special else s.text for s in segments)


def role_of(code: int) -> str:
  """The role in a token's code; "" = none."""
  number = code % COUNTS
  return ROLES[number - 1] if number else ""


def weight_table(weights: Mapping[str, float], answers: str) -> np.ndarray:
  """[NUM_CODES] float32, the weight in the loss by code.

  Args:
    weights: by role; one that is not there has none.
    answers: which turns of the assistant count: 'all' or 'last'.
  """
  table = np.zeros(NUM_CODES, np.float32)
  for number, role in enumerate(ROLES, 1):
    for last in (0, LAST):
      if last or role != "assistant" or answers == "all":
        table[number | COUNTS | last] = weights.get(role, 0.0)
  return table
