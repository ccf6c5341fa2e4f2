"""What is read of a run's folder, how the run stands, and the words that are said of it."""

import fcntl
import json
import re
from pathlib import Path

import numpy as np
import pytest
from run_folders import BEGAN, end, facts, made_again, rolled_back, training, write_run

from ats_jax.metrics.rows import read_jsonl
from ats_jax.orchestrator.record.ledger import Ledger
from ats_jax.report import columns, shown
from ats_jax.report.columns import Column
from ats_jax.report.events import events_of
from ats_jax.report.facts import device_hours, kernels, parts_of_data, spikes
from ats_jax.report.figures import series
from ats_jax.report.plots import figures_of, profiles
from ats_jax.report.read import read_run
from ats_jax.report.report import make_report
from ats_jax.report.thin import kept
from ats_jax.store import paths


def test_rows_of_several_kinds_are_columns(tmp_path):
  rows = training(range(10, 40, 10))
  rows[1] |= {"train/loss": None, "nonfinite": {"train/loss": "nan"}}
  run = read_run(str(write_run(tmp_path / "a", [*rows, {"step": 30, "sample": "text"}])))
  steps, values = run.column("train/loss")
  np.testing.assert_array_equal(steps, [10, 20, 30])
  np.testing.assert_array_equal(values, [4.9, np.nan, 4.7])
  assert run.samples == [(30, "text")]
  assert not len(run.column("no/such").values)


@pytest.mark.parametrize("block", [1, 300, 2**20])
def test_rows_of_all_kinds_are_read_as_json_reads_them(tmp_path, monkeypatch, block):
  """In the order of the file, wherever blocks end, and a damaged line is named by its number."""
  monkeypatch.setattr(columns, "BLOCK", block)
  rng, rows = np.random.default_rng(0), []
  for step in range(1, 200):
    row = {
      "step": step,
      "wall_time": BEGAN + step / 3,
      "a": rng.normal() * 10.0 ** rng.integers(-9, 9),
    }
    rows.append({**row, "b": step} if step > 20 else row)
    if step % 7 == 0:
      rows[-1] |= {"a": None, "nonfinite": {"a": "inf"}}
    if step % 9 == 0:
      rows += [{"step": step, "wall_time": 1.0, "a": -1e-300}, {"step": step, "text": "3.5"}]
    if step % 50 == 0:
      rows.append({"a": 2, "step": step, "wall_time": True, 'c\\"é': 1})
  file = write_run(tmp_path / "a", rows) / "metrics.jsonl"
  found, texts = columns.read_rows(file)
  assert texts == [(step, "text", "3.5") for step in range(9, 200, 9)]
  expected = read_jsonl(file)
  assert set(found) == {"wall_time", "a", "b", 'c\\"é'}
  for name, (steps, values) in found.items():
    both = [(row["step"], float(row[name])) for row in expected if name in row]
    assert list(zip(steps.tolist(), values.tolist(), strict=True)) == both
  few, also = columns.read_rows(file, lambda name: name == "b")
  assert also == [] and list(few) == ["b"]
  np.testing.assert_array_equal(few["b"], found["b"])
  lines = file.read_text().splitlines(keepends=True)
  lines[150] = lines[150][:-3] + "\n"
  file.write_text("".join(lines))
  with pytest.raises(ValueError, match=r"metrics.jsonl:151: not a row of metrics"):
    columns.read_rows(file)


@pytest.mark.parametrize(
  ("rows", "log", "word"),
  [
    ([], (), "no row yet"),
    ([*training(range(10, 110, 10)), end(100)], (), "finished"),
    ([*training(range(10, 60, 10)), end(50)], (), "stopped"),
    (training(range(10, 60, 10)), (), "killed"),
    (
      training(range(10, 60, 10)),
      ("2026-11-28 09:01:00 ERROR   the run ended: FloatingPointError: train/loss is nan",),
      "failed",
    ),
  ],
)
def test_how_a_run_stands(tmp_path, rows, log, word):
  state = read_run(str(write_run(tmp_path / "a", rows, log=log))).state
  assert state.word == word
  if word == "failed":
    assert "FloatingPointError: train/loss is nan" in state.says


def test_each_metric_that_the_report_names_is_read():
  """All but step times, which are of performance.json."""
  text = "".join(path.read_text() for path in Path(shown.__file__).parent.glob("*.py"))
  names = set(re.findall(r'"((?:train|reflex|memory)/(?!step_secs)\w+)"', text))
  assert len(names) >= 20 and all(map(shown.is_shown, names))
  assert shown.is_shown("train/code/loss") and not shown.is_shown("train/accuracy")


def test_a_run_that_writes_no_rows_for_the_report_says_so(tmp_path):
  folder = write_run(tmp_path / "a", [], {"log.writers": ("console",)})
  (folder / "metrics.jsonl").unlink()
  assert read_run(str(folder)).state.says == "It writes no metrics.jsonl, by log.writers=console."


def test_a_run_whose_lock_is_held_is_live_and_a_torn_line_is_left_out(tmp_path):
  folder = write_run(tmp_path / "a", training(range(10, 60, 10)))
  with (folder / "metrics.jsonl").open("a") as file:
    file.write('{"step": 60, "train/lo')
  with (folder / ".lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    run = read_run(str(folder))
  assert run.state.word == "live" and run.step == 50
  assert read_run(str(folder)).state.word == "killed"


def test_an_end_of_an_earlier_start_is_not_that_of_the_newest(tmp_path):
  early = end(50) | {"wall_time": BEGAN - 10}
  rows = [*training(range(10, 60, 10)), early, *training(range(60, 80, 10))]
  run = read_run(str(write_run(tmp_path / "a", rows)))
  assert run.state.word == "killed"


def test_hours_of_devices_count_each_start_that_is_known(tmp_path):
  ended = read_run(str(write_run(tmp_path / "a", [*training(range(10, 60, 10)), end(50, 1800.0)])))
  assert device_hours(ended).startswith("1 device hours (2 x cpu for 30m00s)")
  killed = read_run(str(write_run(tmp_path / "b", training(range(10, 60, 10)))))
  assert "for 50s" in device_hours(killed)  # to the last row
  twice = ("2026-11-28 09:00:00 INFO    devices: 2 x cpu",)
  killed = read_run(str(write_run(tmp_path / "c", training(range(10, 60, 10)), log=twice)))
  assert "1 earlier starts, which were killed, are not counted" in device_hours(killed)


def test_the_spike_score_is_shown_of_enough_rows(tmp_path):
  rows = training(range(1, 102))
  rows[80]["train/loss"] = 90.0
  table = spikes(read_run(str(write_run(tmp_path / "a", rows))))
  assert table is not None and table.rows == (("train/loss", "101", "1.96%"),)  # 1 of 51
  assert spikes(read_run(str(write_run(tmp_path / "b", rows[:50])))) is None


def test_files_that_are_none_are_named(tmp_path):
  with pytest.raises(ValueError, match=r"holds no run \(config.json is missing\)"):
    read_run(str(tmp_path))
  folder = write_run(tmp_path / "a", [])
  (folder / "layers.jsonl").write_text('{"step": 1, "moe/load": [[0.5, 0.5]]}\n{"step"\n')
  with pytest.raises(ValueError, match=r"layers.jsonl:2: not a row of arrays"):
    read_run(str(folder))
  (folder / "layers.jsonl").unlink()
  (folder / "performance.json").write_text("[1]")
  with pytest.raises(ValueError, match=r"performance.json holds \[1\], not a dict"):
    read_run(str(folder))


def test_steps_that_were_made_again_show_what_the_run_continued_with(tmp_path):
  folder = write_run(tmp_path / "a", training(range(5, 65, 5), **{"reflex/z_loss": 8.0}))
  made_again(folder / "decisions.jsonl")
  run = read_run(str(folder))
  steps, losses = run.column("train/loss")
  np.testing.assert_array_equal(steps, range(5, 65, 5))
  np.testing.assert_allclose(losses[-7:], [4.7, 2.0, 2.0, 2.0, np.nan, 4.45, 4.4])
  np.testing.assert_array_equal(run.column("reflex/z_loss").steps, [*range(5, 35, 5), 55, 60])
  assert len(run.column("progress/tokens").steps) == 12
  (event,) = events_of(run)
  assert "training loss, mean of up to 5 rows: 4.8 before (to step 30), " in event.effect
  (report,) = make_report([run]).runs
  assert any(said.startswith("Steps 31 to 50 were made again") for said in report.verdict)


def test_what_simple_models_of_the_text_reach_is_said_and_drawn(tmp_path):
  rows = [*training(range(10, 110, 10)), {"step": 100, "eval/loss": 4.0}]
  rows.append({"step": 100, "eval/bigram_loss": 3.5, "eval/unigram_loss": 6.0})
  (run,) = make_report([read_run(str(write_run(tmp_path / "a", rows)))]).runs
  assert any(
    "4, is NOT below that of a bigram model of the same tokens, 3.5" in s for s in run.verdict
  )
  *_, bigram, unigram = run.figures[0].series
  assert (bigram.x, bigram.y, unigram.y) == ((10.0, 100.0), (3.5, 3.5), (6.0, 6.0))


def test_what_the_run_reads(tmp_path):
  """Splits of one text share what was left out of it."""
  folder = write_run(tmp_path / "a", training(range(10, 20, 10)))
  left_out = {"empty": 2, "duplicate": 40}
  parts = [facts(left_out=left_out), facts(name="validation", left_out=left_out, is_complete=False)]
  (folder / "data.json").write_text(json.dumps({"parts": parts}))
  read, missing, sizes = parts_of_data(read_run(str(folder)))
  assert [row[0] for row in read.rows] == ["training", "validation, its first window"]
  assert read.rows[0][1:4] == (8, 100, 7) and read.rows[0][-1] == "3, 3, 9, 20, 30"
  both = "training, validation, its first window"
  assert missing.rows == ((both, "empty", 2), (both, "duplicate", 40))
  assert sizes.rows[1] == ("training", "8 to 15", 4, 0.5)


def test_profiles_and_kernels(tmp_path):
  folder = write_run(tmp_path / "a", training(range(10, 20, 10)))
  span = {"gpu": "GPU:0", "secs": 0.05, "sending": 0.02, "exposed": 0.01, "idle": 0.005}
  kernel = {"name": "gemm", "calls": 9, "secs": 0.04, "share": 0.8}
  for step in (100, 20):
    facts = {"step": step, "steps": 3, "num_kernels": 5, "kernels": [kernel], "devices": [span]}
    (folder / "profile" / str(step)).mkdir(parents=True)
    (folder / "profile" / str(step) / "summary.json").write_text(json.dumps(facts))
  metadata = json.loads((folder / "metadata.json").read_text())
  metadata["run"] |= {"rope": "xla (reference: it has no (good) kernel)", "swiglu": "fast (x2)"}
  (folder / "metadata.json").write_text(json.dumps(metadata))
  performance = {"kernels": {"rope": "xla", "swiglu": "fast"}}
  (folder / "performance.json").write_text(json.dumps(performance))
  run = read_run(str(folder))
  longest, devices = profiles(run)
  assert "Of steps 100 to 102" in longest.about and "4 shorter" in longest.about
  assert longest.rows == (("gemm", 9, 40.0, 0.8),)
  assert devices.rows[0] == ("20 to 22", "GPU:0", 50.0, "10.0%", "40.0%", "20.0%")
  table = kernels(run)
  assert table and table.about.startswith("1 of 2 ops fall back")
  assert table.rows[0] == ("rope", "xla", "reference: it has no (good) kernel")


def test_a_run_on_a_store(tmp_path, bucket):
  folder = write_run(tmp_path / "a", [*training(range(10, 110, 10)), end(100)])
  rolled_back(folder / "decisions.jsonl")
  for path in folder.iterdir():
    paths.write(paths.Path("gs://bucket/run") / path.name, path.read_bytes())
  paths.write(paths.Path("gs://bucket/run/samples/100.txt"), "a sample")
  paths.write(paths.Path("gs://bucket/run/profile/7/summary.json"), '{"step": 7}')
  run = read_run("gs://bucket/run/")
  assert (run.name, run.state.word, run.samples) == (
    "gs://bucket/run", "finished", [(100, "a sample")],
  )  # fmt: skip
  assert len(run.column("train/loss").values) == 10 and len(events_of(run)) == 1
  assert run.profiles == [{"step": 7}]


def test_few_points_keep_the_extremes_and_what_is_not_finite():
  values = np.zeros(200_000)
  values[[777, 150_001]], values[99_999] = (50.0, -3.0), np.nan
  places = kept(values, 100)
  assert len(places) <= 302 and {0, 777, 99_999, 150_001, 199_999} <= set(places.tolist())
  np.testing.assert_array_equal(kept(values[:150], 100), np.arange(150))
  one = series("x", Column.of(np.arange(200_000), values), 100)
  assert one.facts["greatest"] == (777.0, 50.0) and one.facts["nonfinite"] == 1
  assert None in one.y and json.dumps(one.y, allow_nan=False)


def test_a_decision_has_its_cause_and_the_losses_about_it(tmp_path):
  rows = training(range(10, 60, 10)) + training(range(60, 110, 10), start=4.0)
  folder = write_run(tmp_path / "a", [*rows, end(100)])
  rolled_back(folder / "decisions.jsonl")
  run = read_run(str(folder))
  (event,) = events_of(run)
  assert (event.step, event.kind) == (50, "done")
  assert "rolls back to step 40" in event.what and "the state: weights" in event.cause
  assert "4.7 before (to step 50), 3.2 after (to step 100)" in event.effect
  (loss, *_) = figures_of(run, [event])
  assert loss.events == (0,)
  assert loss.phases == (("warm-up", 0.0, 20.0), ("decay", 20.0, 100.0))


def test_losses_of_the_probe_stand_at_the_steps_of_their_weights(tmp_path):
  folder = write_run(tmp_path / "a", [{"step": 40, "orchestrator/probe_loss": 5.0}])
  book = Ledger(folder / "decisions.jsonl")
  for look, (step, loss, stale) in enumerate([(20, 5.0, False), (40, 4.0, False), (60, 9.0, True)]):
    held = {"": loss, "code": loss + 1.0}
    seen = {"reading": {"first": step - 19, "step": step, "held": held}, "stale": stale}
    book.write("check", 20 * look + 40, **seen, health={"level": "warning", "causes": ["x"]})
  book.close()
  run = read_run(str(folder))
  for name, losses in (
    ("orchestrator/probe_loss", [5, 4]),
    ("orchestrator/code/probe_loss", [6, 5]),
  ):
    assert [list(values) for values in run.column(name)] == [[20, 40], losses]
  (event,) = events_of(run)
  assert (event.step, event.what, event.evidence) == (40, "warning: x", "Of steps 1 to 20.")


def test_the_verdict_says_facts(tmp_path):
  rows = training(range(10, 110, 10))
  rows += [{"step": 50, "eval/loss": 4.25}, {"step": 100, "eval/loss": 4.5}, end(100)]
  folder = write_run(tmp_path / "a", rows, {"optimizer.weight_decay": 0.25})
  rolled_back(folder / "decisions.jsonl")
  (run,) = make_report([read_run(str(folder))]).runs
  said = " ".join(run.verdict)
  for sentence in (
    "It finished at step 100 of 100.",
    "The training loss went from 4.9 (step 10) to 4 (step 100).",
    "The best evaluation has loss 4.25 at step 50; the last one has 4.5 at step 100, +0.25.",
    "carried out 1 decision and made 0 others",
    "Event 1, step 50: decision 0: rolls back to step 40",
    "Of 2m00s of wall time: step 75%, compile 25%.",
  ):
    assert sentence in said, said
  (table,) = (one for one in run.figures if one.title.startswith("Settings"))
  assert ("optimizer.weight_decay", "0.1", "0.25") in table.rows


def test_credentials_in_addresses_are_masked(tmp_path):
  address = "https://me:secret@host/text.jsonl"
  folder = write_run(tmp_path / "a", [], {"data.paths": (address,)})
  text = json.dumps(make_report([read_run(str(folder))]).to_json())
  assert "host/text.jsonl" in text and "secret" not in text


def test_maps_of_sparse_layers(tmp_path):
  folder = write_run(tmp_path / "a", training(range(10, 110, 10)))
  with (folder / "layers.jsonl").open("w") as file:
    for step in range(1000):  # of which some are read
      load = [[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]
      entropy = [1.0, None if step == 0 else 2.0]
      row = {
        "step": step,
        "moe/load": load,
        "moe/layer_entropy": entropy,
        "moe/layer_dropped": [0, 0],
      }
      file.write(json.dumps(row) + "\n")
  run = read_run(str(folder))
  maps = {one.title: one for one in figures_of(run, []) if one.kind == "heat"}
  titles = {"Fullest expert", "Emptiest expert", "Load of each expert", "Load at the end"}
  assert set(maps) == titles | {"Entropy of the routers"}
  assert {row[0] for row in maps["Fullest expert"].values} == {1.0, 2.0}
  assert maps["Load at the end"].values == ((2.0, 2.0, 0.0, 0.0), (1.0,) * 4)
  entropy = maps["Entropy of the routers"]
  assert len(entropy.x) <= 120 and entropy.x[-1] == 999 and entropy.values[1][0] is None
  assert "240 of 1,000 rows" in entropy.about
