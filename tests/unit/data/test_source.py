"""Which files are read, what is malformed in them, and how it is said."""

import dataclasses
import io
import json
import logging
import os
import sysconfig
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from loading import documents

from ats_jax.data.splits import open_datasets, open_split
from ats_jax.data.text.formats import text as text_format
from ats_jax.data.text.formats.token_files import token_documents
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import find_files, read_pieces
from ats_jax.data.tokens.tokenizer import ByteTokenizer, build_tokenizer


def find(*paths, strict=False):
  report = Report(strict=strict)
  return find_files(tuple(map(str, paths)), report), report


@pytest.fixture
def opened(config):
  """All documents of some paths."""

  def make(*paths, tokenizer=ByteTokenizer(), **changes):  # noqa: B008
    return open_split(config(**changes), 0, tuple(map(str, paths)), tokenizer)

  return make


def texts(ds):
  return sorted(documents(ds).values())


class TestFiles:
  def test_folder_is_read_to_the_bottom(self, write, tmp_path):
    for name in ("d/a.txt", "d/sub/b.md", "d/sub/c.jsonl", "d/.git/x.txt", "d/__pycache__/y.py"):
      write(name, "x")
    write("d/picture.jpg", b"\xff")
    files, report = find(tmp_path / "d")
    assert [(f.name, f.kind) for f in files] == [
      ("a.txt", "text"), ("sub/b.md", "text"), ("sub/c.jsonl", "jsonl"),
    ]  # fmt: skip
    assert report.skipped == {"unknown suffix": 1}

  def test_list_glob_and_link_give_a_file_once(self, write, tmp_path):
    a, b = write("d/a[1].txt", "x"), write("d/b.txt", "x")  # one has the characters of a glob
    (tmp_path / "d" / "loop").symlink_to(tmp_path / "d")
    files, report = find(a, f"{tmp_path}/d/*.txt", tmp_path / "d")
    assert [f.path for f in files] == [str(a), str(b)]
    assert report.skipped["listed twice"] == 3

  def test_names_do_not_depend_on_where_the_data_lies(self, write, tmp_path):
    for place in ("here", "far/away"):
      write(f"{place}/d/sub/a.txt", "x")
    for pattern in ("d", "d/sub/a.txt", "d/**/*.txt"):
      here, away = (find(tmp_path / p / pattern)[0] for p in ("here", "far/away"))
      assert [f.name for f in here] == [f.name for f in away]

  def test_default_is_the_standard_library(self):
    files, _ = find()
    names = {f.name for f in files}
    assert "json/decoder.py" in names and len(names) == len(files) > 500
    assert all(f.path.startswith(sysconfig.get_paths()["stdlib"]) for f in files)
    assert not any("site-packages" in n or "__pycache__" in n for n in names)

  @pytest.mark.parametrize(
    ("path", "message"),
    [
      ("no/such.txt", r"'no/such\.txt' does not exist"),
      ("*.txt", r"glob '\*\.txt' matches no file"),
      ("d/a.jpg", r"a\.jpg' has a suffix that says nothing.*\.jsonl"),
      ("d", "holds no file that can be read"),
      ("empty", r"holds no file that can be read\. Known suffixes"),
    ],
  )
  def test_what_is_refused(self, write, tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    write("d/a.jpg", b"x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
      find(path)


class TestMalformed:
  LINES = (
    b'{"text": "good 1"}\n'
    b'{"text": "broken\n'
    b'{"content": 1, "id": 2}\n'
    b'{"text": 3}\n'
    b"[1, 2]\n"
    b"\n"
    b'{"text": "lone \\ud800"}\n'
    b'{"text": "latin \xe9"}\n'
    b'{"text": ""}\n'
    b'{"text": "good 2"}'
  )
  KINDS = ("broken JSON", "missing field", "field not a string", "not an object",
           "lone surrogate", "not UTF-8")  # fmt: skip

  def test_each_line_is_named_and_the_good_ones_are_used(self, write, opened, caplog):
    path = write("d/a.jsonl", self.LINES)
    with caplog.at_level(logging.WARNING, logger="absl"):
      ds = opened(path)
    assert texts(ds) == ["good 1", "good 2"]
    assert ds.info.report["malformed"] == dict.fromkeys(self.KINDS, 1)
    assert ds.info.report["skipped"] == {"empty": 2}
    (report_file,) = ds.info.report["files"]
    report = Path(report_file).read_text()
    for line in (2, 3, 4, 5, 6, 7, 8, 9):
      assert f"{path}:{line}: " in report
    assert "no field 'text' (it has 'content', 'id'; see data.format.text_field)" in report
    latin = self.LINES.index(b"\xe9")
    assert f"{path}:8: not UTF-8 at byte {latin} of the file" in report
    assert f"{path}:2: broken JSON" in caplog.text and report_file in caplog.text
    with pytest.raises(ValueError, match=r"a\.jsonl:2: broken JSON"):  # which the cache knows
      opened(path, strict=True)

  @pytest.mark.parametrize("line", range(2, 9))
  def test_strict_stops_at_it(self, write, opened, line):
    raw = self.LINES.splitlines(keepends=True)[line - 1]
    path = write("a.jsonl", b'{"text": "good"}\n' + raw + b'\n{"no": 1}\n')
    line_at_fault = 4 if line == 6 else 2  # an empty line is no fault
    with pytest.raises(ValueError, match=rf"a\.jsonl:{line_at_fault}: .*data\.strict=False"):
      opened(path, strict=True)

  def test_a_name_cannot_write_to_the_terminal(self, write, opened):
    path = write("a\x1b[2Jb\nc.jsonl", b'{"text": "good"}\n{\n')
    (line,) = opened(path).info.report["first"]
    with pytest.raises(ValueError, match=r"data\.strict=False") as raised:
      opened(path, strict=True)
    for said in (line, str(raised.value)):
      assert r"a\x1b[2Jb\nc.jsonl:2: broken JSON" in said and said.isprintable()

  def test_other_field_byte_order_mark_and_deep_nesting(self, write, opened):
    path = write("a.jsonl", b"\xef\xbb\xbf" + b'{"content": "x"}\n' + b"[" * 200_000 + b"\n")
    ds = opened(path, format={"text_field": "content"})
    assert texts(ds) == ["x"] and ds.info.report["malformed"] == {"broken JSON": 1}

  @pytest.mark.parametrize(
    ("at", "tail"),
    [(0, b"\xc3(b"), (1, b"\xc3"), *((text_format.PIECE - i, b"\xc3(b") for i in (0, 1))],
  )
  def test_file_that_is_not_utf8(self, write, opened, tmp_path, at, tail):
    bad = write("d/bad.txt", b"a" * at + tail)
    write("d/good.txt", "good")
    ds = opened(tmp_path / "d")
    assert texts(ds) == ["good"]
    assert ds.info.report["first"] == [f"{bad}: not UTF-8 at byte {at} (c3)"]
    with pytest.raises(ValueError, match=rf"bad\.txt: not UTF-8 at byte {at} "):
      opened(tmp_path / "d", strict=True)

  def test_empty_file_is_counted_and_named(self, write, opened, tmp_path):
    empty = write("d/empty.txt", "")
    write("d/good.txt", "good")
    for strict in (False, True):  # Python packages are full of them: no fault
      ds = opened(tmp_path / "d", strict=strict)
      assert ds.info.report["skipped"] == {"empty": 1} and texts(ds) == ["good"]
    assert f"{empty}: empty" in Path(ds.info.report["files"][0]).read_text()

  @pytest.mark.usefixtures("no_hang")
  @pytest.mark.parametrize("place", ["folder", "glob", "named"])
  @pytest.mark.parametrize(
    ("target", "kind", "said"),
    [
      (None, "not a regular file", "not a regular file but a pipe, socket or device"),
      ("pipe", "not a regular file", "not a regular file but a pipe, socket or device"),
      ("/dev/zero", "not a regular file", "not a regular file but a pipe, socket or device"),
      ("gone.txt", "unreadable", "cannot be read"),
      ("/proc/self/mem", "unreadable", "cannot be read"),  # opens, and fails to read, also for root
    ],
  )
  def test_what_cannot_be_read_is_named_and_never_waited_for(
    self, write, opened, tmp_path, place, target, kind, said
  ):
    good, odd = write("d/good.txt", "good"), tmp_path / "d" / "odd.txt"
    os.mkfifo(tmp_path / "pipe" if target else odd)
    if target:
      odd.symlink_to(tmp_path / target)
    (tmp_path / "d" / "link.txt").symlink_to(write("elsewhere", "linked"))
    paths = {
      "folder": [tmp_path / "d"], "glob": [f"{tmp_path}/d/*.txt"],
      "named": [good, odd, f"{tmp_path}/d/link.txt"],
    }[place]  # fmt: skip
    ds = opened(*paths)
    assert texts(ds) == ["good", "linked"]
    assert ds.info.report["malformed"] == {kind: 1}
    (first,) = ds.info.report["first"]
    assert "odd.txt: " in first and said in first
    with pytest.raises(ValueError, match=said):
      opened(*paths, strict=True)

  def test_nothing_but_a_pipe(self, tmp_path):
    os.mkfifo(tmp_path / "odd.txt")
    for paths in (tmp_path, tmp_path / "*.txt", tmp_path / "odd.txt"):
      with pytest.raises(ValueError, match=r"no file .* read .*odd\.txt: not a regular file"):
        find(paths)

  def test_no_permission(self):
    with tempfile.TemporaryDirectory() as folder:
      os.chmod(folder, 0o755)
      path = Path(folder) / "secret.txt"
      path.write_text("x")
      path.chmod(0)
      files, report = find(folder)
      nobody, user = 65534, os.geteuid()
      if user == 0:
        os.seteuid(nobody)
      try:
        assert list(read_pieces(files[0], "text", report)) == []
      finally:
        os.seteuid(user)
    assert report.first == [f"{os.path.realpath(path)}: cannot be read (Permission denied)"]


class TestTooLittle:
  def test_nothing_left_names_the_reason(self, write, config):
    path = write("a.jsonl", [{"content": "x"}])
    for tokenizer in ("bytes", "bpe"):
      with pytest.raises(ValueError, match=r"(?s)Nothing is left.*1 missing field.*a\.jsonl:1"):
        open_datasets(config(paths=(str(path),), tokenizer=tokenizer), 0)
    empty = write("b.jsonl", "")
    with pytest.raises(ValueError, match=r"Nothing is left.*the files hold no record"):
      open_datasets(config(paths=(str(empty),), tokenizer="bytes"), 0)

  def test_shorter_than_a_row_and_nothing_to_validate_on(self, write, config, tmp_path):
    cfg = config(paths=(str(write("a.txt", "x" * 50)),), seq_len=52)
    with pytest.raises(ValueError, match=r"51 tokens in 1 documents.*seq_len=52.*at most 51"):
      open_datasets(cfg, 0)
    cfg = dataclasses.replace(cfg, seq_len=51)
    train, validation = open_datasets(cfg, 0)
    assert (train.info.num_rows, train.info.num_documents) == (1, 1)
    assert (validation.info.num_rows, validation.info.num_documents) == (0, 0)
    write("v/empty.txt", "")
    with pytest.raises(ValueError, match=r"v' holds no document: 1 empty"):
      open_datasets(dataclasses.replace(cfg, validation_paths=(str(tmp_path / "v"),)), 0)
    with pytest.raises(ValueError, match=r"'/proc/no/cache' cannot be created.*data\.cache_dir"):
      open_datasets(dataclasses.replace(cfg, cache_dir="/proc/no/cache"), 0)


class TestTokenFiles:
  EOS, BOS = ByteTokenizer.eos_id, ByteTokenizer.bos_id

  def documents(self, path, **changes):
    arguments = dict(vocab_size=259, bos_id=self.BOS, eos_id=self.EOS, report=Report(strict=False))
    line, start, length = token_documents(str(path), **{**arguments, **changes})
    return list(zip(line.tolist(), start.tolist(), length.tolist(), strict=True))

  def save(self, path, ids, dtype=np.uint16):
    ids = np.array(ids, dtype)
    np.save(path, ids) if path.suffix == ".npy" else ids.tofile(path)
    return path

  @pytest.mark.parametrize("name", ["a.bin", "a.npy"])
  def test_documents_end_at_eos_and_rows_come_from_the_file(self, tmp_path, opened, name):
    ids = [1, 2, self.EOS, self.EOS, self.BOS, 3, self.EOS, self.BOS, self.EOS, 4]
    path = self.save(tmp_path / name, ids)
    report = Report(strict=False, file=io.StringIO())
    for chunk in (1, 2, 3, 100):
      found = self.documents(path, chunk=chunk, report=report)
      assert found == [(1, 0, 2), (3, 5, 1), (5, 9, 1)]
    assert report.skipped == {"empty": 8}
    ds = opened(self.save(path, [*b"hello", self.EOS, *"é漢".encode(), self.EOS]), seq_len=8)
    assert documents(ds) == {f"{name}#1": "hello", f"{name}#2": "é漢"}
    assert ds.info.num_tokens == 12 and ds.info.bytes_per_token == 0

  def test_wide_vocabulary_means_uint32(self, tmp_path):
    path = self.save(tmp_path / "a.bin", [70_000, 5, 1], np.uint32)
    assert self.documents(path, vocab_size=70_001, eos_id=5, bos_id=4) == [(1, 0, 1), (2, 2, 1)]

  @pytest.mark.parametrize("chunk", [2, 100])
  def test_foreign_id(self, tmp_path, chunk):
    path = self.save(tmp_path / "a.bin", [1, 2, 3, 4, 300, 6])
    with pytest.raises(ValueError, match=r"a\.bin: id 300 at position 4 is outside .*\[0, 259\)"):
      self.documents(path, chunk=chunk)
    with pytest.raises(ValueError, match=r"a\.npy: id -7 at position 1"):
      self.documents(self.save(tmp_path / "a.npy", [1, -7], np.int32))

  def test_wrong_shapes_and_sizes(self, tmp_path, write, config):
    np.save(tmp_path / "2d.npy", np.zeros((2, 2), np.int32))
    np.save(tmp_path / "f.npy", np.zeros(2, np.float32))
    write("odd.bin", b"abc")
    write("no.npy", b"not an array")
    for name, message in {
      "odd.bin": "3 bytes is no whole number of uint16",
      "2d.npy": "expected a 1-D array of integers, got int32",
      "f.npy": "expected a 1-D array of integers, got float32",
      "no.npy": "",
      "gone.bin": "cannot be read",
    }.items():
      with pytest.raises(ValueError, match=f"{name}: {message}"):
        self.documents(tmp_path / name)
    report = Report(strict=False)
    assert self.documents(write("a.bin", b""), report=report) == []
    assert report.skipped == {"empty": 1}
    path = self.save(tmp_path / "a.bin", [1, 2, 3])
    with pytest.raises(ValueError, match="All input files hold token ids"):
      open_datasets(config(paths=(str(path),), tokenizer="bpe"), 0)

  @pytest.mark.parametrize(
    "header",
    [
      "-" * 9000 + "1", "(" * 3000, "[" * 60, "1", "\x00", "{'a' * 9: 1}",
      "{'descr': ((),), 'fortran_order': False, 'shape': (3,)}",
      "{'descr': [()], 'fortran_order': False, 'shape': (3,)}",
      "{'descr': '<u2', 'fortran_order': False, 'shape': (-1,)}",
      "{'descr': '<u2', 'fortran_order': False, 'shape': (99999999999999999999,)}",
      "{'descr': '<u2', 'fortran_order': False, 'shape': (3,)}" + " " * 20_000,
    ],
  )  # fmt: skip
  def test_a_hostile_header(self, header, write):
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    with pytest.raises(ValueError, match=r"hostile\.npy: .+"):
      self.documents(write("hostile.npy", start + header.encode()))

  def test_a_big_file_is_not_loaded(self, tmp_path):
    size = 2**23
    ids = np.memmap(tmp_path / "big.bin", np.uint16, "w+", shape=size)
    ids[999::1000] = self.EOS
    ids.flush()
    tracemalloc.start()
    try:
      self.documents(tmp_path / "big.bin", chunk=2**18)
      assert tracemalloc.get_traced_memory()[1] < size / 4  # of 2 * size bytes
    finally:
      tracemalloc.stop()


@pytest.mark.parametrize(
  "text",
  [
    Path(json.decoder.__file__).read_text() + "\n\n  x\n",
    "漢字.\n" * 4000,
    "a\n\nb\nc\n\n\nd" * 2000,
  ],
  ids=["code", "lines", "paragraphs"],
)
def test_long_documents_are_cut_where_the_ids_stay_the_same(
  write, opened, config, monkeypatch, text
):
  monkeypatch.setattr(text_format, "PIECE", 1000)
  tokenizer = build_tokenizer(config(tokenizer="bpe", bpe_vocab_size=500), lambda: [text])
  for path in (write("a.py", text), write("a.jsonl", [{"text": text}])):
    files, report = find(path)
    parts = list(read_pieces(files[0], "text", report))
    assert len(parts) > 8 and [p.starts for p in parts] == [True] + [False] * (len(parts) - 1)
    ds = opened(path, tokenizer=tokenizer)
    assert ds.packed.corpus.tokens(0, 0, 10**9).tolist() == tokenizer.encode(text)
    assert ds.info.bytes_per_token == len(text.encode()) / ds.info.num_tokens
  unbroken = opened(write("b.txt", "é" * 5000))  # without line breaks it is cut anywhere
  assert documents(unbroken) == {"b.txt": "é" * 5000}
