"""How published models write conversations.

A template that this module does not know is read from a tokenizer or a file (`jinja.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from ats_jax.data.chat.conversation import Conversation, MalformedError, Message
from ats_jax.data.chat.segments import BOS, EOS, ChatSegment


class Template(Protocol):
  """Writes conversations."""

  @property
  def special(self) -> tuple[str, ...]:
    """Names of the special tokens that it writes, but for the tokenizer's own bos and eos."""
    ...

  @property
  def ends(self) -> tuple[str, ...]:
    """Names of those that end an answer."""
    ...

  def render(self, conversation: Conversation, *, prompt: bool = False) -> list[ChatSegment]:
    """The segments of a conversation; none is empty.

    Args:
      conversation: the turns to write.
      prompt: write the heading of an answer behind it, for a model to go on.

    Raises:
      MalformedError: if the template has no place for one of the turns.
    """
    ...


class _Writer:
  """Collects segments of the turns of one conversation."""

  def __init__(self, messages: Sequence[Message]):
    self.segments: list[ChatSegment] = []
    answers = [m for m in messages if m.role == "assistant"]
    self._last = answers[-1] if answers else None

  def mark(self, text: str, message: Message | None = None) -> None:
    """A special token: of the template, or of the heading of a turn."""
    self.segments.append(ChatSegment(text, message.role if message else "", special=True))

  def text(self, text: str, message: Message | None = None) -> None:
    """Text of the template, or of the heading of a turn."""
    self.segments.append(ChatSegment(text, message.role if message else ""))

  def said(self, text: str, message: Message, *, special: bool = False) -> None:
    """What a turn says, or the special token that ends it."""
    last = message is self._last
    self.segments.append(ChatSegment(text, message.role, special, message.counts, last))

  def done(self) -> list[ChatSegment]:
    """The segments that are not empty."""
    return [s for s in self.segments if s.text]


def _turn(
  out: _Writer, message: Message, *, start: str, heading: str, said: str, end: str, tail: str = ""
) -> None:
  out.mark(start, message)
  out.text(heading, message)
  out.said(said, message)
  out.said(end, message, special=True)
  out.text(tail)


def _chatml(out: _Writer, messages: Sequence[Message], prompt: bool) -> None:
  for m in messages:
    _turn(
      out, m, start="<|im_start|>", heading=f"{m.role}\n", said=m.content, end="<|im_end|>",
      tail="\n",
    )  # fmt: skip
  if prompt:
    out.mark("<|im_start|>")
    out.text("assistant\n")


_QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


def _qwen(out: _Writer, messages: Sequence[Message], prompt: bool) -> None:
  own = () if messages[0].role == "system" else (Message("system", _QWEN_SYSTEM, counts=False),)
  _chatml(out, (*own, *messages), prompt)


def _llama3(out: _Writer, messages: Sequence[Message], prompt: bool) -> None:
  out.mark(BOS)
  for m in messages:
    out.mark("<|start_header_id|>", m)
    out.text(m.role, m)
    _turn(
      out, m, start="<|end_header_id|>", heading="\n\n", said=m.content.strip(), end="<|eot_id|>"
    )
  if prompt:
    out.mark("<|start_header_id|>")
    out.text("assistant")
    out.mark("<|end_header_id|>")
    out.text("\n\n")


def _mistral(out: _Writer, messages: Sequence[Message], prompt: bool) -> None:
  del prompt  # an answer has no heading
  system, turns = _alternating(messages)
  asked = [m for m in turns if m.role == "user"]
  out.mark(BOS)
  for m in turns:
    if m.role == "assistant":
      out.said(f" {m.content.strip()}", m)
      out.said(EOS, m, special=True)
      continue
    out.mark("[INST]", m)
    if system and m is asked[-1]:
      out.said(f" {system.content}", system)
      out.text("\n\n")
      out.said(m.content, m)
    else:
      out.said(f" {m.content}", m)
    out.said("[/INST]", m, special=True)


def _gemma(out: _Writer, messages: Sequence[Message], prompt: bool) -> None:
  system, turns = _alternating(messages)
  out.mark(BOS)
  for m in turns:
    out.mark("<start_of_turn>", m)
    out.text("model\n" if m.role == "assistant" else f"{m.role}\n", m)
    if system and m is turns[0]:
      out.said(system.content, system)
      out.text("\n\n")
    out.said(m.content.strip(), m)
    out.said("<end_of_turn>", m, special=True)
    out.text("\n")
  if prompt:
    out.mark("<start_of_turn>")
    out.text("model\n")


def _plain(out: _Writer, messages: Sequence[Message], prompt: bool) -> None:
  del prompt
  for m in messages:
    out.said(m.content, m)
    if m.role == "assistant":
      out.said(EOS, m, special=True)


def _alternating(messages: Sequence[Message]) -> tuple[Message | None, Sequence[Message]]:
  """The system's turn, if there is one, and the others: of user and assistant in turn.

  Raises:
    MalformedError: if they are not.
  """
  system = messages[0] if messages[0].role == "system" else None
  turns = messages[1:] if system else messages
  for number, message in enumerate(turns):
    expected = ("user", "assistant")[number % 2]
    if message.role != expected:
      raise MalformedError(
        "turns do not alternate",
        "the template has turns of user and assistant in turn, behind one of the system at most; "
        f"here {message.role} stands where {expected} would",
      )
  return system, turns


class Published(NamedTuple):
  """The template of a family of models; see `Template`.

  `writes` gets a writer, the turns, and whether the heading of an answer is to follow.
  """

  name: str
  writes: Callable[[_Writer, Sequence[Message], bool], None]
  special: tuple[str, ...]
  ends: tuple[str, ...]

  def render(self, conversation: Conversation, *, prompt: bool = False) -> list[ChatSegment]:
    """Return the segments of a conversation, none of them empty."""
    messages = conversation.messages
    if tool := next(_of_tools(conversation), ""):
      raise MalformedError(
        "template without tools",
        f"{tool}, for which data.format.template={self.name} has no place. Use "
        "data.format.template=tokenizer, with a tokenizer whose template has one",
      )
    out = _Writer(messages)
    self.writes(out, messages, prompt)
    return out.done()


def _of_tools(conversation: Conversation) -> Iterator[str]:
  """What of a conversation is about tools, in words."""
  if conversation.tools:
    yield "the record has tools"
  for number, message in enumerate(conversation.messages, 1):
    if message.role == "tool":
      yield f"turn {number} is of a tool"
    if message.extra.get("tool_calls"):
      yield f"turn {number} calls a tool"


_IM = ("<|im_start|>", "<|im_end|>")
_HEADER = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
PUBLISHED = {
  t.name: t
  for t in (
    Published("chatml", _chatml, _IM, ("<|im_end|>",)),
    Published("llama3", _llama3, _HEADER, ("<|eot_id|>",)),
    Published("qwen", _qwen, _IM, ("<|im_end|>",)),
    Published("mistral", _mistral, ("[INST]", "[/INST]"), (EOS,)),
    Published("gemma", _gemma, ("<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",)),
    Published("plain", _plain, (), (EOS,)),
  )
}
