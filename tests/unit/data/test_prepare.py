"""`data prepare`: the same rows as from the text itself, whatever happens on the way."""

import dataclasses
import hashlib
import itertools
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from ats_jax.config.schema.text_format import Text
from ats_jax.data.corpus import prepared, shards, tokenise
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.splits import open_datasets, open_split, prepare
from ats_jax.data.tokens.tokenizer import ByteTokenizer

FIELDS = ("tokens", "targets", "segment_ids", "positions")


@pytest.fixture
def folder(write, tmp_path):
  """Text, JSON lines, token ids and what is malformed; some of it longer than a batch."""
  for i in range(30):
    write(f"d/{i:02}.txt", f"file {i}: é 漢字\n" * (i * i))
  rows = [{"text": f"line {i} " * (i % 7)} for i in range(300)]
  write("d/lines.jsonl", [*rows, {"no": 1}, 7])
  ids = [x for i in range(20) for x in [*b"ids " * i, ByteTokenizer.eos_id]]
  np.save(tmp_path / "d" / "ids.npy", np.array(ids, np.uint16))
  return tmp_path / "d"


@pytest.fixture
def small(monkeypatch):
  """Shards and batches of a few kilobytes."""
  monkeypatch.setattr(shards, "SHARD_TOKENS", 20_000)
  monkeypatch.setattr(tokenise, "_BATCH_CHARS", 4000)
  monkeypatch.setattr(tokenise, "_BATCH_IDS", 100)


def hashes(out: Path) -> dict[str, str]:
  """Of what a training reads; the times of files are in manifests and memos."""
  return {
    path.name: hashlib.sha256(path.read_bytes()).hexdigest()
    for path in out.glob("corpus-*/*")
    if path.name != "manifest.json"
  }


def rows(cfg, seed=0):
  train, validation = open_datasets(cfg, seed)
  found = [ds.read_once(range(ds.info.num_rows)) for ds in (train, validation)]
  return train.info.fingerprint, validation.info.fingerprint, found


def assert_same_rows(cfg, other):
  (train, validation, found), (train_2, validation_2, found_2) = rows(cfg), rows(other)
  assert (train, validation) == (train_2, validation_2)
  for split, split_2 in zip(found, found_2, strict=True):
    for field in FIELDS:
      np.testing.assert_array_equal(split[field], split_2[field])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_rows_are_those_of_the_text(folder, config, tmp_path, small, workers, tokenizer):
  cfg = config(
    paths=(str(folder),),
    tokenizer=tokenizer,
    bpe_vocab_size=300,
    validation_fraction=0.1,
    seq_len=32,
  )
  if tokenizer == "bpe":
    (folder / "ids.npy").unlink()
  out = tmp_path / "out"
  prepare(cfg, out, TokeniseOptions(workers))
  corpus = [path for path in out.glob("corpus-*") if path.is_dir()]
  assert len(corpus) == 1 and len(list(corpus[0].glob("tokens-*.bin"))) >= 3
  before = rows(cfg)
  moved = folder.rename(tmp_path / "moved")
  shutil.rmtree(tmp_path / "cache")
  other = dataclasses.replace(cfg, paths=(str(out),))
  assert rows(other)[:2] == before[:2]
  shutil.rmtree(tmp_path / "cache")
  shutil.move(moved, folder)
  assert_same_rows(cfg, other)
  train, _ = open_datasets(other, 0)
  assert {"01.txt", "lines.jsonl:2"} <= {
    train.packed.corpus.name(i) for i in range(len(train.packed.corpus))
  }
  # By default the tokenizer is the one that it was made with.
  assert_same_rows(cfg, dataclasses.replace(other, tokenizer="bpe"))


def test_blocks_of_one_file(write, config, tmp_path):
  path = write("book.txt", "It was a bright cold day.\n" * 2000)
  cfg = config(paths=(str(path),), validation_fraction=0.1, seq_len=32)
  prepare(cfg, tmp_path / "out", TokeniseOptions())
  other = dataclasses.replace(cfg, paths=(str(tmp_path / "out"),))
  assert_same_rows(cfg, other)
  with pytest.raises(ValueError, match=r"fraction=0\.2, but the folder was prepared with .* 0\.1"):
    open_datasets(dataclasses.replace(other, validation_fraction=0.2), 0)
  train, validation = open_datasets(dataclasses.replace(other, validation_fraction=0.0), 0)
  assert not validation.info.num_rows and train.info.num_tokens > 52_000
  ds = open_split(other, 0, (str(tmp_path / "out"),), ByteTokenizer())
  assert ds.info.num_documents == train.info.num_documents


def test_too_little_to_hold_out_is_remembered(write, config, tmp_path, caplog):
  cfg = config(paths=(str(write("a.txt", "x" * 500)),), validation_fraction=0.1, seq_len=32)
  prepare(cfg, tmp_path / "out", TokeniseOptions())
  caplog.clear()
  with caplog.at_level(logging.WARNING, logger="absl"):
    _, validation = open_datasets(dataclasses.replace(cfg, paths=(str(tmp_path / "out"),)), 0)
  assert not validation.info.num_rows and "Too little text to hold any of it out" in caplog.text


KILLED = """
import os, signal, sys
from pathlib import Path
from ats_jax.config.schema import DataConfig
from ats_jax.data.corpus import shards, tokenise
from ats_jax.data.splits import prepare

paths, out, workers, kill_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
shards.SHARD_TOKENS, tokenise._BATCH_CHARS, tokenise._BATCH_IDS = 20_000, 4000, 100

def die(event, arguments, seen=[0]):
  if event in ("os.remove", "os.rename") and "-000" in str(arguments[0]):
    seen[0] += 1
    if seen[0] == kill_at:
      os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
  sys.addaudithook(die)
  cfg = DataConfig(paths=(paths,), tokenizer="bytes", validation_fraction=0.1, seq_len=32)
  prepare(cfg, out, shards.TokeniseOptions(workers))
"""


@pytest.mark.parametrize(("workers", "kill_at"), [(2, 4), (0, 9)])
@pytest.mark.thorough
def test_it_goes_on_where_it_was_killed(folder, config, tmp_path, small, workers, kill_at):
  """Killed as a shard is about to be counted, and as the last step takes away what it needed."""
  script = tmp_path / "killed.py"
  script.write_text(KILLED)
  out, whole = tmp_path / "out", tmp_path / "whole"

  def run(target, kill_at):
    command = [sys.executable, script, folder, target, str(workers), str(kill_at)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)

  killed = run(out, kill_at)
  assert killed.returncode == -9, killed.stderr
  (unfinished,) = out.glob("corpus-*.tmp")
  kept = len(list(unfinished.glob("part-*.json")))
  assert kept >= min(kill_at - 1, 1)
  encoding = [
    p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or ())
  ]
  _, left = psutil.wait_procs(encoding, timeout=120)
  assert not left, "processes that encode have outlived their parent"
  assert run(out, 0).returncode == 0
  prepare(
    config(paths=(str(folder),), validation_fraction=0.1, seq_len=32), whole, TokeniseOptions()
  )
  assert hashes(out) == hashes(whole) and len(hashes(whole)) > 10
  assert not list(out.glob("corpus-*/part-*"))


def test_what_is_done_is_not_done_again(folder, config, tmp_path, small, monkeypatch):
  cfg = config(paths=(str(folder),), validation_fraction=0.1, seq_len=32)
  encoded, encode = itertools.count(), ByteTokenizer.encode_batch

  def counting(self, texts):
    if next(encoded) == 10:
      raise KeyboardInterrupt
    return encode(self, texts)

  monkeypatch.setattr(ByteTokenizer, "encode_batch", counting)
  with pytest.raises(KeyboardInterrupt):
    prepare(cfg, tmp_path / "out", TokeniseOptions())
  prepare(cfg, tmp_path / "out", TokeniseOptions())
  again = next(encoded) - 11
  prepare(cfg, tmp_path / "whole", TokeniseOptions())
  assert (
    0 < again < next(encoded) - again - 12 - 5
  )  # of a whole one, what five batches made is kept
  assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


@pytest.mark.parametrize("file", ["tokens-00001.bin", "columns-00001.npz", "part-00001.json"])
def test_a_shard_that_was_damaged_meanwhile_is_made_again(
  folder, config, tmp_path, small, monkeypatch, file
):
  cfg = config(paths=(str(folder),), validation_fraction=0.1, seq_len=32)
  with monkeypatch.context() as patch, pytest.raises(RuntimeError):
    patch.setattr(shards.Shards, "finish", lambda self: 1 / 0 if not self else fail())
    prepare(cfg, tmp_path / "out", TokeniseOptions())
  (unfinished,) = (tmp_path / "out").glob("corpus-*.tmp")
  raw = bytearray((unfinished / file).read_bytes())
  raw[len(raw) // 2] ^= 1
  (unfinished / file).write_bytes(raw)
  prepare(cfg, tmp_path / "out", TokeniseOptions())
  prepare(cfg, tmp_path / "whole", TokeniseOptions())
  assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def fail():
  raise RuntimeError("stopped before the end")


class TestRefused:
  @pytest.fixture
  def out(self, folder, config, tmp_path):
    self.cfg = config(paths=(str(folder),), validation_fraction=0.1, seq_len=32)
    prepare(self.cfg, tmp_path / "out", TokeniseOptions())
    self.other = dataclasses.replace(self.cfg, paths=(str(tmp_path / "out"),))
    return tmp_path / "out"

  def test_other_paths_beside_it(self, out, folder):
    cfg = dataclasses.replace(self.cfg, paths=(str(out), str(folder)))
    with pytest.raises(ValueError, match="is a prepared folder, which stands alone"):
      open_datasets(cfg, 0)

  def test_another_field_or_tokenizer(self, out, write):
    with pytest.raises(ValueError, match=r"text_field='more', but .* was made with 'text'"):
      open_datasets(dataclasses.replace(self.other, format=Text(text_field="more")), 0)
    path = write("tokenizer.json", "{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
      open_datasets(dataclasses.replace(self.other, tokenizer=str(path)), 0)
    (out / prepared.TOKENIZER).write_text('{"kind": "bytes", "more": 1}')
    open_datasets(self.other, 0)

  def test_ids_of_another_tokenizer(self, out, folder, config, tmp_path):
    (folder / "ids.npy").unlink()
    bpe = config(paths=(str(folder),), tokenizer="bpe", bpe_vocab_size=300, seq_len=32)
    prepare(bpe, tmp_path / "bpe", TokeniseOptions())
    with pytest.raises(ValueError, match="holds ids of another tokenizer"):
      open_split(self.cfg, 0, (str(tmp_path / "bpe"),), ByteTokenizer())
    with pytest.raises(ValueError, match="holds ids of another tokenizer"):
      open_datasets(dataclasses.replace(self.cfg, paths=(str(tmp_path / "bpe"),)), 0)

  @pytest.mark.parametrize("file", ["prepared.json", "tokenizer.json", "corpus-*/tokens-00000.bin"])
  def test_damage(self, out, file):
    (path,) = out.glob(file)
    if file == "tokenizer.json":
      path.write_text('{"kind": "other"}')
    else:
      path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"not what was written|is damaged|cannot be read"):
      open_datasets(self.other, 0)

  def test_malformed_input_if_strict(self, out, folder):
    with pytest.raises(ValueError, match=r"lines\.jsonl:301: no field 'text'"):
      open_datasets(dataclasses.replace(self.other, strict=True), 0)

  def test_what_is_prepared_already(self, out, tmp_path):
    with pytest.raises(ValueError, match="is prepared already"):
      prepare(self.other, tmp_path / "again", TokeniseOptions())


def test_progress_is_shown(folder, config, tmp_path, small):
  said = []
  prepare(
    config(paths=(str(folder),), seq_len=32),
    tmp_path / "out",
    TokeniseOptions(0, False, said.append, 0.0),
  )
  shares = [int(text.split("%")[0].split()[-1]) for text in said]
  assert shares == sorted(shares) and shares[0] < 20 and shares[-1] > 90
  assert "MB/s, now in" in said[0]


def test_counts_are_said(folder, config, tmp_path, caplog):
  with caplog.at_level(logging.INFO, logger="absl"):
    opened = prepare(config(paths=(str(folder),), seq_len=32), tmp_path / "out", TokeniseOptions())
  balance = opened.corpus.report["balance"]
  assert balance == {"records": 352, "documents": 305, "dropped": 47}
  assert "352 records read = 305 documents + 47 left out" in caplog.text
