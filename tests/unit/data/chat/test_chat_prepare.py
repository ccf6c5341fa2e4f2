"""Conversations go through the shards of text: in parallel, the same bytes (see test_prepare)."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from ats_jax.config.schema.text_format import Chat
from ats_jax.data.chat import corpus
from ats_jax.data.corpus import shards
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.splits import open_datasets, prepare

JINJA = """{% for m in messages %}
{%- if m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}
{{- m.role + ': ' + m.content + eos_token }}{% endfor %}"""


@pytest.fixture
def small(monkeypatch):
  """Shards and batches of a few kilobytes."""
  monkeypatch.setattr(shards, "SHARD_TOKENS", 10_000)
  monkeypatch.setattr(corpus, "_BATCH_CHARS", 4000)


@pytest.fixture
def files(write):
  """What is fine, what is no record, and what the template of gemma or JINJA has no place for."""
  rows = [
    {"prompt": f"question {i} é 漢字 " * (i % 9), "completion": f"answer {i} <|im_end|>" * (i % 7)}
    for i in range(200)
  ]
  turns = [{"role": "assistant", "content": "refuse"}, {"role": "assistant", "content": "twice"}]
  odd = [7, {"messages": turns}, {"messages": []}, {"no": 1}]
  for name in ("a", "b"):
    write(f"chats/{name}.jsonl", [*rows[:100], *odd, *rows[100:150], *odd[::-1], *rows[150:]])
  write("chats/c.txt", "no records")
  path = write("t.jinja", JINJA)
  return path.parent / "chats"


@pytest.fixture
def make(files, config):
  """A DataConfig with a template by name, or JINJA."""

  def of(template, **changes):
    name = str(files.parent / "t.jinja") if template == "jinja" else template
    changes = dict(format=Chat(template=name), packing="best_fit", seq_len=512, **changes)
    return config(paths=(str(files),), **changes)

  return of


def test_processes_change_nothing(make, tmp_path, small):
  alone = prepare(make("gemma"), tmp_path / "alone", TokeniseOptions(0)).corpus
  together = prepare(make("gemma"), tmp_path / "together", TokeniseOptions(2)).corpus
  names = [p.name for p in alone.folder.path.iterdir() if p.name != "manifest.json"]
  assert {"tokens-00002.bin", "codes-00002.bin", "report.txt"} <= {*names}
  for name in names:
    one, other = ((c.folder.path / name).read_bytes() for c in (alone, together))
    assert hashlib.sha256(one).digest() == hashlib.sha256(other).digest(), name
  assert together.report["balance"] == {"records": 417, "documents": 400, "dropped": 17}
  assert together.report["malformed"] == alone.report["malformed"] == {
    "turns do not alternate": 4, "no turns": 4, "no conversation": 4, "not an object": 4,
  }  # fmt: skip


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


def test_what_the_template_refuses_and_a_template_at_fault_are_named(make, write, files, tmp_path):
  turns = [{"role": "assistant", "content": "first"}]
  path = write("some.jsonl", [{"prompt": "a", "completion": "b"}, {"messages": turns}])
  with pytest.raises(ValueError, match=r"some\.jsonl:2: the template has turns"):
    open_datasets(dataclasses.replace(make("gemma", strict=True), paths=(str(path),)), 0)
  (files.parent / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
  with pytest.raises(ValueError, match=r"ends an answer with"):  # said by a process
    prepare(make("jinja"), tmp_path / "out", TokeniseOptions(1))
