"""Records of the usual schemas -> pairs of answers, the first of which is preferred."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ats_jax.data.chat.conversation import (
  FIELDS,
  LISTS,
  Conversation,
  MalformedError,
  Message,
  check_meaning,
  instructed,
  read_conversation,
  turn_of,
  turns_before,
  turns_in,
)
from ats_jax.data.chat.records import Schema
from ats_jax.data.chat.segments import REJECTED

ANSWERS = ("chosen", "rejected")
QUESTION = "question"


class Pair(NamedTuple):
  """Two conversations that differ in what follows their common turns.

  Attributes:
    chosen: the preferred one.
    rejected: the other one.
    shared: how many turns they have in common, which do not count in the loss.
  """

  chosen: Conversation
  rejected: Conversation
  shared: int

  @property
  def messages(self) -> tuple[Message, ...]:
    """All turns: those of the first conversation, then those that only the second has."""
    return self.chosen.messages + self.rejected.messages[self.shared :]

  @property
  def written(self) -> tuple[Conversation, ...]:
    """Both, as a template writes one behind the other."""
    return (self.chosen, self.rejected)

  @property
  def second_code(self) -> int:
    """What the codes of the second one say beside its own."""
    return REJECTED


def read_pair(record: Mapping[str, Any]) -> Pair:
  """The pair that a record holds in `chosen` and `rejected`.

  Each is a text, a turn, or a list of turns: whole conversations, or what follows the turns of
  `prompt`, `question`, `instruction` (with `input`), `messages`, `conversation` or
  `conversations`. `system`, `history` and `tools` are as in `read_conversation`.

  Raises:
    MalformedError: if it holds none, or two answers that are the same.
  """
  has = {name: value for name, value in record.items() if value is not None}
  check_meaning(has)
  if missing := [name for name in ANSWERS if name not in has]:
    names = ", ".join(map(repr, list(record)[:8])) or "nothing"
    raise MalformedError("no pair", f"no field {' and '.join(missing)} (it has {names})")
  asked = _asked(has)
  beside = {name: has[name] for name in ("system", "tools") if name in has}
  chosen, rejected = (_conversation(has, name, asked, beside) for name in ANSWERS)
  shared = 0
  for one, other in zip(chosen.messages, rejected.messages, strict=False):
    if (one.role, one.content, one.extra) != (other.role, other.content, other.extra):
      break
    shared += 1
  if not shared:
    raise MalformedError("no question", "the two answers have no turn before them in common")
  if shared == len(chosen.messages) == len(rejected.messages):
    raise MalformedError("equal answers", "chosen and rejected are the same")
  one, other = answer_of(chosen, "chosen", shared), answer_of(rejected, "rejected", shared)
  return Pair(one, other, shared)


def _asked(record: Mapping[str, Any]) -> list[Any]:
  """The turns before the answers, as the record has them."""
  earlier = turns_before(record.get("history") or [])
  for name in ("prompt", QUESTION):
    if name in record:
      return earlier + turns_in(record, name, "user")
  if "instruction" in record:
    return [*earlier, instructed(record)]
  for name in LISTS:
    if isinstance(record.get(name), list):
      return earlier + record[name]
  return earlier


def _conversation(
  record: Mapping[str, Any], name: str, asked: list[Any], beside: Mapping[str, Any]
) -> Conversation:
  """One of the two conversations."""
  value = record[name]
  turns = value if isinstance(value, list) else [value]
  turns = [turn_of("assistant", turn) if isinstance(turn, str) else turn for turn in turns]
  said = read_conversation({"messages": turns}).messages
  is_whole = next(m.role for m in said if m.role != "system") != "assistant"
  return read_conversation({**beside, "messages": turns if is_whole else [*asked, *turns]})


def answer_of(conversation: Conversation, name: str, shared: int) -> Conversation:
  """The conversation in which only what follows the first `shared` turns counts.

  Raises:
    MalformedError: if the assistant says nothing there; `name` is of its field.
  """
  before, after = conversation.messages[:shared], conversation.messages[shared:]
  if not any(message.role == "assistant" for message in after):
    raise MalformedError(
      "no answer", f"field {name!r} has no turn of the role assistant of its own"
    )
  quiet = tuple(message._replace(counts=False) for message in before)
  return conversation._replace(messages=quiet + after)


PAIRS = Schema((*FIELDS, *ANSWERS, QUESTION), read_pair)
