"""A mixture read by two real processes, then by one: each token once an epoch of its source."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_config
from processes import run_job

from ats_jax.data.look.audit import BATCH_SIZE, ReadingPhase, audit
from ats_jax.data.rows.loader import TrainBatches
from ats_jax.data.sources import open_data

SETTINGS = {
  "model.vocab_size": 259,
  "data.phases": (
    {"weights": {"web": 3, "code": 1}, "steps": 3},
    {"weights": {"talk": 1, "code": 2}, "tokens": 200},
    {"weights": {"web": 4, "code": 1, "talk": 2}},
  ),
  "data.filters": ("exact",),
  "data.packing": "best_fit",
  "data.seq_len": 32,
  "data.batch_size": BATCH_SIZE,
  "data.num_workers": 1,
}
# The same as a stream, which `exact` cannot filter.
STREAM = {name: value for name, value in SETTINGS.items() if name != "data.filters"} | {
  "data.reading": {"name": "streaming", "window_mb": 0.001},
  "data.validation_fraction": 0.0,
  "data.phases": (
    {"weights": {"web": 3, "code": 1}, "steps": 3},
    {"weights": {"web": 1, "talk": 2}},
  ),
}
OF_STREAM = 8  # batches that two processes read of it
# What each process reads in training, written down.
PROCESS = """
import json
import numpy as np
from helpers import tiny_config
from ats_jax.data.sources import open_data
from ats_jax.train.feed import train_feed
from ats_jax.sharding.mesh import make_mesh

for folder, settings, count in json.loads(argv[0]):
  cfg = tiny_config(settings)
  train_set, _ = open_data(cfg.data, cfg.seed)
  with jax.set_mesh(make_mesh(cfg)), train_feed(cfg, train_set, tells=True) as batches:
    for k in range(count):
      np.savez(f"{folder}/{rank}-{k}.npz", **next(batches))
    say(json.dumps(batches.position()))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, tuple[str]]:
  """Three uneven sources with copies in them."""
  folder = tmp_path_factory.mktemp("texts")
  for name, size in {"web": 260, "code": 50, "talk": 90}.items():
    rows = [{"text": f"{name} {i % (size - 9)} " * (i % 7 + 1)} for i in range(size)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return {name: (f"{folder}/{name}.jsonl",) for name in ("web", "code", "talk")}


class Recorded:
  """One process's batches, as it wrote them down."""

  def __init__(self, folder: Path, rank: int, position: dict):
    self._files = iter(sorted(folder.glob(f"{rank}-*.npz"), key=lambda f: int(f.stem[2:])))
    self._position = position

  def __next__(self):
    return dict(np.load(next(self._files)))

  def __enter__(self):
    return self

  def __exit__(self, *_):
    assert next(self._files, None) is None

  def position(self):
    return self._position


@pytest.mark.thorough
def test_two_processes_and_then_one_read_each_token_once(sources, tmp_path):
  """Of a stream they read what one process reads, which goes on without their windows."""
  folders = tmp_path / "rows", tmp_path / "stream"
  rows, stream = (
    settings | {"data.sources": sources, "data.cache_dir": f"{tmp_path}/cache"}
    for settings in (SETTINGS, STREAM)
  )
  ds, _ = open_data(tiny_config(rows).data, 0)
  number = next(r for r in itertools.count() if min(ds.progress(r).passes.values()) >= 1)
  count = -(-number // BATCH_SIZE)
  assert count > 6
  for folder in folders:
    folder.mkdir()
  of_job = {"data.cache_dir": f"{tmp_path}/of-the-job"}  # both prepare it at once
  jobs = [
    (str(folders[0]), rows | of_job, count // 2),
    (str(folders[1]), stream | of_job, OF_STREAM),
  ]
  said = run_job(PROCESS, tmp_path, json.dumps(jobs))
  of_rows, of_stream = zip(*[map(json.loads, lines) for lines in said], strict=True)

  def batches(data, *, position, local_rows, **arguments):
    if data is ds and position is None:
      rank = int(local_rows[0] > 0)
      return Recorded(folders[0], rank, of_rows[rank])
    return TrainBatches(data, position=position, local_rows=local_rows, **arguments)

  phases = (ReadingPhase(2, 1, 0.5), ReadingPhase(1, 1, 1.0))
  (result,) = audit(ds, scenarios={"2 processes, then 1": phases}, batches=batches)
  assert (result.difference, result.lost, result.repeated) == ("", 0, 0)
  assert result.targets == ds.info.num_tokens and result.batches == count

  assert of_stream[0] == of_stream[1] and set(of_stream[0]["parts"]) == {"web", "code", "talk"}

  def read(count, position=None):
    ds, _ = open_data(tiny_config(stream).data, 0)
    with TrainBatches(
      ds, position=position, accum_steps=1, batch_size=BATCH_SIZE, num_workers=0, prefetch=2,
      local_rows=np.arange(BATCH_SIZE),
    ) as batches:  # fmt: skip
      return [next(batches) for _ in range(count)]

  whole = read(OF_STREAM + 2)
  for k, batch in enumerate(whole[:OF_STREAM]):
    halves = [np.load(folders[1] / f"{rank}-{k}.npz") for rank in (0, 1)]
    for name, values in batch.items():
      np.testing.assert_array_equal(np.concatenate([h[name] for h in halves], 1), values)
  for one, other in zip(whole[OF_STREAM:], read(2, of_stream[1]), strict=True):
    np.testing.assert_array_equal(one["tokens"], other["tokens"])
