"""`data prepare`: the same rows as from the input itself, whatever happens on the way."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from loading import all_rows, assert_same, documents

from ats_jax.config.schema.text_format import Chat, Text
from ats_jax.data.chat import corpus as chats
from ats_jax.data.corpus import prepared, shards, tokenise
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.splits import open_datasets, open_split, prepare
from ats_jax.data.tokens.tokenizer import ByteTokenizer

JINJA = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"


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
def cfg(folder, config):
  return config(paths=(str(folder),), validation_fraction=0.1, seq_len=32)


@pytest.fixture
def cfg_of(cfg, write):
  """The config of a kind of input: text, or conversations that another process renders."""

  def make(kind):
    if kind == "text":
      return cfg
    rows = [
      {"prompt": f"question {i} é 漢字 " * (i % 9), "completion": f"answer {i}" * (i % 7)}
      for i in range(700)
    ]
    template = Chat(template=str(write("t.jinja", JINJA)))
    return dataclasses.replace(cfg, paths=(str(write("c.jsonl", rows)),), format=template)

  return make


@pytest.fixture
def small(monkeypatch):
  """Shards and batches of a few kilobytes."""
  monkeypatch.setattr(shards, "SHARD_TOKENS", 20_000)
  monkeypatch.setattr(tokenise, "_BATCH_CHARS", 4000)
  monkeypatch.setattr(chats, "_BATCH_CHARS", 4000)
  monkeypatch.setattr(tokenise, "_BATCH_IDS", 100)


def hashes(out: Path) -> dict[str, str]:
  """Of what a training reads; the times of files are in manifests and memos."""
  return {
    path.name: hashlib.sha256(path.read_bytes()).hexdigest()
    for path in out.glob("corpus-*/*")
    if path.name != "manifest.json"
  }


def assert_same_splits(cfg, other):
  for split, same in zip(open_datasets(cfg, 0), open_datasets(other, 0), strict=True):
    assert split.info.fingerprint == same.info.fingerprint
    assert_same(all_rows(split), all_rows(same))


@pytest.mark.parametrize(("tokenizer", "workers"), [("bytes", 0), ("bpe", 2)])
def test_rows_are_those_of_the_text(cfg, folder, tmp_path, small, workers, tokenizer):
  cfg = dataclasses.replace(cfg, tokenizer=tokenizer, bpe_vocab_size=300)
  if tokenizer == "bpe":
    (folder / "ids.npy").unlink()
  out = tmp_path / "out"
  prepare(cfg, out, TokeniseOptions(workers))
  (corpus,) = (path for path in out.glob("corpus-*") if path.is_dir())
  assert len(list(corpus.glob("tokens-*.bin"))) >= 3
  other = dataclasses.replace(cfg, paths=(str(out),))
  assert_same_splits(cfg, other)
  folder.rename(tmp_path / "gone")
  shutil.rmtree(tmp_path / "cache")
  # By default the tokenizer is the one that it was made with.
  train, _ = open_datasets(dataclasses.replace(other, tokenizer="bpe"), 0)
  names = set(documents(train)) | set(documents(open_datasets(other, 0)[1]))
  assert {"01.txt", "lines.jsonl:2"} <= names


def test_blocks_of_one_file(write, config, tmp_path):
  path = write("book.txt", "It was a bright cold day.\n" * 2000)
  cfg = config(paths=(str(path),), validation_fraction=0.1, seq_len=32)
  prepare(cfg, tmp_path / "out", TokeniseOptions())
  other = dataclasses.replace(cfg, paths=(str(tmp_path / "out"),))
  assert_same_splits(cfg, other)
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
import json, os, signal, sys
from pathlib import Path
from ats_jax.config import from_config_dict
from ats_jax.data.chat import corpus
from ats_jax.data.corpus import shards, tokenise
from ats_jax.data.splits import prepare

settings, out, workers, kill_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
shards.SHARD_TOKENS, tokenise._BATCH_CHARS, tokenise._BATCH_IDS = 20_000, 4000, 100
corpus._BATCH_CHARS = 4000

def die(event, arguments, seen=[0]):
  if event in ("os.remove", "os.rename") and "-000" in str(arguments[0]):
    seen[0] += 1
    if seen[0] == kill_at:
      os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
  sys.addaudithook(die)
  cfg = from_config_dict({"data": json.loads(settings)}).data
  prepare(cfg, out, shards.TokeniseOptions(workers))
"""


@pytest.mark.parametrize(
  ("kind", "workers", "kill_at"), [("text", 2, 4), ("text", 0, 9), ("chats", 2, 3)]
)
@pytest.mark.thorough
def test_it_goes_on_where_it_was_killed(cfg_of, tmp_path, small, kind, workers, kill_at):
  """Killed as a shard is about to be counted, and as the last step takes away what it needed."""
  cfg, script, out = cfg_of(kind), tmp_path / "killed.py", tmp_path / "out"
  script.write_text(KILLED)
  settings = {n: getattr(cfg, n) for n in ("paths", "tokenizer", "validation_fraction", "seq_len")}
  if kind == "chats":
    settings["format"] = {"name": "chat", "template": cfg.format.template}
  command = [sys.executable, script, json.dumps(settings), out, str(workers), str(kill_at)]
  environment = {**os.environ, "THIS_TEST": str(out)}
  killed = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
  assert killed.returncode == -9, killed.stderr
  (unfinished,) = out.glob("corpus-*.tmp")
  assert len(list(unfinished.glob("part-*.json"))) >= 1
  _, left = psutil.wait_procs(started_by(str(out)), timeout=120)
  assert not left, "processes that encode or render have outlived their parent"
  prepare(cfg, out, TokeniseOptions(0))
  prepare(cfg, tmp_path / "whole", TokeniseOptions(0))
  assert hashes(out) == hashes(tmp_path / "whole") and len(hashes(out)) > 10
  assert not list(out.glob("corpus-*/part-*"))


def started_by(mark):
  """Processes with this mark in their environment."""
  found = []
  for process in psutil.process_iter():
    with contextlib.suppress(psutil.Error):  # it has ended, or is somebody else's
      if process.environ().get("THIS_TEST") == mark:
        found.append(process)
  return found


@pytest.mark.parametrize("kind", ["text", "chats"])
def test_what_is_done_is_not_done_again(cfg_of, tmp_path, small, monkeypatch, kind):
  cfg, calls = cfg_of(kind), []
  name = "encode_batch" if kind == "text" else "encode_parts"
  encode = getattr(ByteTokenizer, name)

  def counting(self, texts):
    calls.append(1)
    if len(calls) == 15:
      raise KeyboardInterrupt
    return encode(self, texts)

  monkeypatch.setattr(ByteTokenizer, name, counting)
  with pytest.raises(KeyboardInterrupt):
    prepare(cfg, tmp_path / "out", TokeniseOptions())
  prepare(cfg, tmp_path / "out", TokeniseOptions())
  again = len(calls) - 15
  calls[:] = [1] * 15
  prepare(cfg, tmp_path / "whole", TokeniseOptions())
  assert 0 < again < len(calls) - 15 - 5  # what five batches made is kept
  assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


@pytest.mark.parametrize(
  ("kind", "file"),
  [
    ("text", "tokens-00001.bin"), ("text", "columns-00001.npz"), ("text", "part-00001.json"),
    ("chats", "codes-00001.bin"),
  ],
)  # fmt: skip
def test_a_shard_that_was_damaged_meanwhile_is_made_again(
  cfg_of, tmp_path, small, monkeypatch, kind, file
):
  def fail(self):
    raise RuntimeError("stopped before the end")

  cfg = cfg_of(kind)
  with monkeypatch.context() as patch, pytest.raises(RuntimeError):
    patch.setattr(shards.Shards, "finish", fail)
    prepare(cfg, tmp_path / "out", TokeniseOptions())
  (unfinished,) = (tmp_path / "out").glob("corpus-*.tmp")
  raw = bytearray((unfinished / file).read_bytes())
  raw[len(raw) // 2] ^= 1
  (unfinished / file).write_bytes(raw)
  prepare(cfg, tmp_path / "out", TokeniseOptions())
  prepare(cfg, tmp_path / "whole", TokeniseOptions())
  assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


class TestRefused:
  @pytest.fixture
  def out(self, cfg, tmp_path):
    prepare(cfg, tmp_path / "out", TokeniseOptions())
    self.other = dataclasses.replace(cfg, paths=(str(tmp_path / "out"),))
    return tmp_path / "out"

  def refused(self, match, **changes):
    with pytest.raises(ValueError, match=match):
      open_datasets(dataclasses.replace(self.other, **changes), 0)

  def test_settings_that_contradict_it(self, out, folder, write, tmp_path):
    self.refused("is a prepared folder, which stands alone", paths=(str(out), str(folder)))
    self.refused(r"text_field='more', but .* was made with 'text'", format=Text(text_field="more"))
    self.refused(r"is not a tokenizer\.json", tokenizer=str(write("tokenizer.json", "{}")))
    self.refused(r"lines\.jsonl:301: no field 'text'", strict=True)
    with pytest.raises(ValueError, match="is prepared already"):
      prepare(self.other, tmp_path / "again", TokeniseOptions())

  def test_ids_of_another_tokenizer(self, cfg, folder, tmp_path):
    (folder / "ids.npy").unlink()
    bpe = dataclasses.replace(cfg, tokenizer="bpe", bpe_vocab_size=300)
    prepare(bpe, tmp_path / "bpe", TokeniseOptions())
    paths = (str(tmp_path / "bpe"),)
    for open_it in (
      lambda: open_split(cfg, 0, paths, ByteTokenizer()),
      lambda: open_datasets(dataclasses.replace(cfg, paths=paths), 0),
    ):
      with pytest.raises(ValueError, match="holds ids of another tokenizer"):
        open_it()

  def test_damage(self, out):
    for file in ("corpus-*/tokens-00000.bin", "prepared.json", "tokenizer.json"):
      (path,) = out.glob(file)
      before = path.read_bytes()
      path.write_bytes(b'{"kind": "other"}' if file == "tokenizer.json" else before[:-1])
      self.refused(r"not what was written|is damaged|cannot be read")
      path.write_bytes(before)
    (out / prepared.TOKENIZER).write_text('{"kind": "bytes", "more": 1}')
    open_datasets(self.other, 0)


def test_progress_and_counts_are_said(cfg, tmp_path, small, caplog):
  said = []
  cfg = dataclasses.replace(cfg, validation_fraction=0.0)
  with caplog.at_level(logging.INFO, logger="absl"):
    opened = prepare(cfg, tmp_path / "out", TokeniseOptions(0, False, said.append, 0.0))
  shares = [int(text.split("%")[0].split()[-1]) for text in said]
  assert shares == sorted(shares) and shares[0] < 20 and shares[-1] > 90
  assert "MB/s, now in" in said[0]
  assert opened.corpus.report["balance"] == {"records": 352, "documents": 305, "dropped": 47}
  assert "352 records read = 305 documents + 47 left out" in caplog.text
