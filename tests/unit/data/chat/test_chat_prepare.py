"""Conversations go through the shards of text: in parallel, resumable, the same bytes."""

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from typing import cast

import numpy as np
import psutil
import pytest

from ats_jax.config.schema.text_format import Chat
from ats_jax.data.chat import corpus
from ats_jax.data.corpus import shards
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.splits import open_datasets, prepare
from ats_jax.data.tokens.tokenizer import ByteTokenizer

JINJA = """{% for m in messages %}
{%- if m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}
{{- m.role + ': ' + m.content + eos_token }}{% endfor %}"""


@pytest.fixture
def small(monkeypatch):
  """Shards and batches of a few kilobytes."""
  monkeypatch.setattr(shards, "SHARD_TOKENS", 20_000)
  monkeypatch.setattr(corpus, "_BATCH_CHARS", 4000)


@pytest.fixture
def files(write):
  """What is fine, what is no record, and what the template of gemma or JINJA has no place for."""
  rows = [
    {"prompt": f"question {i} é 漢字 " * (i % 9), "completion": f"answer {i} <|im_end|>" * (i % 7)}
    for i in range(400)
  ]
  turns = [{"role": "assistant", "content": "refuse"}, {"role": "assistant", "content": "twice"}]
  odd = [7, {"messages": turns}, {"messages": []}, {"no": 1}]
  for name in ("a", "b"):
    mixed = [*rows[:100], *odd, *rows[100:300], *odd[::-1], *rows[300:]]
    write(f"chats/{name}.jsonl", mixed)
  write("chats/c.txt", "no records")
  path = write("t.jinja", JINJA)
  return path.parent / "chats"


def hashes(out):
  return {
    path.name: hashlib.sha256(path.read_bytes()).hexdigest()
    for path in out.glob("corpus-*/*")
    if path.name != "manifest.json"
  }


@pytest.fixture
def make(files, config):
  """A DataConfig with a template by name, or JINJA."""

  def of(template, **changes):
    name = str(files.parent / "t.jinja") if template == "jinja" else template
    changes = dict(format=Chat(template=name), packing="best_fit", seq_len=512, **changes)
    return config(paths=(str(files),), **changes)

  return of


def test_processes_change_nothing(make, tmp_path, small):
  cfg = make("gemma")
  alone = prepare(cfg, tmp_path / "alone", TokeniseOptions(0))
  together = prepare(cfg, tmp_path / "together", TokeniseOptions(2))
  found = hashes(tmp_path / "alone")
  assert found == hashes(tmp_path / "together")
  assert {"tokens-00002.bin", "codes-00002.bin", "report.txt"} <= found.keys()
  balance = together.corpus.report["balance"]
  assert balance == {"records": 817, "documents": 800, "dropped": 17}
  assert together.corpus.report["malformed"] == {
    "turns do not alternate": 2, "no turns": 4, "no conversation": 4, "not an object": 4,
  } | alone.corpus.report["malformed"]  # fmt: skip


def test_codes_stand_beside_their_ids_in_every_shard(make, tmp_path, small):
  """Of one shard, as of many."""
  many = prepare(make("chatml"), tmp_path / "many", TokeniseOptions(0)).corpus
  shards.SHARD_TOKENS = 2**26
  one = prepare(make("chatml"), tmp_path / "one", TokeniseOptions(0)).corpus
  assert many.folder.meta["shards"] > 3 and one.folder.meta["shards"] == 1
  for document in range(len(one)):
    n = int(one.length[document])
    np.testing.assert_array_equal(one.tokens(document, 0, n), many.tokens(document, 0, n))
    np.testing.assert_array_equal(one.codes(document, 0, n), many.codes(document, 0, n))
    np.testing.assert_array_equal(one.codes(document, 2, 5), one.codes(document, 0, n)[2:5])
    assert len(one.codes(document, 0, n)) == n


KILLED = """
import os, signal, sys
from pathlib import Path
from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.text_format import Chat
from ats_jax.data.corpus import shards
from ats_jax.data.chat import corpus
from ats_jax.data.splits import prepare

paths, template, out, workers, kill_at = sys.argv[1], sys.argv[2], *map(Path, sys.argv[3:])
workers, kill_at = int(str(workers)), int(str(kill_at))
shards.SHARD_TOKENS, corpus._BATCH_CHARS = 20_000, 4000

def die(event, arguments, seen=[0]):
  if event in ("os.remove", "os.rename") and "-000" in str(arguments[0]):
    seen[0] += 1
    if seen[0] == kill_at:
      os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
  sys.addaudithook(die)
  cfg = DataConfig(paths=(paths,), tokenizer="bytes", validation_fraction=0.0, seq_len=512,
                   format=Chat(template=template), packing="best_fit")
  prepare(cfg, out, shards.TokeniseOptions(workers))
"""


@pytest.mark.thorough
def test_it_goes_on_where_it_was_killed(make, tmp_path, small):
  """Killed as a shard is about to be counted, while two processes encode and render."""
  cfg, script, out = make("jinja"), tmp_path / "killed.py", tmp_path / "out"
  script.write_text(KILLED)

  def run(kill_at):
    command = [
      sys.executable,
      script,
      *cfg.paths,
      cast(Chat, cfg.format).template,
      out,
      "2",
      str(kill_at),
    ]
    environment = {**os.environ, "THIS_TEST": str(out)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

  killed = run(3)
  assert killed.returncode == -9, killed.stderr
  (unfinished,) = out.glob("corpus-*.tmp")
  assert list(unfinished.glob("part-*.json"))
  _, left = psutil.wait_procs(started_by(str(out)), timeout=120)
  assert not left
  again = run(0)
  assert again.returncode == 0, again.stderr
  prepare(cfg, tmp_path / "whole", TokeniseOptions())
  assert hashes(out) == hashes(tmp_path / "whole") and len(hashes(out)) > 10
  assert not list(out.glob("corpus-*/part-*"))


def started_by(mark):
  """Processes with this mark in their environment: those that encode, and those that render."""
  found = []
  for process in psutil.process_iter():
    with contextlib.suppress(psutil.Error):  # it has ended, or is somebody else's
      if process.environ().get("THIS_TEST") == mark:
        found.append(process)
  return found


def test_what_is_done_is_not_done_again(make, tmp_path, small, monkeypatch):
  calls, encode = [], ByteTokenizer.encode_batch

  def counting(self, texts):
    calls.append(1)
    if len(calls) == 15:
      raise KeyboardInterrupt
    return encode(self, texts)

  monkeypatch.setattr(ByteTokenizer, "encode_batch", counting)
  with pytest.raises(KeyboardInterrupt):
    prepare(make("chatml"), tmp_path / "out", TokeniseOptions())
  del calls[:]
  calls += [1] * 20
  prepare(make("chatml"), tmp_path / "out", TokeniseOptions())
  again = len(calls) - 20
  prepare(make("chatml"), tmp_path / "whole", TokeniseOptions())
  assert 0 < again < len(calls) - 20 - again - 5
  assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


@pytest.mark.parametrize("file", ["codes-00001.bin", "tokens-00001.bin", "part-00001.json"])
def test_a_shard_that_was_damaged_meanwhile_is_made_again(make, tmp_path, small, monkeypatch, file):
  def fail(self):
    raise RuntimeError("stopped before the end")

  with monkeypatch.context() as patch, pytest.raises(RuntimeError):
    patch.setattr(shards.Shards, "finish", fail)
    prepare(make("gemma"), tmp_path / "out", TokeniseOptions())
  (unfinished,) = (tmp_path / "out").glob("corpus-*.tmp")
  raw = bytearray((unfinished / file).read_bytes())
  raw[len(raw) // 2] ^= 1
  (unfinished / file).write_bytes(raw)
  prepare(make("gemma"), tmp_path / "out", TokeniseOptions())
  prepare(make("gemma"), tmp_path / "whole", TokeniseOptions())
  assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_what_is_nested_too_deeply_is_left_out_by_processes_too(make, write, tmp_path):
  said = lambda **more: [
    {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **more}
  ]  # fmt: skip
  rows = [{"messages": said(tool_calls="DEEP")}, {"tools": "DEEP", "messages": said()}]
  lines = "\n".join(map(json.dumps, [*rows, {"messages": said()}]))
  path = write("deep.jsonl", lines.replace('"DEEP"', 900 * "[" + 900 * "]"))
  cfg = dataclasses.replace(make("jinja"), paths=(str(path),))
  report = prepare(cfg, tmp_path / "out", TokeniseOptions(1)).corpus.report
  assert report["malformed"] == {"nested too deeply": 2}
  assert report["balance"] == {"records": 3, "documents": 1, "dropped": 2}


def test_strict_stops_at_what_the_template_refuses(make, write, tmp_path):
  turns = [{"role": "assistant", "content": "first"}]
  path = write("some.jsonl", [{"prompt": "a", "completion": "b"}, {"messages": turns}])
  with pytest.raises(ValueError, match=r"some\.jsonl:2: the template has turns"):
    open_datasets(dataclasses.replace(make("gemma", strict=True), paths=(str(path),)), 0)


def test_a_template_at_fault_is_named_from_a_process_too(make, files, tmp_path):
  (files.parent / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
  with pytest.raises(ValueError, match=r"ends an answer with"):
    prepare(make("jinja"), tmp_path / "out", TokeniseOptions(2))
