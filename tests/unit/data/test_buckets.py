"""Rows of several lengths, and by difficulty: each token once an epoch, on any hosts."""

import itertools
import pickle
from collections import Counter

import numpy as np
import pytest
from loading import (
  ONE_HOST,
  all_rows,
  assert_each_token_once,
  assert_same,
  batches_of,
  find_fault,
  read,
)

from ats_jax.config.schema.row_order import LengthBuckets, ShortFirst
from ats_jax.config.schema.text_format import Chat
from ats_jax.data.look.overview import overview
from ats_jax.data.look.page import html_page
from ats_jax.data.rows.buckets import LEAST_STEPS, Buckets, StepOrder
from ats_jax.data.rows.dataset import Dataset
from ats_jax.data.rows.difficulty import LEVELS, by_level, rarity
from ats_jax.data.rows.lengths import by_length, row_lengths
from ats_jax.data.sources import open_data
from ats_jax.data.splits import open_documents

BATCH = 6
TWO, MIXED, RISING = LengthBuckets(lengths=2), LengthBuckets(lengths=3), ShortFirst(lengths=3)
CHATS = dict(format=Chat(template="plain"), seq_len=256, batch_size=2, order=TWO)


@pytest.fixture
def parted(write, config):
  """Texts of very different length, in parts."""
  sizes = np.random.default_rng(0).permutation(np.repeat([5, 38, 190], [700, 130, 22]))
  rows = [
    {"text": f"{i} " + ("aaaa", "abcd", "uvwxyz")[i % 3] * (n // 4)} for i, n in enumerate(sizes)
  ]
  path = write("a.jsonl", rows)

  def make(seed=0, **changes) -> Buckets:
    settings = dict(paths=(str(path),), seq_len=128, batch_size=BATCH, order=MIXED)
    ds, _ = open_data(config(**{**settings, **changes}), seed)
    assert isinstance(ds, Buckets)
    return ds

  return make


def test_lengths_are_quantiles_of_tokens_rounded_up():
  # A quarter of the tokens each in documents of 30, 60, 100 and 1000.
  sizes = np.repeat([30, 60, 100, 1000], [1000, 500, 300, 30])
  choose = lambda count, sizes=sizes, **changes: row_lengths(
    sizes, **{"seq_len": 512, "count": count, "batch_size": 2} | changes
  )
  assert choose(1) == (512,)
  assert choose(2) == (64, 512)
  assert choose(3) == (64, 128, 512)
  assert choose(4) == (32, 64, 128, 512)
  # A part of too few steps goes to its neighbour: 30,000 tokens are not LEAST_STEPS of 16 rows.
  assert LEAST_STEPS * 16 * 512 > 30_000
  assert choose(4, batch_size=16) == (64, 512)
  assert choose(4, batch_size=60) == (512,)
  assert choose(4, seq_len=96) == (48, 96)  # 24 is no multiple of 16
  for count, sizes in itertools.product((2, 3, 4), (np.arange(1, 900), np.full(500, 700))):
    found = choose(count, sizes)
    assert len(found) <= count and found[-1] == 512 and all(512 % n == 0 for n in found)


def test_a_document_is_in_the_shortest_row_that_holds_it():
  sizes = np.array([1, 16, 17, 32, 33, 999])
  parts = by_length(sizes, np.arange(10, 16), (16, 32, 64))
  assert [(p.seq_len, p.documents.tolist(), p.name) for p in parts] == [
    (16, [10, 11], "documents of 1 to 16 tokens"), (32, [12, 13], "documents of 17 to 32 tokens"),
    (64, [14, 15], "documents of 33 tokens and more"),
  ]  # fmt: skip


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize(
  ("rows", "a_step"),
  [((10, 23, 7), (4, 4, 4)), ((1, 100), (7, 3)), ((5,), (2,)), ((3, 2, 1, 1), (50, 9, 7, 2))],
)
def test_every_epoch_reads_each_part_once_and_less_than_a_step_more(rows, a_step, seed):
  order, again = StepOrder(rows, a_step, seed), StepOrder(rows, a_step, seed)
  taken, step = Counter(), 0
  for epoch in range(8):
    parts = []
    for step in range(order.start(epoch), order.start(epoch + 1)):
      assert order.epoch(step) == epoch
      part, number = order.find(step)
      assert number == taken[part]
      taken[part] += 1
      parts.append(part)
    for part, (n, k) in enumerate(zip(rows, a_step, strict=True)):
      assert 0 <= taken[part] * k - (epoch + 1) * n < k
    assert seed is not None or parts == sorted(parts)
    assert order.epochs(order.start(epoch + 1)) >= epoch + 1
  for at in np.random.default_rng(0).permutation(step):  # in any order
    assert again.find(int(at)) == order.find(int(at))


def test_a_random_order_is_another_in_each_epoch_and_of_each_seed():
  epochs = lambda seed: [
    tuple(StepOrder((40, 40), (1, 1), seed).find(80 * e + s).part for s in range(80))
    for e in range(3)
  ]
  assert len({*epochs(0), *epochs(1)}) == 6
  assert all(sum(epoch) == 40 for epoch in epochs(0))


@pytest.mark.parametrize(
  "how",
  [{"packing": "concat"}, {"packing": "best_fit", "order": RISING}, {"order": "difficulty"}],
)
def test_an_epoch_holds_each_token_once_on_any_hosts(parted, how, monkeypatch):
  ds = parted(**how)
  assert len(ds.info.parts) > 1
  assert_each_token_once(ds)
  if "order" not in how:  # and the audit would see a row that comes twice
    place = Buckets.place
    monkeypatch.setattr(Buckets, "place", lambda self, row: place(self, 7 if row == 8 else row))
    fault = find_fault(ds)
    assert fault.lost and fault.repeated


def test_rows_are_those_of_a_training_on_the_part_alone(parted):
  ds = parted()
  turns = Counter()
  with batches_of(ds, batch=BATCH) as batches:
    for step in range(ds.order.start(1)):
      length = batches.row_length
      batch = next(batches)
      part = list(ds.info.parts.values())[ds.order.find(step).part]
      assert length == part.info.seq_len == batch["tokens"].shape[-1]
      rows = BATCH * 128 // length
      begin = turns[length]
      turns[length] += rows
      assert_same({k: v[0] for k, v in batch.items()}, part.read(range(begin, begin + rows)))
  assert set(turns) == {part.info.seq_len for part in ds.info.parts.values()} and len(turns) == 3


@pytest.mark.parametrize("order", [MIXED, RISING])
def test_it_goes_on_anywhere_on_another_number_of_hosts(parted, order):
  ds = parted(order=order)
  whole, end = read(ds, 20, batch=BATCH)
  _, position = read(ds, 11, batch=BATCH)
  copy = pickle.loads(pickle.dumps(ds))  # as a process gets it
  rest, end_of_rest = read(copy, 9, batch=BATCH, position=position, hosts=2)
  assert end_of_rest == end
  assert_same(rest, whole[11:])
  halves, _ = read(ds, 20, batch=BATCH, accum=2)
  for batch, half in zip(whole, halves, strict=True):
    assert_same(batch, {k: v.reshape(batch["tokens"].shape) for k, v in half.items()})


def test_a_position_is_one_in_the_same_steps(parted):
  position = parted().position(12)
  assert parted().row_of(position) == 12
  for other in ({"batch_size": 5}, {"order": TWO}, {"order": RISING}, {"seq_len": 256}):
    with pytest.raises(ValueError, match=r"was trained (on other data|with 6)"):
      parted(**other).row_of(position)


def test_whole_rows_hold_short_ones_end_to_end(parted):
  """As the probe of a run without held-out text reads them."""
  ds = parted()
  rows = all_rows(ds)
  assert rows["tokens"].shape == (ds.info.num_rows, 128)
  for row in range(ds.info.num_rows):
    short = ds.read(np.array([row]))
    for name in ("tokens", "targets", "positions", "loss_mask"):
      np.testing.assert_array_equal(rows[name][row], short[name].reshape(-1))
    ids, own = rows["segment_ids"][row], short["segment_ids"]
    starts = (rows["positions"][row] == 0) & (ids > 0)
    pieces = sum(len(set(r[r > 0])) for r in own)
    assert len(set(ids[ids > 0])) == pieces  # no two documents have a number
    assert (np.diff(ids[ids > 0]) >= 0).all() and starts.sum() <= pieces
  padding = ds.read_once(np.array([ds.info.num_rows]))
  assert not padding["segment_ids"].any() and not padding["loss_mask"].any()


def test_short_documents_first_and_the_log_says_so(parted):
  ds = parted(order=RISING)
  lengths = [ds.length(step * BATCH) for step in range(ds.order.start(1))]
  assert lengths == sorted(lengths) and len(set(lengths)) == 3
  news = [
    text
    for step in range(ds.order.start(1) + 1)
    for text in ds.progress((step + 1) * BATCH, since=step * BATCH).news
  ]
  second = lengths.index(lengths[-1]) + 1
  assert f"from step {second} on: documents of" in news[1] and len(news) == 4
  assert news[2] == "all documents have been read; epoch 2 begins"
  assert all(f"rows of {n}" in ds.info.in_words() for n in set(lengths))
  assert ds.progress(ds.order.start(1) * BATCH).epochs == 1.0


def test_easy_documents_come_first(parted):
  ds = parted(order="difficulty")
  assert 1 < len(ds.info.parts) <= LEVELS
  part = next(iter(ds.info.parts.values()))
  everything = np.sort(np.concatenate([p.packed.documents for p in ds.info.parts.values()]))
  bits = np.full(len(part.packed.corpus), np.nan)
  bits[everything] = rarity(part.packed.corpus, everything, ds.info.tokenizer.vocab_size)
  levels = [bits[p.packed.documents] for p in ds.info.parts.values()]
  for easier, harder in itertools.pairwise(levels):
    assert easier.max() <= harder.min()
  steps = [ds.order.find(step).part for step in range(ds.order.start(1))]
  assert steps == sorted(steps)


def test_rarity_is_the_mean_surprise_of_a_token(write, config):
  path = write("a.jsonl", [{"text": t} for t in ("aaaa", "aab", "bc", "c")])
  opened = open_documents(config(paths=(str(path),)), 0.0)
  found = rarity(opened.corpus, np.arange(4), opened.tokenizer.vocab_size)
  bits = {c: -np.log2(n / 10) for c, n in {"a": 6, "b": 2, "c": 2}.items()}
  want = [np.mean([bits[c] for c in text]) for text in ("aaaa", "aab", "bc", "c")]
  np.testing.assert_allclose(found, want, rtol=1e-12)
  only = rarity(opened.corpus, np.array([2, 3]), opened.tokenizer.vocab_size)
  np.testing.assert_allclose(only, [(np.log2(3) + np.log2(1.5)) / 2, np.log2(1.5)], rtol=1e-12)


def test_levels_hold_about_as_many_tokens_and_no_document_twice():
  rng = np.random.default_rng(0)
  sizes, difficulty = rng.integers(1, 40, 900), rng.random(900)
  parts = by_level(difficulty, sizes, np.arange(900), seq_len=64, batch_size=2)
  assert len(parts) == LEVELS
  assert sorted(np.concatenate([p.documents for p in parts])) == list(range(900))
  shares = [sizes[p.documents].sum() / sizes.sum() for p in parts]
  np.testing.assert_allclose(shares, 1 / LEVELS, atol=40 / sizes.sum())
  few = by_level(difficulty, sizes, np.arange(900), seq_len=64, batch_size=30)
  assert len(few) == sizes.sum() // (LEAST_STEPS * 64 * 30) > 1


def test_a_text_that_cannot_be_parted_is_read_as_usual_and_that_is_said(write, config, caplog):
  path = write("a.jsonl", [{"text": "document " * 30}] * 9)
  settings = dict(paths=(str(path),), seq_len=128, batch_size=BATCH)
  plain, _ = open_data(config(**settings), 0)
  for order in ("buckets", "length", "difficulty"):
    caplog.clear()
    ds, _ = open_data(config(**settings, order=order), 0)
    assert isinstance(ds, Dataset) and ds.info.fingerprint == plain.info.fingerprint
    assert f"data.order={order} has no effect" in caplog.text


def turns(asked, said, **more):
  return {
    "messages": [
      {"role": "user", "content": asked}, {"role": "assistant", "content": said, **more}
    ]
  }  # fmt: skip


def test_conversations_keep_whole_and_padding_is_said(write, config, caplog):
  chats = [turns(f"what {i}", "so it is " * (1 + 22 * (i % 16 == 0))) for i in range(200)]
  path = write("c.jsonl", [*chats, turns("what 0", "so it is " * 500)])
  ds, _ = open_data(config(paths=(str(path),), **CHATS), 0)
  assert isinstance(ds, Buckets) and len(ds.info.parts) == 2
  assert ds.info.num_documents == 200 and ds.info.report["skipped"]
  assert all((part.packed.plan.begin == 0).all() for part in ds.info.parts.values())  # none is cut
  assert_each_token_once(ds, ONE_HOST)
  assert 0 < ds.padding < 1 and f"{ds.padding:.1%} padding" in ds.info.in_words()
  assert ("are padding" in caplog.text) == (ds.padding > 0.1)


def test_the_report_shows_the_lengths(parted, config):
  ds = parted()
  path = next(iter(ds.info.parts.values())).packed.corpus._files[0].path
  cfg = config(paths=(str(path),), seq_len=128, batch_size=BATCH, order=MIXED)
  found = overview(cfg, open_documents(cfg, 0.0))
  want = [
    (n, p.info.seq_len, p.info.num_documents, p.info.num_tokens) for n, p in ds.info.parts.items()
  ]
  assert [tuple(p) for p in found.packed] == want
  text = html_page(found)
  assert all(f"<td>{name}</td>" in text for name in ds.info.parts)
  assert "Rows of training" not in html_page(found._replace(packed=[]))


def test_parts_of_which_nothing_is_left_are_refused(write, config):
  """Of conversations in two lengths none has a token in the loss."""
  silent = [turns("what " * (1 + 40 * (i % 8 == 0)), "so", weight=0) for i in range(400)]
  path = write("c.jsonl", silent)
  with pytest.raises(ValueError, match=r"Nothing is left .* 400 without a token in the loss"):
    open_data(config(paths=(str(path),), **CHATS), 0)
