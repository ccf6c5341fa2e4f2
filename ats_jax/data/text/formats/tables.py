"""Rows of files that other libraries read: Parquet and Arrow (pyarrow), ArrayRecord.

Memory is that of a few rows; of Parquet, of a page of each column.
"""

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from ats_jax.data.text.formats import extra

_ROWS = 64  # in memory at a time

# The fields of a row by name; or the error of a row whose text is not UTF-8.
TableRow = dict[str, Any] | UnicodeDecodeError


def parquet(path: str, fields: Sequence[str] | None) -> Iterator[TableRow]:
  """The rows of a Parquet file; without any of `fields`, those that it has."""
  module = extra.import_extra("pyarrow.parquet", path)
  with module.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
    columns = _among(fields, file.schema_arrow.names)
    for batch in file.iter_batches(batch_size=_ROWS, columns=columns, use_threads=False):
      yield from _rows(batch)


def arrow(path: str, fields: Sequence[str] | None) -> Iterator[TableRow]:
  """The rows of an Arrow file: of the stream format, as Hugging Face's, or of the file format."""
  module = extra.import_extra("pyarrow", path)
  with module.memory_map(path) as file:
    is_file = bytes(file.read(6)) == b"ARROW1"
    file.seek(0)
    for batch in _batches(module.ipc, file, is_file):
      part = batch.select(_among(fields, batch.schema.names))
      _refuse_damage(module, part)
      for begin in range(0, part.num_rows, _ROWS):
        yield from _rows(part.slice(begin, _ROWS))


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


def _among(fields: Sequence[str] | None, names: list[str]) -> list[str]:
  """The columns to read: if none of `fields` is there, all, so that a message can name them."""
  return [name for name in names if fields is not None and name in fields] or names


def _rows(batch: Any) -> Iterator[TableRow]:
  try:
    yield from batch.to_pylist()
  except UnicodeDecodeError:
    for number in range(batch.num_rows):
      try:
        (row,) = batch.slice(number, 1).to_pylist()
      except UnicodeDecodeError as e:
        row = e
      yield row


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
