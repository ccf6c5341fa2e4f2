"""Records of the usual schemas -> answers that are desirable or not, each beside another's answer.

What a model says to a question without being asked it, as a loss needs it, is the answer of
another record in place of its own.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ats_jax.data.chat.conversation import (
  FIELDS,
  LISTS,
  VERDICTS,
  Conversation,
  MalformedError,
  Message,
  read_conversation,
)
from ats_jax.data.chat.pairs import ANSWERS, QUESTION, Pair, answer_of, read_pair
from ats_jax.data.chat.preference import PreferenceFormat
from ats_jax.data.chat.records import Schema
from ats_jax.data.chat.segments import GOOD, REJECTED
from ats_jax.data.text.report import Report


class Labelled(NamedTuple):
  """An answer with its label, and perhaps the same question with an answer to another one.

  Attributes:
    own: the conversation, of which the answer alone counts.
    shared: how many turns stand before the answer.
    is_good: whether the answer is desirable.
    other: the question with an answer to another one; None = it is not known yet.
  """

  own: Conversation
  shared: int
  is_good: bool
  other: Conversation | None = None

  @property
  def messages(self) -> tuple[Message, ...]:
    """The turns of the record."""
    return self.own.messages

  @property
  def asked(self) -> tuple[tuple[str, str], ...]:
    """What stands before the answer."""
    return tuple((m.role, m.content) for m in self.own.messages[: self.shared])

  @property
  def written(self) -> tuple[Conversation, ...]:
    """Both conversations, as a template writes one behind the other."""
    assert self.other is not None, "documents are joined"
    return (self.own, self.other)

  @property
  def second_code(self) -> int:
    """What the codes of the second conversation say beside its own."""
    return REJECTED | (GOOD if self.is_good else 0)

  def beside(self, other: "Labelled") -> "Labelled":
    """The same with the answer of `other` as well."""
    messages = self.own.messages[: self.shared] + other.own.messages[other.shared :]
    return self._replace(other=self.own._replace(messages=messages))


def read_labelled(record: Mapping[str, Any]) -> Labelled | Pair:
  """The conversation that a record holds, with its label; or a pair, whose answers have one each.

  The label is true or false, in `label` or `kto_tag`. The answer is what follows the last turn of
  the user. All else is as in `read_conversation` and `read_pair`.

  Raises:
    MalformedError: if it holds neither.
  """
  has = {name: value for name, value in record.items() if value is not None}
  label = next((has[name] for name in VERDICTS if name in has), None)
  if label is None:
    if has.keys() & {*ANSWERS}:
      return read_pair(has)
    raise MalformedError("no label", f"no field {' or '.join(VERDICTS)} says how its answer is")
  if label not in (True, False):
    raise MalformedError("no label", f"the label {label!r:.40} is neither true nor false")
  said = read_conversation({name: has[name] for name in has if name not in VERDICTS})
  users = [number for number, m in enumerate(said.messages, 1) if m.role == "user"]
  if not users:
    raise MalformedError("no question", "no turn is of the role user")
  name = next(name for name in (*LISTS, "completion", "output") if name in has)
  return Labelled(answer_of(said, name, users[-1]), users[-1], bool(label))


def with_others(
  found: Iterator[tuple[int, Any]], file: str, report: Report
) -> Iterator[tuple[int, Labelled]]:
  """Answers beside that of the last record before with another question.

  Those before which there is none take the first one behind them; pairs become two answers.
  """
  waiting: list[tuple[int, Labelled]] = []
  other: Labelled | None = None  # of another question than `last`
  last: Labelled | None = None
  for place, each in _one_by_one(found, report):
    if last is not None and each.asked != last.asked:
      other = last
    last = each
    if other is None:
      waiting.append((place, each))
      continue
    for where, earlier in waiting:
      yield where, earlier.beside(each)
    waiting = []
    yield place, each.beside(other)
  for where, _ in waiting:
    report.bad("no other question", f"{file}:{where}", "no record of the file has another question")


def _one_by_one(found: Iterator[tuple[int, Any]], report: Report) -> Iterator[tuple[int, Labelled]]:
  for place, each in found:
    if isinstance(each, Pair):
      report.records += 1  # it counts as two
      yield place, Labelled(each.chosen, each.shared, is_good=True)
      yield place, Labelled(each.rejected, each.shared, is_good=False)
    else:
      yield place, each


class LabelledFormat(PreferenceFormat):
  """Answers with a label; the second conversation of a document has the other answer."""

  schema = Schema((*FIELDS, *ANSWERS, QUESTION), read_labelled, with_others)

  @property
  def key(self) -> list[str]:
    """See the base class."""
    return ["labelled", "whole"]
