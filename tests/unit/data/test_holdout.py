"""What is held out where documents are few: blocks inside them, and nothing of a tiny text."""

import dataclasses
import json
import logging
import random

import numpy as np
import pytest
from loading import ONE_HOST, assert_each_token_once, documents

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


@pytest.fixture
def splits(config, write):
  """The splits of one file of text, or of paths."""

  def make(text="", *, seed=0, **changes):
    paths = (str(write("a.txt", text)),) if text else ()
    usual = dict(paths=paths, validation_fraction=0.05, seq_len=32)
    return open_datasets(config(**{**usual, **changes}), seed)

  return make


def by_number(parts):
  """All parts of one file, by the number in their names."""
  number = lambda name: int(name.rpartition("[")[2][:-1]) if name.endswith("]") else 0
  return [parts[name] for name in sorted(parts, key=number)]


def test_a_part_of_one_file_is_held_out(splits, caplog):
  text = prose(3000)
  with caplog.at_level(logging.WARNING, logger="absl"):
    train, validation = splits(text)
  parts = by_number(documents(train) | documents(validation))
  assert "".join(parts) == text
  assert 0.02 < sum(map(len, documents(validation).values())) / len(text) < 0.2
  assert caplog.text.count("Too few documents to hold out whole ones") == 1
  assert "blocks" in caplog.text and "a.txt" in train.packed.corpus.name(0)
  # Blocks are whole lines but for what is cut at the end of the text.
  assert all(part.endswith("\n") for part in parts[:-1])
  for ds in (train, validation):
    assert_each_token_once(ds, ONE_HOST)


def test_the_same_blocks_each_time(splits, tmp_path):
  train, held = splits(prose(50_000))
  again, same = splits(prose(50_000), seed=1, cache_dir=str(tmp_path / "other"))
  assert documents(held) == documents(same)
  assert train.info.fingerprint == again.info.fingerprint
  other, _ = splits(prose(50_000, seed=1))
  assert other.info.fingerprint != train.info.fingerprint


def test_a_damaged_note_is_made_again(splits, tmp_path):
  before = documents(splits(prose(9000))[1])
  (note,) = (tmp_path / "cache").glob("split-*")
  for damage in ("half", "[]", '{"fraction": 1, "more": 2}'):
    note.write_text(damage)
    assert documents(splits(prose(9000))[1]) == before


def test_a_text_that_is_too_small_is_trained_on_whole(splits, caplog):
  with caplog.at_level(logging.WARNING, logger="absl"):
    for count, num_chars in enumerate((100, 2000, 2000), 1):  # said at each start
      train, validation = splits("x" * num_chars)
      assert (train.info.num_documents, validation.info.num_rows) == (1, 0)
      assert caplog.text.count("Too little text to hold any of it out") == count
    assert "--config.data.validation_paths" in caplog.text
    # With what could be held out this one is a row, without it none.
    train, validation = splits("x" * 4000, seq_len=4001)
  assert (train.info.num_rows, validation.info.num_rows) == (1, 0)
  assert "shorter than one row of data.seq_len=4001" in caplog.text


def test_of_few_documents_blocks_or_whole_ones(splits, write, tmp_path):
  for i in range(19):
    write(f"d/{i}.txt", prose(2000, seed=i))
  train, validation = splits(paths=(str(tmp_path / "d"),))
  held = sum(map(len, documents(validation).values()))
  assert validation.info.num_rows and 0 < held < 0.2 * 19 * 2000
  assert held + sum(map(len, documents(train).values())) == 19 * 2000
  short = [prose(90, seed=i) for i in range(12)]
  path = write("a.jsonl", [{"text": text} for text in short])
  train, validation = splits(paths=(str(path),), seq_len=8)
  assert (train.info.num_documents, validation.info.num_documents) == (11, 1)
  assert {*documents(train).values(), *documents(validation).values()} == {*short}


def test_token_files_are_cut_too(tmp_path, splits):
  ids = np.arange(6000) % 250
  np.save(tmp_path / "a.npy", np.append(ids, ByteTokenizer.eos_id).astype(np.uint16))
  train, validation = splits(paths=(str(tmp_path / "a.npy"),), validation_fraction=0.1)
  parts = {}
  for ds in (train, validation):
    for d in map(int, ds.packed.documents):
      parts[ds.packed.corpus.name(d)] = ds.packed.corpus.tokens(d, 0, 10**9)
  assert np.array_equal(np.concatenate(by_number(parts)), ids)
  assert 0.05 < validation.info.num_tokens / 6000 < 0.2
  assert_each_token_once(train, ONE_HOST)


def test_many_documents_are_split_as_they_always_were(splits, write, tmp_path):
  """Pinned: a split that moved would put validation text into the training of old runs."""
  for i in range(40):
    write(f"d/{i}.txt", prose(300, seed=i))
  train, validation = splits(paths=(str(tmp_path / "d"),), validation_fraction=0.1)
  assert sorted(documents(validation)) == ["14.txt"]
  assert train.info.fingerprint == "bd7ae9d3025f556ef1c360c4d36d78b8"
  (note,) = (tmp_path / "cache").glob("split-*")
  assert json.loads(note.read_text()) == dataclasses.asdict(Split(0.1))


def test_only_as_much_is_read_as_the_answer_needs(splits, write, monkeypatch, tmp_path):
  for i in range(200):
    write(f"d/{i}.txt", "some text")
  read, pieces = [], holdout.read_pieces
  monkeypatch.setattr(
    holdout, "read_pieces", lambda file, *a: read.append(file) or pieces(file, *a)
  )
  splits(paths=(str(tmp_path / "d"),), validation_fraction=0.1)
  assert 10 <= len(read) < 60


def test_the_bpe_sees_training_text_only(splits):
  text = prose(40_000)
  planted = text
  for part in documents(splits(text, validation_fraction=0.2)[1]).values():
    # Of the same length, so that the blocks are the same.
    planted = planted.replace(part, ("zyzzyva " * len(part))[: len(part) - 1] + "\n")
  train, validation = splits(planted, validation_fraction=0.2, tokenizer="bpe", bpe_vocab_size=300)
  assert any("zyzzyva" in part for part in documents(validation).values())
  assert not any("zyzzyva zyzzyva zyzzyva" in part for part in documents(train).values())
  assert len(train.info.tokenizer.encode("zyzzyva")) >= 6


class TestCut:
  FILE = SourceFile("/x/a.txt", "a.txt", "text")

  def parts(self, pieces, blocks):
    pieces = [Piece(0, i == 0, text) for i, text in enumerate(pieces)]
    found = [
      (p.part, p.starts, p.text) for p in Split(0.1, 8, {"a.txt": blocks}).cut(self.FILE, pieces)
    ]
    assert [part for part, _, _ in found] == sorted(part for part, _, _ in found)
    return found

  @pytest.mark.parametrize(
    ("text", "block", "parts"),
    [
      # Borders move to the next line, else to a space, or not at all.
      ("0123456789\nabcdefgh\nABC\n", [8, 16], {0: "0123456789\n", 1: "abcdefgh\n", 2: "ABC\n"}),
      ("0123456789 abcdefghijklm", [8, 16], {0: "0123456789 ", 1: "abcde", 2: "fghijklm"}),
      ("0123456789abcdef", [0, 8], {1: "01234567", 2: "89abcdef"}),
      ("0123456789abcdef", [8, 16], {0: "01234567", 1: "89abcdef"}),
    ],
  )  # fmt: skip
  def test_borders(self, text, block, parts):
    assert self.parts([text], [block]) == [(part, True, own) for part, own in parts.items()]

  @pytest.mark.parametrize("size", [1, 7, 100])
  def test_however_the_text_comes(self, size):
    text = prose(100)
    pieces = [text[i : i + size] for i in range(0, 100, size)]
    parts = self.parts(pieces, [[16, 32], [48, 56]])
    assert "".join(text for _, _, text in parts) == text
    assert [part for part, starts, _ in parts if starts] == [0, 1, 2, 3, 4]

  def test_documents_of_one_file_are_told_apart(self):
    file = SourceFile("/x/a.jsonl", "a.jsonl", "jsonl")
    split = Split(0.1, 4, {"a.jsonl:2": [[0, 4]]})
    pieces = [Piece(1, True, "aaaaaaaa"), Piece(2, True, "bbbbbbbb"), Piece(3, True, "cc")]
    assert [(p.line, p.part, p.starts, p.text) for p in split.cut(file, pieces)] == [
      (1, 0, True, "aaaaaaaa"), (2, 1, True, "bbbb"), (2, 2, True, "bbbb"), (3, 0, True, "cc"),
    ]  # fmt: skip
