import json
import signal
import zlib
from pathlib import Path

import numpy as np
import pytest
from loading import WideTokenizer

from ats_jax.config.build import unchecked
from ats_jax.config.schema import DataConfig
from ats_jax.data.rows.dataset import Dataset
from ats_jax.data.splits import open_split


@pytest.fixture
def no_hang():
  """Ends the process where a test waits for ever, as the one that opens a pipe does."""
  signal.alarm(1200)
  yield
  signal.alarm(0)


@pytest.fixture
def config(tmp_path):
  """A DataConfig with a cache of the test's own."""

  def make(**changes) -> DataConfig:
    defaults = dict(tokenizer="bytes", cache_dir=str(tmp_path / "cache"), validation_fraction=0.0)
    return unchecked({"data": {**defaults, **changes}}).data

  return make


@pytest.fixture
def numbered(tmp_path, config):
  """A dataset in which token i of the corpus has id i, so a batch says what it holds."""

  def make(lengths, seed=0, **changes) -> Dataset:
    parts, at = [], 0
    for length in lengths:
      parts += [np.arange(at, at + length), [WideTokenizer.eos_id]]
      at += length
    path = tmp_path / f"numbered-{zlib.crc32(str(lengths).encode())}.npy"
    if not path.exists():  # a thread of an earlier dataset may still read it
      np.save(path, np.concatenate(parts).astype(np.uint32))
    return open_split(config(**changes), seed, (str(path),), WideTokenizer())

  return make


@pytest.fixture
def write(tmp_path):
  """write("a/b.txt", content) -> path; a list becomes JSON lines."""

  def to(name: str, content) -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
      content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path

  return to
