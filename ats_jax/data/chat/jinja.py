"""A tokenizer's own template: jinja, rendered in a process of its own (`sandbox.py`).

Two things make its segments exact. In what the turns say each name of a special token is broken by
a character that occurs nowhere else, so that those left in the result are the template's. And what
an answer is follows from the template itself: from its `{% generation %}` marks, or from what one
more turn adds to the text so far.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import select
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ats_jax.data.chat.conversation import Conversation, MalformedError, Message, utf8
from ats_jax.data.chat.segments import BOS, EOS, ChatSegment

TIMEOUT_SECS = 10.0  # for one conversation; a template takes a millisecond
_PROGRAM = Path(__file__).with_name("sandbox.py")
_FREE = [chr(c) for c in range(0xFDD0, 0xFDF0)]  # no characters, and never will be (Unicode 23.7)
_PROBE = Conversation((Message("user", "question"), Message("assistant", "answer")))
_LONGER = Conversation(_PROBE.messages * 2)


class Sandbox:
  """A process that renders one template; started when it is needed, ended with this object."""

  def __init__(self, source: str):
    self._source = source
    self._process: subprocess.Popen | None = None
    self._has_marks = False

  @property
  def has_marks(self) -> bool:
    """Whether the template has `{% generation %}` blocks."""
    self._start()
    return self._has_marks

  def render(self, **variables: Any) -> str:
    """The text of the template.

    Args:
      **variables: what it knows, and `marks`, the texts before and behind what is generated.

    Raises:
      MalformedError: if the template refuses them.
      ValueError: if it does not end, or does what no template may.
    """
    self._start()
    reply = self._ask(variables)
    if "hostile" in reply:
      raise ValueError(f"the chat template does what no template may: {reply['hostile']}.")
    if "refused" in reply:
      raise MalformedError("template refuses it", f"the template says: {reply['refused']}")
    return utf8(reply["text"], "what the template writes")

  def _start(self) -> None:
    if self._process is not None:
      return
    self._process = subprocess.Popen(
      [sys.executable, "-P", str(_PROGRAM)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
    )
    weakref.finalize(self, _end, self._process)
    reply = self._ask(self._source)
    if "broken" in reply:
      raise ValueError(f"the chat template is no jinja: {reply['broken']}.")
    self._has_marks = reply["has_marks"]

  def _ask(self, request: Any) -> dict[str, Any]:
    process = self._process
    assert process is not None and process.stdin is not None and process.stdout is not None
    try:
      process.stdin.write(json.dumps(request).encode() + b"\n")
      process.stdin.flush()
      return json.loads(_line(process.stdout.fileno()))
    except (BrokenPipeError, TimeoutError, EOFError) as e:
      _end(process)
      why = (
        f"it did not end in {TIMEOUT_SECS:.0f} s"
        if isinstance(e, TimeoutError)
        else f"its process ended with {process.returncode}"
      )
      raise ValueError(f"the chat template cannot be rendered: {why}.") from e


def _line(file: int) -> bytes:
  """A line from a file descriptor, in time."""
  line = b""
  while not line.endswith(b"\n"):
    if not select.select([file], [], [], TIMEOUT_SECS)[0]:
      raise TimeoutError
    part = os.read(file, 2**20)
    if not part:
      raise EOFError
    line += part
  return line


def _end(process: subprocess.Popen) -> None:
  process.kill()
  process.wait()
  for pipe in filter(None, (process.stdin, process.stdout)):
    with contextlib.suppress(BrokenPipeError):  # what it was still to be told
      pipe.close()


class JinjaTemplate:
  """A template of a tokenizer's; see `Template`."""

  def __init__(self, source: str, names: Mapping[str, str], special: Sequence[str], marks: bool):
    """Start nothing yet.

    Args:
      source: the jinja text.
      names: what the template calls the tokenizer's own tokens, e.g. {"bos_token": "<s>"}.
      special: names of all special tokens of the tokenizer.
      marks: whether to heed its `{% generation %}` marks, if it has any.
    """
    self.source, self.names, self.special = source, dict(names), tuple(special)
    self.sandbox = Sandbox(source)
    self._heeds_marks = marks
    self._ends: tuple[str, ...] = ()
    tokens = sorted({*special, *names.values()}, key=len, reverse=True)
    if tokens and len(tokens[-1]) < 2:
      raise ValueError(
        f"the tokenizer's special token {tokens[-1]!r} is one character, as text has it."
      )
    self._tokens = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
    self._heads = tuple({token[:n] for token in tokens for n in range(1, len(token))})
    self._tails = tuple({token[n:] for token in tokens for n in range(1, len(token))})
    self._own = {names[n]: own for n, own in (("bos_token", BOS), ("eos_token", EOS)) if n in names}

  @property
  def ends(self) -> tuple[str, ...]:
    """Names of the special tokens that end an answer, as a first conversation shows.

    Raises:
      ValueError: if it is not jinja, does not end, or leaves the end of an answer out of the loss.
    """
    if not self._ends:
      try:
        answer = [s for s in self.render(_PROBE) if s.counts]
      except MalformedError as e:
        raise ValueError(f"the chat template is tried with a question and an answer: {e}") from e
      self._ends = (answer[-1].text,)
    return self._ends

  @functools.cached_property
  def _tail(self) -> str:
    """What stands behind the last turn of a conversation, such as an eos; it is of no turn.

    It is what a conversation and a longer one have in common at their ends, from where they differ
    on. If no answer ends before it, it is the end of the last answer.
    """
    try:
      short, long = (self._writing(c)[0].text() for c in (_PROBE, _LONGER))
    except MalformedError:  # it takes no second question, so each conversation ends in one way
      return ""
    pairs = enumerate(zip(short, long, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), len(short))
    inside = (m.start() for m in self._tokens.finditer(short) if m.start() < at < m.end())
    at = next(inside, at)  # tokens that begin alike are no part of what is common
    ends = [m.end() for m in self._tokens.finditer(short, 0, at)]
    is_end = bool(ends) and not short[ends[-1] : at].strip()
    return short[at:] if is_end and long.endswith(short[at:]) else ""

  def render(self, conversation: Conversation, *, prompt: bool = False) -> list[ChatSegment]:
    """Return the segments of a conversation; a role is known for answers only.

    Raises:
      MalformedError: if the template refuses it, an answer is not found exactly, or its end is not
        in the loss.
      ValueError: if the template does not end, or does what no template may.
    """
    try:
      write, breaker = self._writing(conversation)
    except RecursionError as e:
      raise MalformedError("nested too deeply", "tools or their calls are nested too deeply") from e
    if prompt:
      text, spans = write.text(prompt=True), []
    else:
      text, spans = write.marked() if self._has_marks else write.by_turns(self._tail)
    segments: list[ChatSegment] = []
    at = 0
    for number, (turn, begin, end) in enumerate(spans, 1):
      end = self._end_of_turn(text, begin, end)
      like = ChatSegment("", "assistant", counts=conversation.messages[turn].counts)
      segments += self._cut(text[at:begin], ChatSegment(""))
      segments += self._cut(text[begin:end], like._replace(last=number == len(spans)))
      at = end
    segments += self._cut(text[at:], ChatSegment(""))
    without_breakers = (s._replace(text=s.text.replace(breaker, "")) for s in segments)
    return [s for s in without_breakers if s.text]

  def _writing(self, conversation: Conversation) -> tuple["_Writing", str]:
    """What the template gets, and the character that breaks the names of special tokens in it."""
    holds = json.dumps([conversation, self.source, self.special], ensure_ascii=False)
    free = [c for c in _FREE if c not in holds]
    if len(free) < 3:
      detail = "it holds nearly all characters that Unicode excludes"
      raise MalformedError("noncharacters", detail)
    broken = functools.partial(self._broken, breaker=free[2])
    turns = [
      {**broken(m.extra), "role": m.role, "content": broken(m.content)}
      for m in conversation.messages
    ]
    tools = broken(conversation.tools)
    return _Writing(self.sandbox, self.names, turns, tools, (free[0], free[1])), free[2]

  @property
  def _has_marks(self) -> bool:
    return self._heeds_marks and self.sandbox.has_marks

  def _broken(self, value: Any, breaker: str) -> Any:
    """A value of JSON in whose strings, alone or joined with others, no special token stands."""
    if isinstance(value, Mapping):
      return {self._split(k, breaker): self._broken(v, breaker) for k, v in value.items()}
    if isinstance(value, list | tuple):
      return [self._broken(v, breaker) for v in value]
    if not isinstance(value, str):
      return value
    value = self._split(value, breaker)
    before = breaker if value.startswith(self._tails) else ""
    return before + value + (breaker if value.endswith(self._heads) else "")

  def _split(self, text: str, breaker: str) -> str:
    while self._tokens.search(text):
      text = self._tokens.sub(lambda m: m[0][0] + breaker + m[0][1:], text)
    return text

  def _end_of_turn(self, text: str, begin: int, end: int) -> int:
    """Where the special token ends with which an answer ends; blanks may follow it.

    Raises:
      MalformedError: if there is none.
    """
    tokens = list(self._tokens.finditer(text, begin, end))
    if tokens and not text[tokens[-1].end() : end].strip():
      return tokens[-1].end()
    if self._has_marks:
      raise MalformedError(
        "end of an answer not found",
        "the chat template leaves the end of an answer out of the loss: its {% generation %} marks "
        f"enclose {text[begin:end][-40:]!r}, which ends with no special token. A model would never "
        "learn to stop. Set data.format.marks=false to take whole turns in their place.",
      )
    raise MalformedError(
      "end of an answer not found",
      f"the chat template ends an answer with {text[begin:end][-40:]!r}, which is no special token "
      "of the tokenizer, so the end of a turn is not in the loss. A model would never learn to "
      "stop. Write {{ eos_token }} behind an answer, or use a template by name: "
      "data.format.template=chatml.",
    )

  def _cut(self, text: str, like: ChatSegment) -> Iterator[ChatSegment]:
    """Text and special tokens in turn, in all else like a segment."""
    at = 0
    for match in self._tokens.finditer(text):
      yield like._replace(text=text[at : match.start()])
      yield like._replace(text=self._own.get(match[0], match[0]), special=True)
      at = match.end()
    yield like._replace(text=text[at:])


class _Writing(NamedTuple):
  """One conversation for one template: its text, whole or in part."""

  sandbox: Sandbox
  names: Mapping[str, str]
  turns: Sequence[Mapping[str, Any]]
  tools: Any
  marks: tuple[str, str]

  def text(self, count: int | None = None, *, prompt: bool = False, marks: bool = False) -> str:
    """The text of the first turns; None = of all."""
    return self.sandbox.render(
      **self.names,
      messages=self.turns[:count],
      tools=self.tools,
      documents=None,
      add_generation_prompt=prompt,
      marks=self.marks if marks else ("", ""),
    )

  def answers(self) -> list[int]:
    """Which turns are answers."""
    return [number for number, turn in enumerate(self.turns) if turn["role"] == "assistant"]

  def marked(self) -> tuple[str, list[tuple[int, int, int]]]:
    """The text, and of each answer its turn, and from where to where its marks are."""
    answers = self.answers()
    parts = re.split(f"[{''.join(self.marks)}]", self.text(marks=True))
    if len(parts) != 2 * len(answers) + 1:
      raise MalformedError(
        "answers not found",
        f"the chat template marks {len(parts) // 2} of {len(answers)} answers with "
        "{% generation %}. Set data.format.marks=false to take whole turns in their place.",
      )
    ends = list(itertools.accumulate(map(len, parts)))
    return "".join(parts), list(zip(answers, ends[0::2], ends[1::2], strict=False))

  def by_turns(self, tail: str) -> tuple[str, list[tuple[int, int, int]]]:
    """The text, and of each answer its turn, and from where to where that adds to those before.

    Args:
      tail: what stands behind the last turn, whichever that is.
    """
    text = self.text()
    spans = []
    for turn in self.answers():
      before, after = self.text(turn, prompt=True), self.text(turn + 1).removesuffix(tail)
      if not text.startswith(after) or not after.startswith(before):
        raise MalformedError(
          "answers not found",
          f"the chat template writes what comes before turn {turn + 1} in another way once that "
          "turn or a later one follows, so it cannot be told which tokens are the answer. Use a "
          "template with {% generation %} marks, or one by name: data.format.template=chatml.",
        )
      spans.append((turn, len(before), len(after)))
    return text, spans
