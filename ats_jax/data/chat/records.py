"""Files of records -> conversations; what is malformed goes to the report by file and line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ats_jax.data.chat.conversation import Conversation, MalformedError, read_conversation
from ats_jax.data.source import Piece, Report, SourceFile, json_rows

SUFFIXES = (".jsonl",)


def records(path: str, report: Report) -> Iterator[tuple[dict[str, Any], int]]:
  """The records of a file, each with its place there, counted from 1."""
  with open(path, "rb") as lines:
    yield from json_rows(lines, path, report)


def conversations(file: SourceFile, report: Report) -> Iterator[tuple[int, Conversation]]:
  """The conversations of a file, each with its place there."""
  if Path(file.name).suffix.lower() not in SUFFIXES:
    report.skip("no records", file.path)
    return
  try:
    for record, place in records(file.path, report):
      try:
        conversation = read_conversation(record)
      except MalformedError as e:
        report.bad(e.kind, f"{file.path}:{place}", str(e))
      else:
        yield place, conversation
  except OSError as e:
    report.bad("unreadable", file.path, f"cannot be read ({e.strerror})")


def message_pieces(file: SourceFile, report: Report) -> Iterator[Piece]:
  """What is said in the conversations of a file, as pieces of documents of text."""
  for place, conversation in conversations(file, report):
    for number, message in enumerate(conversation.messages):
      yield Piece(place, number == 0, message.content)
