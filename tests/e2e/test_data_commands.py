"""Commands of `data`, as a user runs them, and a training on what they leave."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import runs
from commands import called, train_flags

from ats_jax.data.tokens.tokenizer import ByteTokenizer


@pytest.fixture
def folder(tmp_path):
  folder = tmp_path / "text"
  folder.mkdir()
  lines = [json.dumps({"text": f"line {i} with é"}) for i in range(60)]
  lines[7], lines[8], lines[9] = '{"text": "cut', '{"content": 1}', '{"text": ""}'
  (folder / "a.jsonl").write_text("\n".join(lines))
  (folder / "b.txt").write_text("a file\n" * 20)
  (folder / "c.txt").write_bytes(b"latin \xe9")
  (folder / "d.jpg").write_bytes(b"\xff")
  (folder / "e.txt").symlink_to(tmp_path / "nowhere")
  os.mkfifo(folder / "f.txt")
  return folder


def test_validate(folder, tmp_path):
  flags = (f"--config.data.paths={folder}", f"--config.data.cache_dir={tmp_path}/cache")
  result = called("data", "validate", *flags)
  assert result.code == 1 and "Traceback" not in result.err
  assert result.out.splitlines() == [
    f"{folder}/d.jpg: unknown suffix",
    f"{folder}/f.txt: not a regular file but a pipe, socket or device",
    f"{folder}/a.jsonl:8: broken JSON (Invalid control character at: line 1 column 14 (char 13))",
    f"{folder}/a.jsonl:9: no field 'text' (it has 'content'; see data.format.text_field)",
    f"{folder}/a.jsonl:10: empty",
    f"{folder}/c.txt: not UTF-8 at byte 6 (e9)",
    f"{folder}/e.txt: cannot be read (No such file or directory)",
    "  broken JSON                    1",
    "  missing field                  1",
    "  not UTF-8                      1",
    "  unreadable                     1",
    "  empty                          1",
    "63 records read = 58 documents + 5 left out; 4 files, 2 passed over",
  ]
  assert not list((tmp_path / "cache").glob("corpus-*"))
  (tmp_path / "good.jsonl").write_text('{"content": "é"}\n')
  flags = (f"--config.data.paths={tmp_path}/good.jsonl", "--config.data.format.text_field=content")
  result = called("data", "validate", *flags)
  assert (result.code, result.out) == (
    0, "1 record read = 1 document + 0 left out; 1 files, 0 passed over\n"
  )  # fmt: skip


def test_report_of_named_sources_and_of_a_filtered_folder(folder, tmp_path):
  (tmp_path / "b.txt").write_text("Another text.\n" * 20)
  out, page, cache = (tmp_path / name for name in ("prepared", "report.html", "cache"))
  report = lambda *flags: called(
    "data", "report", f"--out={page}", "--config.data.tokenizer=bytes",
    f"--config.data.cache_dir={cache}", *flags,
  )  # fmt: skip
  result = report(f"--config.data.sources=a={folder},b={tmp_path}/b.txt")
  assert result.code == 0 and page.is_file(), result.err
  assert "64 records read" in result.out

  page.unlink()
  (folder / "g.txt").write_text("A  file\n" * 20)
  flags = (f"--config.data.paths={folder}", "--config.data.tokenizer=bytes")
  filters = "--config.data.filters=exact"
  prepared = called("data", "prepare", f"--out={out}", "--workers=0", filters, *flags)
  assert prepared.code == 0, prepared.err
  assert "64 records read = 58 documents + 6 left out" in prepared.out
  shutil.rmtree(folder)
  result = report(f"--config.data.paths={out}")
  assert result.out == f"64 records read = 58 documents + 6 left out: {page}\n", result.err
  assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_token_files_are_checked_against_their_tokenizer(tmp_path):
  np.array([1, 2, ByteTokenizer.eos_id, 999], np.uint16).tofile(tmp_path / "a.bin")
  flags = (f"--config.data.paths={tmp_path}/a.bin", f"--config.data.cache_dir={tmp_path}/cache")
  result = called("data", "validate", "--config.data.tokenizer=bytes", *flags)
  assert result.code == 1 and "a.bin: id 999 at position 3 is outside" in result.out
  result = called("data", "validate", *flags)
  assert result.code == 1 and "a.bin: ids need the tokenizer" in result.out


def test_prepare_then_train_without_the_text(folder, tiny, tmp_path):
  flags = (f"--config.data.paths={folder}", "--config.data.bpe_vocab_size=300")
  result = called("data", "prepare", f"--out={tmp_path}/out", "--workers=2", *flags)
  assert result.code == 0, result.err
  counts, summary = result.out.splitlines()
  assert counts.startswith("63 records read = 58 documents + 5 left out (see ")
  assert summary.endswith(f"To train: --config.data.paths={tmp_path}/out")
  shutil.rmtree(folder)
  own = f"data.paths={tmp_path}/out", "data.tokenizer=bpe", "data.bpe_vocab_size=300"
  result = called("train", *train_flags(tmp_path / "run", *tiny, *own))
  assert result.code == 0, result.err
  assert "63 records read = 58 documents + 5 left out" in result.err


SENTENCE = "The café by the harbour opens at seven, and its first guests come in from the boats.\n"


@pytest.mark.parametrize(("repeats", "validated"), [(60, True), (10, False)])
def test_one_file(tiny, tmp_path, repeats, validated):
  """A training on exactly one file, which is all that many people have."""
  book = tmp_path / "book.txt"
  book.write_text(SENTENCE * repeats, encoding="utf-8")
  own = f"data.paths={book}", "data.validation_fraction=0.02", "eval.bigram_baseline=True"
  flags = train_flags(tmp_path / "run", *tiny, *own, "eval.every_steps=4")
  result = called("train", *flags)
  assert result.code == 0, result.err
  assert "is complete: step" in called("train", *flags).err  # and its baselines stay one row
  parts = json.loads((tmp_path / "run" / "data.json").read_text())["parts"]
  assert [part["name"] for part in parts] == ["training", "validation"][: 1 + validated]
  assert sum(part["tokens"] - part["documents"] for part in parts) == len(book.read_bytes())
  if validated:
    assert result.err.count("Held out for validation") == 1
    said = re.search(r"bigram model of the same tokens, ([\d.]+)", result.err)
    (row,) = [r for r in runs.rows(tmp_path / "run") if "eval/bigram_loss" in r]
    assert said and float(said[1]) == pytest.approx(row["eval/bigram_loss"], abs=1e-4)
    assert 0 < row["eval/bigram_loss"] < row["eval/unigram_loss"]
  else:
    assert result.err.count("Too little text to hold any of it out for validation") == 1
    assert "eval/loss" not in (tmp_path / "run" / "metrics.jsonl").read_text()
