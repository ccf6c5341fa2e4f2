"""Where a row of a run comes from: its source, and the documents of which files."""

from typing import NamedTuple

from ats_jax.data.rows.contract import TrainRows


class Origin(NamedTuple):
  """Of one row of a run; of several short ones the first.

  Attributes:
    parts: names of the parts that lead to it, such as its source; () = the rows have none.
    row: its number among the rows of that part, over the run.
    documents: names of its documents: file and place in the file; () = they are not known.
  """

  parts: tuple[str, ...]
  row: int
  documents: tuple[str, ...]


def origin_of(rows: TrainRows, row: int) -> Origin:
  """Where row `row` of a run on `rows` comes from."""
  if not rows.info.parts:
    return Origin((), row, rows.documents(row))
  name, numbers = in_part(rows, row)
  origin = origin_of(rows.info.parts[name], numbers[0])
  return origin._replace(parts=(name, *origin.parts))


def in_part(rows: TrainRows, row: int) -> tuple[str, range]:
  """The part that a row of a run is of, and which of its rows it is."""
  before, after = rows.progress(row).rows, rows.progress(row + 1).rows
  (name,) = (name for name in before if after[name] > before[name])
  return name, range(before[name], after[name])
