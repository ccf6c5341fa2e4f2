"""`data.reading=streaming`: the same rows whatever happens, on a bounded piece of disk."""

import dataclasses
import json
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest

from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.reading import Streaming
from ats_jax.config.schema.setting import Table
from ats_jax.data.rows import stream, windows
from ats_jax.data.rows.loader import TrainBatches
from ats_jax.data.sources import open_data
from ats_jax.data.tokens.tokenizer import ByteTokenizer

COUNT = 240  # documents


@pytest.fixture
def folder(write, tmp_path) -> Path:
  """Four files of numbered lines, and what is malformed."""
  for f in range(4):
    rows = [{"text": f"<{f * 60 + i}>{'é' * (i % 13)}"} for i in range(60)]
    write(f"d/{f}.jsonl", [*rows[:30], {"no": 1}, *rows[30:], 7])
  write("d/empty.txt", "")
  return tmp_path / "d"


@pytest.fixture
def streamed(folder, config):
  """A config of windows of about a thousand characters."""

  def make(**changes):
    settings = dict(
      paths=(str(folder),), reading=Streaming(window_mb=0.001), seq_len=48, packing="best_fit"
    )
    return config(**{**settings, **changes})

  return make


@pytest.fixture
def long(write, monkeypatch):
  """One document more, which is longer than a window."""
  monkeypatch.setattr("ats_jax.data.text.formats.text.PIECE", 500)
  return write("d/long.txt", "a long word\n" * 900)


def open_rows(cfg, seed=0):
  train, held_out = open_data(cfg, seed)
  assert not held_out.info.num_rows
  return train


def folder_of(cfg) -> Path:
  (found,) = Path(cfg.cache_dir).glob("stream-*")
  return found


def epoch_rows(cfg) -> int:
  """How many rows an epoch has, when it has been read."""
  known = json.loads((folder_of(cfg) / "windows.json").read_text())
  assert known[str(len(known) - 1)][2] is None
  return sum(rows for _, rows, *_ in known.values())


def read(ds, count, *, position=None, hosts=1, workers=0, batch=12, tells=False):
  """`count` batches, of all hosts together, and the position behind them."""
  found = []
  for local in np.array_split(np.arange(batch), hosts):
    with TrainBatches(
      ds, position=position, accum_steps=1, batch_size=batch, local_rows=local,
      num_workers=workers, prefetch=2, tells=tells,
    ) as batches:  # fmt: skip
      found.append([next(batches) for _ in range(count)])
      end = batches.position()
  join = lambda parts: {name: np.concatenate([p[name] for p in parts], 1) for name in parts[0]}
  return [join(parts) for parts in zip(*found, strict=True)], end


def assert_same(some, others):
  for one, other in zip(some, others, strict=True):
    assert one.keys() == other.keys()
    for name in one:
      np.testing.assert_array_equal(one[name], other[name])


def texts(batch) -> list[str]:
  """What stands in a batch of whole documents."""
  found, ids = [], ByteTokenizer()
  rows = (batch[name].reshape(-1, 48) for name in ("targets", "segment_ids"))
  for targets, segments in zip(*rows, strict=True):
    for segment in range(1, segments.max() + 1):
      *text, last = targets[segments == segment]
      found.append(ids.decode([*text, last]) + "." * int(last == ids.eos_id))
  return found


def test_each_document_once_an_epoch(streamed, long):
  """Over several windows; of an epoch no more and no less than its documents and long parts."""
  cfg = streamed()
  ds = open_rows(cfg)
  ds.visit(700)
  size = epoch_rows(cfg)
  counts = []
  for epoch in range(2):
    found = texts(ds.read(np.arange(epoch * size, (epoch + 1) * size)))
    short = sorted(int(text[1:].split(">")[0]) for text in found if text.startswith("<"))
    assert short == list(range(COUNT))
    rest = "".join(text.rstrip(".") for text in found if not text.startswith("<"))
    assert sorted(rest) == sorted("a long word\n" * 900)
    counts.append(found)
  assert counts[0] != counts[1] and sorted(counts[0]) == sorted(counts[1])
  assert len(json.loads((folder_of(cfg) / "windows.json").read_text())) >= 8


def test_counts_add_up_over_all_windows(streamed, long, caplog):
  cfg = streamed()
  with caplog.at_level("INFO", logger="absl"):
    open_rows(cfg).visit(800)
  lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Window ")]
  first = {line.split(":")[0]: line for line in lines}  # some are made again in the next epoch
  figures = [line.replace(",", "").split() for line in first.values()]
  records, documents, dropped = (sum(int(f[i]) for f in figures) for i in (2, 6, 9))
  parts = documents - COUNT  # of the long text
  assert dropped == 4 * 2 + 1 and 4 < parts < 10
  assert records == documents + dropped


@pytest.mark.parametrize(("at", "hosts"), [(5, 3), (12, 1)])
def test_it_goes_on_anywhere_also_where_nothing_is_kept(streamed, tmp_path, at, hosts):
  cfg = streamed()
  whole, _ = read(open_rows(cfg), 15)
  _, position = read(open_rows(cfg), at)
  position = json.loads(json.dumps(position))
  rest, end = read(open_rows(cfg), 15 - at, position=position, hosts=hosts)
  assert_same(rest, whole[at:])
  cfg = dataclasses.replace(cfg, cache_dir=str(tmp_path / "elsewhere"))
  rest, end_there = read(open_rows(cfg), 15 - at, position=position, hosts=hosts)
  assert_same(rest, whole[at:])
  assert end == end_there


def test_another_machine_begins_at_the_window(streamed, tmp_path, monkeypatch):
  cfg = streamed()
  ds = open_rows(cfg)
  row = 130
  position = ds.position(row)
  assert position["window"][2] > 0
  expected = ds.read(np.arange(row, row + 5))
  cfg = dataclasses.replace(cfg, cache_dir=str(tmp_path / "elsewhere"))
  fresh = open_rows(cfg)
  assert fresh.row_of(position) == row
  np.testing.assert_array_equal(fresh.read(np.arange(row, row + 5))["tokens"], expected["tokens"])
  known = json.loads((folder_of(cfg) / "windows.json").read_text())
  assert set(map(int, known)) <= {0, position["window"][2], position["window"][2] + 1}


def test_disk_is_bounded_and_nothing_is_taken_from_under_a_reader(streamed):
  """With processes and a thread that makes windows ahead."""
  cfg = streamed()
  alone, _ = read(open_rows(streamed(cache_dir=cfg.cache_dir + "-2")), 14)
  most, done = [0], threading.Event()

  def watch():
    while not done.is_set():
      most[0] = max(most[0], len(list(Path(cfg.cache_dir).glob("stream-*/window-*"))))
      done.wait(0.002)

  thread = threading.Thread(target=watch)
  thread.start()
  found, _ = read(open_rows(cfg), 14, workers=2, tells=True)
  done.set()
  thread.join()
  assert_same(found, alone)
  assert windows.RING - 1 <= most[0] <= windows.RING + 1  # two of the readers', in two processes


def test_windows_are_made_ahead(streamed):
  cfg = streamed()
  ds = open_rows(cfg)
  with TrainBatches(
    ds, accum_steps=1, batch_size=4, local_rows=np.arange(4), num_workers=0, prefetch=1, tells=True
  ) as batches:
    next(batches)
    deadline = time.monotonic() + 30
    while len(list(folder_of(cfg).glob("window-*/corpus-?"))) < 1 + stream.AHEAD:
      assert time.monotonic() < deadline
      time.sleep(0.01)
  assert not [t for t in threading.enumerate() if t.name == "data-ahead"]


def test_order_depends_on_seed_and_not_on_who_reads(streamed):
  cfg = streamed()
  ds, other = open_rows(cfg), open_rows(cfg, seed=1)
  rows = np.arange(40)
  one = ds.read(rows)
  assert_same([one], [pickle.loads(pickle.dumps(ds)).read(rows)])
  assert_same([{k: v[::-1] for k, v in one.items()}], [open_rows(cfg).read(rows[::-1])])
  assert (one["tokens"] != other.read(rows)["tokens"]).any()


def test_a_mixture_of_a_stream_and_a_prepared_text(streamed, folder, write):
  """Row by row what each gives alone; it goes on with the cache gone."""
  plain = write("plain.jsonl", [{"text": f"plain {i}"} for i in range(50)])
  paths = {"big": folder, "small": f"{folder}/0.jsonl", "old": plain}
  sources = Table({name: (str(path),) for name, path in paths.items()})
  phases = (Phase(Table(big=2, small=1), steps=3), Phase(Table(big=1, old=1)))
  cfg = streamed(paths=(), sources=sources, phases=phases, batch_size=12)
  ds = open_rows(cfg)
  assert not ds.info.is_complete
  whole, _ = read(ds, 9, tells=True)
  _, position = read(open_rows(cfg), 4)
  fresh = open_rows(dataclasses.replace(cfg, cache_dir=cfg.cache_dir + "-2"))
  rest, _ = read(fresh, 5, position=json.loads(json.dumps(position)), hosts=2)
  assert_same(rest, whole[4:])
  alone = open_rows(streamed())
  place = ds.schedule.find(np.arange(9 * 12))
  here = place.source == 0
  tokens = np.concatenate([b["tokens"].reshape(-1, 48) for b in whole])
  np.testing.assert_array_equal(tokens[here], alone.read(place.row[here])["tokens"])
  assert ds.progress(40).passes["big"] is None


class TestChanged:
  def test_other_files(self, streamed, folder):
    cfg = streamed()
    _, position = read(open_rows(cfg), 3)
    (folder / "new.txt").write_text("more")
    with pytest.raises(ValueError, match="was trained on other data"):
      read(open_rows(cfg), 1, position=position)

  def test_inside_of_a_file(self, streamed, long, monkeypatch):
    """What the hash of its ends does not see is seen when the window is made again."""
    monkeypatch.setattr(stream, "_ENDS", 8)
    cfg = streamed()
    ds = open_rows(cfg)
    ds.visit(400)
    middle = long.read_bytes()[100:-100].replace(b"long word", b"LONG WORD")
    long.write_bytes(long.read_bytes()[:100] + middle + long.read_bytes()[-100:])
    with pytest.raises(ValueError, match=r"The input changed since the run began: window \d+"):
      open_rows(cfg).read(np.arange(epoch_rows(cfg)))


def test_nothing_to_train_on(streamed, write):
  path = write("none.jsonl", [{"no": 1}] * 5)
  with pytest.raises(ValueError, match="Nothing is left to train on"):
    read(open_rows(streamed(paths=(str(path),))), 1)


def test_strict_names_the_line(streamed):
  with pytest.raises(ValueError, match=r"jsonl:31: no field 'text'"):
    open_rows(dataclasses.replace(streamed(), strict=True)).visit(400)


class TestOnAStore:
  @pytest.fixture
  def memory(self, folder):
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for path in folder.iterdir():
      memory.pipe_file(f"/bucket/d/{path.name}", path.read_bytes())
    yield memory
    memory.store.clear()

  def test_rows_are_those_of_local_files_and_one_copy_is_kept(self, streamed, memory):
    alone, there = open_rows(streamed()), open_rows(streamed(paths=("memory://bucket/d",)))
    (of_store,) = Path(there._windows.folder.parent).glob(there._windows.folder.name)
    for row in range(0, 240, 8):
      rows = np.arange(row, row + 8)
      ours, theirs = alone._windows, there._windows
      numbers = {ds.visit(int(r)).number for r in rows for ds in (alone, there)}
      for number in numbers:
        assert ours.window(number) == theirs.window(number)
      there.read(rows)
      assert len(list(of_store.glob("copy-*"))) <= 1
    assert not list(of_store.parent.glob("remote-*"))

  def test_a_copy_of_a_killed_process_is_taken_away(self, streamed, memory):
    ds = open_rows(streamed(paths=("memory://bucket/d",)))
    left = ds._windows.folder / "copy-of-a-killed-one"
    left.mkdir()
    (left / "lock").touch()
    ds.visit(60)
    assert not left.exists()

  def test_another_version_is_other_data(self, streamed, memory):
    cfg = streamed(paths=("memory://bucket/d",))
    _, position = read(open_rows(cfg), 1)
    memory.pipe_file("/bucket/d/0.jsonl", b'{"text": "new"}')
    with pytest.raises(ValueError, match="was trained on other data"):
      read(open_rows(cfg), 1, position=position)

  def test_a_bpe_is_not_trained_on_a_store(self, streamed, memory):
    with pytest.raises(ValueError, match="a BPE is trained on many files at once"):
      open_rows(streamed(paths=("memory://bucket/d",), tokenizer="bpe"))


def test_ids_are_not_streamed(streamed, folder):
  np.save(folder / "ids.npy", np.zeros(9, np.uint16))
  with pytest.raises(ValueError, match=r"ids\.npy holds ids, which is not read in windows"):
    open_rows(streamed())


READ = """
import resource, sys
from pathlib import Path
import numpy as np
from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.reading import Streaming
from ats_jax.data.sources import open_data

cfg = DataConfig(
  paths=(sys.argv[1],), cache_dir=sys.argv[2], reading=Streaming(window_mb=1.0), tokenizer="bytes",
  validation_fraction=0.0, seq_len=1024,
)
train, _ = open_data(cfg, 0)
size = most = row = 0
while train.visit(row).epoch == 0:
  train.read(np.arange(row, row + 16))
  row += 16
  if row % 1024 == 0:
    size = sum(f.stat().st_size for f in Path(sys.argv[2]).rglob("*") if f.is_file())
    most = max(size, most)
print(row, most, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.thorough
def test_memory_and_disk_do_not_grow_with_the_text(tmp_path):
  """An epoch of 6 MB and of 30 MB, in windows of 1 MB: 2 MB of ids and 0.1 of documents each."""
  found = []
  for megabytes in (6, 30):
    path = tmp_path / f"{megabytes}.jsonl"
    with path.open("w") as file:
      for i in range(megabytes * 1000):
        file.write(json.dumps({"text": f"{i} " + "word " * 197}) + "\n")
    command = [sys.executable, "-c", READ, path, tmp_path / f"cache-{megabytes}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found.append([int(word) for word in done.stdout.split()])
  (rows, disk, memory), (more_rows, more_disk, more_memory) = found
  assert more_rows > 4 * rows
  assert disk < more_disk < windows.RING * 2.5e6
  assert more_memory < memory + 30e6
