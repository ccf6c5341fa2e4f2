"""The page of `data report`: its figures, and that no document gets out of its frame."""

import html
import re

import numpy as np
import pytest

from ats_jax.config.schema.filters import Exact
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.look.html import visible
from ats_jax.data.look.overview import overview
from ats_jax.data.look.page import html_page
from ats_jax.data.splits import open_documents, prepare

HOSTILE = (
  "<script>alert(1)</script></pre></body><img src=x onerror=alert(1)>\"'><svg onload=alert(1)>"
  "<style>*{display:none}</style>&lt;\x1b[31m\u202e\x00 <!-- ]]> ${x} {x} "
)


@pytest.fixture
def folder(write, tmp_path):
  """Documents that are hostile in their text, their file's name and a malformed line."""
  rows = [{"text": f"{HOSTILE} {i}"} for i in range(30)]
  write("d/<img src=x onerror=alert(1)>&.jsonl", [*rows, *rows[:10], {HOSTILE: 1}, {"text": ""}])
  write("d/sub/a.txt", "one text of a file\n" * 9)
  return tmp_path / "d"


@pytest.fixture
def shown(config):
  """The overview of some paths."""

  def make(*paths, **changes):
    cfg = config(paths=tuple(map(str, paths)), **changes)
    return overview(cfg, open_documents(cfg, 0.0))

  return make


def test_nothing_hostile_is_markup_and_the_page_asks_for_nothing(folder, shown):
  text = html_page(shown(folder, filters=(Exact(),)))
  assert not re.search(r"https?:|url\(|@import|//", text.split("</style>")[0])
  tags = re.findall(r"<([a-z!]\w*)([^<>]*)>", text)
  assert text.count("<") == len(tags) + text.count("</") and text.count("<style>") == 1
  assert not {tag for tag, _ in tags} & {
    "script", "img", "iframe", "object", "a", "link", "base", "form"
  }  # fmt: skip
  assert not re.search(r"\b(on\w+|src|href)\s*=", " ".join(attributes for _, attributes in tags))
  samples = [html.unescape(found) for found in re.findall(r"(?s)<pre>(.*?)</pre>", text)]
  assert sum("<script>alert(1)</script>" in found for found in samples) == 15  # 5 kept, 5 pairs
  assert all("[U+001B][31m[U+202E][U+0000]" in found for found in samples if "script" in found)
  assert "content=\"default-src 'none'" in text


def test_figures(folder, shown, config, tmp_path):
  """They are those of the corpus, and the same of a prepared folder whose text is gone."""
  cfg = config(paths=(str(folder),), filters=(Exact(),))
  found = shown(folder, filters=(Exact(),))
  assert found.balance == {"records": 43, "documents": 31, "dropped": 12}
  assert found.reasons == {
    ("filtered", "exact"): 10, ("malformed", "missing field"): 1, ("skipped", "empty"): 1,
  }  # fmt: skip
  assert [(s.name, s.documents, s.kept) for s in found.sources] == [
    ("<img src=x onerror=alert(1)>&.jsonl", 40, 30), ("sub/", 1, 1),
  ]  # fmt: skip
  sizes, kept = found.chars
  assert len(sizes) == 41 and kept.sum() == 31
  assert found.num_tokens == int(open_documents(cfg, 0.0).corpus.length.sum()) == found.num_bytes
  prepare(cfg, tmp_path / "out", TokeniseOptions(0))
  again = shown(tmp_path / "out")
  assert again.samples == found.samples and again.sources == found.sources
  assert again.reasons == found.reasons


def test_without_filters_it_says_so(folder, shown):
  found = shown(folder)
  assert found.chars is None and not found.samples
  text = html_page(found)
  assert "Filters: none" in text and "Samples" not in text
  assert [(s.documents, s.kept) for s in found.sources] == [(40, 40), (1, 1)]


def test_many_sources_are_few_lines(write, shown, tmp_path):
  for i in range(20):
    write(f"d/{i:02}.txt", "text " * (i + 1))
  sources = shown(tmp_path / "d").sources
  assert len(sources) == 16 and sources[-1].name == "5 others" and sources[-1].documents == 5
  assert sources[0].name == "19.txt" and sum(s.documents for s in sources) == 20


def test_histogram_bars_hold_all_documents(write, shown):
  lengths = [1, 2, 3, 4, 1023, 1024, 5000]
  text = html_page(shown(write("a.jsonl", [{"text": "x" * n} for n in lengths])))
  counts = re.findall(r"<title>([\d,]+) to ([\d,]+): (\d+) kept", text)
  plain = [tuple(int(n.replace(",", "")) for n in found) for found in counts]
  expected = np.histogram(lengths, [2**k for k in range(14)])[0]
  assert plain == [(2**k, 2 ** (k + 1) - 1, count) for k, count in enumerate(expected) if count]


def test_roles_of_conversations(write, shown):
  say = lambda role, text: {"role": role, "content": text}
  rows = [{"messages": [say("user", "Hello?"), say("assistant", "Yes, hello.")]}] * 3
  found = shown(write("a.jsonl", rows), format="chat", packing="best_fit")
  assert set(found.roles) >= {"user", "assistant"}
  tokens, said = found.roles["assistant"]
  assert said >= 3 * len("Yes, hello.") and tokens > said
  assert sum(tokens for tokens, _ in found.roles.values()) == found.num_tokens
  assert "Who speaks" in html_page(found)


def test_what_cannot_be_seen_is_made_visible_and_large_counts_fit(shown, write):
  assert visible("a\tb\nc<&\"'\x7f\u200b") == "a\tb\nc<&\"'[U+007F][U+200B]"
  found = shown(write("a.txt", "text"))
  sizes = {9_999_999: "9,999,999", 12_345_678: "12.3 million", 34 * 10**9: "34.0 billion"}
  for count, said in sizes.items():
    assert f"<b>{said}</b><span>tokens kept" in html_page(found._replace(num_tokens=count))
