"""Filters on conversations: judged by all that is said, dropped whole, counted and named."""

import json

import pytest
from loading import documents

from ats_jax.config.schema.filters import Exact, Near, Repetition
from ats_jax.config.schema.text_format import Chat
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.splits import open_datasets, open_documents, prepare


def record(*said):
  roles = ("user", "assistant") * len(said)
  return {"messages": [dict(role=r, content=c) for r, c in zip(roles, said, strict=False)]}


ROWS = [
  *(record(f"What is {i}?", f"It is a number, {i}.") for i in range(30)),
  {"messages": "none"},
  record("WHAT is 3?", "it is a  number, 3."),  # as number 3, but for capitals and spaces
  {"instruction": "What is 5?", "output": "It is a number, 5."},  # as number 5
  record("What is 7?", "It is a number, 8."),  # a question of one, the answer of another
  record("One and two.", "Three."),
]


@pytest.fixture
def chats(write, config):
  path = write("chats.jsonl", ROWS)

  def make(**changes):
    usual = dict(paths=(str(path),), format=Chat(), seq_len=128, filters=(Exact(),))
    return config(**{**usual, **changes})

  return make


def lines(corpus):
  return sorted(int(corpus.name(d).split(":")[1]) for d in range(len(corpus)))


def test_copies_are_dropped_whole_and_counts_add_up(chats, tmp_path):
  opened = open_documents(chats(), 0.0)
  corpus = opened.corpus
  assert corpus.report["balance"] == {"records": 35, "documents": 32, "dropped": 3}
  assert corpus.report["filtered"] == {"exact": 2}
  kept = lines(corpus)
  assert {34, 35} <= set(kept) and 31 not in kept
  assert len({4, 32} & set(kept)) == len({6, 33} & set(kept)) == 1
  named = (corpus.folder.path / "report.txt").read_text()
  assert named.count("chats.jsonl:") == 3 and "exact" in named
  samples = json.loads((opened.sifted.path / "samples.json").read_text())
  (twin,) = (s for s in samples if s["reason"] == "exact" and "3" in s["text"])
  assert twin["text"].lower().split() == twin["kept_text"].lower().split()
  whole = open_documents(chats(filters=()), 0.0).corpus  # what is kept is as without filters
  of_line = {whole.name(d): d for d in range(len(whole))}
  for d in range(len(corpus)):
    other, length = of_line[corpus.name(d)], int(corpus.length[d])
    assert corpus.tokens(d, 0, length).tolist() == whole.tokens(other, 0, length + 1).tolist()
    assert corpus.codes(d, 0, length).tolist() == whole.codes(other, 0, length + 1).tolist()
  prepare(chats(), tmp_path / "out", TokeniseOptions(0))
  train, _ = open_datasets(chats(paths=(str(tmp_path / "out"),)), 0)
  assert documents(train) == documents(open_datasets(chats(), 0)[0])


@pytest.mark.filters
def test_rules_look_at_all_turns(chats, write):
  """Of a conversation that says the same line again and again, in whichever turn."""
  answer = (
    "Mix strong flour with water, some salt and a little yeast. Knead until it no longer sticks, "
    "cover the bowl, and wait about an hour. Shape two loaves, let them rise again while your oven "
    "gets hot, then cut their tops. Bake for forty minutes; they sound hollow when done."
  )
  good = record("How do I make bread at home without a machine?", answer)
  spam = record("Buy now!\n" * 30, "Why should I?")
  path = write("rules.jsonl", [good, spam, record("Hello, how are you?", "Buy now!\n" * 30)])
  opened = open_documents(chats(paths=(str(path),), filters=(Repetition(), Near())), 0.0)
  assert lines(opened.corpus) == [1]
  (reason,) = opened.corpus.report["filtered"]
  assert reason.startswith("repetition: ") and opened.corpus.report["filtered"][reason] == 2
