"""What others lost or repeated on a resume: huggingface/datasets #8308, #8145 and #8408.

Their streams began anew at a second resume (#8308), left out up to a batch of a `map` or a filter
(#8145), and lost what a shuffle buffer held, or gave it twice (#8408). Here texts are filtered,
mapped to tokens, shuffled, and stopped again and again.
"""

import itertools
import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from loading import assert_same, read

from ats_jax.data.sources import open_data
from ats_jax.data.tokens.tokenizer import ByteTokenizer

BATCH, COUNT = 6, 150
PHASES = ({"weights": {"a": 2, "b": 1}, "steps": 5}, {"weights": {"a": 1, "b": 3}})
STREAM = {"name": "streaming", "window_mb": 0.0015}
KINDS = {
  "filtered": dict(filters=("exact",)),
  "streamed": dict(reading=STREAM),
  "mixed streams": dict(reading=STREAM, phases=PHASES),
}


@pytest.fixture
def settings(write, tmp_path):
  """Those of `data`: rows of numbered documents, a third of which come twice to be filtered."""

  def make(kind):
    twice = "filters" in KINDS[kind]
    numbers = [i for i in range(COUNT) for _ in range(1 + (i % 3 == 0 and twice))]
    rows = [{"text": f"<{i}>{'é' * (i % 9)}"} for i in numbers]
    files = {name: (str(write(f"{name}.jsonl", rows[k::2])),) for k, name in enumerate("ab")}
    texts = {"sources": files} if "phases" in KINDS[kind] else {"paths": sum(files.values(), ())}
    usual = dict(seq_len=24, packing="best_fit", batch_size=BATCH)
    return usual | texts | KINDS[kind]

  return make


@pytest.fixture
def opened(settings, config):
  return lambda kind: open_data(config(**settings(kind)), 0)[0]


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


@pytest.mark.parametrize("kind", ["filtered", "streamed"])
def test_no_document_is_skipped_or_comes_twice_after_resumes(opened, kind):
  """Stopped after each batch, with more of them read ahead (#8145, #8408); over an epoch.

  Each time new objects go on, as in a new process; some at once after the last (#8308).
  """
  ds = opened(kind)
  ends = (r for r in itertools.count() if kind == "streamed" and ds.visit(r).epoch)
  size = ds.info.num_rows if kind == "filtered" else next(ends)
  found, position = [], None
  for _ in range(-(-size // BATCH)):
    _, position = read(opened(kind), 0, position=position, batch=BATCH)
    batches, position = read(opened(kind), 1, position=position, batch=BATCH, prefetch=3)
    found += batches
  assert_same(found, read(ds, len(found), batch=BATCH)[0])
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
def test_processes_that_are_killed_with_rows_read_ahead(opened, settings, tmp_path):
  whole, _ = read(opened("mixed streams"), 9, batch=BATCH)
  usual = dict(cache_dir=str(tmp_path / "other"), tokenizer="bytes", validation_fraction=0.0)
  given = json.dumps(usual | settings("mixed streams"))
  script, found = tmp_path / "killed.py", []
  script.write_text(KILLED)
  for count in (4, 5):
    command = [sys.executable, script, given, tmp_path / "kept.json", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    found += json.loads(done.stdout)
  np.testing.assert_array_equal([batch["tokens"][0] for batch in whole], np.squeeze(found, 1))
