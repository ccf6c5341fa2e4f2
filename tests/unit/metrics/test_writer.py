"""Our writers, and with `-m tf` the one of CLU."""

import contextlib
import csv
import io
import json
import math
import struct
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event, SessionLog

from ats_jax.config.schema import LogConfig
from ats_jax.metrics.console import ConsoleWriter
from ats_jax.metrics.create import create_writer
from ats_jax.metrics.files import CsvWriter, JsonlWriter
from ats_jax.metrics.rows import read_csv, read_jsonl
from ats_jax.metrics.tensorboard import TensorboardWriter
from ats_jax.metrics.writer import (
  TIME_KEYS,
  MultiWriter,
  is_time_key,
)

EVENT_WRITERS = [
  pytest.param(TensorboardWriter, id="tensorboard"),
  pytest.param(lambda d: MultiWriter([TensorboardWriter(d)]), id="multi"),
  pytest.param(
    lambda d: create_writer(LogConfig(writers=("clu",)), d, resume_step=None),
    id="clu",
    marks=pytest.mark.tf,
  ),
]
WRITERS = [
  *EVENT_WRITERS,
  pytest.param(lambda d: JsonlWriter(d / "metrics.jsonl"), id="jsonl"),
  pytest.param(lambda d: CsvWriter(d / "metrics.csv"), id="csv"),
  pytest.param(lambda d: ConsoleWriter(), id="console"),
]


def read_events(directory):
  """All events below `directory`, oldest file first, from the TFRecord framing."""
  events = []
  for path in sorted(directory.glob("**/events.out.tfevents.*")):
    data = path.read_bytes()
    while data:
      (length,) = struct.unpack("<Q", data[:8])
      events.append(Event.FromString(data[12 : 12 + length]))
      data = data[12 + length + 4 :]
  return events


def number(value):
  """The number in a summary value: tensorboardX writes a field, TensorFlow a tensor."""
  if value.HasField("simple_value"):
    return value.simple_value
  content = value.tensor.tensor_content
  return struct.unpack("<f", content)[0] if content else value.tensor.float_val[0]


def scalars_of(events):
  return {
    (event.step, value.tag): number(value)
    for event in events
    for value in event.summary.value
    if value.HasField("simple_value") or value.metadata.plugin_data.plugin_name == "scalars"
  }


@pytest.mark.parametrize("make", WRITERS)
def test_a_writer_takes_every_kind(make, tmp_path):
  writer = make(tmp_path)
  writer.write_hparams({"lr": 1e-3, "name": "debug", "layers": 4, "tied": True})
  writer.write_scalars(1, {"a/int": 3, "a/float": 0.5, "a/numpy": np.float32(0.1)})
  writer.write_scalars(1, {"a/jax": jnp.float32(2.5), "a/array": np.array(1.0)})
  writer.write_texts(1, {"sample": "once upon\na time"})
  writer.write_images(1, {"image": np.zeros((1, 4, 4, 3), np.float32)})
  writer.write_videos(1, {"video": np.zeros((1, 2, 4, 4, 3), np.float32)})
  writer.write_audios(1, {"audio": np.zeros((1, 8, 1), np.float32)}, sample_rate=8000)
  writer.write_histograms(1, {"h": np.arange(9.0)}, num_buckets={"h": 3})
  writer.write_histograms(2, {"h": jnp.arange(9)})
  writer.write_summaries(1, {"raw": np.zeros((2,), np.float32)})
  writer.flush()
  writer.close()


@pytest.mark.parametrize("make", EVENT_WRITERS)
def test_event_files_hold_what_was_written(make, tmp_path):
  writer = make(tmp_path)
  expected = {}
  for step in (1, 2, 3):
    row = {"train/loss": 1.0 / step, "train/accuracy": np.float32(step)}
    writer.write_scalars(step, row)
    expected |= {(step, name): pytest.approx(float(v)) for name, v in row.items()}
  writer.write_scalars(3, {"eval/loss": jnp.float32(jnp.nan)})
  writer.write_texts(3, {"sample": "hello"})
  writer.write_histograms(3, {"weights": np.arange(9.0)})
  writer.flush()
  events = read_events(tmp_path)  # flush is enough: the writer is still open
  found = scalars_of(events)
  assert math.isnan(found.pop((3, "eval/loss")))
  assert found == expected
  tags = {value.tag.split("/")[0] for event in events for value in event.summary.value}
  assert tags >= {"sample", "weights"}
  writer.close()


# JSON lines and CSV.

NAMES = ("train/loss", "train/lr", "eval/loss", "moe/load, max", 'odd "name"')
NUMBERS = st.one_of(st.floats(), st.integers(-(2**60), 2**60), st.floats(width=32).map(np.float32))
ROWS = st.lists(
  st.tuples(st.integers(0, 9), st.dictionaries(st.sampled_from(NAMES), NUMBERS)), max_size=8
)


def same(a, b):
  """Equal bit for bit, NaN included."""
  return repr(float(a)) == repr(float(b))


def jsonl_rows(path):
  return [
    (row["step"], {k: v for k, v in row.items() if k not in ("step", "wall_time")})
    for row in read_jsonl(path)
  ]


def csv_rows(path):
  """Rows as an outside reader sees them, empty cells left out."""
  with path.open(newline="") as file:
    return [
      (int(row["step"]), {k: float(row[k]) for k in row if k in NAMES and row[k] != ""})
      for row in csv.DictReader(file)
    ]


def check_rows(found, expected):
  assert [step for step, _ in found] == [step for step, _ in expected]
  for (_, got), (_, want) in zip(found, expected, strict=True):
    assert got.keys() == want.keys()
    assert all(same(got[name], want[name]) for name in want)


@pytest.mark.parametrize(("cls", "read"), [(JsonlWriter, jsonl_rows), (CsvWriter, csv_rows)])
@settings(max_examples=20, deadline=None)
@given(before=ROWS, last_step=st.integers(-1, 9), after=ROWS, torn=st.binary(max_size=5))
@example(before=[], last_step=0, after=[], torn=b"\r")  # no newline, though Python reads it as one
def test_rows_survive_a_resume_exactly(cls, read, before, last_step, after, torn):
  with tempfile.TemporaryDirectory() as directory:
    path = Path(directory) / "metrics"
    writer = cls(path)
    for step, row in before:
      writer.write_scalars(step, row)
    writer.close()
    with path.open("ab") as file:
      file.write(torn.replace(b"\n", b"x"))  # what a kill in the middle of a write leaves
    writer = cls(path, last_step=last_step)
    for step, row in after:
      writer.write_scalars(step, row)
    writer.flush()
    check_rows(read(path), [(s, row) for s, row in before if s <= last_step] + after)
    writer.close()
    assert [p.name for p in path.parent.iterdir()] == ["metrics"]


@pytest.mark.parametrize(("cls", "read"), [(JsonlWriter, jsonl_rows), (CsvWriter, csv_rows)])
def test_a_file_cut_anywhere_keeps_its_complete_rows(cls, read, tmp_path):
  path = tmp_path / "metrics"
  writer = cls(path)
  rows = [(1, {"train/loss": 0.1}), (2, {"train/loss": math.inf})]
  for step, row in rows:
    writer.write_scalars(step, row)
  writer.close()
  whole = path.read_bytes()
  header = 0 if cls is JsonlWriter else 1
  for size in range(len(whole) + 1):
    path.write_bytes(whole[:size])
    cls(path, last_step=5).close()
    complete = max(whole[:size].count(b"\n") - header, 0)
    check_rows(read(path), rows[:complete])


def test_jsonl_is_json_for_any_parser(tmp_path):
  writer = JsonlWriter(tmp_path / "m.jsonl")
  writer.write_scalars(7, {"a": math.nan, "b": -math.inf, "c": np.float32(0.1), "d": 2**62})
  writer.write_scalars(8, {"e": jnp.bfloat16(1.5), "f": np.bool_(True)})
  writer.write_texts(8, {"sample": "zwei\nZeilen \u2028 äöü"})
  writer.close()

  def refuse(token):
    raise AssertionError(f"{token} is not JSON")

  text = (tmp_path / "m.jsonl").read_text()
  rows = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
  assert rows[0]["a"] is None and rows[0]["nonfinite"] == {"a": "nan", "b": "-inf"}
  assert np.float32(rows[0]["c"]) == np.float32(0.1) and rows[0]["d"] == 2**62
  assert rows[1]["e"] == 1.5 and rows[1]["f"] == 1 and "nonfinite" not in rows[1]
  assert rows[2]["sample"] == "zwei\nZeilen \u2028 äöü"
  back = read_jsonl(tmp_path / "m.jsonl")
  assert math.isnan(back[0]["a"]) and back[0]["b"] == -math.inf and "nonfinite" not in back[0]
  assert [row["step"] for row in back] == [7, 8, 8]
  assert all(row["wall_time"] > 1.7e9 for row in back)


def test_a_damaged_line_is_an_error_that_names_it(tmp_path):
  path = tmp_path / "m.jsonl"
  path.write_text('{"step": 1}\n\0\0\0\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"m\.jsonl:2: not a row"):
    JsonlWriter(path, last_step=5)
  assert path.read_text().count("\n") == 3  # untouched
  path.write_text('{"loss": 1}\n')
  with pytest.raises(ValueError, match=r"m\.jsonl:1"):
    read_jsonl(path)
  path.write_text("step,wall_time,loss\n1,0.0\n")
  with pytest.raises(ValueError, match=r"m\.jsonl:2: not a row.*1,0\.0"):
    CsvWriter(path, last_step=5)
  path.write_text("a,b\n1,0.0\n")
  with pytest.raises(ValueError, match=r"m\.jsonl:1: not a row"):
    CsvWriter(path, last_step=5)


def test_rows_go_on_in_the_old_columns_after_a_column_could_not_be_added(tmp_path):
  writer = CsvWriter(tmp_path / "m.csv")
  writer.write_scalars(1, {"a": 1.0})
  (tmp_path / "m.csv.tmp").mkdir()  # in the way of the new file
  with pytest.raises(IsADirectoryError):
    writer.write_scalars(2, {"a": 2.0, "b": 2.0})
  writer.write_scalars(3, {"a": 3.0})
  (tmp_path / "m.csv.tmp").rmdir()
  writer.write_scalars(4, {"b": 4.0})
  writer.close()
  header, rows = read_csv(tmp_path / "m.csv")
  assert header == ["step", "wall_time", "a", "b"]
  assert [(row[0], *row[2:]) for row in rows] == [
    ("1", "1.0", ""), ("3", "3.0", ""), ("4", "", "4.0"),
  ]  # fmt: skip


@pytest.mark.parametrize("cls", [JsonlWriter, CsvWriter, TensorboardWriter])
def test_bad_scalars_are_named(cls, tmp_path):
  with contextlib.closing(cls(tmp_path if cls is TensorboardWriter else tmp_path / "m")) as writer:
    for scalars, words in (
      ({"x": np.ones(3)}, r"'x': expected one real number, got float64 of shape \(3,\)"),
      ({"x": np.ones(1)}, r"of shape \(1,\)"),  # CLU takes no vector of one either
      ({"x": "3"}, "'x': expected one real number"),
      ({"x": 1j}, "'x': expected one real number, got complex128"),
      ({"step": 3}, "'step'"),
      ({"two\nlines": 3}, "printable"),
    ):
      with pytest.raises(ValueError, match=words):
        writer.write_scalars(1, scalars)


# TensorBoard.


def test_tensorboard_hides_what_runs_again(tmp_path):
  for last_step in (-1, 4):
    writer = TensorboardWriter(tmp_path, last_step=last_step)
    for step in range(last_step + 1, last_step + 8):
      writer.write_scalars(step, {"train/loss": step + last_step / 10})
    writer.close()
  assert len(list(tmp_path.iterdir())) == 2  # begun in the same second, yet two files
  starts = [e.step for e in read_events(tmp_path) if e.session_log.status == SessionLog.START]
  assert starts == [0, 5]


@pytest.mark.tf
def test_tensorboard_itself_sees_one_value_a_step(tmp_path):
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

  test_tensorboard_hides_what_runs_again(tmp_path)
  events = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
  assert [event.step for event in events] == list(range(12))
  assert [event.value for event in events[5:]] == pytest.approx([s + 0.4 for s in range(5, 12)])


def test_a_histogram_of_nan_does_not_stop_the_run(tmp_path):
  writer = TensorboardWriter(tmp_path)
  writer.write_histograms(1, {"w": np.array([1.0, np.nan, 2.0, np.inf]), "v": np.array([np.nan])})
  writer.close()
  events = read_events(tmp_path)
  assert scalars_of(events) == {(1, "w/nonfinite"): 2, (1, "v/nonfinite"): 1}
  (histo,) = (v.histo for e in events for v in e.summary.value if v.HasField("histo"))
  assert (histo.num, histo.min, histo.max) == (2, 1, 2)


# Console and assembly.


def test_console_lines_are_short_and_aligned():
  lines = []
  writer = ConsoleWriter(lines.append)
  for step, loss in ((10, 3.25), (100, 12.0625)):
    row = {"train/loss": loss, "train/tokens_per_sec": 123456.7, "train/learning_rate": 3e-4}
    writer.write_scalars(step, {**row, "train/z": 2.0, "memory/host_rss_gib": 1.0})
  writer.write_scalars(100, {"eval/loss": math.nan, "eval/batches": 3})
  writer.write_scalars(100, {"goodput/step_secs": 1.0})
  named = {"eval/code/loss": 2.5, "eval/code/accuracy": 0.5, "eval/web/loss": 4.0}
  writer.write_scalars(200, {"eval/loss": 3.0, **named})
  assert lines == [
    "step      10  train  loss 3.25      tok/s 123,457   lr 0.0003",
    "step     100  train  loss 12.06     tok/s 123,457   lr 0.0003",
    "step     100  eval   loss nan       batches 3",
    "step     200  eval   loss 3         code/loss 2.5       web/loss 4",
  ]


def test_create_writer_writes_the_workdir_and_resumes(tmp_path, capsys):
  cfg = LogConfig()
  for resume_step, steps in ((None, (0, 1, 2, 3)), (1, (2, 3, 4))):
    writer = create_writer(cfg, tmp_path / "run", resume_step=resume_step)
    for step in steps:
      writer.write_scalars(step, {"train/loss": 1 / (step + 1)})
    # Before it is closed: a process that is killed loses no row.
    assert [s for s, _ in jsonl_rows(tmp_path / "run/metrics.jsonl")] == list(range(steps[-1] + 1))
    assert [s for s, _ in csv_rows(tmp_path / "run/metrics.csv")] == list(range(steps[-1] + 1))
    writer.close()
  assert len(list((tmp_path / "run").glob("events.out.tfevents.*"))) == 2
  assert capsys.readouterr().out.count("train  loss") == 7
  create_writer(cfg, tmp_path / "run", resume_step=None).close()  # begins anew
  assert read_jsonl(tmp_path / "run/metrics.jsonl") == []
  assert read_csv(tmp_path / "run/metrics.csv") == (["step", "wall_time"], [])


def test_create_writer_writes_on_the_main_process_only(tmp_path, monkeypatch):
  writer = create_writer(LogConfig(), tmp_path / "run", resume_step=None, is_main=False)
  writer.write_scalars(1, {"a": 1})
  writer.close()
  assert not (tmp_path / "run").exists()
  monkeypatch.setitem(sys.modules, "clu", None)
  with pytest.raises(ValueError, match=r"pip install 'ats_jax\[tf\]'"):
    create_writer(LogConfig(writers=("clu",)), tmp_path, resume_step=None)


def test_multi_writer_closes_all_even_if_one_fails(tmp_path):
  class Failing(ConsoleWriter):
    def close(self):
      raise OSError("disk full")

  last = JsonlWriter(tmp_path / "m.jsonl")
  with pytest.raises(OSError, match="disk full"):
    MultiWriter([Failing(), last]).close()
  with pytest.raises(ValueError, match="closed"):
    last.write_scalars(1, {"a": 1})


def test_time_keys():
  text = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
  paragraph = text[text.index("**Comparing two runs.**") :].split("\n\n")[0]
  assert not [pattern for pattern in TIME_KEYS if f"`{pattern}`" not in paragraph]
  timed = ["wall_time", "train/tokens_per_sec", "train/steps_per_sec", "train/mfu", "train/mfu_6n"]
  timed += ["train/tflops_per_device"]
  timed += ["goodput/step_secs", "goodput/step_share", "eval/wall_secs", "memory/host_rss_gib"]
  timed += ["checkpoint/stall_secs", "orchestrator/health"]
  assert all(map(is_time_key, timed))
  exact = ["step", "train/loss", "eval/loss", "train/learning_rate", "moe/load_max", "moe/share"]
  exact += ["orchestrator/probe_loss", "orchestrator/lr_scale", "orchestrator/decisions"]
  assert not any(map(is_time_key, exact))


def test_the_console_holds_nothing_back(monkeypatch):
  """As in a log file: a killed run has the lines of all its rows there."""
  raw = io.BytesIO()
  monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw))
  ConsoleWriter().write_scalars(3, {"train/loss": 1.5})
  assert b"step       3  train  loss 1.5" in raw.getvalue()
