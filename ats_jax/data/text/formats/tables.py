"""Rows of files that other libraries read: Parquet and Arrow (pyarrow), ArrayRecord.

Memory is that of a few rows; of Parquet, of a page of each column.
"""

import contextlib
import importlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from ats_jax.data.text.formats import extra
from ats_jax.store import paths

_ROWS = 64  # in memory at a time


class LostRows(NamedTuple):
  """Rows in a row that a damaged part of a file held: how many, and what is wrong with it."""

  number: int
  error: Exception


# The fields of a row by name, null where it was not asked for; the error of a row with a value that
# is none; or rows that are lost together.
TableRow = dict[str, Any] | ValueError | LostRows


def parquet(path: str, fields: Sequence[str]) -> Iterator[TableRow]:
  """The rows of a Parquet file with the columns of `fields`; others are not read."""
  module = extra.import_extra("pyarrow.parquet", path)
  damage = extra.import_extra("pyarrow", path).ArrowException
  with module.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
    names = file.schema_arrow.names
    columns = [name for name in names if name in fields]
    for group in range(file.num_row_groups):
      left = file.metadata.row_group(group).num_rows
      batches = file.iter_batches(
        batch_size=_ROWS, row_groups=[group], columns=columns, use_threads=False
      )
      try:
        for batch in batches:
          left -= batch.num_rows
          yield from _rows(batch, names)
      except (OSError, damage) as e:  # the next group begins at a place of its own
        yield LostRows(left, e)


def arrow(path: str, fields: Sequence[str]) -> Iterator[TableRow]:
  """The rows of an Arrow file: of the stream format, as Hugging Face's, or of the file format."""
  module = extra.import_extra("pyarrow", path)
  with module.memory_map(path) as file:
    is_file = bytes(file.read(6)) == b"ARROW1"
    file.seek(0)
    for batch in _batches(module.ipc, file, is_file):
      names = batch.schema.names
      part = batch.select([name for name in names if name in fields])
      try:
        _refuse_damage(module, part)
      except module.ArrowInvalid as e:
        yield LostRows(part.num_rows, e)
        continue
      for begin in range(0, part.num_rows, _ROWS):
        yield from _rows(part.slice(begin, _ROWS), names)


def _batches(ipc: Any, file: Any, is_file: bool) -> Iterator[Any]:
  if not is_file:
    yield from ipc.open_stream(file)
    return
  reader = ipc.open_file(file)
  for number in range(reader.num_record_batches):
    yield reader.get_batch(number)


def _refuse_damage(module: Any, batch: Any) -> None:
  """Raise an ArrowInvalid where to read a value would leave the file, and so end the process."""
  for column in batch.columns:
    try:
      column.validate(full=True)
    except module.ArrowInvalid as e:
      # Of a column of text it is the last check; which of its values it is, `_rows` finds out.
      if "UTF8" not in str(e) or module.types.is_nested(column.type):
        raise


def _rows(batch: Any, names: Sequence[str]) -> Iterator[TableRow]:
  """The rows of a batch; of all `names`, of which it has the columns that were asked for."""
  empty = dict.fromkeys(names)
  read = batch.schema.names
  try:
    columns = [values_of(column) for column in batch.columns]
  except ValueError as e:
    if batch.num_rows == 1:
      yield e
      return
    for number in range(batch.num_rows):
      yield from _rows(batch.slice(number, 1), names)
    return
  for row in zip(*columns, strict=True) if columns else [()] * batch.num_rows:
    yield empty | dict(zip(read, row, strict=True))


def values_of(column: Any) -> list[Any]:
  """The values of an Arrow array, as JSON would have given them.

  So an object has no field that is null, with which tables fill up their structs, a time is its
  text, and a decimal is a number. Bytes, which JSON has not, stay bytes.

  Raises:
    ValueError: if one of them is none: text that is not UTF-8, JSON that is broken.
  """
  arrow, compute = map(importlib.import_module, ("pyarrow", "pyarrow.compute"))
  kind = column.type
  types = arrow.types
  if isinstance(kind, arrow.BaseExtensionType):
    values = values_of(column.storage)
    is_json = kind.extension_name == "arrow.json"
    return [v if v is None or not is_json else paths.parse_json(v) for v in values]
  if types.is_dictionary(kind):
    return values_of(column.dictionary_decode())
  if types.is_run_end_encoded(kind):
    return values_of(compute.run_end_decode(column))
  if types.is_struct(kind):
    names = [kind.field(i).name for i in range(kind.num_fields)]
    rows = zip(*map(values_of, column.flatten()), strict=True) if names else [()] * len(column)
    filled = ({n: v for n, v in zip(names, r, strict=True) if v is not None} for r in rows)
    return _where_valid(column, filled)
  if types.is_map(kind):
    ends = column.offsets.to_pylist()
    keys = values_of(column.keys.slice(ends[0], ends[-1] - ends[0]))
    items = values_of(column.items.slice(ends[0], ends[-1] - ends[0]))
    pairs = list(zip(keys, items, strict=True))
    parts = itertools.pairwise(end - ends[0] for end in ends)
    return _where_valid(column, (dict(pairs[begin:end]) for begin, end in parts))
  if types.is_nested(kind) and not types.is_union(kind):  # all kinds of lists
    items = iter(values_of(column.flatten()))
    counts = compute.list_value_length(column).to_pylist()
    return [None if n is None else list(itertools.islice(items, n)) for n in counts]
  if types.is_decimal(kind):
    whole = kind.scale <= 0
    return [None if v is None else int(v) if whole else float(v) for v in column.to_pylist()]
  if types.is_temporal(kind) and not types.is_interval(kind):
    return column.cast(arrow.string()).to_pylist()  # Python's own times hold fewer of them
  return column.to_pylist()


def _where_valid(column: Any, values: Iterable[Any]) -> list[Any]:
  valid = column.is_valid().to_pylist()
  return [value if there else None for value, there in zip(values, valid, strict=True)]


def array_record(path: str) -> Iterator[bytes]:
  """The records of an ArrayRecord file.

  Raises:
    OSError: if it is damaged.
  """
  module = extra.import_extra("array_record.python.array_record_module", path)
  open(path, "rb").close()  # its own message says less
  with contextlib.ExitStack() as stack:
    stack.push(_damaged)
    reader = module.ArrayRecordReader(path)
    stack.callback(reader.close)  # which fails if the file could not be opened
    count = reader.num_records()
    for begin in range(0, count, _ROWS):
      yield from reader.read(list(range(begin, min(begin + _ROWS, count))))


def _damaged(
  kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
  if kind is not None and issubclass(kind, ValueError | RuntimeError | IndexError):
    raise OSError(f"no intact ArrayRecord file: {error}") from error
