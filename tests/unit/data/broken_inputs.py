"""A seeded corpus of broken files: what people really have, and what a bad disk makes of it."""

import bz2
import gzip
import importlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

WORDS = [
  "plain", "é", "漢字", "🙂\u200d", "a\x00b", "\ufeff", "\u2028", "<|endoftext|>", "\r", "\t ",
]  # fmt: skip


class Case(NamedTuple):
  """A file, and how many records it holds: None if only the reader can tell."""

  path: Path
  records: int | None


def make(folder: Path, seed: int) -> Case:
  """Case number `seed`, in a folder that is there."""
  draw = random.Random(seed)
  return draw.choice(KINDS)(folder, f"{seed:05}", draw)


def _text(draw: random.Random, most: int = 40) -> str:
  return "".join(draw.choice(WORDS) + draw.choice(" \n") for _ in range(draw.randrange(most)))


def _write(folder: Path, name: str, content: bytes, records: int | None) -> Case:
  (folder / name).write_bytes(content)
  return Case(folder / name, records)


_LINES: list[Callable[[random.Random], bytes]] = [
  lambda d: json.dumps({"text": _text(d)}).encode(),
  lambda d: json.dumps({"text": _text(d)}, ensure_ascii=False).encode(),
  lambda d: json.dumps({"text": _text(d) + "x"}).encode()[: d.randrange(1, 9)],  # truncated
  lambda d: json.dumps({"text": d.choice([None, 3, 1.5, True, [], {}, ["a"]])}).encode(),
  lambda d: json.dumps({d.choice(["txt", "Text", ""]): "x"}).encode(),
  lambda d: json.dumps(d.choice([[], 1, "a", None, [{"text": "x"}]])).encode(),
  lambda d: b'{"text": "\\ud8%02x"}' % d.randrange(256),  # a lone surrogate
  lambda d: '{"text": "é"}'.encode(d.choice(["latin-1", "utf-16", "utf-32", "cp500"])),
  lambda d: b'{"text": "a", "text": %d}' % d.randrange(9),  # the same key twice
  lambda d: b"[" * d.randrange(1, 200_000),
  lambda d: b'{"text": ' + b"9" * d.randrange(1, 6000) + b"}",
  lambda d: b'{"text": NaN, "n": Infinity}',
  lambda d: b'{"messages": [{"role": "", "content": "x"}]}',
  lambda d: d.choice([b"", b" ", b"\t\r", b"\x00", b"null", b"{}", b"\xef\xbb\xbf"]),
  lambda d: bytes(d.choices(range(11, 256), k=d.randrange(60))),
  lambda d: json.dumps({"text": "long " * d.randrange(20_000)}).encode(),
]  # fmt: skip


def _json_lines(draw: random.Random) -> tuple[bytes, int]:
  lines = [draw.choice(_LINES)(draw).replace(b"\n", b"") for _ in range(draw.randrange(12))]
  ends = draw.choice([b"\n", b"\r\n"])
  raw = b"".join(line + ends for line in lines)
  if lines and lines[-1] and draw.random() < 0.5:
    raw = raw.removesuffix(ends)
  return raw, len(lines)


def jsonl(folder: Path, stem: str, draw: random.Random) -> Case:
  return _write(folder, f"{stem}.jsonl", *_json_lines(draw))


def text(folder: Path, stem: str, draw: random.Random) -> Case:
  raw = bytearray(_text(draw, 400).encode(draw.choice(["utf-8", "utf-8", "utf-16"])))
  for _ in range(draw.choice([0, 0, 1, 5])):
    raw[draw.randrange(len(raw) + 1) :] = bytes([draw.randrange(256)])
  return _write(folder, f"{stem}{draw.choice(['.txt', '.md', '.py'])}", bytes(raw), 1)


def compressed(folder: Path, stem: str, draw: random.Random) -> Case:
  """Packed rightly, under the name of another packer, cut off, changed, or with more behind it."""
  plain, records = _json_lines(draw)
  pack = draw.choice([gzip.compress, bz2.compress, lambda raw: raw])
  suffix, raw, fault = draw.choice([".gz", ".bz2"]), bytearray(pack(plain)), draw.randrange(4)
  if fault == 1:
    del raw[draw.randrange(len(raw) + 1) :]
  elif fault == 2 and raw:
    raw[draw.randrange(len(raw))] ^= draw.randrange(1, 256)
  elif fault == 3:
    raw += b"more"
  right = {gzip.compress: ".gz", bz2.compress: ".bz2"}.get(pack) == suffix
  return _write(
    folder, f"{stem}.jsonl{suffix}", bytes(raw), records if right and not fault else None
  )


def ids(folder: Path, stem: str, draw: random.Random) -> Case:
  """Ids of any type and shape; some past the vocabulary of bytes."""
  size, kind = draw.randrange(60), draw.choice(["uint8", "uint16", "int32", "int64", "float32"])
  top = draw.choice([258, 259, 300, 70_000])
  array = np.array([draw.randrange(top) for _ in range(size)]).astype(kind)
  if draw.random() < 0.5:
    (folder / f"{stem}.bin").write_bytes(array.tobytes() + b"x" * draw.choice([0, 0, 1]))
    return Case(folder / f"{stem}.bin", None)
  if draw.random() < 0.2 and size % 2 == 0:
    array = array.reshape(2, -1)
  path = folder / f"{stem}.npy"
  np.save(path, array)
  raw = bytearray(path.read_bytes())
  fault = draw.randrange(5)
  if fault == 0:
    raw[draw.randrange(len(raw))] ^= draw.randrange(1, 256)
  elif fault == 1:
    del raw[draw.randrange(len(raw)) :]
  path.write_bytes(raw)
  return Case(path, None)


def special(folder: Path, stem: str, draw: random.Random) -> Case:
  """What is no file of text at all."""
  path = folder / f"{stem}.txt"
  target = draw.choice([None, folder / f"nowhere-{stem}", path, "/dev/zero"])
  if target is None:
    os.mkfifo(path)
  else:
    path.symlink_to(target)
  return Case(path, None)


def array_records(folder: Path, stem: str, draw: random.Random) -> Case:
  module = importlib.import_module("array_record.python.array_record_module")
  path = folder / f"{stem}.array_record"
  writer = module.ArrayRecordWriter(str(path), f"group_size:{draw.randrange(1, 5)}")
  count = draw.randrange(8)
  for _ in range(count):
    writer.write(draw.choice(_LINES)(draw))
  writer.close()
  return _harm(path, draw, count)


def tables(folder: Path, stem: str, draw: random.Random) -> Case:
  pa = importlib.import_module("pyarrow")
  count = draw.randrange(8)
  values = draw.choice([
    [_text(draw) for _ in range(count)], [draw.choice([None, "", "é"]) for _ in range(count)],
    list(range(count)), [[_text(draw)] for _ in range(count)], [b"\xff"] * count,
    [{"text": "x"}] * count,
  ])  # fmt: skip
  names = draw.choice(["text", "text", "text", "content"])
  table = pa.table({names: values, "n": range(count)})
  path = folder / f"{stem}{draw.choice(['.parquet', '.arrow'])}"
  if path.suffix == ".parquet":
    importlib.import_module("pyarrow.parquet").write_table(table, path, row_group_size=3)
  else:
    new = draw.choice([pa.ipc.new_file, pa.ipc.new_stream])
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
      writer.write_table(table, max_chunksize=3)
  return _harm(path, draw, count)


def _harm(path: Path, draw: random.Random, count: int) -> Case:
  raw, fault = bytearray(path.read_bytes()), draw.randrange(4)
  if fault == 1:
    del raw[draw.randrange(len(raw) + 1) :]
  elif fault == 2 and raw:
    for _ in range(draw.randrange(1, 20)):
      raw[draw.randrange(len(raw))] ^= draw.randrange(1, 256)
  elif fault == 3:
    raw = bytearray(draw.choice([b"", b"x", os.fsencode(path), bytes(999)]))
  path.write_bytes(raw)
  return Case(path, None if fault else count)


KINDS = [jsonl, jsonl, jsonl, text, compressed, ids, special, array_records]
