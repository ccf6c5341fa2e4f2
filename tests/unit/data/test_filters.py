"""Filters: what is dropped is the same on every way there, and everything is accounted for."""

import dataclasses
import hashlib
import importlib.util
import json

import numpy as np
import pytest

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.names import flatten
from ats_jax.config.schema.filters import C4, Exact, Gopher, Language, Near, Repair, spelled
from ats_jax.data import splits
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.filters import duplicates, judge, parts, sieve, sift
from ats_jax.data.filters.judge import DocumentHead, Judge
from ats_jax.data.splits import open_datasets, open_documents, prepare
from ats_jax.data.text import hub_dataset
from ats_jax.data.text.formats.text import PIECE, Piece, cut_text

without = pytest.mark.skipif(
  importlib.util.find_spec("rensa") is not None, reason="the extra filters is there"
)


@pytest.fixture
def folder(write, tmp_path):
  """100 documents: 1 in 4 is there again in other spaces and capitals; some of it is malformed."""
  rows = [{"text": f"Line {i} of a text, with its own words."} for i in range(40)]
  again = [{"text": f"  LINE {i}\tof a text,\nwith its own words. "} for i in range(0, 40, 2)]
  write("d/a.jsonl", [*rows, {"no": 1}, {"text": ""}])
  write("d/b.jsonl", [*again, *({"text": f"Another {i}: é 漢字."} for i in range(20))])
  for i in range(20):
    write(f"d/{i:02}.txt", f"File {i % 15}: é 漢字\n" * (i % 15 + 1))
  return tmp_path / "d"


@pytest.fixture
def small(monkeypatch):
  """Batches and parts of a few documents."""
  monkeypatch.setattr(sift, "_BATCH_CHARS", 500)
  monkeypatch.setattr(parts, "PART_CHARS", 1500)


def bytes_of(opened):
  """All that a training reads of the text, and what was said of each document."""
  paths = [p for p in opened.corpus.folder.path.iterdir() if p.name != "manifest.json"]
  names = ("verdict.npy", "first.npy", "file.npy", "line.npy", "chars.npy", "samples.json")
  paths += [opened.sifted.path / name for name in names]
  assert {p.name for p in opened.sifted.path.iterdir()} == {*names, "manifest.json"}
  return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def test_counts_add_up_and_all_is_named(folder, config):
  opened = open_documents(config(paths=(str(folder),), filters=(Exact(),)), 0.0)
  report, meta = opened.corpus.report, opened.sifted.meta
  assert meta["documents"] == 100 == meta["kept"] + sum(meta["dropped"].values())
  assert meta["dropped"] == {"exact": 25} == report["filtered"]
  assert report["balance"] == {"records": 102, "documents": 75, "dropped": 27}
  assert len(opened.corpus) == 75
  text = (opened.corpus.folder.path / "report.txt").read_text()
  assert text.count(": exact\n") == 25
  assert sift.in_words(meta) == "100 documents = 75 kept + 25 exact"
  samples = json.loads((opened.sifted.path / "samples.json").read_text())
  assert [sample["reason"] for sample in samples] == [""] * 5 + ["exact"] * 5
  for sample in samples[5:]:
    assert sample["text"].casefold().split() == sample["kept_text"].casefold().split()
    assert sample["name"] != sample["kept"]


def test_what_is_kept_does_not_depend_on_the_order_of_files(folder, config):
  files = sorted(map(str, folder.iterdir()))
  orders = (files, files[::-1], files[7:] + files[:7])
  kept = set()
  for paths in orders:
    corpus = open_documents(config(paths=tuple(paths), filters=(Exact(),)), 0.0).corpus
    kept.add(frozenset(corpus.name(d) for d in range(len(corpus))))
  assert len(kept) == 1 and len(kept.pop()) == 75


def test_processes_and_kills_change_nothing(folder, config, tmp_path, small, monkeypatch):
  cfg = config(paths=(str(folder),), filters=(Exact(),), validation_fraction=0.1)
  expected = bytes_of(prepare(cfg, tmp_path / "alone", TokeniseOptions(0)))
  assert bytes_of(prepare(cfg, tmp_path / "two", TokeniseOptions(2))) == expected
  judged, real = [], judge.Judge.__call__
  for deadline in (4, 3, 100):  # batches until it is killed, the last time as it joins the parts
    left = iter(range(deadline))

    def until(self, heads, left=left):
      if next(left, None) is None:
        raise KeyboardInterrupt
      judged.extend(heads)
      return real(self, heads)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
      patch.setattr(judge.Judge, "__call__", until)
      patch.setattr(parts.Parts, "joined", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
      prepare(cfg, tmp_path / "killed", TokeniseOptions(0))
  assert 100 < len(judged) < 140  # a part that was written is not judged again
  written = sorted((tmp_path / "killed").glob("sift-*.tmp/judged-*.npz"))
  assert len(written) > 2
  raw = bytearray(written[1].read_bytes())
  raw[len(raw) // 2] ^= 1  # but for one that is damaged
  written[1].write_bytes(raw)
  assert bytes_of(prepare(cfg, tmp_path / "killed", TokeniseOptions(0))) == expected


def test_a_prepared_folder_keeps_its_filters(folder, config, tmp_path, monkeypatch):
  cfg = config(paths=(str(folder),), filters=(Exact(),), seq_len=16)
  prepare(cfg, tmp_path / "out", TokeniseOptions(0))
  train, _ = open_datasets(cfg, 0)
  again, _ = open_datasets(config(paths=(str(tmp_path / "out"),), seq_len=16), 0)
  assert again.info.fingerprint == train.info.fingerprint
  assert again.info.report["skipped"]["exact"] == 25
  all_of_it, _ = open_datasets(dataclasses.replace(cfg, filters=()), 0)
  assert all_of_it.info.fingerprint != train.info.fingerprint
  with pytest.raises(ValueError, match=r"data.filters='near', but .* prepared with 'exact'"):
    open_documents(config(paths=(str(tmp_path / "out"),), filters=(Near(),)), 0.0)
  before = open_documents(cfg, 0.0).content
  monkeypatch.setattr(sift, "versions", lambda filters: {"rensa": "0.5.1"})
  assert open_documents(cfg, 0.0).content != before  # versions of packages are part of it


def test_a_long_document_is_compared_to_its_end(config, write, tmp_path, monkeypatch):
  monkeypatch.setattr(sift, "LONGEST", PIECE)
  monkeypatch.setattr(sieve, "LONGEST", PIECE)
  text = "some words of a long document\n" * 20_000
  for name, changed in {"a": text, "b": text, "c": text + "end\n"}.items():
    write(f"d/{name}.txt", changed)
  opened = open_documents(config(paths=(str(tmp_path / "d"),), filters=(Exact(),)), 0.0)
  assert opened.sifted.meta["dropped"] == {"exact": 1}


def test_blocks_are_what_was_judged():
  text = "some words of a long document\n" * 400_000
  pieces = list(cut_text([text], 7))
  found = list(sieve.blocks(pieces))
  assert "".join(found) == text
  assert len(found) == 3 and len(found[0]) >= sieve.LONGEST
  assert list(map(list, sieve.group_documents([*pieces, *pieces]))) == [pieces, pieces]


def test_a_file_that_changed_is_noticed(folder, config, monkeypatch):
  files, *_ = splits._find((str(folder),), config(), hub_dataset.TRAIN)
  opened = sift.sift(config(filters=(Exact(),)), files, "", TokeniseOptions(0))
  own = next(file.sieve for file in opened.files if file.name == "a.jsonl")
  report = sift.Report(strict=False)
  for count in (39, 41):
    with pytest.raises(ValueError, match=r"a\.jsonl has changed since"):
      list(own.passed("a.jsonl", iter([Piece(i, True, "x") for i in range(count)]), report))


def test_equal_and_similar_keep_the_lowest_key_of_each_group():
  """Signatures of known similarity: groups of 4, each a chain of neighbours at 0.86 or more."""
  rng = np.random.default_rng(0)
  hashes = rng.integers(0, 5, (200, 2)).astype(np.uint64)
  keys = rng.permutation(200).astype(np.uint64)
  kept = duplicates.group_equal(hashes, keys)
  for i in range(200):
    group = np.flatnonzero((hashes == hashes[i]).all(1))
    assert kept[i] == group[keys[group].argmin()]

  first = rng.integers(0, 2**32, (50, duplicates.NUM_HASHES), np.uint32)
  group = [first]
  for _ in range(3):
    other = group[-1].copy()
    for row in other:
      at = rng.choice(duplicates.NUM_HASHES, 18, replace=False)
      row[at] = rng.integers(0, 2**32, len(at), np.uint32)
    group.append(other)
  far = first.copy()
  far[:, : duplicates.NUM_HASHES // 2] = 0  # half of it is shared by all, half with its own
  far[:, 0] = range(50)
  found = np.concatenate([*group, far])
  keys = rng.permutation(250).astype(np.uint64)
  kept = duplicates.group_similar(found, np.arange(250), keys, 0.8)
  members = [np.arange(4) * 50 + i for i in range(50)]
  for which in members:
    assert set(kept[which]) == {which[keys[which].argmin()]}
  assert (kept[200:] == np.arange(200, 250)).all()
  order = rng.permutation(250)
  shuffled = duplicates.group_similar(found[order], np.arange(250), keys[order], 0.8)
  assert (order[shuffled] == kept[order]).all()
  some = np.flatnonzero(rng.random(250) < 0.5)
  part = duplicates.group_similar(found, some, keys[some], 0.8)
  assert (
    part == duplicates.group_similar(found[some], np.arange(len(some)), keys[some], 0.8)
  ).all()


def test_bands_find_pairs_at_the_threshold():
  for threshold in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0):
    rows = duplicates.rows_of_a_band(threshold)
    assert 1 - (1 - threshold**rows) ** (duplicates.NUM_HASHES // rows) >= 0.95
  assert duplicates.rows_of_a_band(0.8) == 7


def test_exact_hash_and_what_a_judge_says_to_compare():
  same = duplicates.exact_hash("Caf\u00e9  x\n", b"")
  assert duplicates.exact_hash("cafe\u0301 X", b"") == same
  assert duplicates.exact_hash("caf\u00e9x", b"") != same
  assert duplicates.exact_hash("Caf\u00e9  x\n", b"rest") != same
  documents = [DocumentHead(text, b"") for text in ("One", "one ", "two")]
  found = Judge((Exact(),))(documents)
  assert found.stage.tolist() == [1, 1, 1] and found.reasons.tolist() == [""]
  assert (found.exact[0] == found.exact[1]).all() and (found.exact[0] != found.exact[2]).any()


@pytest.mark.parametrize(
  ("filters", "stage", "found", "instead"),
  [
    # The first document falls to `repair`: before it is compared, or after.
    ((Repair(), Exact(), C4()), [0, 3, 3, 2], [0, 3, 3, 1], [-1, -1, -1, 2]),
    ((Exact(), Repair(), C4()), [1, 3, 3, 2], [1, 0, 3, 0], [-1, 0, -1, 2]),
  ],
)
def test_only_what_earlier_filters_kept_is_compared(filters, stage, found, instead):
  exact = np.array([[1, 1], [1, 1], [2, 2], [2, 2]], np.uint64)
  near = np.empty((0, duplicates.NUM_HASHES), np.uint32)
  keys = np.arange(4, dtype=np.uint64)
  resolved = judge.drop_duplicates(filters, np.array(stage, np.int16), keys, exact, near)
  assert [values.tolist() for values in resolved] == [found, instead]


def checked(filters, **changes):
  """`data.filters` of a config that was checked."""
  config = base_config()
  config.update_from_flattened_dict({"data.filters": filters, **changes})
  return from_config_dict(config).data.filters


def test_filters_by_name_by_mapping_and_as_instances():
  near = Near(threshold=0.7)
  assert checked(("exact", {"name": "near", "threshold": 0.7})) == (Exact(), near)
  assert checked((Exact(), near)) == (Exact(), near)
  assert checked(()) == ()
  config = base_config()
  config.data.filters = (near, "gopher")
  cfg = from_config_dict(config)
  assert cfg.data.filters == (near, Gopher())
  stored = json.loads(json.dumps(flatten(cfg)["data.filters"]))
  assert stored[0] == {"name": "near", "threshold": 0.7}
  assert checked(tuple(stored)) == (near, Gopher())


@pytest.mark.parametrize(
  ("filters", "message"),
  [
    (("dedup",), r"'dedup' is unknown. Choose one of: repair, exact"),
    (("exact", "exact"), "names exact twice"),
    (({"threshold": 0.7},), "data.filters.name='' is unknown"),
    (({"name": "near", "n": 1},), r"unknown key data.filters\[0\].n"),
    (({"name": "exact", "threshold": 1.0},), r"\[0\].threshold is a setting of .*name=near"),
    (({"name": "near", "threshold": "high"},), r"\[0\].threshold must be float, got 'high'"),
    ((Exact(), Near(threshold=0.1)), r"data.filters\[1\] \(near\).threshold=0.1 is too small"),
    (("language",), "does not say which languages to keep"),
    ((Language(keep=("en",), min_score=2.0),), "min_score=2.0 is too large"),
  ],
)
def test_wrong_filters(filters, message):
  with pytest.raises(ValueError, match=message):
    checked(filters)


def test_filters_that_change_text_are_refused_for_conversations():
  message = "data.filters: repair changes text, and data.format=chat reads conversations"
  with pytest.raises(ValueError, match=message):
    checked(("exact", "repair"), **{"data.format": "chat"})


def test_one_spelling():
  """It is in the keys of what was filtered before."""
  filters = (Near(threshold=0.7), Exact(), Near(threshold=0.8), Language(keep=("en", "de")))
  assert spelled(filters) == "near:threshold=0.7,exact,near,language:keep=en+de"
  assert spelled((C4(split_paragraph=False, min_num_sentences=3),)) == (
    "c4:min_num_sentences=3:split_paragraph=false"
  )
  assert spelled(()) == ""


@without
@pytest.mark.parametrize("one", [Repair(), Near(), Language(keep=("en",)), Gopher(), C4()])
def test_a_missing_package_is_named_before_any_work(one):
  with pytest.raises(ValueError, match=r"data.filters=.* needs .*pip install 'ats_jax\[filters\]'"):
    Judge((one,))
