import contextlib
import io
import json
import logging
import os
import signal
import sysconfig
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ats_jax.data.splits import open_datasets, open_split
from ats_jax.data.text.formats import text as text_format
from ats_jax.data.text.formats.token_files import token_documents
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import find_files, read_pieces
from ats_jax.data.tokens.tokenizer import ByteTokenizer, build_tokenizer


def find(*paths, strict=False):
  report = Report(strict=strict)
  return find_files(tuple(map(str, paths)), report), report


def texts(ds):
  """Every document of a split, decoded from its tokens."""
  tokens = [ds.packed.corpus.tokens(int(d), 0, 10**9) for d in ds.packed.documents]
  return sorted(ds.info.tokenizer.decode(t) for t in tokens)


@contextlib.contextmanager
def time_limit(seconds):
  """Fails the test where it hangs: to open a pipe waits for ever."""

  def stop(*_):
    pytest.fail(f"still busy after {seconds} s")

  before = signal.signal(signal.SIGALRM, stop)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


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
    a, b = write("d/a.txt", "x"), write("d/b.txt", "x")
    (tmp_path / "d" / "loop").symlink_to(tmp_path / "d")
    files, report = find(a, f"{tmp_path}/d/*.txt", tmp_path / "d")
    assert [f.path for f in files] == [str(a), str(b)]
    assert report.skipped["listed twice"] == 3

  def test_a_file_name_with_glob_characters(self, write):
    path = write("a[1].txt", "x")
    assert find(path)[0][0].path == str(path)

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

  def test_missing_path(self):
    with pytest.raises(ValueError, match=r"'no/such\.txt' does not exist"):
      find("no/such.txt")

  def test_glob_without_match(self, tmp_path):
    with pytest.raises(ValueError, match=r"glob '.*\*\.txt' matches no file"):
      find(tmp_path / "*.txt")

  def test_unknown_suffix(self, write):
    with pytest.raises(ValueError, match=r"a\.jpg' has a suffix that says nothing.*\.jsonl"):
      find(write("a.jpg", b"x"))

  def test_folder_without_a_text(self, write, tmp_path):
    write("d/a.jpg", b"x")
    with pytest.raises(ValueError, match="holds no file that can be read"):
      find(tmp_path / "d")

  def test_an_empty_folder_is_not_called_malformed(self, tmp_path):
    (tmp_path / "d").mkdir()
    with pytest.raises(ValueError, match=r"holds no file that can be read\. Known suffixes"):
      find(tmp_path / "d")


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

  def test_each_line_is_named_and_the_good_ones_are_used(self, write, config, caplog):
    path = write("d/a.jsonl", self.LINES)
    with caplog.at_level(logging.WARNING, logger="absl"):
      ds = open_split(config(), 0, (str(path),), ByteTokenizer())
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

  @pytest.mark.parametrize("line", range(2, 9))
  def test_strict_stops_at_it(self, write, config, line):
    raw = self.LINES.splitlines(keepends=True)[line - 1]
    path = write("a.jsonl", b'{"text": "good"}\n' + raw + b'\n{"no": 1}\n')
    line_at_fault = 4 if line == 6 else 2  # an empty line is no fault
    with pytest.raises(ValueError, match=rf"a\.jsonl:{line_at_fault}: .*data\.strict=False"):
      open_split(config(strict=True), 0, (str(path),), ByteTokenizer())

  def test_strict_also_stops_at_what_the_cache_knows(self, write, config):
    path = write("a.jsonl", self.LINES)
    open_split(config(), 0, (str(path),), ByteTokenizer())
    with pytest.raises(ValueError, match=r"a\.jsonl:2: broken JSON"):
      open_split(config(strict=True), 0, (str(path),), ByteTokenizer())

  def test_other_field_and_byte_order_mark(self, write, config):
    path = write("a.jsonl", b"\xef\xbb\xbf" + b'{"content": "x"}\n')
    ds = open_split(config(format={"text_field": "content"}), 0, (str(path),), ByteTokenizer())
    assert texts(ds) == ["x"] and not ds.info.report["malformed"]

  def test_deep_nesting_is_no_crash(self, write, config):
    path = write("a.jsonl", b"[" * 200_000 + b'\n{"text": "x"}\n')
    ds = open_split(config(), 0, (str(path),), ByteTokenizer())
    assert ds.info.report["malformed"] == {"broken JSON": 1} and texts(ds) == ["x"]

  @pytest.mark.parametrize(
    "at", [0, 5, text_format.PIECE - 1, text_format.PIECE, text_format.PIECE + 7]
  )
  def test_file_that_is_not_utf8(self, write, config, tmp_path, at):
    bad = write("d/bad.txt", b"a" * at + b"\xc3(" + b"b" * 10)
    write("d/good.txt", "good")
    ds = open_split(config(), 0, (str(tmp_path / "d"),), ByteTokenizer())
    assert texts(ds) == ["good"]
    assert ds.info.report["first"] == [f"{bad}: not UTF-8 at byte {at} (c3)"]
    with pytest.raises(ValueError, match=rf"bad\.txt: not UTF-8 at byte {at} "):
      open_split(config(strict=True), 0, (str(tmp_path / "d"),), ByteTokenizer())

  def test_file_that_ends_inside_a_character(self, write, config, tmp_path):
    bad = write("d/bad.txt", "aé".encode()[:-1])
    write("d/good.txt", "good")
    ds = open_split(config(), 0, (str(tmp_path / "d"),), ByteTokenizer())
    assert ds.info.report["first"] == [f"{bad}: not UTF-8 at byte 1 (c3)"]

  def test_empty_file_is_counted_and_named(self, write, config, tmp_path):
    empty = write("d/empty.txt", "")
    write("d/good.txt", "good")
    for strict in (False, True):  # Python packages are full of them: no fault
      ds = open_split(config(strict=strict), 0, (str(tmp_path / "d"),), ByteTokenizer())
      assert ds.info.report["skipped"] == {"empty": 1} and texts(ds) == ["good"]
    assert f"{empty}: empty" in Path(ds.info.report["files"][0]).read_text()

  def test_unreadable_file(self, write, config, tmp_path):
    link = tmp_path / "d" / "bad.txt"
    write("d/good.txt", "good")
    link.symlink_to("/proc/self/mem")  # opens, and fails to read, also for root
    ds = open_split(config(), 0, (str(tmp_path / "d"),), ByteTokenizer())
    assert texts(ds) == ["good"] and ds.info.report["malformed"] == {"unreadable": 1}
    with pytest.raises(ValueError, match="cannot be read"):
      open_split(config(strict=True), 0, (str(tmp_path / "d"),), ByteTokenizer())

  @pytest.mark.parametrize("place", ["folder", "glob", "named"])
  @pytest.mark.parametrize("special", ["pipe", "link to a pipe", "link to a device"])
  def test_what_is_no_regular_file_is_named_and_never_opened(
    self, write, config, tmp_path, special, place
  ):
    good, odd = write("d/good.txt", "good"), tmp_path / "d" / "odd.txt"
    if special == "pipe":
      os.mkfifo(odd)
    elif special == "link to a pipe":
      os.mkfifo(tmp_path / "pipe")
      odd.symlink_to(tmp_path / "pipe")
    else:
      odd.symlink_to("/dev/zero")
    (tmp_path / "d" / "link.txt").symlink_to(write("elsewhere", "linked"))
    paths = {
      "folder": (str(tmp_path / "d"),),
      "glob": (f"{tmp_path}/d/*.txt",),
      "named": (str(good), str(odd), f"{tmp_path}/d/link.txt"),
    }[place]
    with time_limit(20):
      ds = open_split(config(), 0, paths, ByteTokenizer())
    assert texts(ds) == ["good", "linked"]
    assert ds.info.report["malformed"] == {"not a regular file": 1}
    assert ds.info.report["first"] == [f"{odd}: not a regular file but a pipe, socket or device"]
    with time_limit(20), pytest.raises(ValueError, match=r"odd\.txt: not a regular file"):
      open_split(config(strict=True), 0, paths, ByteTokenizer())

  def test_nothing_but_a_pipe(self, tmp_path):
    os.mkfifo(tmp_path / "odd.txt")
    for paths in (tmp_path, tmp_path / "*.txt", tmp_path / "odd.txt"):
      with pytest.raises(ValueError, match=r"no file .* read .*odd\.txt: not a regular file"):
        find(paths)

  @pytest.mark.parametrize("paths", [("d",), ("d/*.txt",), ("d/bad.txt", "d/good.txt")])
  def test_broken_link(self, write, config, tmp_path, paths, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("d/good.txt", "good")
    (tmp_path / "d" / "bad.txt").symlink_to(tmp_path / "gone.txt")
    ds = open_split(config(), 0, paths, ByteTokenizer())
    assert texts(ds) == ["good"] and ds.info.report["malformed"] == {"unreadable": 1}

  def test_no_permission(self):
    with tempfile.TemporaryDirectory() as folder:
      os.chmod(folder, 0o755)
      path = Path(folder) / "secret.txt"
      path.write_text("x")
      path.chmod(0)
      files, report = find(folder)
      nobody = 65534
      user = os.geteuid()
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

  def test_shorter_than_a_row(self, write, config):
    path = write("a.txt", "x" * 50)
    with pytest.raises(ValueError, match=r"51 tokens in 1 documents.*seq_len=52.*at most 51"):
      open_datasets(config(paths=(str(path),), seq_len=52), 0)
    train, _ = open_datasets(config(paths=(str(path),), seq_len=51), 0)
    assert train.info.num_rows == 1

  def test_nothing_to_validate_on(self, write, config, tmp_path):
    path = write("a.txt", "x" * 99)
    train, validation = open_datasets(config(paths=(str(path),), seq_len=8), 0)
    assert (train.info.num_documents, validation.info.num_documents, validation.info.num_rows) == (
      1,
      0,
      0,
    )
    write("v/empty.txt", "")
    with pytest.raises(ValueError, match=r"v' holds no document: 1 empty"):
      open_datasets(
        config(paths=(str(path),), seq_len=8, validation_paths=(str(tmp_path / "v"),)), 0
      )

  def test_cache_that_cannot_be_written(self, write, config):
    cfg = config(paths=(str(write("a.txt", "x")),), cache_dir="/proc/no/cache")
    with pytest.raises(ValueError, match=r"'/proc/no/cache' cannot be created.*data\.cache_dir"):
      open_datasets(cfg, 0)


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
  def test_documents_end_at_eos(self, tmp_path, name):
    ids = [1, 2, self.EOS, self.EOS, self.BOS, 3, self.EOS, self.BOS, self.EOS, 4]
    path = self.save(tmp_path / name, ids)
    report = Report(strict=False, file=io.StringIO())
    for chunk in (1, 2, 3, 100):
      found = self.documents(path, chunk=chunk, report=report)
      assert found == [(1, 0, 2), (3, 5, 1), (5, 9, 1)]
    assert report.skipped == {"empty": 8}

  @pytest.mark.parametrize("name", ["a.bin", "a.npy"])
  def test_rows_come_from_the_file(self, tmp_path, config, name):
    path = self.save(tmp_path / name, [*b"hello", self.EOS, *b"you", self.EOS])
    ds = open_split(config(seq_len=8), 0, (str(path),), ByteTokenizer())
    assert (
      texts(ds) == ["hello", "you"] and ds.info.num_tokens == 10 and ds.info.bytes_per_token == 0
    )
    assert sorted(ds.packed.corpus.name(d) for d in (0, 1)) == [f"{name}#1", f"{name}#2"]

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

  def test_wrong_shapes_and_sizes(self, tmp_path, write):
    with pytest.raises(ValueError, match=r"odd\.bin: 3 bytes is no whole number of uint16"):
      self.documents(write("odd.bin", b"abc"))
    np.save(tmp_path / "2d.npy", np.zeros((2, 2), np.int32))
    with pytest.raises(ValueError, match=r"2d\.npy: expected a 1-D array of integers, got int32"):
      self.documents(tmp_path / "2d.npy")
    np.save(tmp_path / "f.npy", np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"f\.npy: expected a 1-D array of integers, got float32"):
      self.documents(tmp_path / "f.npy")
    with pytest.raises(ValueError, match=r"no\.npy: "):
      self.documents(write("no.npy", b"not an array"))
    with pytest.raises(ValueError, match=r"gone\.bin: cannot be read"):
      self.documents(tmp_path / "gone.bin")

  def test_empty_file_is_counted(self, tmp_path, write):
    report = Report(strict=False)
    assert self.documents(write("a.bin", b""), report=report) == []
    assert report.skipped == {"empty": 1}

  def test_bpe_has_nothing_to_train_on(self, tmp_path, config):
    path = self.save(tmp_path / "a.bin", [1, 2, 3])
    with pytest.raises(ValueError, match="All input files hold token ids"):
      open_datasets(config(paths=(str(path),), tokenizer="bpe"), 0)

  def test_a_big_file_is_not_loaded(self, tmp_path, config):
    size = 2**25
    ids = np.memmap(tmp_path / "big.bin", np.uint16, "w+", shape=size)
    ids[999::1000] = self.EOS
    ids.flush()
    tracemalloc.start()
    try:
      self.documents(tmp_path / "big.bin", chunk=2**20)
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
def test_long_documents_are_cut_where_the_ids_stay_the_same(write, config, monkeypatch, text):
  monkeypatch.setattr(text_format, "PIECE", 1000)
  tokenizer = build_tokenizer(config(tokenizer="bpe", bpe_vocab_size=500), lambda: [text])
  for path in (write("a.py", text), write("a.jsonl", [{"text": text}])):
    files, report = find(path)
    parts = list(read_pieces(files[0], "text", report))
    assert len(parts) > 8 and [p.starts for p in parts] == [True] + [False] * (len(parts) - 1)
    ds = open_split(config(), 0, (str(path),), tokenizer)
    assert ds.packed.corpus.tokens(0, 0, 10**9).tolist() == tokenizer.encode(text)
    assert ds.info.bytes_per_token == len(text.encode()) / ds.info.num_tokens


def test_a_document_without_line_breaks_is_cut_anywhere(write, config, monkeypatch):
  monkeypatch.setattr(text_format, "PIECE", 100)
  text = "é" * 5000
  ds = open_split(config(), 0, (str(write("a.txt", text)),), ByteTokenizer())
  assert texts(ds) == [text] and ds.info.num_documents == 1
