import types

import numpy as np
import pytest
from commands import called
from loading import find_fault

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


@pytest.fixture
def ds(write, config):
  path = write("a.jsonl", [{"text": f"document number {i} " * (i % 5 + 1)} for i in range(20)])
  return open_split(config(seq_len=32, packing="best_fit"), 0, (str(path),), ByteTokenizer())


def with_plan(ds, root, **changed):
  """The dataset with some arrays of its plan replaced."""

  def build(folder):
    arrays = {**ds.packed.plan._asdict(), "documents": ds.packed.documents, **changed}
    for name, values in arrays.items():
      np.save(folder / f"{name}.npy", values)
    return {"num_bytes": 0} | {n: getattr(ds.info, n) for n in ("num_tokens", "num_documents")}

  root.mkdir(exist_ok=True)
  folder = cache.cached(root, "faulty", build)
  packed = Packed(ds.packed.corpus, folder, ds.info.tokenizer, seq_len=ds.info.seq_len)
  return Dataset(packed, fingerprint="x", seed=0, report=ds.info.report)


@pytest.mark.parametrize(
  ("packing", "overlap", "text"),
  [
    ("concat", 0, "long document " * 9),
    ("concat", 5, "long document " * 9),
    ("best_fit", 0, "long document " * 3),
    ("best_fit", 15, "long document " * 3),
  ],
)
def test_all_scenarios_are_clean(write, config, packing, overlap, text):
  path = write("a.jsonl", [{"text": text + str(i)} for i in range(20)])
  cfg = config(seq_len=16, packing=packing, overlap=overlap)
  ds = open_split(cfg, 0, (str(path),), ByteTokenizer())
  results = list(audit(ds))
  assert [r.scenario for r in results] == list(SCENARIOS)
  assert {h for phases in SCENARIOS.values() for h, _, _ in phases} == {1, 2, 4, 7}
  for r in results:
    assert (r.difference, r.lost, r.repeated) == ("", 0, 0)
    assert (r.rows, r.targets) == (ds.info.num_rows, ds.info.num_tokens)


class TestPlantedFaults:
  """Each fault must be seen, and named."""

  def find(self, ds, **arguments):
    result = find_fault(ds, **arguments)
    assert result.difference
    return result

  def test_pieces_that_are_lost_repeated_or_displaced(self, ds, tmp_path):
    corpus, plan = ds.packed.corpus, ds.packed.plan
    pieces = {n: np.array(getattr(plan, n)) for n in ("document", "begin", "length")}
    document, begin, length = pieces.values()

    def without(keep):
      counts = np.add.reduceat(keep.astype(int), plan.first[:-1])
      first = np.concatenate([[0], counts[counts > 0].cumsum()])
      return {"first": first, **{n: values[keep] for n, values in pieces.items()}}

    lost = self.find(with_plan(ds, tmp_path / "lost", **without(np.arange(len(length)) != 3)))
    assert (lost.lost, lost.repeated) == (length[3], 0)
    name = corpus.name(int(document[3]))
    assert lost.difference == f"token {begin[3]} of document {name!r} came 0 times"

    unknown = self.find(with_plan(ds, tmp_path / "unknown", **without(document != document[0])))
    assert unknown.lost == corpus.length[document[0]] + 1

    moved = begin.copy()
    moved[np.flatnonzero(begin > 0)[0]] -= 1
    off = self.find(with_plan(ds, tmp_path / "off", begin=moved))
    assert off.repeated and off.lost

    other = next(i for i in np.flatnonzero(length == length[5]) if i != 5)
    document[5], begin[5] = document[other], begin[other]
    twice = self.find(with_plan(ds, tmp_path / "twice", document=document, begin=begin))
    assert twice.repeated == twice.lost == length[5]

  def test_row_served_twice(self, ds, monkeypatch):
    index = Dataset.row_index
    monkeypatch.setattr(Dataset, "row_index", lambda self, r: index(self, 7 if r == 8 else r))
    result = self.find(ds)
    assert result.repeated and result.lost and "came" in result.difference

  def test_loader_that_drops_a_batch_or_resumes_late(self, ds):
    def drops(ds, **arguments):
      batches = TrainBatches(ds, **arguments)
      next(batches)
      return batches

    def late(ds, *, position, **arguments):
      position = position and position | {"row": position["row"] + 1}
      return TrainBatches(ds, position=position, **arguments)

    assert self.find(ds, batches=drops).lost
    assert not find_fault(ds, batches=late).difference
    resumed = (ReadingPhase(1, 1, 0.5), ReadingPhase(2, 1, 1.0))
    assert self.find(ds, phases=resumed, batches=late).lost

  @pytest.mark.parametrize(
    ("field", "words"),
    [
      ("tokens", "the input of"), ("targets", "has a wrong id"), ("loss_mask", "a wrong weight"),
      ("segment_ids", "segment_ids"), ("positions", "positions"),
    ],
  )  # fmt: skip
  def test_wrong_content_in_the_real_batch(self, ds, field, words):
    class Wrong(TrainBatches):
      def __next__(self):
        batch = super().__next__()
        batch[field] = np.roll(batch[field], 1, axis=-1)
        return batch

    result = self.find(
      ds, batches=lambda read_ds, **how: (Wrong if read_ds is ds else TrainBatches)(read_ds, **how)
    )
    assert not result.lost and not result.repeated and words in result.difference

  def test_a_segment_that_runs_into_the_next_document(self, ds, monkeypatch):
    """As if documents were joined without an eos: the input before is another document's."""
    row = Packed._row

    def joined(self, i):
      out = row(self, i)
      tokens, targets, segments, *_ = out
      second = np.flatnonzero(segments == 2)
      if len(second):
        tokens[second[0]] = targets[second[0] - 1]
      return out

    monkeypatch.setattr(Packed, "_row", joined)
    assert "crosses a document boundary" in self.find(ds).difference

  def test_the_command_fails_and_names_it(self, ds, tmp_path, capsys):
    begin = np.array(ds.packed.plan.begin)
    begin[np.flatnonzero(begin > 0)[0]] -= 1
    assert not _audit(with_plan(ds, tmp_path, begin=begin), ds)
    out = capsys.readouterr().out
    assert out.count("FAULT: ") == 5 and "of document 'a.jsonl:" in out


def test_stats(write, config, capsys):
  path = write("a.jsonl", [{"text": "aab"}, {"text": "é" * 10}, {"no": 1}])
  train, validation = open_datasets(config(paths=(str(path),), seq_len=8), 0)
  expected = {
    "documents": 2, "text tokens": 23, "targets (with one eos a document)": 25,
    "bytes of text": 23, "rows": "4 of 8", "padding": "21.875%", "vocabulary used": "4 of 259",
    "left out: missing field": 1,
  }  # fmt: skip
  assert expected.items() <= stats(train.info).items()
  counts = vocabulary_counts(train.packed)
  assert counts[ord("a")] == 2 and counts[0xC3] == 10 and counts.sum() == 23
  assert _stats(train, validation)
  out = capsys.readouterr().out
  assert "train: " in out and "validation: " in out and "21.875%" in out


def test_command_line(write, tmp_path):
  text = write("a.jsonl", [{"text": f"document number {i}"} for i in range(30)])
  script = write(
    "c.py",
    "from ats_jax.config import base_config\n"
    "def get_config(variant=''):\n"
    "  config = base_config()\n"
    "  config.data.tokenizer, config.data.seq_len = 'bytes', 16\n"
    f"  config.data.cache_dir = {str(tmp_path / 'cache')!r}\n"
    "  return config\n",
  )
  done = called("data", "audit", f"--config={script}", f"--config.data.paths={text}")
  assert done.code == 0, done.err
  assert done.out.count("exactly once") == 5
  done = called("data", "audit", f"--config={script}", "--config.data.paths=/no/such/file")
  assert done.code == REFUSED and "error: paths: '/no/such/file' does not exist" in done.err
  assert "Traceback" not in done.err


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_counting_looks_at_each_document_once(monkeypatch, chunk):
  """Else many short documents take time in proportion to the square of their number."""

  class Tokens(np.ndarray):
    looked_at = 0

    def __len__(self):
      Tokens.looked_at += 1
      return self.size

  texts = [np.arange(n % 5) for n in range(40)]
  corpus = types.SimpleNamespace(
    length=[t.size for t in texts], tokens=lambda n, begin, end: texts[n][begin:end].view(Tokens)
  )
  packed = types.SimpleNamespace(
    corpus=corpus, documents=range(40), tokenizer=types.SimpleNamespace(vocab_size=6)
  )
  monkeypatch.setattr("ats_jax.data.look.stats._CHUNK", chunk)
  assert vocabulary_counts(packed).tolist() == [32, 24, 16, 8, 0, 0]
  assert Tokens.looked_at == sum(-(-t.size // chunk) for t in texts)
