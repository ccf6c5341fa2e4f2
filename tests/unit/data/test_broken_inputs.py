"""Every broken input is named or accepted, none ends the process, and the counts add up.

A seeded corpus of broken files: what people really have, and what a bad disk makes of it.
"""

import bz2
import gzip
import importlib
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from ats_jax.config.schema.filters import Exact
from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.reading import Streaming
from ats_jax.config.schema.setting import Table
from ats_jax.data.look.checks import check_files
from ats_jax.data.sources import open_data
from ats_jax.data.splits import open_split
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import find_files
from ats_jax.data.tokens.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("no_hang")


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
  kind = draw.choice(KINDS)
  path, records = kind(folder / f"{seed:05}", draw)
  if kind is jsonl or kind is text:
    return Case(path, records)
  harmed = _harm(path, draw)
  return Case(path, None if harmed else records)


def _text(draw: random.Random, most: int = 40) -> str:
  return "".join(draw.choice(WORDS) + draw.choice(" \n") for _ in range(draw.randrange(most)))


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


def jsonl(stem: Path, draw: random.Random) -> Case:
  lines = [draw.choice(_LINES)(draw).replace(b"\n", b"") for _ in range(draw.randrange(12))]
  ends = draw.choice([b"\n", b"\r\n"])
  raw = b"".join(line + ends for line in lines)
  if lines and lines[-1] and draw.random() < 0.5:
    raw = raw.removesuffix(ends)
  path = stem.with_suffix(".jsonl")
  path.write_bytes(raw)
  return Case(path, len(lines))


def text(stem: Path, draw: random.Random) -> Case:
  raw = bytearray(_text(draw, 400).encode(draw.choice(["utf-8", "utf-8", "utf-16"])))
  for _ in range(draw.choice([0, 0, 1, 5])):
    raw[draw.randrange(len(raw) + 1) :] = bytes([draw.randrange(256)])
  path = stem.with_suffix(draw.choice([".txt", ".md", ".py"]))
  path.write_bytes(raw)
  return Case(path, 1)


def compressed(stem: Path, draw: random.Random) -> Case:
  """Packed rightly, or under the name of another packer."""
  plain, records = jsonl(stem, draw)
  packers = {".gz": gzip.compress, ".bz2": bz2.compress}
  suffix, named = draw.choice([*packers]), draw.choice([*packers])
  path = plain.with_suffix(f".jsonl{named}")
  path.write_bytes(packers[suffix](plain.read_bytes()))
  plain.unlink()
  return Case(path, records if suffix == named else None)


def ids(stem: Path, draw: random.Random) -> Case:
  """Ids of any type and shape; some past the vocabulary of bytes."""
  size, kind = draw.randrange(60), draw.choice(["uint8", "uint16", "int32", "int64", "float32"])
  top = draw.choice([258, 259, 300, 70_000])
  array = np.array([draw.randrange(top) for _ in range(size)]).astype(kind)
  path = stem.with_suffix(draw.choice([".bin", ".npy"]))
  if path.suffix == ".bin":
    array.tofile(path)
  else:
    np.save(path, array.reshape(2, -1) if draw.random() < 0.2 and size % 2 == 0 else array)
  return Case(path, None)


def array_records(stem: Path, draw: random.Random) -> Case:
  module = importlib.import_module("array_record.python.array_record_module")
  path = stem.with_suffix(".array_record")
  writer = module.ArrayRecordWriter(str(path), f"group_size:{draw.randrange(1, 5)}")
  count = draw.randrange(8)
  for _ in range(count):
    writer.write(draw.choice(_LINES)(draw))
  writer.close()
  return Case(path, count)


def _harm(path: Path, draw: random.Random) -> bool:
  """Cut off, changed in some bytes, or replaced; or left as it is."""
  raw, fault = bytearray(path.read_bytes()), draw.randrange(4)
  if fault == 1:
    del raw[draw.randrange(len(raw) + 1) :]
  elif fault == 2 and raw:
    for _ in range(draw.randrange(1, 20)):
      raw[draw.randrange(len(raw))] ^= draw.randrange(1, 256)
  elif fault == 3:
    raw = bytearray(draw.choice([b"", b"x", os.fsencode(path), bytes(999), bytes(raw) + b"more"]))
  path.write_bytes(raw)
  return bool(fault)


KINDS = [jsonl, jsonl, jsonl, text, compressed, ids, array_records]


def tried(folder, config, seed):
  """Check one case; the report, and whether a training would read the file."""
  case = make(folder, seed)
  lines = io.StringIO()  # all that the report is told
  report = Report(strict=False, file=lines)
  files = find_files((str(case.path),), Report(strict=False))
  check_files(files, config(), ByteTokenizer(), report)
  balance = report.balance()
  assert balance["records"] == balance["documents"] + balance["dropped"], seed
  assert case.records in (None, balance["records"]), (seed, case, balance, lines.getvalue())
  # One line for each thing that was dropped, which says where.
  said = lines.getvalue().splitlines()
  assert len(said) == balance["dropped"], (seed, said)
  assert all(line.startswith(str(case.path)) and "Traceback" not in line for line in said), seed
  return None if "unusable token file" in report.malformed else report


def try_all(tmp_path, config, seeds):
  """All cases alone, then all that a training would read in one corpus."""
  folder = tmp_path / "d"
  folder.mkdir()
  expected: dict[str, int] = {"records": 0, "documents": 0, "dropped": 0}
  used = 0
  for seed in seeds:
    report = tried(folder, config, seed)
    if report:
      used += 1
      expected = {name: n + expected[name] for name, n in report.balance().items()}
    else:
      next(folder.glob(f"{seed:05}.*")).unlink(missing_ok=True)
  assert expected["documents"] > used / 10 and expected["dropped"] > used / 3  # a fair mixture
  ds = open_split(config(seq_len=64), 0, (str(folder),), ByteTokenizer())
  assert ds.packed.corpus.report["balance"] == expected
  assert ds.info.num_documents == expected["documents"]
  assert ds.read_once(range(ds.info.num_rows))["loss_mask"].sum() == ds.info.num_tokens
  return expected


def try_filtered_sources(tmp_path, config, expected):
  """The same files as two sources of a mixture, with copies dropped; and as a stream."""
  files = sorted((tmp_path / "d").iterdir())
  assert len(files) > 20
  for number, file in enumerate(files):
    (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
    os.rename(file, tmp_path / "ab"[number % 2] / file.name)
  paths = {name: tmp_path / name for name in "ab"}
  for name in ("one", "two"):
    (tmp_path / "a" / f"{name}.txt").write_text("The same words.")
  usual = dict(seq_len=64, phases=(Phase(Table(a=2, b=1), steps=3), Phase(Table(b=1))))
  sources = Table({name: (str(path),) for name, path in paths.items()})
  cfg = config(sources=sources, filters=(Exact(),), **usual)
  ds, _ = open_data(cfg, 0)
  reports = [part.packed.corpus.report for part in ds.info.parts.values()]
  sums = {name: sum(r["balance"][name] for r in reports) for name in expected}
  copies = sum(sum(r["filtered"].values()) for r in reports)
  assert copies > 0 and sums == {
    "records": expected["records"] + 2,
    "documents": expected["documents"] + 2 - copies,
    "dropped": expected["dropped"] + copies,
  }
  ds.read(np.arange(200))

  both = tuple(map(str, paths.values()))
  for file in find_files(both, Report(strict=False)):
    if file.kind == "tokens":  # which a stream does not read
      os.unlink(file.path)
  whole = open_split(config(seq_len=64), 0, both, ByteTokenizer())
  stream, _ = open_data(config(paths=both, seq_len=64, reading=Streaming(window_mb=0.3)), 0)
  targets, row = 0, 0
  while stream.visit(row).epoch == 0:
    targets += int(stream.read(np.array([row]))["loss_mask"].sum())
    row += 1
  assert targets == whole.info.num_tokens


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_case(tmp_path, config, count):
  expected = try_all(tmp_path, config, range(count, 2 * count))
  try_filtered_sources(tmp_path, config, expected)
