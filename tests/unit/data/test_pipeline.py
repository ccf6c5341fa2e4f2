"""From files to batches: which row is where, on any number of hosts and after a resume."""

import dataclasses
import hashlib
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading import all_rows, assert_same, batches_of, documents, read

from ats_jax.config.schema.setting import Table
from ats_jax.data.batch import FIELDS, random_batch
from ats_jax.data.rows.loader import eval_batches
from ats_jax.data.sources import open_eval_sets
from ats_jax.data.splits import open_datasets, open_split
from ats_jax.data.tokens.tokenizer import ByteTokenizer

LENGTHS = [3, 30, 1, 7, 19, 12, 2, 2, 40, 5, 6, 11, 9, 14]


@pytest.fixture
def ds(numbered):
  return numbered(LENGTHS, seq_len=8)


def at(ds, row):
  """The position behind so many rows."""
  return {"row": row, "data": ds.info.fingerprint}


def flat(batches):
  """[rows, seq] of each field, in global order, from whole batches."""
  return {f: np.concatenate([b[f].reshape(-1, b[f].shape[-1]) for b in batches]) for f in FIELDS}


def test_row_layout_formula(ds):
  """Row of batch k, micro-step a, slot j is global row start + (k * accum + a) * micro + j."""
  start, accum, micro, local = 5, 3, 4, np.array([0, 2, 3])
  batches, _ = read(ds, 3, position=at(ds, start), local=local, accum=accum)
  for k, batch in enumerate(batches):
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
      name: ((3, 3, 8), np.dtype(field.dtype)) for name, field in FIELDS.items()
    }
    for a in range(accum):
      for slot, j in enumerate(local):
        want = ds.read(np.array(start + (k * accum + a) * micro + j))
        assert_same({f: batch[f][a, slot] for f in FIELDS}, want)


def test_context_is_read_again_and_does_not_count(write, config):
  path = write("a.txt", "abcdefghijklmnop")
  cfg = config(seq_len=10, overlap=4, packing="concat")
  ds = open_split(cfg, 0, (str(path),), ByteTokenizer())
  first, second = (ds.read_once(np.array(row)) for row in (0, 1))
  text = lambda ids: "".join(chr(i) if i < 256 else "|" for i in ids)
  assert [text(first[name]) for name in ("tokens", "targets")] == ["|abcdefghi", "abcdefghij"]
  assert [text(second[name]) for name in ("tokens", "targets")] == ["fghijklmno", "ghijklmnop"]
  assert first["loss_mask"].all()
  assert second["loss_mask"].tolist() == [0] * 4 + [1] * 6
  assert second["positions"].tolist() == list(range(10)) and (second["segment_ids"] == 1).all()
  assert ds.info.num_tokens == 17 and ds.info.num_rows == 3


def test_random_batches_are_packed_like_real_ones():
  batch = random_batch((2, 3, 10), vocab_size=7, segments=3)
  assert batch.keys() == FIELDS.keys()
  assert {x.shape for x in batch.values()} == {(2, 3, 10)}
  assert all(batch[name].dtype == field.dtype for name, field in FIELDS.items())
  assert batch["tokens"].max() < 7 and batch["loss_mask"].all()
  np.testing.assert_array_equal(batch["tokens"][..., 1:], batch["targets"][..., :-1])
  np.testing.assert_array_equal(batch["segment_ids"][1, 2], [1, 1, 1, 1, 2, 2, 2, 3, 3, 3])
  np.testing.assert_array_equal(batch["positions"][0, 1], [0, 1, 2, 3, 0, 1, 2, 0, 1, 2])


@given(
  start=st.integers(0, 100), accum=st.sampled_from([1, 2, 3, 6]), hosts=st.sampled_from([1, 2]),
  prefetch=st.integers(1, 5),
)  # fmt: skip
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
def test_the_same_rows_on_any_arrangement(numbered, start, accum, hosts, prefetch):
  ds = numbered(LENGTHS, seq_len=8)
  batches, _ = read(ds, 3, position=at(ds, start), accum=accum, hosts=hosts, prefetch=prefetch)
  assert_same(flat(batches), ds.read(range(start, start + 36)))


def test_a_position_is_behind_what_was_handed_out(ds, numbered):
  """What a run keeps is JSON and alike on all hosts; batches made ahead do not move it."""
  whole = ds.read(range(36))
  with batches_of(ds, accum=2, batch=4, local=[1]) as batches:
    start = batches.position()
  assert start == at(ds, 0)
  _, position = read(ds, 3, accum=2, batch=4, local=[1], prefetch=3)
  assert read(ds, 1, position=start)[1] == position == at(ds, 12)
  again, _ = read(ds, 4, position=position, batch=6)
  assert_same(flat(again), {name: x[12:] for name, x in whole.items()})
  with pytest.raises(ValueError, match=rf"(?s)other data.*{position['data']}.*Restore them"):
    batches_of(numbered(LENGTHS, seq_len=16), position=position)


def test_each_epoch_is_a_permutation_of_its_own(ds):
  rows = ds.info.num_rows
  assert rows % 4  # so that batches straddle the border
  epochs = flat(read(ds, rows, batch=4)[0])["targets"].reshape(4, rows, 8)
  as_sets = [sorted(map(bytes, epoch)) for epoch in epochs]
  assert as_sets[0] == as_sets[1] == as_sets[2] == as_sets[3]
  assert len(set(as_sets[0])) == rows
  assert len({epoch.tobytes() for epoch in epochs}) == 4
  order = [[ds.row_index(e * rows + i) for i in range(rows)] for e in range(20)]
  assert all(sorted(o) == list(range(rows)) for o in order)
  assert len(set(map(tuple, order))) == 20


def test_order_depends_on_the_seed_alone(numbered):
  orders = {}
  for seed in (0, 1, 2):
    ds = numbered(LENGTHS, seed, seq_len=8)
    rows = ds.read(range(2 * ds.info.num_rows))
    assert_same(rows, numbered(LENGTHS, seed, seq_len=8).read(range(2 * ds.info.num_rows)))
    orders[seed] = rows["targets"].tobytes()
  assert len(set(orders.values())) == 3
  # Seed 1 must not be seed 0 one epoch later.
  a, b = (numbered(LENGTHS, seed, seq_len=8) for seed in (0, 1))
  n = a.info.num_rows
  assert [a.row_index(n + i) for i in range(n)] != [b.row_index(i) for i in range(n)]


def test_order_is_pinned(numbered):
  """A library that changed its shuffle would make a resumed run lose and repeat rows."""
  ds = numbered(LENGTHS, 7, seq_len=8, packing="best_fit")
  rows = ds.read(range(2 * ds.info.num_rows))
  digest = hashlib.sha256(b"".join(rows[f].tobytes() for f in (
    "tokens", "targets", "loss_mask", "segment_ids", "positions"))).hexdigest()  # fmt: skip
  assert digest[:16] == "0e7bda4cfbdfe0cc"


def test_pickle_reopens_the_files(ds):
  raw = pickle.dumps(ds)
  assert len(raw) < 4000
  assert_same(pickle.loads(raw).read(range(40)), ds.read(range(40)))


def test_one_row(numbered):
  ds = numbered([5], seq_len=8)
  assert ds.info.num_rows == 1
  rows = flat(read(ds, 3)[0])["targets"]
  assert (rows == rows[0]).all()


@pytest.mark.parametrize("hosts", [1, 2])
def test_evaluation_is_one_pass_in_order_then_padding(ds, hosts):
  def batches(num_batches=0):
    shares = []
    for local in np.split(np.arange(4), hosts):
      with eval_batches(ds, batch_size=4, local_rows=local, num_batches=num_batches) as found:
        shares.append(list(found))
    return [
      {f: np.concatenate([part[f] for part in parts]) for f in FIELDS}
      for parts in zip(*shares, strict=True)
    ]

  num_rows, whole = ds.info.num_rows, batches()
  assert len(whole) == -(-num_rows // 4) and num_rows % 4
  assert whole[0]["tokens"].shape == (4, 8)
  rows = flat(whole)
  assert_same({f: rows[f][:num_rows] for f in FIELDS}, all_rows(ds))
  padding = {f: rows[f][rows["segment_ids"] == 0] for f in FIELDS}  # also at the end of a row
  assert len(padding["tokens"]) > 8 * (len(rows["tokens"]) - num_rows)
  assert not padding["loss_mask"].any() and not padding["positions"].any()
  assert (padding["tokens"] == ds.info.tokenizer.pad_id).all()
  assert (padding["targets"] == ds.info.tokenizer.pad_id).all()
  assert rows["loss_mask"].sum() == ds.info.num_tokens
  assert len(batches(2)) == 2 and len(batches(10**6)) == len(whole)


def test_arguments_that_contradict_each_other(ds):
  for local in ([4], [-1], [1, 1], [2, 1], [], [0.5], [[0]]):
    with pytest.raises(ValueError, match="local_rows="):
      batches_of(ds, batch=4, local=local)
  with pytest.raises(ValueError, match="batch_size=5"):
    batches_of(ds, batch=5, accum=2)


def test_empty_split(write, config):
  _, empty = open_datasets(config(paths=(str(write("a.txt", "x" * 99)),), seq_len=8), 0)
  with pytest.raises(ValueError, match="no row to train on"):
    batches_of(empty)
  with eval_batches(empty, batch_size=2, local_rows=np.arange(2), num_batches=0) as batches:
    assert list(batches) == []


class TestSplit:
  @pytest.fixture
  def cfg(self, write, config, tmp_path):
    for i in range(60):
      write(f"d/{i}.txt", f"text file {i}")
    write("d/lines.jsonl", [{"text": f"line {i}"} for i in range(200)])
    return config(paths=(str(tmp_path / "d"),), validation_fraction=0.2, seq_len=8)

  def held(self, cfg, seed=0):
    return set(documents(open_datasets(cfg, seed)[1]))

  def test_each_document_is_in_one_split_and_stays_there(self, cfg, write):
    (train, validation), (_, same) = open_datasets(cfg, 0), open_datasets(cfg, 1)
    a, b = set(documents(train)), set(documents(validation))
    assert not a & b and len(a | b) == 260
    assert 30 < len(b) < 80
    assert any(":" in name for name in b) and any(".txt" in name for name in b)
    assert_same(all_rows(validation), all_rows(same))  # whatever the seed
    more, less = (self.held(dataclasses.replace(cfg, validation_fraction=f)) for f in (0.5, 0.1))
    assert less < b < more
    write("d/new.txt", "new")
    assert self.held(cfg, 1) - {"new.txt"} == b

  def test_named_evaluation_sets(self, cfg, write, tmp_path):
    folder = tmp_path / "v"
    for name in ("main", "code", "more", "wiki"):
      write(f"v/{name}.txt", f"text of {name}")
    sets = Table(code=(f"{folder}/code.txt", f"{folder}/more.*"), wiki=(f"{folder}/wiki.txt",))
    main = (f"{folder}/main.txt",)
    cfg = dataclasses.replace(cfg, validation_paths=main, validation_sets=sets)
    train, validation = open_datasets(cfg, 0)
    assert train.info.num_documents == 260
    found = open_eval_sets(cfg, validation)
    assert [(s.name, s.prefix, set(documents(s.dataset))) for s in found] == [
      ("", "eval/", {"main.txt"}), ("code", "eval/code/", {"code.txt", "more.txt"}),
      ("wiki", "eval/wiki/", {"wiki.txt"}),
    ]  # fmt: skip
    plain = dataclasses.replace(cfg, validation_sets=Table())
    assert [s.name for s in open_eval_sets(plain, open_datasets(plain, 0)[1])] == [""]

  def test_named_sets_leave_the_main_one_as_it_is(self, cfg, write):
    """The rows that are held out of the training text are the same with others beside them."""
    path = write("v/a=b.txt", "other text")
    train, validation = open_datasets(cfg, 0)
    more = dataclasses.replace(cfg, validation_sets=Table(other=(str(path),)))
    again, same = open_datasets(more, 0)
    assert again.info.fingerprint == train.info.fingerprint
    assert same.info.fingerprint == validation.info.fingerprint
    main, other = open_eval_sets(more, same)
    assert main.dataset is same and set(documents(other.dataset)) == {"a=b.txt"}
    (only,) = open_eval_sets(cfg, validation)
    assert only.dataset is validation
    alone = dataclasses.replace(more, validation_fraction=0.0)
    assert [s.name for s in open_eval_sets(alone, open_datasets(alone, 0)[1])] == ["other"]


def test_bytes_per_token(write, config):
  ds = open_split(config(seq_len=8), 0, (str(write("a.txt", "é" * 50)),), ByteTokenizer())
  assert ds.info.num_tokens == 101 and ds.info.bytes_per_token == 100 / 101
