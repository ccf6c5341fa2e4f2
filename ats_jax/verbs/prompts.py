"""A file of prompts: reading it, and the rows of what becomes of them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ats_jax.data.chat.conversation import Message, read_question, utf8
from ats_jax.data.tokens.base import Tokenizer
from ats_jax.inference.engine.engine import Engine
from ats_jax.inference.engine.request import Finished, Request
from ats_jax.store import paths


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One line of a file.

  Attributes:
    where: file and line.
    given: what the row of the result repeats: `prompt`, or `messages` as they stand in the file.
    text: to continue; "" with turns.
    turns: to answer; () = `text` is continued.
  """

  where: str
  given: dict[str, Any]
  text: str
  turns: tuple[Message, ...] = ()

  def asked(self, before: Sequence[Message]) -> "Prompt":
    """The same as a turn of a user behind others; turns stay as they are."""
    turns = self.turns or (*before, Message("user", self.text))
    return dataclasses.replace(self, turns=turns)

  def ids(self, tokenizer: Tokenizer) -> list[int]:
    """What the model reads.

    Raises:
      ValueError: if it knows no turns, or its template has no place for one.
    """
    if not self.turns:
      return [tokenizer.of_text.bos_id, *tokenizer.encode(self.text)]
    from ats_jax.data.chat.tokenizer import prompt_of  # here: few runs are on conversations

    try:
      return prompt_of(tokenizer, self.turns)
    except ValueError as e:
      raise ValueError(f"{self.where}: {e}") from e


def read_prompts(path: paths.Path) -> list[Prompt]:
  """The prompts of a file: a JSON object with `prompt` or `messages` a line, or a text a line.

  Lines without anything are left out.

  Raises:
    ValueError: for a line that is none, with its number, or if there are none at all.
    OSError: if the file cannot be read.
  """
  is_json = path.suffix in (".jsonl", ".ndjson")
  prompts = []
  for number, raw in enumerate(paths.read(path).split(b"\n"), 1):
    if not raw.strip():
      continue
    try:
      line = raw.decode().removesuffix("\r")
      where = f"{path}:{number}"
      prompts.append(_of_json(where, line) if is_json else Prompt(where, {"prompt": line}, line))
    except UnicodeDecodeError as e:
      raise ValueError(f"{path}:{number}: not UTF-8 at byte {e.start} of the line.") from e
    except ValueError as e:
      raise ValueError(f"{path}:{number}: {e}.") from e
  if not prompts:
    raise ValueError(f"{path} holds no prompt: a text or a JSON object a line was expected.")
  return prompts


def _of_json(where: str, line: str) -> Prompt:
  row = paths.parse_json(line)
  if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
    raise ValueError('expected a JSON object with either "prompt" or "messages"')
  if "messages" in row:
    return Prompt(where, {"messages": row["messages"]}, "", read_question(row["messages"]))
  if not isinstance(row["prompt"], str):
    raise ValueError(f'"prompt" is {row["prompt"]!r:.40}, not a text')
  return Prompt(where, {"prompt": row["prompt"]}, utf8(row["prompt"], '"prompt"'))


def answers(
  engine: Engine, prompts: Sequence[Prompt], requests: Sequence[Request]
) -> Iterator[dict[str, Any]]:
  """A row for each prompt, in order, as soon as it and those before it are done.

  The rows have `text` and `finished`, or `error` where a request was refused.
  """
  places = {engine.submit(request): at for at, request in enumerate(requests)}
  texts, done, next_one = [""] * len(prompts), dict[int, dict[str, Any]](), 0
  for event in engine.events():
    at = places[event.id]
    texts[at] += event.text
    if not event.finished:
      continue
    if event.finished is Finished.REFUSED:
      done[at] = {**prompts[at].given, "error": event.message}
    else:
      done[at] = {**prompts[at].given, "text": texts[at], "finished": str(event.finished)}
    while next_one in done:
      yield done.pop(next_one)
      next_one += 1
