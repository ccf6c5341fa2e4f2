"""Records of the usual schemas -> conversations; each one that is malformed with its reason."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ats_jax.config.schema.text_format import ROLES
from ats_jax.store import paths

ALIASES = {
  **{role: role for role in ROLES},
  "developer": "system",
  "human": "user",
  "prompter": "user",
  "gpt": "assistant",
  "function_call": "assistant",
  "model": "assistant",
  "bot": "assistant",
  "chatbot": "assistant",
  "ai": "assistant",
  "function": "tool",
  "observation": "tool",
  "ipython": "tool",
}
LISTS = ("messages", "conversation", "conversations")  # fields that hold a list of turns
_MEDIA = ("images", "videos", "audios", "image", "video", "audio")
VERDICTS = ("label", "kto_tag")  # false for an answer that is not to be learnt
# All that is read of a record: tables need not read more.
FIELDS = (
  *LISTS, "prompt", "completion", "instruction", "input", "output", "history", "system", "tools",
  *_MEDIA, *VERDICTS,
)  # fmt: skip
_DEEPEST = 100  # objects and lists of tools and their calls, one in the other
_ROLE, _TEXT = ("role", "from"), ("content", "value")  # what a turn calls them, ShareGPT's second


class MalformedError(ValueError):
  """A record that is no conversation.

  Attributes:
    kind: a few words, by which such records are counted.
  """

  def __init__(self, kind: str, detail: str):
    super().__init__(detail)
    self.kind = kind


class Message(NamedTuple):
  """One turn.

  Attributes:
    role: one of `ROLES`.
    content: text of the turn.
    counts: whether the turn may be in the loss; the record's own `weight` of 0 says no.
    extra: the turn's other fields, as JSON gave them; only a template of one's own reads them.
  """

  role: str
  content: str
  counts: bool = True
  extra: Mapping[str, Any] = {}


class Conversation(NamedTuple):
  """Turns in order, and the `tools` of the record, which only a template of one's own reads."""

  messages: tuple[Message, ...]
  tools: Sequence[Any] | None = None

  @property
  def written(self) -> tuple["Conversation", ...]:
    """What of it a template writes, one behind the other."""
    return (self,)


def read_conversation(record: Mapping[str, Any]) -> Conversation:
  """The conversation that a record holds.

  The schemas, the first that fits: a list of turns in `messages`, `conversation` or
  `conversations`, each {role, content} or {from, value}; `prompt` and `completion`, two texts or
  two lists of turns; `instruction`, `output` and perhaps `input`. A text `system` beside them is
  a turn of its own in front, the pairs of `history` are turns before the question, and `tools` may
  be JSON text. A field that is null, as tables fill up rows, is not there.

  Raises:
    MalformedError: if it holds none, or one without a turn to learn from.
  """
  has = list(record)
  record = {name: value for name, value in record.items() if value is not None}
  check_meaning(record)
  turns = _turns(record, has)
  if not turns:
    raise MalformedError("no turns", "the conversation has no turn")
  messages = [_message(turn, number) for number, turn in enumerate(turns, 1)]
  system = record.get("system")
  if isinstance(system, str) and system and messages[0].role != "system":
    messages.insert(0, Message("system", utf8(system, "system")))
  if not any(m.role == "assistant" for m in messages):
    raise MalformedError(
      "no answer", "no turn is of the role assistant, so there is nothing to learn"
    )
  tools = record.get("tools")
  if isinstance(tools, str):
    tools = _json(tools, "field 'tools'") if tools.strip() else None
  if tools is not None and not isinstance(tools, list):
    raise MalformedError("tools not a list", f"field 'tools' is {_kind(tools)}, not a list")
  _check_depth(tools, "field 'tools'")
  return Conversation(tuple(messages), tools or None)


def read_question(turns: Any) -> tuple[Message, ...]:
  """Turns that a model is to answer, in the forms that `read_conversation` knows.

  Raises:
    MalformedError: if they are none.
  """
  if not isinstance(turns, list):
    raise MalformedError("turns not a list", f"messages are {_kind(turns)}, not a list of turns")
  if not turns:
    raise MalformedError("no turns", "messages hold no turn")
  return tuple(_message(turn, number) for number, turn in enumerate(turns, 1))


def check_meaning(record: Mapping[str, Any]) -> None:
  """Refuse a record of which a part that is not read changes what the rest means."""
  for name in _MEDIA:
    if record.get(name):
      raise MalformedError("not text alone", f"field {name!r} is not empty: only text can be read")
  for name in VERDICTS:
    if record.get(name) is False:
      raise MalformedError("answer not to learn", f"field {name!r} is false, so its answer is bad")


def _json(text: str, where: str) -> Any:
  try:
    return paths.parse_json(text)
  except ValueError as e:
    raise MalformedError("broken JSON", f"{where} is text that is no JSON ({e})") from e


def _check_depth(value: Any, where: str, left: int = _DEEPEST) -> None:
  """Refuse what could not be sent to another process."""
  if isinstance(value, bytes):
    raise MalformedError("bytes", f"{where} holds bytes, which are no text")
  parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
  if parts and not left:
    raise MalformedError("nested too deeply", f"{where} is nested more than {_DEEPEST} deep")
  for part in parts:
    _check_depth(part, where, left - 1)


def _turns(record: Mapping[str, Any], has: Sequence[str]) -> list[Any]:
  """The turns as the record has them, or as it would have them under `messages`.

  `has` are the names of its fields, for a message.
  """
  earlier = turns_before(record.get("history") or [])
  for name in LISTS:
    if name in record:
      if earlier:
        raise MalformedError("history", f"field 'history' stands beside the turns of {name!r}")
      if not isinstance(record[name], list):
        raise MalformedError(
          "turns not a list", f"field {name!r} is {_kind(record[name])}, not a list of turns"
        )
      return record[name]
  if {"prompt", "completion"} <= record.keys():
    asked = turns_in(record, "prompt", "user")
    return earlier + asked + turns_in(record, "completion", "assistant")
  if {"instruction", "output"} <= record.keys():
    return [*earlier, instructed(record), turn_of("assistant", text_of(record, "output"))]
  raise MalformedError(
    "no conversation",
    "no messages, conversation, conversations, prompt with completion, or instruction with output "
    f"(it has {', '.join(map(repr, has[:8])) or 'nothing'})",
  )


def instructed(record: Mapping[str, Any]) -> dict[str, str]:
  """The question in `instruction`, and perhaps `input`."""
  asked = [text_of(record, "instruction")]
  if record.get("input"):
    asked.append(text_of(record, "input"))
  return turn_of("user", "\n\n".join(asked))


def turns_before(history: Any) -> list[Any]:
  """The turns of `history`, pairs of a question and an answer."""
  pairs = history if isinstance(history, list) else [history]
  turns = []
  for number, pair in enumerate(pairs, 1):
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(t, str) for t in pair):
      raise MalformedError("history", f"pair {number} of 'history' is no list of two texts")
    turns += [turn_of("user", pair[0]), turn_of("assistant", pair[1])]
  return turns


def turns_in(record: Mapping[str, Any], name: str, role: str) -> list[Any]:
  """A prompt or a completion: turns, or the text of one."""
  return record[name] if isinstance(record[name], list) else [turn_of(role, text_of(record, name))]


def turn_of(role: str, content: str) -> dict[str, str]:
  """A turn as a record of `messages` has it."""
  return {"role": role, "content": content}


def text_of(record: Mapping[str, Any], name: str) -> str:
  """The text of a field; raises `MalformedError` if it is none."""
  value = record[name]
  if not isinstance(value, str):
    raise MalformedError("field not a string", f"field {name!r} is {_kind(value)}, not a string")
  return value


def _message(turn: Any, number: int) -> Message:
  if not isinstance(turn, dict):
    raise MalformedError("turn not an object", f"turn {number} is {_kind(turn)}, not an object")
  turn = {name: value for name, value in turn.items() if value is not None}
  role_field = next((name for name in _ROLE if name in turn), None)
  if role_field is None:
    raise MalformedError("no role", f"turn {number} has neither 'role' nor 'from'")
  role = turn[role_field]
  if not isinstance(role, str) or role.lower() not in ALIASES:
    known = ", ".join(ALIASES)
    raise MalformedError(
      "unknown role", f"turn {number} has the role {role!r:.40}; known are {known}"
    )
  text_field = next((name for name in _TEXT if name in turn), "content")
  if role.lower() == "function_call":  # of ShareGPT: the text is the call
    turn |= {text_field: "", "tool_calls": _calls(turn.get(text_field), number)}
  content = _content(turn.get(text_field), turn, number)
  weight = turn.get("weight", 1)
  if weight not in (0, 1):
    raise MalformedError(
      "weight not 0 or 1", f"turn {number} has the weight {weight!r:.40}, not 0 or 1"
    )
  extra = {k: v for k, v in turn.items() if k not in (role_field, text_field, "weight")}
  _check_depth(extra, f"turn {number}")
  return Message(ALIASES[role.lower()], content, bool(weight), extra)


def _calls(text: Any, number: int) -> list[Any]:
  """The tool calls in the text of a turn of the role function_call: one, or a list."""
  where = f"turn {number} of the role function_call"
  found = _json(text, where) if isinstance(text, str) else text
  calls = found if isinstance(found, list) else [found]
  if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
    raise MalformedError("no tool call", f"{where} holds no object with a name")
  return [{"type": "function", "function": call} for call in calls]


def _content(content: Any, turn: Mapping[str, Any], number: int) -> str:
  """The text of a turn; a turn that only calls tools may have none."""
  if content is None and turn.get("tool_calls"):
    content = ""
  if isinstance(content, list):
    content = "".join(_text_part(part, number) for part in content)
  if not isinstance(content, str):
    raise MalformedError("content not text", f"turn {number} has {_kind(content)} as its text")
  return utf8(content, f"turn {number}")


def _text_part(part: Any, number: int) -> str:
  if not isinstance(part, dict) or not isinstance(part.get("text"), str):
    kind = part.get("type") if isinstance(part, dict) else _kind(part)
    raise MalformedError(
      "content not text", f"turn {number} holds {kind!r:.40}: only text can be read"
    )
  return part["text"]


def utf8(text: str, where: str) -> str:
  """`text`, or `MalformedError` if it has no UTF-8 form."""
  try:
    text.encode()
  except UnicodeEncodeError as e:
    raise MalformedError(
      "lone surrogate", f"a lone surrogate at character {e.start} of {where}"
    ) from e
  return text


def _kind(value: Any) -> str:
  """What JSON calls the type of a value."""
  names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value"}
  return "null" if value is None else names.get(type(value), "a number")
