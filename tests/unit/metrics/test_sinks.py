"""W&B, MLflow and trackio, offline, by the real libraries (`-m sinks`), and without them."""

import json
import struct
import subprocess
import sys

import pytest
from helpers import tiny_config

from ats_jax.config.schema import LogConfig
from ats_jax.metrics.create import create_writer
from ats_jax.metrics.rows import read_jsonl
from ats_jax.train.loop import train

LEVELDB_BLOCK = 2**15
pytestmark = pytest.mark.filterwarnings("default")  # those of the libraries
SINKS = ("wandb", "mlflow", "trackio")
RUN = "0123456789abcdef"


@pytest.mark.parametrize("name", SINKS)
def test_a_missing_library_is_said_with_its_extra(name, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, name, None)
  words = rf"log.writers: '{name}' needs the library {name} .*pip install 'ats_jax\[{name}\]'"
  with pytest.raises(ValueError, match=words):
    create_writer(LogConfig(writers=("jsonl", name)), tmp_path, resume_step=None)


@pytest.fixture
def offline(tmp_path, monkeypatch):
  """Nothing of the user's own is read or sent to."""
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("WANDB_SILENT", "true")
  monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID"):
    monkeypatch.delenv(name, raising=False)


def open_sink(name, folder, resume_step=None):
  cfg = LogConfig(writers=("jsonl", name), project="cats")
  return create_writer(cfg, folder, resume_step=resume_step, run=RUN)


def wandb_records(folder):
  """What an offline run of W&B holds, of all its starts."""
  import wandb

  wandb.teardown()  # its process writes on behind `finish`, until it ends
  found = []
  for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
    of_start = records_of(path.read_bytes())
    assert any(r.WhichOneof("record_type") == "exit" for r in of_start), path
    found += of_start
  return found


def records_of(data):
  """Protobufs in the log format of LevelDB."""
  from wandb.proto.wandb_internal_pb2 import Record

  at, record, found = 7, b"", []
  while at < len(data):
    if LEVELDB_BLOCK - at % LEVELDB_BLOCK < 7:  # no room for a header
      at += LEVELDB_BLOCK - at % LEVELDB_BLOCK
      continue
    _, length, kind = struct.unpack("<IHB", data[at : at + 7])
    record += data[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4) and at <= len(data):  # whole, or its last part
      found.append(Record.FromString(record))
      record = b""
  return found


def wandb_history(folder):
  """(step, name) -> value."""
  found = {}
  for record in wandb_records(folder):
    if record.WhichOneof("record_type") == "history":
      row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
      found |= {(row["step"], name): value for name, value in row.items()}
  return found


@pytest.mark.sinks
def test_all_three_take_a_whole_run(tmp_path, monkeypatch, offline):
  import mlflow
  import trackio.utils
  from trackio.sqlite_storage import SQLiteStorage

  for module in (trackio.utils, sys.modules["trackio.sqlite_storage"]):
    monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
  (tmp_path / "text.txt").write_text("the cat sat on the mat, and the dog on the log. " * 40)
  cfg = tiny_config(
    {
      "num_steps": 4,
      "model.vocab_size": 384,
      "data.paths": (str(tmp_path / "text.txt"),),
      "data.validation_fraction": 0.0,
      "data.cache_dir": str(tmp_path / "cache"),
      "log.every_steps": 2,
      "log.progress": False,
      "log.project": "cats",
      "log.writers": ("jsonl", "wandb", "mlflow", "trackio"),
      "sample.max_tokens": 4,
    }
  )
  run = tmp_path / "run"
  train(cfg, run)
  losses = {
    row["step"]: row["train/loss"]
    for row in read_jsonl(run / "metrics.jsonl")
    if "train/loss" in row
  }
  assert losses.keys() == {2, 4}
  name = f"run-{(run / 'run_id').read_text()[:8]}"

  history = wandb_history(run)
  assert {s: history[s, "train/loss"] for s in losses} == losses
  (sample,) = (run / "wandb").glob("offline-run-*/files/media/html/sample_*.html")
  assert "<pre>" in sample.read_text()

  client = mlflow.MlflowClient(f"sqlite:///{run}/mlflow.db")
  (found,) = client.search_runs([client.get_experiment_by_name("cats").experiment_id])
  assert (found.info.run_name, found.info.status) == (name, "FINISHED")
  assert found.data.params["model.num_layers"] == "2"
  metrics = client.get_metric_history(found.info.run_id, "train/loss")
  assert {metric.step: metric.value for metric in metrics} == losses
  assert len(list((run / "mlflow").glob("*/artifacts/sample/4.txt"))) == 1

  rows = [row for row in SQLiteStorage.get_logs("cats", name) if "train/loss" in row]
  assert {row["step"]: row["train/loss"] for row in rows} == losses


@pytest.mark.sinks
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_run_goes_on_in_its_own_page(name, tmp_path, offline, monkeypatch):
  import mlflow

  address = "https://me:hush-hush@host/a.txt"
  monkeypatch.setattr(sys, "argv", ["ats-jax", f"--config.data.paths={address}"])
  for resume_step, steps in ((None, (1, 2, 3, 4)), (2, (3, 4, 5))):
    writer = open_sink(name, tmp_path, resume_step)
    writer.write_hparams(
      {"num_steps": 5 + (resume_step or 0), "project": "", "data.paths": (address,)}
    )
    for step in steps:
      writer.write_scalars(step, {"train/loss": step + (resume_step or 0)})
    writer.close()
  if name == "wandb":
    runs = {r.run.run_id for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "run"}
    assert runs == {RUN}
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(b"hush-hush" in file.read_bytes() for file in files)
    losses = {s: v for (s, metric), v in wandb_history(tmp_path).items() if metric == "train/loss"}
    assert losses == {1: 1, 2: 2, 3: 5, 4: 6, 5: 7}  # steps that run again replace the old ones
    return
  client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
  (found,) = client.search_runs([client.get_experiment_by_name("cats").experiment_id])
  history = client.get_metric_history(found.info.run_id, "train/loss")
  assert sorted(m.step for m in history) == [1, 2, 3, 3, 4, 4, 5]
  assert found.data.params["num_steps"] == "5"
  assert found.data.params["data.paths"] == "('https://***@host/a.txt',)"


ONLINE = """
import sys
from pathlib import Path
from ats_jax.config.schema import LogConfig
from ats_jax.metrics.create import create_writer
create_writer(LogConfig(writers=("wandb",)), Path(sys.argv[1]), resume_step=None)
"""


@pytest.mark.sinks
def test_a_sink_that_cannot_be_opened_is_said_at_the_start(tmp_path, offline, monkeypatch):
  monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
  monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
  with pytest.raises(ValueError, match=r"'mlflow' cannot be opened: .*MLFLOW_TRACKING_URI"):
    open_sink("mlflow", tmp_path)
  monkeypatch.setenv("WANDB_MODE", "online")  # read once in a process
  command = [sys.executable, "-c", ONLINE, str(tmp_path)]
  result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
  assert "ValueError: log.writers: 'wandb' cannot be opened:" in result.stderr
  assert "Run `wandb login`, or set WANDB_MODE=offline, or take 'wandb' out" in result.stderr
