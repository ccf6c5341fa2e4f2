"""What was malformed or left out, counted by kind and named; nothing is dropped without a word."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, TextIO

from ats_jax.store.secrets import masked

_SHOWN = 5  # problems repeated in the log


class Report:
  """Counts records, and what was malformed or left out; names each in a file if it is given one.

  A record is a file of text, a line, a row, or a document of a token file. What of a file cannot be
  read is one more. So `records` = `documents` + what was left out, which `balance` checks.

  Attributes:
    records: seen.
    documents: that they held.
    malformed: kind -> count of records and files that could not be used.
    skipped: kind -> count of what is harmless to leave out (empty, unknown suffix, listed twice).
    filtered: reason -> count of documents that filters dropped.
    first: the first few malformed ones, in words.
  """

  def __init__(self, *, strict: bool, file: TextIO | None = None):
    self.records = self.documents = 0
    self.malformed: Counter[str] = Counter()
    self.skipped: Counter[str] = Counter()
    self.filtered: Counter[str] = Counter()
    self.first: list[str] = []
    self._strict, self._file = strict, file

  def bad(self, kind: str, where: str, detail: str, count: int = 1) -> None:
    """Records something malformed, or raises ValueError if `strict`.

    Args:
      kind: by which it is counted.
      where: the file and the line.
      detail: what is wrong with it.
      count: number of records that share this fault.
    """
    line = _visible(f"{where}: {detail}")
    if self._strict:
      raise ValueError(f"{line}. Mend it, or set data.strict=False to count it and leave it out.")
    self.malformed[kind] += count
    if len(self.first) < _SHOWN:
      self.first.append(line)
    self._write(line)

  def lost(self, kind: str, where: str, detail: str) -> None:
    """As `bad`, for a file or the rest of one, of which nobody knows what it would have held."""
    self.records += 1
    self.bad(kind, where, detail)

  def skip(self, kind: str, where: str) -> None:
    """Records something that holds no document."""
    self.skipped[kind] += 1
    self._write(f"{where}: {kind}")

  def drop(self, reason: str, where: str) -> None:
    """Records a document that a filter drops."""
    self.filtered[reason] += 1
    self._write(f"{where}: {reason}")

  def join(self, other: "Report", lines: str) -> None:
    """Take in what `other` counted, and the lines that it wrote."""
    self.records += other.records
    self.documents += other.documents
    for name in ("malformed", "skipped", "filtered"):
      getattr(self, name).update(getattr(other, name))
    self.first = (self.first + other.first)[:_SHOWN]
    if self._file:
      self._file.write(lines)

  def taken(self) -> "Report":
    """What was counted so far; counting begins anew."""
    taken = Report(strict=self._strict)
    taken.join(self, "")
    self.records = self.documents = 0
    for name in ("malformed", "skipped", "filtered"):
      getattr(self, name).clear()
    self.first = []
    return taken

  @property
  def dropped(self) -> int:
    """Records that hold no document."""
    return self.malformed.total() + self.skipped.total()

  def balance(self) -> dict[str, int]:
    """The counts, which add up."""
    dropped = self.dropped + self.filtered.total()
    assert self.records == self.documents + dropped, (self.records, self.documents, str(self))
    return {"records": self.records, "documents": self.documents, "dropped": dropped}

  def summary(self) -> dict[str, Any]:
    """The counts and the first few as plain types."""
    counts = {"malformed": self.malformed, "skipped": self.skipped, "filtered": self.filtered}
    return {**{name: dict(count) for name, count in counts.items()}, "first": self.first}

  def __str__(self) -> str:
    counts = {**self.malformed, **self.skipped, **self.filtered}
    text = ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "nothing malformed"
    return "; ".join([text, *self.first])

  def _write(self, line: str) -> None:
    if self._file:
      self._file.write(_visible(line) + "\n")


def _visible(line: str) -> str:
  """A line without line breaks, escape sequences and credentials, which names of files may have."""
  shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in masked(line))
  return "".join(shown)


def in_words(balance: Mapping[str, int]) -> str:
  """`Report.balance` in words."""
  records, documents = (
    f"{balance[name]:,} {name.removesuffix('s') if balance[name] == 1 else name}"
    for name in ("records", "documents")
  )
  return f"{records} read = {documents} + {balance['dropped']:,} left out"
