"""Files of each format, written by the format's own library, with text of several bytes a sign."""

import bz2
import gzip
import importlib
import json
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
from loading import documents

from ats_jax.data.splits import open_split
from ats_jax.data.text.formats import extra, opening, records
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import find_files, read_pieces
from ats_jax.data.tokens.tokenizer import ByteTokenizer

TEXTS = [
  "plain", "é 漢字 🙂\u200d Ω\n", "a\x00b", "\ufeffmark", "x" * 300_000 + "é", "tab\tand\r\n",
]  # fmt: skip


def zstd():
  return importlib.import_module(opening._ZSTD)


def zstd_with_checksum(raw: bytes) -> bytes:
  return zstd().compress(raw, options={zstd().CompressionParameter.checksum_flag: 1})


def texts(path, config, **changes):
  ds = open_split(config(seq_len=64, **changes), 0, (str(path),), ByteTokenizer())
  found = list(documents(ds).values())
  balance = ds.packed.corpus.report["balance"]
  assert balance["records"] == balance["documents"] + balance["dropped"]
  assert balance["documents"] == len(found)
  return found, ds


def read(path, field="text"):
  """The documents of a path without a tokenizer, and the report."""
  found, report = find_files((str(path),), Report(strict=False)), Report(strict=False)
  joined: dict[tuple, str] = {}
  for file in found:
    for piece in read_pieces(file, field, report):
      key = (file.name, piece.line)
      joined[key] = joined.get(key, "") + piece.text
  report.balance()
  return joined, report


def json_lines(texts):
  return "".join(json.dumps({"text": t}, ensure_ascii=i % 2 == 0) + "\n" for i, t in
                 enumerate(texts)).encode()  # fmt: skip


PACK = {".gz": gzip.compress, ".bz2": bz2.compress}


class TestCompressed:
  @pytest.mark.parametrize("suffix", [*PACK, pytest.param(".zst", marks=pytest.mark.formats)])
  def test_text_and_json_lines(self, write, config, suffix):
    pack = PACK.get(suffix) or zstd().compress
    path = write(f"d/a.jsonl{suffix}", pack(json_lines(TEXTS[:3])) + pack(json_lines(TEXTS[3:])))
    write(f"d/b.txt{suffix.upper()}", pack("é one document\n".encode()))
    found, ds = texts(path.parent, config)
    assert found == [*TEXTS, "é one document\n"]
    assert ds.packed.corpus.name(0) == f"a.jsonl{suffix}:1"

  @pytest.mark.parametrize("suffix", [".gz", pytest.param(".zst", marks=pytest.mark.formats)])
  @pytest.mark.parametrize("damage", ["cut", "flip", "other", "empty"])
  def test_damaged(self, write, config, suffix, damage):
    pack = PACK.get(suffix) or zstd_with_checksum
    lines = json_lines([os.urandom(99).hex() for _ in range(5000)])
    raw = bytearray(pack(lines))
    if damage == "cut":
      raw = raw[: len(raw) // 2]
    elif damage == "flip":
      raw[len(raw) // 2] ^= 255
    else:
      raw = b"no archive" if damage == "other" else b""
    path = write(f"d/a.jsonl{suffix}", bytes(raw))
    write("d/b.txt", "good")
    joined, report = read(path.parent)
    assert joined.pop(("b.txt", 0)) == "good" and (damage == "flip" or len(joined) < 5000)
    if damage != "empty":
      assert report.malformed["unreadable"] == 1, report
      assert any(line.startswith(f"{path}") for line in report.first)
      assert damage == "flip" or report.malformed.total() == 1  # flipped bytes may be lines too
    assert report.records == len(joined) + 1 + report.dropped

  @pytest.mark.parametrize(
    ("name", "message"),
    [
      ("a.npy.gz", "is compressed, which only text, JSON and CSV may be"),
      ("a.parquet.gz", "is compressed, which only text, JSON and CSV may be"),
      ("a.gz", r"a\.gz' has a suffix that says nothing"),
    ],
  )
  def test_what_is_read_from_anywhere_is_not_compressed(self, write, name, message):
    with pytest.raises(ValueError, match=message):
      read(write(name, b"x"))


def test_array_record(tmp_path, config):
  module = importlib.import_module("array_record.python.array_record_module")
  path = tmp_path / "a.array_record"
  writer = module.ArrayRecordWriter(str(path), "group_size:3")
  for text in TEXTS:
    writer.write(json.dumps({"text": text}).encode())
  writer.write(b'{"no": 1}')
  writer.write(b"no JSON")
  writer.close()
  found, ds = texts(path, config)
  assert found == TEXTS and ds.info.report["malformed"] == {"missing field": 1, "broken JSON": 1}
  assert f"{path}:7: no field 'text'" in ds.info.report["first"][0]
  for name, raw in {
    "cut": path.read_bytes()[:-70_000],
    "other": b"no such file",
    "empty": b"",
  }.items():
    bad = tmp_path / f"{name}.array_record"
    bad.write_bytes(raw)
    joined, report = read(bad)
    assert not joined and report.malformed == {"unreadable": 1}, report


@pytest.mark.formats
class TestTables:
  @pytest.fixture
  def pa(self):
    return importlib.import_module("pyarrow")

  @pytest.fixture
  def table(self, pa):
    return pa.table({"n": range(len(TEXTS)), "text": TEXTS})

  @pytest.mark.parametrize(
    ("kind", "codec"), [("string", "zstd"), ("large_string", "none"), ("dictionary", "snappy")]
  )
  def test_parquet(self, pa, table, tmp_path, config, codec, kind):
    parquet = importlib.import_module("pyarrow.parquet")
    own = pa.dictionary(pa.int32(), pa.string()) if kind == "dictionary" else getattr(pa, kind)()
    table = table.set_column(1, "text", table["text"].cast(own))
    parquet.write_table(table, tmp_path / "a.parquet", compression=codec, row_group_size=2)
    found, ds = texts(tmp_path / "a.parquet", config)
    assert found == TEXTS and ds.packed.corpus.name(3) == "a.parquet:4"

  @pytest.mark.parametrize("kind", ["new_file", "new_stream"])
  def test_arrow(self, pa, table, tmp_path, config, kind):
    with (
      pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
      getattr(pa.ipc, kind)(sink, table.schema) as writer,
    ):
      writer.write_table(table, max_chunksize=2)
    assert texts(tmp_path / "a.arrow", config)[0] == TEXTS

  def test_what_is_wrong_with_a_row(self, pa, tmp_path):
    parquet = importlib.import_module("pyarrow.parquet")
    latin = pa.StringArray.from_buffers(
      2, pa.py_buffer(np.array([0, 4, 8], np.int32)), pa.py_buffer(b"goodb\xe9d.")
    )
    for name, column in {
      "latin": latin, "null": pa.array(["good", None]), "empty": pa.array(["good", ""]),
      "number": pa.array([1, 2]), "bytes": pa.array([b"x", b"y"]),
    }.items():  # fmt: skip
      parquet.write_table(pa.table({"text": column}), tmp_path / f"{name}.parquet")
    parquet.write_table(pa.table({"content": ["x"], "n": [1]}), tmp_path / "other.parquet")
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    joined, report = read(tmp_path)
    assert joined == {(f"{name}.parquet", 1): "good" for name in ("latin", "null", "empty")}
    assert report.malformed == {"not UTF-8": 1, "field not a string": 5, "missing field": 1}
    assert report.skipped == {"empty": 1} and report.records == 11
    _, report = read(tmp_path / "other.parquet")
    (said,) = report.first
    assert "other.parquet:1: no field 'text' (it has 'content', 'n'" in said

  @pytest.mark.parametrize(("name", "share"), [("a.parquet", 0.9), ("a.arrow", 0.3)])
  def test_cut_off(self, pa, tmp_path, name, share):
    table = pa.table({"text": [os.urandom(50).hex() for _ in range(3000)]})
    path = tmp_path / name
    if name == "a.parquet":
      importlib.import_module("pyarrow.parquet").write_table(table, path)
    else:
      with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    joined, report = read(path)
    assert len(joined) < 3000 and report.malformed == {"unreadable": 1}

  @pytest.mark.parametrize("suffix", ["parquet", "arrow"])
  def test_values_are_those_of_json(self, pa, tmp_path, suffix):
    turns = [[{"n": 1, "x": None}, None], [], None, [{"n": None, "x": [None, 2]}]]
    json_lists = pa.ListArray.from_arrays(
      pa.array([0, 1, 1, 2, 3], pa.int32()),
      pa.ExtensionArray.from_storage(
        pa.json_(pa.string()), pa.array(['{"a": null}', "[1]", None], pa.string())
      ),
    )
    columns = {
      "turns": (pa.array(turns), [[{"n": 1}, None], [], None, [{"x": [None, 2]}]]),
      "json": (json_lists, [[{"a": None}], [], [[1]], [None]]),
      "map": (
        pa.array([[("a", 1)], None, [], [("b", None)]], pa.map_(pa.string(), pa.int64())),
        [{"a": 1}, None, {}, {"b": None}],
      ),
      "word": (pa.array(["a", None, "b", "a"]).dictionary_encode(), ["a", None, "b", "a"]),
      "year": (
        pa.array([-2 * 62135596800000000] * 4, pa.int64()).cast(pa.timestamp("us")),
        ["-1968-01-02 00:00:00.000000"] * 4,
      ),
      "nanos": (
        pa.array([1, 2, None, 3], pa.timestamp("ns")),
        [*(f"1970-01-01 00:00:00.00000000{n}" for n in (1, 2)), None,
         "1970-01-01 00:00:00.000000003"],
      ),
      "price": (pa.array([1, 2, None, 3]).cast(pa.decimal128(21, 2)), [1.0, 2.0, None, 3.0]),
      "fixed": (pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
                [[1, 2], None, [3, 4], [5, 6]]),
      "bytes": (pa.array([b"x"] * 4), [b"x"] * 4),
    }  # fmt: skip
    table = pa.table({name: column for name, (column, _) in columns.items()})
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
      importlib.import_module("pyarrow.parquet").write_table(table, path)
    else:
      with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.slice(1))  # values of a slice begin within their buffers
        writer.write_table(table)
    report = Report(strict=True)
    rows = [row for _, row in records.records(str(path), tuple(columns), report)][-4:]
    for name, (_, expected) in columns.items():
      assert [row[name] for row in rows] == expected, name
    assert all(
      row == dict.fromkeys(columns) | {"word": row["word"]}
      for _, row in records.records(str(path), ("word",), report)
    )  # no other column is read

  def test_a_damaged_page_costs_its_group_alone(self, pa, tmp_path):
    parquet = importlib.import_module("pyarrow.parquet")
    path, rows = tmp_path / "a.parquet", [os.urandom(20).hex() for _ in range(400)]
    parquet.write_table(
      pa.table({"text": rows}), path, row_group_size=100, compression="zstd", use_dictionary=False
    )
    start = parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    raw = bytearray(path.read_bytes())
    raw[start : start + 400] = bytes(400)
    path.write_bytes(raw)
    joined, report = read(path)
    assert {line: text for (_, line), text in joined.items()} == {
      n: text for n, text in enumerate(rows, 1) if not 100 < n <= 200
    }
    assert report.malformed == {"unreadable": 100} and report.records == 400
    assert "a.parquet:101: 100 rows cannot be read" in report.first[0]

  def test_zstd_with_a_long_window(self, write):
    keys = zstd().CompressionParameter
    options = {
      keys.window_log: 31,
      keys.enable_long_distance_matching: 1,
      keys.content_size_flag: 0,
    }
    packer = zstd().ZstdCompressor(options=options)
    raw = packer.compress(json_lines(["a", "b"])) + packer.flush()
    assert list(read(write("a.jsonl.zst", raw))[0].values()) == ["a", "b"]

  def test_a_dataset_that_was_saved(self, tmp_path, config):
    datasets = importlib.import_module("datasets")
    data = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    data.save_to_disk(str(tmp_path / "one"), num_shards=2)
    (tmp_path / "one" / "cache-17.arrow").write_bytes(b"of a map")
    found, ds = texts(tmp_path / "one", config)
    assert found == TEXTS and ds.info.report["skipped"]["not part of the dataset"] == 1
    shuffled = data.select([3, 1])
    shuffled.save_to_disk(str(tmp_path / "two"))
    assert texts(tmp_path / "two", config)[0] == [TEXTS[3], TEXTS[1]]
    datasets.DatasetDict(train=data, test=shuffled).save_to_disk(str(tmp_path / "both"))
    assert list(read(tmp_path / "both")[0].values()) == TEXTS  # to train on
    assert texts(tmp_path / "both", config)[0] == [TEXTS[3], TEXTS[1]]  # to validate on
    assert texts(tmp_path / "both" / "train", config)[0] == TEXTS
    (tmp_path / "two" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state\.json of a dataset cannot be read"):
      texts(tmp_path / "two", config)


def test_an_extra_that_is_missing_is_named(write, monkeypatch):
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
  monkeypatch.setitem(sys.modules, opening._ZSTD, None)
  for name in ("a.parquet", "a.arrow", "a.txt.zst"):
    with pytest.raises(ValueError, match=rf"{name} needs .*pip install 'ats_jax\[formats\]'"):
      read(write(name, b"x"))
  with pytest.raises(ValueError, match=r"x needs nowhere_there.*ats_jax\[more\]"):
    extra.import_extra("nowhere_there", "x", "more")


class TestSize:
  def test_a_line_that_is_too_long_is_named_and_the_next_is_read(self, write, monkeypatch):
    monkeypatch.setattr(records, "LONGEST_LINE", 100)
    lines = [{"text": "a"}, {"text": "b" * 500}, {"text": "c" * 80}, {"text": "d" * 101}]
    path = write("a.jsonl", lines)
    joined, report = read(path)
    assert [key[1] for key in joined] == [1, 3] and report.malformed == {"too long": 2}
    assert report.first[0] == f"{path}:2: a line of 513 bytes: more than 100"

  @pytest.mark.parametrize(
    ("name", "records", "chars"),
    [
      pytest.param("a.jsonl", 2, 4, marks=pytest.mark.thorough),
      pytest.param("a.txt", 1, 50_000_000, marks=pytest.mark.thorough),
      pytest.param("a.parquet", 20_000, 108_000_000, marks=pytest.mark.formats),
    ],
  )
  def test_100_mb_in_one_line_or_row_group_take_little_memory(self, tmp_path, name, records, chars):
    path = tmp_path / name
    if name == "a.parquet":
      table = importlib.import_module("pyarrow").table(
        {"text": [f"{i:05} " * 900 for i in range(20_000)]}
      )
      importlib.import_module("pyarrow.parquet").write_table(table, path, row_group_size=20_000)
    else:
      begin, end = {"a.jsonl": (b'{"text": "', b'"}\n{"text": "next"}\n')}.get(name, (b"", b""))
      path.write_bytes(begin + "é".encode() * 50_000_000 + end)
    code = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import find_files, read_pieces
if {name!r} == "a.parquet":
  import pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = Report(strict=False)
(file,) = find_files(({str(path)!r},), report)
size = sum(len(p.text) for p in read_pieces(file, "text", report))
print(size, report.records, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    size, count, memory = map(int, done.stdout.split())
    assert (size, count) == (chars, records)
    assert memory < 90_000  # KiB

  def test_more_files_than_may_be_open(self, tmp_path, config):
    folder = tmp_path / "d"
    folder.mkdir()
    for i in range(1000):
      (folder / f"{i}.txt").write_text(f"line {i}\n")
    os.mkfifo(folder / "pipe.txt")
    (folder / "gone.txt").symlink_to(tmp_path / "nothing")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
    try:
      found, ds = texts(folder, config)
    finally:
      resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(found) == 1000
    assert ds.info.report["malformed"] == {"not a regular file": 1, "unreadable": 1}


def test_a_link_is_read_by_its_own_name(write, tmp_path, config):
  """As in the cache of the Hugging Face hub, whose files are named by their hashes."""
  blob = write("blobs/0f3a", json_lines(TEXTS))
  (tmp_path / "a.jsonl").symlink_to(blob)
  ids = tmp_path / "blobs" / "77"
  with open(ids, "wb") as file:
    np.save(file, np.array([*b"ids", ByteTokenizer.eos_id], np.uint16))
  (tmp_path / "b.npy").symlink_to(ids)
  names = [texts(tmp_path / name, config)[0] for name in ("a.jsonl", "b.npy")]
  assert names == [TEXTS, ["ids"]]


def test_opening_says_what_is_wrong(tmp_path):
  with pytest.raises(opening.errors()) as raised:
    opening.open_decompressed(str(tmp_path / "none.gz"))
  assert opening.reason(raised.value) == "No such file or directory"
  assert opening.reason(EOFError("cut off.\nhere")) == "cut off. here"
  assert opening.suffix("a/B.JSONL.GZ") == ".jsonl" and opening.suffix("a.gz") == ""


def llm_c(ids, magic=20240520, version=1, dtype="<u2", count=None):
  header = np.zeros(256, "<i4")
  header[:3] = magic, version, len(ids) if count is None else count
  return header.tobytes() + np.asarray(ids, dtype).tobytes()


class TestOtherPrograms:
  """Files as other programs write them, which their first bytes say."""

  @pytest.mark.parametrize("kind", [{}, {"magic": 20240801, "version": 7, "dtype": "<u4"}])
  def test_token_files_with_a_header(self, write, config, kind):
    found, _ = texts(write("a.bin", llm_c([257, 65, 66, 257, 67], **kind)), config)
    assert found == ["AB", "C"]

  def test_a_token_file_that_its_header_contradicts(self, write, config):
    with pytest.raises(ValueError, match=r"a\.bin: 1,028 bytes, and its header.*says \[9\] ids"):
      texts(write("a.bin", llm_c([65, 66], count=9)), config)

  def test_pointers_of_git_lfs_are_named_and_not_read(self, write):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1234567\n"
    for name in ("a.txt", "a.jsonl", "a.parquet", "a.npy"):
      write(f"d/{name}", pointer)
    path = write("d/b.txt", "of a version https://git-lfs.github.com/spec/v1")
    report = Report(strict=False)
    assert [file.path for file in find_files((str(path.parent),), report)] == [str(path)]
    assert report.malformed == {"pointer of Git LFS": 4}
    assert "a pointer of Git LFS, not the file itself: run `git lfs pull`" in report.first[0]

  @pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
  def test_marks_where_files_were_joined(self, write, name):
    half = {"a.csv": "id,text\n1,é\n", "a.txt": "é\n"}.get(name, '{"text": "é"}\n')
    joined, report = read(write(name, f"\ufeff{half}" * 2))
    assert "".join(joined.values()).replace("\n", "") == "éé" and not report.malformed


JSON_FILES = [
  ('{"text": "a"}\n\n{"text": "b"}', {1: "a", 3: "b"}, {}),  # lines, as C4's
  ('[{"text": "a"}, {"text": "b"}]', {1: "a", 2: "b"}, {}),
  ('[\n  {\n "text": "a"\n},\n{"text": "]"}\n]\n', {1: "a", 2: "]"}, {}),
  ('{\n "text": "a"\n}', {1: "a"}, {}),
  ('{"text": "a"}', {1: "a"}, {}),
  ('\ufeff[{"text": "a"}]', {1: "a"}, {}),
  ('[{"text": "a"}, 7, {"text": "b"}]', {1: "a", 3: "b"}, {"not an object": 1}),
  ('[{"text": "a"}, {"text": b}, {"text": "c"}]', {1: "a"}, {"broken JSON": 1}),
  ('[{"text": "a"}', {1: "a"}, {"broken JSON": 1}),
  ('[{"text": "' + "x" * 3_000_000 + '"}, {"text": "b"}]', {1: "x" * 3_000_000, 2: "b"}, {}),
  (b'[{"text": "a"}, {"text": "\xe9"}, {"text": "c"}]', {1: "a", 3: "c"}, {"not UTF-8": 1}),
  ("[]", {}, {}),
  ("", {}, {}),
  ("[" * 100_000, {}, {"broken JSON": 1}),
]


@pytest.mark.parametrize(("content", "expected", "malformed"), JSON_FILES)
def test_json_files(write, content, expected, malformed):
  raw = content if isinstance(content, bytes) else content.encode()
  for path in (write("a.json", raw), write("a.json.gz", gzip.compress(raw))):
    joined, report = read(path)
    assert {line: text for (_, line), text in joined.items()} == expected
    assert report.malformed == malformed


CSV_FILES = [
  ('text,n\n"a, ""b""\nc",1\nd,2\n', {2: 'a, "b"\nc', 4: "d"}, {}),
  ("text,n\r\na,1\r\n\r\nb,2", {2: "a", 4: "b"}, {}),
  ("text,n\na\nb,2\n", {3: "b"}, {"broken CSV": 1}),
  (b"text,n\n\xe9,1\nb,2\n", {3: "b"}, {"not UTF-8": 1}),
  ("n,body\n1,a\n", {}, {"missing field": 1}),
]


@pytest.mark.parametrize(("content", "expected", "malformed"), CSV_FILES)
def test_csv_files(write, content, expected, malformed):
  raw = content if isinstance(content, bytes) else content.encode()
  for path in (write("a.csv", raw), write("a.tsv", raw.replace(b",", b"\t"))):
    joined, report = read(path)
    tab = path.suffix == ".tsv"
    expect = {n: text.replace(",", "\t") if tab else text for n, text in expected.items()}
    assert {line: text for (_, line), text in joined.items()} == expect
    assert report.malformed == malformed
