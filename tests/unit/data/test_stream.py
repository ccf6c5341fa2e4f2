"""`data.reading=streaming`: the same rows whatever happens, on a bounded piece of disk."""

import dataclasses
import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
from loading import assert_same, batches_of, read

from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.reading import Streaming
from ats_jax.config.schema.setting import Table
from ats_jax.data.rows import stream, windows
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


def elsewhere(cfg):
  """The config of a machine where nothing is kept."""
  return dataclasses.replace(cfg, cache_dir=cfg.cache_dir + "-2")


def folder_of(cfg) -> Path:
  (found,) = Path(cfg.cache_dir).glob("stream-*")
  return found


def known_windows(cfg):
  return json.loads((folder_of(cfg) / "windows.json").read_text())


def epoch_rows(cfg) -> int:
  """How many rows an epoch has, when it has been read."""
  known = known_windows(cfg)
  assert known[str(len(known) - 1)][2] is None
  return sum(rows for _, rows, *_ in known.values())


def texts(batch) -> list[str]:
  """What stands in a batch of whole documents."""
  found, ids = [], ByteTokenizer()
  rows = (batch[name].reshape(-1, 48) for name in ("targets", "segment_ids"))
  for targets, segments in zip(*rows, strict=True):
    for segment in range(1, segments.max() + 1):
      *text, last = targets[segments == segment]
      found.append(ids.decode([*text, last]) + "." * int(last == ids.eos_id))
  return found


def test_each_document_once_an_epoch_and_counts_add_up(streamed, long, caplog):
  """Over several windows; of an epoch no more and no less than its documents and long parts."""
  cfg = streamed()
  with caplog.at_level("INFO", logger="absl"):
    ds = open_rows(cfg)
    ds.visit(800)
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
  assert len(known_windows(cfg)) >= 8
  news = ds.progress(size + 1, since=1).news
  assert news == ["all of its text has been read; its epoch 2 begins"]

  lines = [text for text in caplog.messages if text.startswith("Window ")]
  first = {line.split(":")[0]: line for line in lines}  # some are made again in the next epoch
  figures = [line.replace(",", "").split() for line in first.values()]
  records, documents, dropped = (sum(int(f[i]) for f in figures) for i in (2, 6, 9))
  parts = documents - COUNT  # of the long text
  assert dropped == 4 * 2 + 1 and 4 < parts < 10
  assert records == documents + dropped


def test_it_goes_on_anywhere_also_where_nothing_is_kept(streamed):
  cfg = streamed()
  whole, _ = read(open_rows(cfg), 10)
  _, position = read(open_rows(cfg), 5)
  rest, end = read(open_rows(cfg), 5, position=position)
  assert_same(rest, whole[5:])
  rest, end_there = read(open_rows(elsewhere(cfg)), 5, position=position, hosts=3)
  assert_same(rest, whole[5:])
  assert end == end_there


def test_another_machine_begins_at_the_window(streamed):
  cfg = streamed()
  ds, row = open_rows(cfg), 130
  position = ds.position(row)
  assert position["window"][2] > 0
  fresh = open_rows(elsewhere(cfg))
  assert fresh.row_of(position) == row
  assert_same(fresh.read(np.arange(row, row + 5)), ds.read(np.arange(row, row + 5)))
  known = set(map(int, known_windows(elsewhere(cfg))))
  assert known <= {0, position["window"][2], position["window"][2] + 1}


def test_disk_is_bounded_and_nothing_is_taken_from_under_a_reader(streamed):
  """With a process and a thread that makes windows ahead."""
  cfg = streamed()
  alone, _ = read(open_rows(elsewhere(cfg)), 14)
  most, done = [0], threading.Event()

  def watch():
    while not done.is_set():
      most[0] = max(most[0], len(list(Path(cfg.cache_dir).glob("stream-*/window-*"))))
      done.wait(0.002)

  thread = threading.Thread(target=watch)
  thread.start()
  found, _ = read(open_rows(cfg), 14, workers=1, tells=True)
  done.set()
  thread.join()
  assert_same(found, alone)
  assert not [t for t in threading.enumerate() if t.name == "data-ahead"]
  assert windows.RING - 1 <= most[0] <= windows.RING + 1  # one of the reader's, in another process


def test_windows_are_made_ahead(streamed):
  cfg = streamed()
  for _ in open_rows(cfg).prepare(0, lambda: True):
    pass
  assert len(list(folder_of(cfg).glob("window-*/corpus-?"))) == 1 + stream.AHEAD


def test_order_depends_on_seed_and_not_on_who_reads(streamed):
  cfg = streamed()
  ds, other = open_rows(cfg), open_rows(cfg, seed=1)
  rows = np.arange(40)
  one = ds.read(rows)
  assert_same(one, pickle.loads(pickle.dumps(ds)).read(rows))
  assert_same({k: v[::-1] for k, v in one.items()}, open_rows(cfg).read(rows[::-1]))
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
  whole, _ = read(ds, 6, tells=True)
  _, position = read(open_rows(cfg), 4)
  rest, _ = read(open_rows(elsewhere(cfg)), 2, position=position, hosts=2)
  assert_same(rest, whole[4:])
  place = ds.schedule.find(np.arange(6 * 12))
  here = place.source == 0
  tokens = np.concatenate([b["tokens"].reshape(-1, 48) for b in whole])
  alone = open_rows(streamed()).read(place.row[here])
  np.testing.assert_array_equal(tokens[here], alone["tokens"])
  assert ds.progress(40).passes["big"] is None


class TestRefused:
  def test_other_files(self, streamed, folder):
    _, position = read(open_rows(streamed()), 1)
    (folder / "new.txt").write_text("more")
    with pytest.raises(ValueError, match="was trained on other data"):
      batches_of(open_rows(streamed()), position=position)

  def test_a_change_inside_of_a_file(self, streamed, long, monkeypatch):
    """What the hash of its ends does not see is seen when the window is made again."""
    monkeypatch.setattr(stream, "_ENDS", 8)
    cfg = streamed()
    ds = open_rows(cfg)
    ds.visit(400)
    middle = long.read_bytes()[100:-100].replace(b"long word", b"LONG WORD")
    long.write_bytes(long.read_bytes()[:100] + middle + long.read_bytes()[-100:])
    with pytest.raises(ValueError, match=r"The input changed since the run began: window \d+"):
      open_rows(cfg).read(np.arange(epoch_rows(cfg)))

  def test_input_that_cannot_be_used(self, streamed, folder, write):
    path = write("none.jsonl", [{"no": 1}] * 5)
    with pytest.raises(ValueError, match="Nothing is left to train on"):
      read(open_rows(streamed(paths=(str(path),))), 1)
    with pytest.raises(ValueError, match=r"jsonl:31: no field 'text'"):
      open_rows(streamed(strict=True)).visit(400)
    np.save(folder / "ids.npy", np.zeros(9, np.uint16))
    with pytest.raises(ValueError, match=r"ids\.npy holds ids, which is not read in windows"):
      open_rows(streamed())


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
    of_store = there._windows.folder
    for row in range(0, 240, 16):
      rows = np.arange(row, row + 16)
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

  def test_what_is_refused(self, streamed, memory):
    cfg = streamed(paths=("memory://bucket/d",))
    position = open_rows(cfg).position(12)
    memory.pipe_file("/bucket/d/0.jsonl", b'{"text": "new"}')
    with pytest.raises(ValueError, match="was trained on other data"):
      batches_of(open_rows(cfg), position=position)
    with pytest.raises(ValueError, match="a BPE is trained on many files at once"):
      open_rows(dataclasses.replace(cfg, tokenizer="bpe"))


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
most, memory = 0, []
for row in range(0, 2**30, 1024):
  if train.visit(row).epoch:
    break
  train.read(np.arange(row, row + 1024, 16))
  most = max(most, sum(f.stat().st_size for f in Path(sys.argv[2]).rglob("*") if f.is_file()))
  memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(row, most, memory[5], memory[-1])
"""


@pytest.mark.thorough
def test_memory_and_disk_do_not_grow_with_the_text(tmp_path):
  """An epoch of 20 MB in windows of 1 MB: 2 MB of ids and 0.1 of documents each."""
  path = tmp_path / "long.jsonl"
  with path.open("w") as file:
    for i in range(20_000):
      file.write(json.dumps({"text": f"{i} " + "word " * 197}) + "\n")
  command = [sys.executable, "-c", READ, path, tmp_path / "cache"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr
  rows, disk, early, late = map(int, done.stdout.split())
  assert rows > 16 * 1024
  assert disk < windows.RING * 2.5e6
  assert late < early + 15e6
