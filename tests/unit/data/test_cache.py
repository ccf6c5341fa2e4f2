import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from ats_jax.data.corpus import cache
from ats_jax.data.splits import open_datasets
from ats_jax.data.tokens.tokenizer import ByteTokenizer


@pytest.fixture
def corpus(write, tmp_path):
  for i in range(40):
    write(f"d/{i}.txt", f"document {i}: " + "abc " * i)
  return tmp_path / "d"


@pytest.fixture
def work(monkeypatch):
  """Counts texts tokenised and files hashed."""
  counts = {"texts": 0, "files": 0}
  encode_batch, file_digest = ByteTokenizer.encode_batch, cache.hashlib.file_digest

  def counting_encode(self, texts):
    counts["texts"] += len(texts)
    return encode_batch(self, texts)

  def counting_digest(f, name):
    counts["files"] += Path(f.name).suffix == ".txt" and Path(f.name).name != "report.txt"
    return file_digest(f, name)

  monkeypatch.setattr(ByteTokenizer, "encode_batch", counting_encode)
  monkeypatch.setattr(cache.hashlib, "file_digest", counting_digest)
  return counts


@pytest.fixture
def cfg(corpus, config):
  return config(paths=(str(corpus),), seq_len=16)


def first_rows(cfg):
  train, _ = open_datasets(cfg, 0)
  return train.info.fingerprint, train.read(range(train.info.num_rows))["tokens"].tobytes()


def test_second_start_reads_nothing_and_touched_files_are_hashed_only(cfg, corpus, work):
  first = first_rows(cfg)
  assert work == {"texts": 40, "files": 40}
  assert first_rows(cfg) == first
  assert work == {"texts": 40, "files": 40}
  os.utime(corpus / "3.txt", (1, 1))
  assert first_rows(cfg) == first
  assert work == {"texts": 40, "files": 80}


@pytest.mark.parametrize("change", ["content", "name", "new file", "gone file"])
def test_other_input_is_tokenised_again(cfg, corpus, work, change):
  first = first_rows(cfg)
  path = corpus / "3.txt"
  if change == "content":
    path.write_text(path.read_text().replace("a", "b"))
  elif change == "name":
    path.rename(corpus / "three.txt")
  elif change == "new file":
    (corpus / "new.txt").write_text("new")
  else:
    path.unlink()
  assert first_rows(cfg) != first
  assert work["texts"] > 40


def test_the_fingerprint_depends_on_the_rows_and_not_on_where_the_data_lies(cfg, corpus, tmp_path):
  first = first_rows(cfg)
  prints = {first[0]} | {
    first_rows(dataclasses.replace(cfg, **changes))[0]
    for changes in (
      {"seq_len": 24}, {"packing": "best_fit"}, {"max_segments": 2}, {"validation_fraction": 0.3},
      {"tokenizer": "bpe", "bpe_vocab_size": 300},
    )
  }  # fmt: skip
  assert len(prints) == 6
  corpus.rename(tmp_path / "elsewhere")
  assert first_rows(dataclasses.replace(cfg, paths=(str(tmp_path / "elsewhere"),))) == first


@pytest.mark.parametrize(("file", "kind"), [
  ("corpus-*/tokens-*.bin", "flip"), ("corpus-*/length.npy", "truncate"),
  ("plan-*/begin.npy", "remove"), ("corpus-*/manifest.json", "flip"),
  ("bpe-*/tokenizer.json", "truncate"), ("plan-*/manifest.json", "remove"),
])  # fmt: skip
def test_damage_is_found_and_mended(cfg, tmp_path, caplog, file, kind):
  cfg = dataclasses.replace(cfg, tokenizer="bpe", bpe_vocab_size=300)
  first = first_rows(cfg)
  paths = list((tmp_path / "cache").glob(file))
  assert paths
  for path in paths:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= kind == "flip"
    path.write_bytes(raw[:-1] if kind == "truncate" else raw)
    if kind == "remove":
      path.unlink()
  with caplog.at_level("WARNING", logger="absl"):
    assert first_rows(cfg) == first
  assert "is damaged" in caplog.text and "building it again" in caplog.text
  caplog.clear()
  assert first_rows(cfg) == first
  assert "damaged" not in caplog.text


def test_a_damaged_memo_is_made_again(cfg, tmp_path):
  first = first_rows(cfg)
  for memo in (tmp_path / "cache").glob("memo-*"):
    memo.write_text("half")
  assert first_rows(cfg) == first


def test_a_copied_cache_is_checked_by_hash_and_used(tmp_path):
  built = []

  def build(folder):
    built.append(1)
    np.save(folder / "x.npy", np.arange(5))
    return {"n": 5}

  cache.cached(tmp_path, "key", build)
  (entry,) = tmp_path.glob("key-*/x.npy")
  os.utime(entry, (1, 1))
  folder = cache.cached(tmp_path, "key", build)
  assert len(built) == 1 and folder.array("x").tolist() == [0, 1, 2, 3, 4] and folder.meta["n"] == 5


def test_an_entry_of_another_format_is_built_again(tmp_path, monkeypatch):
  monkeypatch.setattr(cache, "FORMAT", cache.FORMAT - 1)
  cache.cached(tmp_path, "key", lambda folder: {"of": "before"})
  monkeypatch.undo()
  assert cache.cached(tmp_path, "key", lambda folder: {"of": "now"}).meta == {"of": "now"}


def test_a_failed_build_leaves_nothing_behind(tmp_path):
  def fail(folder):
    (folder / "half.npy").write_text("half")
    raise ValueError("no")

  with pytest.raises(ValueError, match="no"):
    cache.cached(tmp_path, "key", fail)
  assert not (tmp_path / "key").exists()
  build = lambda folder: {"files": [p.name for p in folder.iterdir()]}
  assert cache.cached(tmp_path, "key", build).meta == {"files": []}


def test_processes_that_start_together_build_once(tmp_path):
  script = """
    import sys
    from pathlib import Path
    import numpy as np
    from ats_jax.data.corpus import cache
    root = Path(sys.argv[1])
    def build(folder):
      with open(root / "builds", "a") as f:
        f.write("x")
      np.save(folder / "x.npy", np.arange(1000))
      return {}
    print("ready", flush=True)
    sys.stdin.readline()
    print(cache.cached(root, "key", build).array("x").sum())
  """
  command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  running = [subprocess.Popen(command, **pipes) for _ in range(3)]
  assert [p.stdout.readline() for p in running] == ["ready\n"] * 3
  for p in running:
    p.stdin.write("go\n")
    p.stdin.flush()
  assert [p.communicate()[0] for p in running] == ["499500\n"] * 3
  assert (tmp_path / "builds").read_text() == "x"


def test_place_of_the_cache(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
  assert cache.cache_root("") == tmp_path / "xdg" / "ats_jax" / "data"
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  assert cache.cache_root("") == tmp_path / "home" / ".cache" / "ats_jax" / "data"
  assert cache.cache_root(str(tmp_path / "own")).is_dir()


def test_keys_tell_parts_apart():
  assert cache.digest("a", "b") != cache.digest("ab") != cache.digest("a", ["b"])
  assert cache.digest({"b": 1, "a": 2}) == cache.digest({"a": 2, "b": 1})
