"""What others lost or repeated on a resume: huggingface/datasets #8308, #8145 and #8408.

Their streams began anew at a second resume (#8308), left out up to a batch of a `map` or a filter
(#8145), and lost what a shuffle buffer held, or gave it twice (#8408). Here texts are filtered,
mapped to tokens, shuffled, and stopped again and again.
"""

import itertools
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from ats_jax.data.rows.loader import TrainBatches
from ats_jax.data.sources import open_data
from ats_jax.data.tokens.tokenizer import ByteTokenizer

BATCH, BATCHES, COUNT = 6, 14, 150
KINDS = {
  "filtered": dict(filters=("exact",)),
  "mixed": dict(
    filters=("exact",),
    phases=({"weights": {"a": 2, "b": 1}, "steps": 5}, {"weights": {"a": 1, "b": 3}}),
  ),
  "streamed": dict(reading={"name": "streaming", "window_mb": 0.0015}),
}


def texts(kind, files):
  """The settings of `data` that name two files."""
  if kind == "mixed":
    return {"sources": {name: (str(path),) for name, path in files.items()}}
  return {"paths": tuple(map(str, files.values()))}


@pytest.fixture
def opened(write, config):
  """Rows of numbered documents, a third of which come twice."""

  def make(kind):
    numbers = [i for i in range(COUNT) for _ in range(1 + (i % 3 == 0 and kind != "streamed"))]
    rows = [{"text": f"<{i}>{'é' * (i % 9)}"} for i in numbers]
    files = {name: write(f"{name}.jsonl", rows[k::2]) for k, name in enumerate("ab")}
    cfg = config(
      **texts(kind, files), seq_len=24, packing="best_fit", batch_size=BATCH, **KINDS[kind]
    )
    return open_data(cfg, 0)[0]

  return make


def read(ds, count, position=None):
  with TrainBatches(
    ds, position=position, accum_steps=1, batch_size=BATCH, local_rows=np.arange(BATCH),
    num_workers=0, prefetch=3,
  ) as batches:  # fmt: skip
    return [next(batches) for _ in range(count)], json.loads(json.dumps(batches.position()))


def numbers(batches) -> list[int]:
  """Of the documents in them, each of which is whole."""
  found = []
  for batch in batches:
    pairs = zip(batch["targets"][0], batch["segment_ids"][0], strict=True)
    for targets, segments in pairs:
      for segment in range(1, segments.max() + 1):
        text = ByteTokenizer().decode(targets[segments == segment])
        found.append(int(text[1:].split(">")[0]))
  return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_and_a_third_resume_go_on(opened, kind):
  """Each in new objects, as in a new process; some at once after the last (#8308)."""
  whole, _ = read(opened(kind), BATCHES)
  found, position = [], None
  for count in (3, 1, 0, 4, 6):
    batches, position = read(opened(kind), count, position)
    found += batches
  assert len(found) == BATCHES
  for one, other in zip(whole, found, strict=True):
    for name in one:
      np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("kind", ["filtered", "streamed"])
def test_no_document_is_skipped_or_comes_twice_after_resumes(opened, kind):
  """Stopped after each batch, with more of them read ahead (#8145, #8408); over an epoch."""
  ds = opened(kind)
  ends = (r for r in itertools.count() if kind == "streamed" and ds.visit(r).epoch)
  size = ds.info.num_rows if kind == "filtered" else next(ends)
  found, position = [], None
  for _ in range(-(-size // BATCH)):
    batches, position = read(opened(kind), 1, position)
    found += batches
  behind = len(found) * BATCH - size  # rows of the next epoch
  extra = numbers([{n: x[:, BATCH - behind :] for n, x in found[-1].items()}])
  assert len(found) > 3 and sorted(numbers(found)) == sorted([*range(COUNT), *extra])


KILLED = """
import json, os, signal, sys
import numpy as np
from ats_jax.config import from_config_dict
from ats_jax.data.rows.loader import TrainBatches
from ats_jax.data.sources import open_data

if __name__ == "__main__":
  settings, kept, count = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
  ds, _ = open_data(from_config_dict({"data": settings}).data, 0)
  position = json.load(open(kept)) if os.path.exists(kept) else None
  batches = TrainBatches(ds, position=position, accum_steps=1, batch_size=6, tells=True,
                         local_rows=np.arange(6), num_workers=1, prefetch=3)
  tokens = [next(batches)["tokens"].tolist() for _ in range(count)]
  json.dump(batches.position(), open(kept, "w"))
  print(json.dumps(tokens), flush=True)
  os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["mixed", "streamed"])
def test_processes_that_are_killed_with_rows_read_ahead(opened, kind, tmp_path, config):
  whole, _ = read(opened(kind), 9)
  settings = dict(
    **texts(kind, {name: f"{tmp_path}/{name}.jsonl" for name in "ab"}),
    cache_dir=str(tmp_path / "other"), tokenizer="bytes", validation_fraction=0.0, seq_len=24,
    packing="best_fit", batch_size=BATCH, **KINDS[kind],
  )  # fmt: skip
  script, found = tmp_path / "killed.py", []
  script.write_text(KILLED)
  for count in (4, 5):
    command = [sys.executable, script, json.dumps(settings), tmp_path / "kept.json", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    found += json.loads(done.stdout)
  np.testing.assert_array_equal([batch["tokens"] for batch in whole], found)
