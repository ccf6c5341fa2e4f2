"""Several sources in one training: each token once an epoch of its source, on any hosts."""

import dataclasses
import pickle
import threading

import numpy as np
import pytest
from loading import (
  SEVERAL_HOSTS,
  all_rows,
  assert_each_token_once,
  assert_same,
  batches_of,
  find_fault,
  read,
)  # fmt: skip

from ats_jax.config.schema.filters import Exact
from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table
from ats_jax.data.corpus.shards import DEFAULT_OPTIONS
from ats_jax.data.rows.mixture import Joined, Mixture
from ats_jax.data.rows.origin import origin_of
from ats_jax.data.sources import by_size, mixture_phases, open_data, open_eval_sets
from ats_jax.data.splits import open_datasets, prepare

PHASES = (
  Phase(Table(web=3, code=1), steps=2),
  Phase(Table(talk=1, code=2), tokens=40),
  Phase(Table(web=1, code=1, talk=2)),
)


@pytest.fixture
def texts(write):
  """Three sources of very uneven size."""
  sizes = {"web": 90, "code": 9, "talk": 23}
  rows = lambda name, n: [{"text": f"{name} {i} " * (i % 7 + 1)} for i in range(n)]
  return Table({n: (str(write(f"{n}.jsonl", rows(n, size))),) for n, size in sizes.items()})


@pytest.fixture
def mixed(texts, config):
  def make(ratio=PHASES, **changes):
    """`ratio`: weights of one phase, or phases."""
    own = {"mixture" if isinstance(ratio, Table) else "phases": ratio}
    settings = dict(sources=texts, seq_len=16, batch_size=4, packing="best_fit")
    return open_data(config(**{**settings, **own, **changes}), 0)[0]

  return make


def test_rows_are_those_of_runs_on_one_source(mixed, texts, config):
  ds = mixed()
  batch = ds.read(np.arange(60))
  place = ds.schedule.find(np.arange(60))
  np.testing.assert_array_equal(batch.pop("source"), place.source[:, None].repeat(16, 1))
  for number, (path,) in enumerate(texts.values()):
    alone, _ = open_datasets(config(paths=(path,), seq_len=16, packing="best_fit"), 0)
    here = place.source == number
    assert_same({k: v[here] for k, v in batch.items()}, alone.read(place.row[here]))


def test_a_row_is_traced_to_its_source_and_documents(mixed):
  ds = mixed()
  place, batch = ds.schedule.find(np.arange(20)), ds.read(np.arange(20))
  for row, (source, number) in enumerate(zip(*place, strict=True)):
    name = ("web", "code", "talk")[source]
    origin = origin_of(ds, row)
    assert origin[:2] == ((name,), number)
    assert len(origin.documents) == batch["segment_ids"][row].max()
    text = bytes(batch["targets"][row].clip(0, 255).astype(np.uint8)).decode(errors="replace")
    lines = [int(document.removeprefix(f"{name}.jsonl:")) for document in origin.documents]
    # Lines are counted from 1, and numbers in the text from 0.
    assert any(f" {line - 1} " in text for line in lines)


def test_weights_become_exact_shares(mixed):
  source = mixed(Table(web=0.3, code=0.7)).read(np.arange(200))["source"][:, 0]
  assert np.abs(np.cumsum(source == 0) - np.arange(1, 201) * 0.3).max() < 1


@pytest.mark.parametrize("order", ["even", "random"])
def test_sources_take_turns_or_come_in_random_order(mixed, order):
  ds = mixed(Table(web=1, code=1), mixture_order=order)
  source = ds.read(np.arange(64))["source"][:, 0]
  assert (source[1:] != source[:-1]).all() == (order == "even")


def test_phases_begin_at_their_step(mixed):
  ds = mixed()  # 2 steps of 4 rows; 40 tokens are 2.5 rows of 16, so one step; the rest
  assert ds.schedule.starts.tolist() == [0, 8, 12]
  source = ds.read(np.arange(32))["source"][:, 0]
  shares = [np.bincount(s, minlength=3).tolist() for s in (source[:8], source[8:12], source[12:])]
  assert shares == [[6, 2, 0], [0, 3, 1], [5, 5, 10]]


def test_epochs_as_a_length(config):
  cfg = config(
    seq_len=16,
    batch_size=4,
    phases=(Phase(Table(a=1, b=1), epochs=1.5), Phase(Table(b=1), epochs=2), Phase(Table(a=1))),
  )
  assert [stage.rows for stage in mixture_phases(cfg, {"a": 10, "b": 3})] == [20, 8, 0]


@pytest.mark.parametrize(
  ("temperature", "parts"), [(1.0, (9, 1)), (2.0, (3, 1)), (1e9, (1, 1)), (0.5, (81, 1))]
)
def test_temperature_over_sizes(config, temperature, parts):
  (stage,) = mixture_phases(config(temperature=temperature), {"a": 900, "b": 100})
  shares = np.array(stage.parts) / sum(stage.parts)
  np.testing.assert_allclose(shares, np.array(parts) / sum(parts), atol=1e-4)
  assert by_size({"a": 10**9, "b": 1}, 1.0)["b"] == 1  # the smallest is not rounded away


def test_each_token_once_an_epoch_of_its_source_on_any_hosts(mixed, monkeypatch):
  """Their number changes, switches of phases are among the rows, and a fault would be seen."""
  phases = (
    Phase(Table(web=3, code=1), steps=4),
    Phase(Table(talk=1, code=2), tokens=300),
    Phase(Table(web=4, code=1, talk=2)),
  )
  ds = mixed(phases)
  assert_each_token_once(ds)
  find = type(ds.schedule).find

  def off(self, rows):
    place = find(self, rows)
    return place._replace(row=np.where(place.row == 5, 6, place.row))

  monkeypatch.setattr(type(ds.schedule), "find", off)
  result = find_fault(ds)
  assert result.lost and result.repeated and "came" in result.difference


def test_a_source_that_never_ends_its_epoch_is_not_lost(mixed):
  ds = mixed((Phase(Table(web=1), steps=1), Phase(Table(code=1, talk=1))))
  result = find_fault(ds, SEVERAL_HOSTS)
  assert (result.difference, result.lost) == ("", 0)
  assert result.targets < ds.info.num_tokens


def test_resume_in_the_middle_of_a_mixture_is_bit_equal(mixed):
  """At any batch, also on other hosts, in a pickled copy, and across a switch of phases."""
  ds = mixed()
  whole, _ = read(ds, 6, batch=4)
  for at, hosts in ((1, 3), (2, 1), (3, 1), (5, 2)):
    _, position = read(ds, at, batch=4)
    copy = pickle.loads(pickle.dumps(ds))
    assert_same(read(copy, 6 - at, position=position, batch=4, hosts=hosts)[0], whole[at:])


class TestAnotherMixture:
  """Resumed with another ratio."""

  @pytest.mark.parametrize("last", [Table(talk=1), Table(code=1)])
  def test_a_phase_that_is_appended_or_changed_before_it_began(self, mixed, last):
    """Rows before the new phase stay what they were; the new one begins where it says."""
    first = Phase(Table(web=1, code=1), steps=4)
    for before in (Table(web=1, code=1), (first, Phase(Table(talk=1)))):
      _, position = read(mixed(before), 3, batch=4)
      (fourth, fifth), _ = read(mixed((first, Phase(last))), 2, position=position, batch=4)
      assert set(fourth["source"].flat) == {0, 1}
      assert set(fifth["source"].flat) == {2 if "talk" in last else 1}

  @pytest.mark.parametrize(
    "other",
    [
      Table(web=1, code=2),
      (Phase(Table(web=1, code=1), steps=2), Phase(Table(talk=1))),
      (Phase(Table(web=1), steps=1), Phase(Table(web=1, code=1))),
    ],
  )
  def test_what_was_trained_on_must_stay(self, mixed, other):
    _, position = read(mixed(Table(web=1, code=1)), 3, batch=4)
    with pytest.raises(ValueError, match=r"phases: the first 12 rows .* append the new phase"):
      batches_of(mixed(other), position=position, batch=4)

  def test_other_text(self, mixed, write):
    _, position = read(mixed(), 1)
    write("code.jsonl", [{"text": "other " * 9}] * 9)
    with pytest.raises(ValueError, match="trained on other data"):
      batches_of(mixed(), position=position)


def test_epochs_and_phases_are_said_and_counted(mixed, caplog):
  ds = mixed((Phase(Table(code=1), steps=5), Phase(Table(web=1, code=1))))
  sizes = {name: part.info.num_rows for name, part in ds.info.parts.items()}
  with caplog.at_level("INFO", "absl"):
    read(ds, 9, batch=4, tells=True)
  said = caplog.messages
  assert said.count("phase 2 of 2 of data.phases begins: web 50.0%, code 50.0%") == 1
  again = [text for text in said if text.startswith("source code: ")]
  rows = int(ds.schedule.counts(36)[1])
  assert len(again) == (rows - 1) // sizes["code"] >= 1
  assert again[0] == (
    f"source code: all of its {sizes['code']} rows have been read; its epoch 2 begins"
  )
  passes = {"web": 8 / sizes["web"], "code": 28 / sizes["code"], "talk": 0.0}
  assert ds.progress(36).passes == passes


def test_a_second_epoch_has_an_order_of_its_own(mixed):
  ds = mixed(Table(code=1))
  rows = ds.info.parts["code"].info.num_rows
  first, second = (ds.read(np.arange(e * rows, (e + 1) * rows)) for e in (0, 1))
  as_set = lambda batch: {row.tobytes() for row in batch["targets"]}
  assert as_set(first) == as_set(second)
  assert (first["targets"] != second["targets"]).any()


def test_many_sources_take_no_more_threads_than_one(write, config):
  entries = {f"s{i}": (str(write(f"s{i}.txt", f"text {i} " * 9)),) for i in range(9)}
  counts = []
  for sources in (Table(s0=entries["s0"]), Table(entries)):
    ds, _ = open_data(config(sources=sources, seq_len=16, batch_size=4), 0)
    before = threading.active_count()
    with batches_of(ds, batch=4) as batches:
      for _ in range(20):
        next(batches)
      counts.append(threading.active_count() - before)
  assert counts[0] == counts[1]


def test_one_tokenizer_of_all_texts(mixed):
  ds = mixed(tokenizer="bpe", bpe_vocab_size=300)
  prints = {part.info.tokenizer.fingerprint for part in ds.info.parts.values()}
  assert prints == {ds.info.tokenizer.fingerprint}
  for name in ds.info.parts:  # the text of each has trained it
    assert len(ds.info.tokenizer.encode(f"{name} ")) < len(name) + 1


def test_prepared_folders_as_sources(texts, config, tmp_path, mixed):
  cfg = config(sources=texts, seq_len=16, batch_size=4, packing="best_fit", phases=PHASES)
  made = Table()
  for name, (path,) in texts.items():
    alone = dataclasses.replace(cfg, paths=(path,), sources=Table(), phases=())
    prepare(alone, tmp_path / name, DEFAULT_OPTIONS)
    made[name] = (str(tmp_path / name),)
  want, got = mixed(), mixed(sources=made)
  assert_same(want.read(np.arange(30)), got.read(np.arange(30)))
  assert want.info.fingerprint == got.info.fingerprint
  with pytest.raises(ValueError, match=r"names web, code, talk\. Prepare each of them"):
    prepare(cfg, tmp_path / "all", DEFAULT_OPTIONS)


class TestValidation:
  @pytest.fixture
  def cfg(self, texts, config):
    return config(sources=texts, seq_len=16, validation_fraction=0.2)

  def test_each_source_holds_out_its_own(self, cfg):
    train, main = open_data(cfg, 0)
    assert isinstance(train, Mixture) and isinstance(main, Joined)
    sets = open_eval_sets(cfg, main)
    assert [s.name for s in sets] == ["", "web", "code", "talk"]
    assert sum(s.dataset.info.num_rows for s in sets[1:]) == main.info.num_rows
    rows, own = all_rows(main), [all_rows(s.dataset) for s in sets[1:]]
    joined = {name: np.concatenate([r[name] for r in own]) for name in rows}
    ordered = lambda batch: {n: x[np.lexsort(batch["targets"].T)] for n, x in batch.items()}
    assert_same(ordered(rows), ordered(joined))
    for name, part in main.info.parts.items():
      overlap = set(part.packed.documents) & set(train.info.parts[name].packed.documents)
      assert not overlap and len(part.packed.documents)
    padding = main.read_once(np.array([main.info.num_rows, main.info.num_rows + 3]))
    assert not padding["loss_mask"].any()
    known = sum(s.dataset.info.bytes_per_token * s.dataset.info.num_tokens for s in sets[1:])
    assert main.info.bytes_per_token == pytest.approx(known / main.info.num_tokens)

  def test_a_text_for_all_and_a_name_twice(self, cfg, write):
    other = (str(write("other.txt", "another text " * 9)),)
    for_all = dataclasses.replace(cfg, validation_paths=other)
    train, main = open_data(for_all, 0)
    assert [s.name for s in open_eval_sets(for_all, main)] == [""]
    assert main.info.num_documents == 1 and train.info.num_documents == 122
    twice = dataclasses.replace(cfg, validation_sets=Table(web=other))
    with pytest.raises(ValueError, match=r"validation_sets: 'web' is what the source web"):
      open_eval_sets(twice, open_data(twice, 0)[1])


def test_filters_judge_each_source(write, config):
  one, two = ([{"text": f"{name} {i}"} for i in range(20)] for name in ("one", "two"))
  files = {"a": write("a.jsonl", [*one, *one[:5]]), "b": write("b.jsonl", two)}
  sources = Table({name: (str(path),) for name, path in files.items()})
  train, _ = open_data(config(sources=sources, filters=(Exact(),), seq_len=16), 0)
  assert [part.info.num_documents for part in train.info.parts.values()] == [20, 20]


@pytest.mark.parametrize("content", ["", "short"])
def test_an_empty_source_is_named(write, config, content):
  good, bad = write("good.txt", "some text " * 30), write("bad.txt", content)
  with pytest.raises(ValueError, match=r"data.sources: dull: (Nothing is left|The training)"):
    open_data(config(sources=Table(good=(str(good),), dull=(str(bad),)), seq_len=16), 0)
