"""What is held out where documents are few: blocks inside them, and nothing of a tiny text."""

import dataclasses
import json
import logging
import random

import numpy as np
import pytest

from ats_jax.data.look.audit import audit
from ats_jax.data.splits import open_datasets
from ats_jax.data.text import holdout
from ats_jax.data.text.formats.text import Piece
from ats_jax.data.text.holdout import Split
from ats_jax.data.text.source import SourceFile
from ats_jax.data.tokens.tokenizer import ByteTokenizer

WORDS = "the cat sat on a mat under an élan of 漢字 while rain fell over every red roof"


def prose(num_chars: int, seed: int = 0) -> str:
  draw, lines = random.Random(seed), []
  while sum(map(len, lines)) < num_chars:
    lines.append(" ".join(draw.choices(WORDS.split(), k=9)) + "\n")
  return "".join(lines)[:num_chars]


def documents(ds):
  """Name -> text of each document of a split."""
  return {
    ds.packed.corpus.name(int(d)): ds.info.tokenizer.decode(
      ds.packed.corpus.tokens(int(d), 0, 10**9)
    )
    for d in ds.packed.documents
  }


def in_order(*splits):
  """The texts of all parts of one file, by the number in their names."""
  parts = {name: text for split in splits for name, text in documents(split).items()}
  number = lambda name: int(name.rpartition("[")[2][:-1]) if name.endswith("]") else 0
  return [parts[name] for name in sorted(parts, key=number)]


@pytest.mark.parametrize("num_chars", [3_000, 20_000])
@pytest.mark.thorough
def test_a_part_of_one_file_is_held_out(write, config, caplog, num_chars):
  text = prose(num_chars)
  cfg = config(paths=(str(write("book.txt", text)),), validation_fraction=0.05, seq_len=32)
  with caplog.at_level(logging.WARNING, logger="absl"):
    train, validation = open_datasets(cfg, 0)
  assert "".join(in_order(train, validation)) == text
  held = sum(map(len, documents(validation).values()))
  assert 0.02 < held / num_chars < 0.2
  assert caplog.text.count("Too few documents to hold out whole ones") == 1
  assert "blocks" in caplog.text and "book.txt" in train.packed.corpus.name(0)
  # Blocks are whole lines but for what is cut at the end of the text.
  assert all(part.endswith("\n") for part in in_order(train, validation)[:-1])
  assert all(not result.difference for ds in (train, validation) for result in audit(ds))


def test_the_same_blocks_each_time(write, config):
  path = write("book.txt", prose(50_000))
  first, again = (
    open_datasets(
      config(paths=(str(path),), validation_fraction=0.05, seq_len=32, cache_dir=c), seed
    )
    for c, seed in ((str(path.parent / "one"), 0), (str(path.parent / "two"), 1))
  )
  assert documents(first[1]) == documents(again[1])
  assert first[0].info.fingerprint == again[0].info.fingerprint
  write("book.txt", prose(50_000, seed=1))
  assert open_datasets(config(paths=(str(path),), validation_fraction=0.05, seq_len=32), 0)[
    0
  ].info.fingerprint != (first[0].info.fingerprint)


def test_a_damaged_note_is_made_again(write, config, tmp_path):
  cfg = config(paths=(str(write("a.txt", prose(9000))),), validation_fraction=0.05, seq_len=32)
  before = documents(open_datasets(cfg, 0)[1])
  (note,) = (tmp_path / "cache").glob("split-*")
  for damage in ("half", "[]", '{"fraction": 1, "more": 2}'):
    note.write_text(damage)
    assert documents(open_datasets(cfg, 0)[1]) == before


@pytest.mark.parametrize("num_chars", [100, 1000, 2000])
def test_a_tiny_file_is_trained_on_whole(write, config, caplog, num_chars):
  cfg = config(paths=(str(write("a.txt", "x" * num_chars)),), validation_fraction=0.05, seq_len=32)
  with caplog.at_level(logging.WARNING, logger="absl"):
    train, validation = open_datasets(cfg, 0)
    open_datasets(cfg, 0)
  assert (train.info.num_documents, validation.info.num_rows) == (1, 0)
  assert caplog.text.count("Too little text to hold any of it out") == 2  # once a start
  assert "--config.data.validation_paths" in caplog.text


def test_what_is_held_out_never_makes_the_rest_too_short(write, config, caplog):
  """With it the text is one row, without it none."""
  cfg = config(paths=(str(write("a.txt", "x" * 4000)),), validation_fraction=0.05, seq_len=4001)
  with caplog.at_level(logging.WARNING, logger="absl"):
    train, validation = open_datasets(cfg, 0)
  assert (train.info.num_rows, validation.info.num_rows) == (1, 0)
  assert "shorter than one row of data.seq_len=4001" in caplog.text


def test_a_folder_of_nineteen(write, config, tmp_path):
  for i in range(19):
    write(f"d/{i}.txt", prose(2000, seed=i))
  cfg = config(paths=(str(tmp_path / "d"),), validation_fraction=0.05, seq_len=32)
  train, validation = open_datasets(cfg, 0)
  assert (
    validation.info.num_rows and sum(map(len, documents(validation).values())) < 0.2 * 19 * 2000
  )
  texts = sorted(documents(train).values()) + sorted(documents(validation).values())
  assert sum(map(len, texts)) == 19 * 2000


def test_short_documents_are_held_out_whole(write, config):
  rows = [{"text": prose(90, seed=i)} for i in range(12)]
  cfg = config(paths=(str(write("a.jsonl", rows)),), validation_fraction=0.05, seq_len=8)
  train, validation = open_datasets(cfg, 0)
  assert (train.info.num_documents, validation.info.num_documents) == (11, 1)
  assert {*documents(train).values(), *documents(validation).values()} == {r["text"] for r in rows}


def test_token_files_are_cut_too(tmp_path, config):
  ids = np.arange(60_000) % 250
  np.save(tmp_path / "a.npy", np.append(ids, ByteTokenizer.eos_id).astype(np.uint16))
  cfg = config(paths=(str(tmp_path / "a.npy"),), validation_fraction=0.1, seq_len=64)
  train, validation = open_datasets(cfg, 0)
  parts = {}
  for ds in (train, validation):
    for d in map(int, ds.packed.documents):
      parts[ds.packed.corpus.name(d)] = ds.packed.corpus.tokens(d, 0, 10**9)
  number = lambda name: int(name.rpartition("[")[2][:-1]) if name.endswith("]") else 0
  joined = np.concatenate([parts[name] for name in sorted(parts, key=number)])
  assert np.array_equal(joined, ids)
  assert 0.05 < validation.info.num_tokens / 60_000 < 0.2
  assert all(not result.difference for result in audit(train))


def test_many_documents_are_split_as_they_always_were(write, config, tmp_path):
  """Pinned: a split that moved would put validation text into the training of old runs."""
  for i in range(40):
    write(f"d/{i}.txt", prose(300, seed=i))
  cfg = config(paths=(str(tmp_path / "d"),), validation_fraction=0.1, seq_len=32)
  train, validation = open_datasets(cfg, 0)
  assert sorted(documents(validation)) == ["14.txt"]
  assert train.info.fingerprint == "bd7ae9d3025f556ef1c360c4d36d78b8"
  (note,) = (tmp_path / "cache").glob("split-*")
  assert json.loads(note.read_text()) == dataclasses.asdict(Split(0.1))


def test_only_as_much_is_read_as_the_answer_needs(write, config, monkeypatch, tmp_path):
  for i in range(400):
    write(f"d/{i}.txt", "some text")
  read, pieces = [], holdout.read_pieces
  monkeypatch.setattr(
    holdout, "read_pieces", lambda file, *a: read.append(file) or pieces(file, *a)
  )
  open_datasets(config(paths=(str(tmp_path / "d"),), validation_fraction=0.1, seq_len=32), 0)
  assert 10 <= len(read) < 60


def test_the_bpe_sees_training_text_only(write, config):
  text = prose(40_000)
  cfg = config(paths=(str(write("a.txt", text)),), validation_fraction=0.2, seq_len=8)
  held = documents(open_datasets(cfg, 0)[1]).values()
  planted = text
  for part in held:  # of the same length, so that the blocks are the same
    planted = planted.replace(part, ("zyzzyva " * len(part))[: len(part) - 1] + "\n")
  path = write("a.txt", planted)
  cfg = config(
    paths=(str(path),), validation_fraction=0.2, seq_len=8, tokenizer="bpe", bpe_vocab_size=300
  )
  train, validation = open_datasets(cfg, 0)
  assert any("zyzzyva" in part for part in documents(validation).values())
  assert not any("zyzzyva zyzzyva zyzzyva" in part for part in documents(train).values())
  assert len(train.info.tokenizer.encode("zyzzyva")) >= 6


class TestCut:
  FILE = SourceFile("/x/a.txt", "a.txt", "text")

  def parts(self, pieces, blocks, block=8):
    split = Split(0.1, block, {"a.txt": blocks})
    return [(p.part, p.starts, p.text) for p in split.cut(self.FILE, pieces)]

  def whole(self, pieces):
    return [Piece(0, i == 0, text) for i, text in enumerate(pieces)]

  def test_borders_move_to_the_next_line(self):
    text = "0123456789\nabcdefgh\nABCDEFGH\n"
    assert self.parts(self.whole([text]), [[8, 16]]) == [
      (0, True, "0123456789\n"), (1, True, "abcdefgh\n"), (2, True, "ABCDEFGH\n"),
    ]  # fmt: skip

  def test_without_lines_they_move_to_a_space_or_not_at_all(self):
    assert self.parts(self.whole(["0123456789 abcdefghijklm"]), [[8, 16]]) == [
      (0, True, "0123456789 "), (1, True, "abcde"), (2, True, "fghijklm"),
    ]  # fmt: skip

  def test_a_block_at_the_beginning_and_one_at_the_end(self):
    text = "0123456789abcdef"
    assert self.parts(self.whole([text]), [[0, 8]]) == [
      (1, True, "01234567"), (2, True, "89abcdef")
    ]  # fmt: skip
    assert self.parts(self.whole([text]), [[8, 16]]) == [
      (0, True, "01234567"), (1, True, "89abcdef")
    ]  # fmt: skip

  @pytest.mark.parametrize("size", [1, 3, 7, 100])
  def test_however_the_text_comes(self, size):
    text = prose(100)
    pieces = self.whole([text[i : i + size] for i in range(0, 100, size)])
    parts = self.parts(pieces, [[16, 32], [48, 56]])
    assert "".join(text for _, _, text in parts) == text
    assert [part for part, starts, _ in parts if starts] == [0, 1, 2, 3, 4]
    assert [part for part, _, _ in parts] == sorted(part for part, _, _ in parts)

  def test_documents_of_one_file_are_told_apart(self):
    file = SourceFile("/x/a.jsonl", "a.jsonl", "jsonl")
    split = Split(0.1, 4, {"a.jsonl:2": [[0, 4]]})
    pieces = [Piece(1, True, "aaaaaaaa"), Piece(2, True, "bbbbbbbb"), Piece(3, True, "cc")]
    assert [(p.line, p.part, p.starts, p.text) for p in split.cut(file, pieces)] == [
      (1, 0, True, "aaaaaaaa"), (2, 1, True, "bbbb"), (2, 2, True, "bbbb"), (3, 0, True, "cc"),
    ]  # fmt: skip
