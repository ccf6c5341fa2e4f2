import numpy as np
import pytest
from commands import called

from ats_jax.data.corpus import cache
from ats_jax.data.look.audit import SCENARIOS, ReadingPhase, audit
from ats_jax.data.look.stats import stats, vocabulary_counts
from ats_jax.data.rows.dataset import Dataset
from ats_jax.data.rows.loader import TrainBatches
from ats_jax.data.rows.packed import Packed
from ats_jax.data.splits import open_datasets, open_split
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.exits import REFUSED
from ats_jax.verbs.data import _audit, _stats

ONE_HOST = {"1 host": (ReadingPhase(1, 1, 1.0),)}


@pytest.fixture
def ds(write, config):
  path = write("a.jsonl", [{"text": f"document number {i} " * (i % 5 + 1)} for i in range(40)])
  return open_split(config(seq_len=32, packing="best_fit"), 0, (str(path),), ByteTokenizer())


def with_plan(ds, root, **changed):
  """The dataset with some arrays of its plan replaced."""

  def build(folder):
    arrays = {**ds.packed.plan._asdict(), "documents": ds.packed.documents, **changed}
    for name, values in arrays.items():
      np.save(folder / f"{name}.npy", values)
    return {
      "num_tokens": ds.info.num_tokens,
      "num_documents": ds.info.num_documents,
      "num_bytes": 0,
    }

  folder = cache.cached(root, "faulty", build)
  packed = Packed(ds.packed.corpus, folder, ds.info.tokenizer, seq_len=ds.info.seq_len)
  return Dataset(packed, fingerprint="x", seed=0, report=ds.info.report)


@pytest.mark.parametrize("packing", ["concat", "first_fit", "best_fit"])
@pytest.mark.parametrize("text", ["a", "long document " * 9])
def test_all_scenarios_are_clean(write, config, packing, text):
  path = write("a.jsonl", [{"text": text + str(i)} for i in range(50)])
  ds = open_split(config(seq_len=16, packing=packing), 0, (str(path),), ByteTokenizer())
  results = list(audit(ds))
  assert [r.scenario for r in results] == list(SCENARIOS)
  assert {h for phases in SCENARIOS.values() for h, _, _ in phases} == {1, 2, 4, 7}
  for r in results:
    assert (r.difference, r.lost, r.repeated) == ("", 0, 0)
    assert (r.rows, r.targets) == (ds.info.num_rows, ds.info.num_tokens)


class TestPlantedFaults:
  """Each fault must be seen, and named."""

  def find(self, ds, **arguments):
    (result,) = audit(ds, scenarios=ONE_HOST, **arguments)
    assert result.difference
    return result

  def test_lost_piece(self, ds, tmp_path):
    keep = np.arange(len(ds.packed.plan.length)) != 3
    first = ds.packed.plan.first - (ds.packed.plan.first > 3)
    lost = int(ds.packed.plan.length[3])
    pieces = {n: getattr(ds.packed.plan, n)[keep] for n in ("document", "begin", "length")}
    faulty = with_plan(ds, tmp_path, first=first, **pieces)
    result = self.find(faulty)
    assert (result.lost, result.repeated) == (lost, 0)
    name = ds.packed.corpus.name(int(ds.packed.plan.document[3]))
    assert result.difference == f"token {ds.packed.plan.begin[3]} of document {name!r} came 0 times"

  def test_repeated_piece(self, ds, tmp_path):
    document, begin, length = (
      np.array(getattr(ds.packed.plan, n)) for n in ("document", "begin", "length")
    )
    same = np.flatnonzero(length == length[5])
    other = same[same != 5][0]
    document[5], begin[5] = document[other], begin[other]
    result = self.find(with_plan(ds, tmp_path, document=document, begin=begin))
    assert result.repeated == result.lost == length[5]

  def test_lost_document_that_the_plan_never_heard_of(self, ds, tmp_path):
    gone = ds.packed.plan.document[0]
    keep = ds.packed.plan.document != gone
    counts = np.add.reduceat(keep.astype(int), ds.packed.plan.first[:-1])
    counts = counts[counts > 0]
    faulty = with_plan(
      ds, tmp_path, first=np.concatenate([[0], counts.cumsum()]),
      **{n: getattr(ds.packed.plan, n)[keep] for n in ("document", "begin", "length")},
    )  # fmt: skip
    assert self.find(faulty).lost == ds.packed.corpus.length[gone] + 1

  def test_piece_one_place_off(self, ds, tmp_path):
    begin = np.array(ds.packed.plan.begin)
    cut = np.flatnonzero(begin > 0)[0]
    begin[cut] -= 1
    result = self.find(with_plan(ds, tmp_path, begin=begin))
    assert result.repeated and result.lost

  def test_row_served_twice(self, ds, monkeypatch):
    index = Dataset.row_index
    monkeypatch.setattr(Dataset, "row_index", lambda self, r: index(self, 7 if r == 8 else r))
    result = self.find(ds)
    assert result.repeated and result.lost and "came" in result.difference

  def test_loader_that_drops_a_batch(self, ds):
    def drops(ds, **arguments):
      batches = TrainBatches(ds, **arguments)
      next(batches)  # the first batch is gone
      return batches

    (result,) = audit(ds, scenarios=ONE_HOST, batches=drops)
    assert result.difference and result.lost

  def test_resume_one_row_late(self, ds):
    def late(ds, *, position, **arguments):
      position = position and position | {"row": position["row"] + 1}
      return TrainBatches(ds, position=position, **arguments)

    (good, bad) = audit(
      ds,
      scenarios={**ONE_HOST, "resumed": (ReadingPhase(1, 1, 0.5), ReadingPhase(2, 1, 1.0))},
      batches=late,
    )
    assert not good.difference and bad.difference and bad.lost

  @pytest.mark.parametrize("field", ["tokens", "targets", "loss_mask", "segment_ids", "positions"])
  def test_wrong_content_in_the_real_batch(self, ds, field):
    def wrong(read_ds, **arguments):
      batches = TrainBatches(read_ds, **arguments)
      if read_ds is not ds:
        return batches
      read = batches.__class__.__next__

      class Wrong(batches.__class__):
        def __next__(self):
          batch = read(self)
          batch[field] = np.roll(batch[field], 1, axis=-1)
          return batch

      batches.__class__ = Wrong
      return batches

    result = self.find(ds, batches=wrong)
    assert not result.lost and not result.repeated
    words = {"tokens": "the input of", "targets": "has a wrong id", "loss_mask": "a wrong weight"}
    assert words.get(field, field) in result.difference

  def test_a_segment_that_runs_into_the_next_document(self, ds, monkeypatch):
    """As if documents were joined without an eos: the input before is another document's."""
    row = Packed._row

    def joined(self, i):
      out = row(self, i)
      tokens, targets, segments, _ = out
      second = np.flatnonzero(segments == 2)
      if len(second):
        tokens[second[0]] = targets[second[0] - 1]
      return out

    monkeypatch.setattr(Packed, "_row", joined)
    assert "crosses a document boundary" in self.find(ds).difference

  def test_the_command_fails_and_names_it(self, ds, tmp_path, capsys):
    assert _audit(ds, ds)
    assert "exactly once" in capsys.readouterr().out
    begin = np.array(ds.packed.plan.begin)
    begin[np.flatnonzero(begin > 0)[0]] -= 1
    assert not _audit(with_plan(ds, tmp_path, begin=begin), ds)
    out = capsys.readouterr().out
    assert out.count("FAULT: ") == 5 and "of document 'a.jsonl:" in out


def test_stats(write, config, capsys):
  path = write("a.jsonl", [{"text": "aab"}, {"text": "é" * 10}, {"no": 1}])
  train, validation = open_datasets(config(paths=(str(path),), seq_len=8), 0)
  figures = stats(train.info)
  assert figures["documents"] == 2 and figures["text tokens"] == 23
  assert figures["targets (with one eos a document)"] == 25 and figures["bytes of text"] == 23
  assert figures["rows"] == "4 of 8" and figures["padding"] == "21.875%"
  assert figures["vocabulary used"] == "4 of 259" and figures["left out: missing field"] == 1
  counts = vocabulary_counts(train.packed)
  assert counts[ord("a")] == 2 and counts[0xC3] == 10 and counts.sum() == 23
  assert _stats(train, validation)
  out = capsys.readouterr().out
  assert "train: " in out and "validation: " in out and "21.875%" in out


def test_command_line(write, tmp_path):
  text = write("a.jsonl", [{"text": f"document number {i}"} for i in range(99)])
  script = write(
    "c.py",
    "from ats_jax.config import base_config\n"
    "def get_config(variant=''):\n"
    "  config = base_config()\n"
    "  config.data.tokenizer = 'bytes'\n"
    "  config.data.seq_len = 16\n"
    f"  config.data.cache_dir = {str(tmp_path / 'cache')!r}\n"
    "  return config\n",
  )
  done = called("data", "audit", f"--config={script}", f"--config.data.paths={text}")
  assert done.code == 0, done.err
  assert done.out.count("exactly once") == 5
  done = called("data", "audit", f"--config={script}", "--config.data.paths=/no/such/file")
  assert done.code == REFUSED and "error: paths: '/no/such/file' does not exist" in done.err
  assert "Traceback" not in done.err
