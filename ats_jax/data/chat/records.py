"""Files of records -> conversations; what is malformed goes to the report by file and line."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ats_jax.data.chat.conversation import (
  FIELDS,
  MalformedError,
  read_conversation,
)
from ats_jax.data.text.formats import opening
from ats_jax.data.text.formats.records import READERS, records
from ats_jax.data.text.formats.text import Piece
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile


class Joining(Protocol):
  """Makes documents of what the records of a file hold, which needs more than one of them."""

  def __call__(
    self, found: Iterator[tuple[int, Any]], file: str, report: Report
  ) -> Iterator[tuple[int, Any]]:
    """What the documents hold, each with its place in the file of that name."""
    ...


def _as_they_are(
  found: Iterator[tuple[int, Any]], file: str, report: Report
) -> Iterator[tuple[int, Any]]:
  del file, report
  return found


class Schema(NamedTuple):
  """What records are read as.

  Attributes:
    fields: all that is read of a record.
    read: makes a `Conversation` of one, or what has its `messages` and `written`; raises
      `MalformedError`.
    join: makes documents of what is read.
  """

  fields: Sequence[str]
  read: Callable[[Mapping[str, Any]], Any]
  join: Joining = _as_they_are


CONVERSATIONS = Schema(FIELDS, read_conversation)


def conversations(
  file: SourceFile, report: Report, schema: Schema = CONVERSATIONS
) -> Iterator[tuple[int, Any]]:
  """The conversations of a file, each with its place there; `report` counts its records.

  Those that filters drop are passed over.
  """
  numbered = _conversations(file, report, schema)
  kept = file.sieve.kept(file.path, numbered, report) if file.sieve else numbered
  yield from schema.join(kept, file.path, report)


def _conversations(file: SourceFile, report: Report, schema: Schema) -> Iterator[tuple[int, Any]]:
  if opening.suffix(file.name) not in READERS:
    report.records += 1
    report.skip("no records", file.path)
    return
  try:
    for place, row in records(file.path, schema.fields, report):
      try:
        conversation = schema.read(row)
      except MalformedError as e:
        report.bad(e.kind, f"{file.path}:{place}", str(e))
      else:
        yield place, conversation
  except opening.errors() as e:
    report.lost("unreadable", file.path, f"cannot be read ({opening.reason(e)})")


def message_pieces(
  file: SourceFile, report: Report, schema: Schema = CONVERSATIONS
) -> Iterator[Piece]:
  """What is said in the conversations of a file, as pieces of documents of text."""
  for place, conversation in conversations(file, report, schema):
    report.documents += 1
    for number, message in enumerate(conversation.messages):
      yield Piece(place, number == 0, message.content)
