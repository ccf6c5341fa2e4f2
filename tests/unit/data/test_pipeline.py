import dataclasses
import hashlib
import json
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ats_jax.config.schema.setting import Table
from ats_jax.data.rows.loader import TrainBatches, eval_batches
from ats_jax.data.sources import open_eval_sets
from ats_jax.data.splits import open_datasets, open_split
from ats_jax.data.tokens.tokenizer import ByteTokenizer

LENGTHS = [3, 30, 1, 7, 19, 12, 2, 2, 40, 5, 6, 11, 9, 14]
FIELDS = ("tokens", "targets", "loss_mask", "segment_ids", "positions")


@pytest.fixture
def ds(numbered):
  return numbered(LENGTHS, seq_len=8)


def at(ds, row):
  """The position behind so many rows."""
  return {"row": row, "data": ds.info.fingerprint}


def take(ds, count, *, start_row=0, accum=1, batch=4, local=None, workers=0, prefetch=2):
  local = np.arange(batch // accum) if local is None else np.asarray(local)
  with TrainBatches(
    ds, position=at(ds, start_row), accum_steps=accum, batch_size=batch, local_rows=local,
    num_workers=workers, prefetch=prefetch,
  ) as batches:  # fmt: skip
    return [next(batches) for _ in range(count)]


def flat(batches):
  """[rows, seq] of each field, in global order, from whole batches."""
  return {f: np.concatenate([b[f].reshape(-1, b[f].shape[-1]) for b in batches]) for f in FIELDS}


def assert_same(a, b):
  for field in FIELDS:
    assert a[field].dtype == b[field].dtype
    np.testing.assert_array_equal(a[field], b[field])


def test_shapes_and_dtypes(ds):
  (batch,) = take(ds, 1, accum=3, batch=12, local=[1, 3])
  assert sorted(batch) == sorted(FIELDS)
  assert {x.shape for x in batch.values()} == {(3, 2, 8)}
  assert {f: batch[f].dtype.name for f in FIELDS} == {
    **dict.fromkeys(FIELDS, "int32"), "loss_mask": "float32"
  }  # fmt: skip
  assert all(type(x) is np.ndarray for x in batch.values())


def test_row_layout_formula(ds):
  """Row of batch k, micro-step a, slot j is global row start + (k * accum + a) * micro + j."""
  start, accum, micro, local = 5, 3, 4, np.array([0, 2, 3])
  for k, batch in enumerate(take(ds, 3, start_row=start, accum=accum, batch=12, local=local)):
    for a in range(accum):
      for slot, j in enumerate(local):
        want = ds.read(np.array(start + (k * accum + a) * micro + j))
        assert_same({f: batch[f][a, slot] for f in FIELDS}, want)


RECKLESS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@given(
  start=st.integers(0, 100), accum=st.sampled_from([1, 2, 3, 6]), hosts=st.sampled_from([1, 2]),
  prefetch=st.integers(1, 5),
)  # fmt: skip
@RECKLESS
def test_the_same_rows_on_any_arrangement(numbered, start, accum, hosts, prefetch):
  ds = numbered(LENGTHS, seq_len=8)
  micro = 12 // accum
  shares = [
    take(ds, 3, start_row=start, accum=accum, batch=12, local=local, prefetch=prefetch)
    for local in np.split(np.arange(micro), hosts)
  ]
  joined = [
    {f: np.concatenate([part[f] for part in parts], axis=1) for f in FIELDS}
    for parts in zip(*shares, strict=True)
  ]
  assert_same(flat(joined), ds.read(range(start, start + 36)))


def test_resume_anywhere_continues_the_stream(ds):
  whole = flat(take(ds, 30))
  for consumed in (0, 1, 7, 29):
    rest = flat(take(ds, 30 - consumed, start_row=4 * consumed))
    assert_same(rest, {f: whole[f][4 * consumed :] for f in FIELDS})


def open_at(ds, position, *, accum=1, batch=4, local=None, workers=0):
  local = np.arange(batch // accum) if local is None else np.array(local)
  return TrainBatches(
    ds, position=position, accum_steps=accum, batch_size=batch, local_rows=local,
    num_workers=workers, prefetch=3,
  )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_is_behind_what_was_handed_out(ds, workers):
  """What a run keeps is JSON and alike on all hosts; batches made ahead do not move it."""
  rest = flat(take(ds, 6))
  with open_at(ds, None, accum=2, local=[1], workers=workers) as batches:
    start = batches.position()
    for _ in range(3):
      next(batches)
    position = json.loads(json.dumps(batches.position()))
  with open_at(ds, start, accum=1, batch=12) as batches:
    next(batches)
    assert batches.position() == position
  with open_at(ds, position, batch=6) as batches:
    again = flat([next(batches), next(batches)])
  assert_same(again, {name: x[12:] for name, x in rest.items()})


def test_a_position_in_other_data_is_refused(numbered):
  with open_at(numbered(LENGTHS, seq_len=8), None) as batches:
    next(batches)
    position = batches.position()
  with pytest.raises(ValueError, match=rf"(?s)other data.*{position['data']}.*Restore them"):
    open_at(numbered(LENGTHS, seq_len=16), position)


def test_each_epoch_is_a_permutation_of_its_own(ds):
  assert ds.info.num_rows % 4  # so that batches straddle the border
  rows = flat(take(ds, ds.info.num_rows))["targets"]
  epochs = rows.reshape(4, ds.info.num_rows, 8)
  as_sets = [sorted(map(bytes, epoch)) for epoch in epochs]
  assert as_sets[0] == as_sets[1] == as_sets[2] == as_sets[3]
  assert len(set(as_sets[0])) == ds.info.num_rows
  assert len({epoch.tobytes() for epoch in epochs}) == 4
  order = [
    [ds.row_index(e * ds.info.num_rows + i) for i in range(ds.info.num_rows)] for e in range(50)
  ]
  assert all(sorted(o) == list(range(ds.info.num_rows)) for o in order)
  assert len(set(map(tuple, order))) == 50


def test_order_depends_on_the_seed_alone(numbered):
  orders = {}
  for seed in (0, 1, 2):
    ds = numbered(LENGTHS, seed, seq_len=8)
    again = numbered(LENGTHS, seed, seq_len=8)
    rows = ds.read(range(2 * ds.info.num_rows))
    assert_same(rows, again.read(range(2 * ds.info.num_rows)))
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
  digest = hashlib.sha256(b"".join(rows[f].tobytes() for f in FIELDS)).hexdigest()
  assert digest[:16] == "0e7bda4cfbdfe0cc"


def test_pickle_reopens_the_files(ds):
  raw = pickle.dumps(ds)
  assert len(raw) < 4000
  assert_same(pickle.loads(raw).read(range(40)), ds.read(range(40)))


def test_one_row(numbered):
  ds = numbered([5], seq_len=8)
  assert ds.info.num_rows == 1
  rows = flat(take(ds, 3))["targets"]
  assert (rows == rows[0]).all()


class TestEval:
  def read(self, ds, hosts=1, batch=4, num_batches=0):
    shares = []
    for local in np.split(np.arange(batch), hosts):
      with eval_batches(ds, batch_size=batch, local_rows=local, num_batches=num_batches) as b:
        shares.append(list(b))
    return [
      {f: np.concatenate([part[f] for part in parts]) for f in FIELDS}
      for parts in zip(*shares, strict=True)
    ]

  @pytest.mark.parametrize("hosts", [1, 2])
  def test_one_pass_in_order_then_padding(self, ds, hosts):
    batches = self.read(ds, hosts)
    assert len(batches) == -(-ds.info.num_rows // 4) and ds.info.num_rows % 4
    assert batches[0]["tokens"].shape == (4, 8)
    rows = flat(batches)
    assert_same(
      {f: rows[f][: ds.info.num_rows] for f in FIELDS}, ds.read_once(range(ds.info.num_rows))
    )
    rest = {f: rows[f][ds.info.num_rows :] for f in FIELDS}
    assert not rest["loss_mask"].any() and not rest["segment_ids"].any()
    assert (rest["tokens"] == ds.info.tokenizer.pad_id).all()
    assert rows["loss_mask"].sum() == ds.info.num_tokens

  def test_part_of_it(self, ds):
    assert len(self.read(ds, num_batches=2)) == 2
    assert len(self.read(ds, num_batches=10**6)) == -(-ds.info.num_rows // 4)

  def test_twice_the_same(self, ds):
    assert_same(flat(self.read(ds)), flat(self.read(ds)))


class TestArguments:
  @pytest.mark.parametrize(
    "arguments",
    [dict(batch=5, accum=2)]
    + [dict(local=x) for x in ([4], [-1], [1, 1], [2, 1], [], [0.5], [[0]])],
  )
  def test_contradictions(self, ds, arguments):
    with pytest.raises(ValueError, match=r"batch_size=5|local_rows="):
      take(ds, 1, **arguments)

  def test_empty_split(self, write, config):
    path = write("a.txt", "x" * 99)
    _, empty = open_datasets(config(paths=(str(path),), seq_len=8), 0)
    with pytest.raises(ValueError, match="no row to train on"):
      take(empty, 1)
    with eval_batches(empty, batch_size=2, local_rows=np.arange(2), num_batches=0) as batches:
      assert list(batches) == []


class TestSplit:
  @pytest.fixture
  def documents(self, write, tmp_path):
    for i in range(60):
      write(f"d/{i}.txt", f"text file {i}")
    write("d/lines.jsonl", [{"text": f"line {i}"} for i in range(200)])
    return str(tmp_path / "d")

  def names(self, ds):
    return {ds.packed.corpus.name(int(d)) for d in ds.packed.documents}

  def test_each_document_is_in_one_split(self, documents, config):
    train, validation = open_datasets(
      config(paths=(documents,), validation_fraction=0.2, seq_len=8), 0
    )
    a, b = self.names(train), self.names(validation)
    assert not a & b and len(a | b) == 260
    assert 30 < len(b) < 80
    assert any(":" in name for name in b) and any(".txt" in name for name in b)

  def test_a_document_keeps_its_side_when_others_come(self, documents, config, write):
    cfg = config(paths=(documents,), validation_fraction=0.2, seq_len=8)
    before = self.names(open_datasets(cfg, 0)[1])
    write("d/new.txt", "new")
    assert self.names(open_datasets(cfg, 1)[1]) - {"new.txt"} == before

  def test_more_fraction_only_adds(self, documents, config):
    held = [
      self.names(open_datasets(config(paths=(documents,), validation_fraction=f, seq_len=8), 0)[1])
      for f in (0.1, 0.3, 0.5)
    ]
    assert held[0] < held[1] < held[2]

  def test_validation_paths(self, documents, config, write, tmp_path):
    write("v/v.txt", "other text")
    cfg = config(
      paths=(documents,),
      validation_paths=(str(tmp_path / "v"),),
      validation_fraction=0.5,
      seq_len=8,
    )
    train, validation = open_datasets(cfg, 0)
    assert train.info.num_documents == 260 and self.names(validation) == {"v.txt"}

  def test_named_evaluation_sets(self, documents, config, write, tmp_path):
    folder = tmp_path / "v"
    for name in ("main", "code", "more", "wiki"):
      write(f"v/{name}.txt", f"text of {name}")
    sets = Table(code=(f"{folder}/code.txt", f"{folder}/more.*"), wiki=(f"{folder}/wiki.txt",))
    main = f"{folder}/main.txt"
    cfg = config(paths=(documents,), validation_paths=(main,), validation_sets=sets, seq_len=8)
    _, validation = open_datasets(cfg, 0)
    sets = open_eval_sets(cfg, validation)
    assert [(s.name, s.prefix) for s in sets] == [
      ("", "eval/"), ("code", "eval/code/"), ("wiki", "eval/wiki/")
    ]  # fmt: skip
    assert [self.names(s.dataset) for s in sets] == [
      {"main.txt"}, {"code.txt", "more.txt"}, {"wiki.txt"}
    ]  # fmt: skip

  def test_named_sets_leave_the_main_one_as_it_is(self, documents, config, write):
    """The rows that are held out of the training text are the same with others beside them."""
    path = write("v/v.txt", "other text")
    cfg = config(paths=(documents,), validation_fraction=0.2, seq_len=8)
    train, validation = open_datasets(cfg, 0)
    more = dataclasses.replace(cfg, validation_sets=Table(other=(str(path),)))
    again, same = open_datasets(more, 0)
    assert (again.info.fingerprint, same.info.fingerprint) == (
      train.info.fingerprint,
      validation.info.fingerprint,
    )
    main, other = open_eval_sets(more, same)
    assert main.dataset is same and self.names(other.dataset) == {"v.txt"}
    (only,) = open_eval_sets(cfg, validation)
    assert only.dataset is validation

  def test_sets_without_a_main_one(self, documents, config, write):
    path = write("v/a=b.txt", "other text")
    cfg = config(paths=(documents,), validation_sets=Table(other=(str(path),)), seq_len=8)
    (other,) = open_eval_sets(cfg, open_datasets(cfg, 0)[1])
    assert other.name == "other" and self.names(other.dataset) == {"a=b.txt"}
    plain = dataclasses.replace(cfg, validation_sets=Table(), validation_paths=(str(path),))
    assert [s.name for s in open_eval_sets(plain, open_datasets(plain, 0)[1])] == [""]

  def test_validation_rows_do_not_depend_on_the_seed(self, documents, config):
    cfg = config(paths=(documents,), validation_fraction=0.2, seq_len=8)
    a, b = (open_datasets(cfg, seed)[1] for seed in (0, 1))
    assert_same(a.read_once(range(a.info.num_rows)), b.read_once(range(b.info.num_rows)))

  def test_bpe_sees_training_text_only(self, config, write, tmp_path):
    """The word that only held-out documents use gets no token of its own."""
    for i in range(60):
      write(f"d/{i}.txt", "common words " * 20)
    cfg = config(
      paths=(str(tmp_path / "d"),), tokenizer="bytes", validation_fraction=0.3, seq_len=8
    )
    for name in self.names(open_datasets(cfg, 0)[1]):
      write(f"d/{name}", "zyzzyva " * 50)
    cfg = config(
      paths=(str(tmp_path / "d"),), tokenizer="bpe", bpe_vocab_size=300, validation_fraction=0.3,
      seq_len=8,
    )  # fmt: skip
    train, validation = open_datasets(cfg, 0)
    assert len(train.info.tokenizer.encode("common")) <= 2
    assert len(train.info.tokenizer.encode("zyzzyva")) >= 6
    assert validation.info.num_documents


def test_bytes_per_token(write, config):
  ds = open_split(config(seq_len=8), 0, (str(write("a.txt", "é" * 50)),), ByteTokenizer())
  assert ds.info.num_tokens == 101 and ds.info.bytes_per_token == 100 / 101
