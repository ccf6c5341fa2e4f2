"""What a whole run writes: for TensorBoard, read back by tensorboardX and, with `-m tf`, by itself.

And the page of metrics, which names all of it and nothing else.
"""

import json
import math
import re
import textwrap
from pathlib import Path

import canonical
import pytest
from helpers import CACHED, tiny_config
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData
from test_writer import read_events, scalars_of

from ats_jax.checkpoint import workdir
from ats_jax.config.names import flatten
from ats_jax.metrics.goodput import CATEGORIES
from ats_jax.metrics.memory import _DEVICE_STATS
from ats_jax.metrics.rows import read_jsonl
from ats_jax.train.loop import train

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
FIELDS = {"step", "wall_time", "sample"}
# A device's alone: `Throughput` and `memory_metrics` are tested to write them.
NOT_ON_A_CPU = {"train/mfu", "train/mfu_6n", *_DEVICE_STATS.values()}
OF_A_STUDENT = {"train/divergence"}  # tests/unit/train/test_distill_run.py has it
NOT_ALONE = {"hosts/slowest", "hosts/slowest_ratio"}  # of jobs: tests/multidevice has them
# Of float16: tests/unit/train/test_loss_scale_run.py has them.
NOT_WIDE = {"train/loss_scale", "train/loss_scale_change", "train/skipped", "train/skipped_updates"}
NOT_MIXED = {"orchestrator/risen_sources"}  # of mixtures: tests/unit/orchestrator has it
TEXT = "the cat sat on the mat, and the dog on the log. " * 40


def sparse_run(folder, changes=()):
  """Train two layers with experts, the second of which skips tokens; its workdir."""
  (folder / "text.txt").write_text(TEXT)
  (folder / "other.txt").write_text(TEXT[::-1])
  cfg = tiny_config(
    CACHED
    | canonical.KINDS["hybrid"]
    | {
      "num_steps": 4,
      "model.vocab_size": 384,
      "moe.dispatch": "capacity",
      "data.paths": (str(folder / "text.txt"),),
      "data.validation_paths": (str(folder / "other.txt"),),
      "data.cache_dir": str(folder / "cache"),
      "eval.every_steps": 2,
      "log.every_steps": 2,
      "log.progress": False,
      "log.writers": ("jsonl", "tensorboard"),
      "sample.max_tokens": 8,
      **dict(changes),
    }
  )
  train(cfg, folder / "run")
  return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The workdir of a sparse run in 8 bits under an orchestrator."""
  folder = tmp_path_factory.mktemp("sparse")
  return sparse_run(
    folder,
    {
      "data.validation_sets": {"code": (f"{folder}/text.txt",)},
      "orchestrator.mode": "observe",
      "orchestrator.check_interval": 2,
      "precision.fp8": True,
      "precision.fp8_keep_first": 0,
      "precision.fp8_keep_last": 0,
    },
  )


def values_of(run, plugin=""):
  """(step, tag) -> a value of TensorBoard's, of one plugin."""
  return {
    (event.step, value.tag): value
    for event in read_events(run)
    for value in event.summary.value
    if value.metadata.plugin_data.plugin_name == plugin
  }


@pytest.mark.thorough
def test_the_sample_and_the_settings_are_texts(run):
  found = values_of(run, "text")
  texts = {key: value.tensor.string_val[0].decode() for key, value in found.items()}
  assert texts.keys() == {(4, "sample/text_summary"), (0, "config/text_summary")}
  sample = textwrap.dedent(texts[4, "sample/text_summary"])
  assert sample + "\n" == (run / "samples" / "4.txt").read_text()
  lines = texts[0, "config/text_summary"].splitlines()
  assert "    moe.num_experts = 4" in lines and "    data.tokenizer = 'bytes'" in lines
  rows = [row for row in read_jsonl(run / "metrics.jsonl") if "sample" in row]
  assert [(row["step"], row["sample"]) for row in rows] == [(4, sample)]
  # TensorBoard takes a text for Markdown, in which line breaks would be lost: it is indented.
  assert all(line.startswith("    ") for text in texts.values() for line in text.split("\n"))


@pytest.mark.thorough
def test_the_load_of_experts_is_a_histogram_a_layer(run):
  found = {key: value.histo for key, value in values_of(run).items() if value.HasField("histo")}
  layers = [json.loads(line) for line in (run / "layers.jsonl").read_text().splitlines()]
  assert [row["step"] for row in layers] == [2, 4]
  for row in layers:
    for number, loads in enumerate(row["moe/load"]):
      histogram = found.pop((row["step"], f"moe/load/layer_{number:02d}"))
      assert histogram.num == 4 and histogram.sum == pytest.approx(sum(loads))
      assert (histogram.min, histogram.max) == pytest.approx((min(loads), max(loads)))
  per_layer = {tag for _, tag in found}
  assert per_layer >= {"moe/layer_entropy", "mod/layer_routed"} and "mod/depths" not in per_layer


@pytest.mark.thorough
def test_the_settings_are_hyper_parameters(run):
  found = {
    tag: HParamsPluginData.FromString(value.metadata.plugin_data.content)
    for (_, tag), value in values_of(run, "hparams").items()
  }
  written = found["_hparams_/session_start_info"].session_start_info.hparams
  cfg = workdir.load_config(run)
  assert written.keys() == flatten(cfg).keys()
  assert written["moe.top_k"].number_value == 2 and written["moe.dispatch"].string_value
  metrics = {m.name.tag for m in found["_hparams_/experiment"].experiment.metric_infos}
  assert metrics >= {"eval/loss", "train/loss"}
  assert found["_hparams_/session_end_info"].session_end_info.status  # the run has ended


def on_the_page():
  """Name -> (unit, when, meaning), placeholders filled in."""
  found = {}
  rows = re.findall(r"^\| `([^`]+)` \|(.*)\|(.*)\|(.*)\|$", PAGE.read_text(), re.MULTILINE)
  for name, *columns in rows:
    if re.match(r"[a-z]+/", name) and len(columns) == 3:
      for category in (*CATEGORIES, "other") if "CATEGORY" in name else ("",):
        found[name.replace("CATEGORY", category)] = [column.strip() for column in columns]
  return found


@pytest.mark.thorough
def test_every_metric_that_is_written_is_on_the_page(run):
  rows = read_jsonl(run / "metrics.jsonl")
  written = {name for row in rows for name in row}
  general = lambda name: re.sub("(code|main)/", "", name).replace("layer_00", "layer_NN")
  named = set(map(general, written)) - FIELDS
  assert any(name.startswith("eval/code/") for name in written)
  assert named - on_the_page().keys() == set()
  assert on_the_page().keys() - named == (
    NOT_ON_A_CPU | NOT_ALONE | NOT_MIXED | NOT_WIDE | OF_A_STUDENT
  )
  # What sparse layers are worth.
  rows = [row for row in rows if "train/loss" in row]
  for row in rows:
    assert 0.0 < row["mod/flops_saved"] < 1.0
    assert 0.0 < row["moe/efficiency"] <= 1.0
  events = scalars_of(read_events(run))
  assert events[4, "mod/flops_saved"] == pytest.approx(rows[-1]["mod/flops_saved"])
  assert events[4, "train/tflops_per_device"] > 0


def test_the_page_says_when_each_is_written():
  for name, (_, when, meaning) in on_the_page().items():
    assert when in ("log", "eval", "save", "look", "end") and meaning, name


# TensorBoard's own readers.


@pytest.mark.tf
@pytest.mark.filterwarnings("default")  # those of TensorFlow and TensorBoard
def test_tensorboard_itself_reads_hyper_parameters_and_results(run):
  from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
  from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
  from tensorboard.context import RequestContext
  from tensorboard.plugins.base_plugin import TBContext
  from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

  multiplexer = EventMultiplexer().AddRunsFromDirectory(str(run.parent))
  multiplexer.Reload()
  provider = MultiplexerDataProvider(multiplexer, str(run.parent))
  backend = backend_context.Context(TBContext(data_provider=provider, logdir=str(run.parent)))
  asked = RequestContext()
  hparams = backend.hparams_metadata(asked, "")
  experiment = backend.experiment_from_metadata(asked, "", True, hparams, [])
  request = api_pb2.ListSessionGroupsRequest(slice_size=9)
  request.allowed_statuses.append(api_pb2.STATUS_SUCCESS)
  for metric in experiment.metric_infos:
    request.col_params.add().metric.CopyFrom(metric.name)
  page = list_session_groups.Handler(asked, backend, "", request).run()
  (group,) = page.session_groups
  assert group.hparams["moe.num_experts"].number_value == 4
  results = {value.name.tag: value.value for value in group.sessions[0].metric_values}
  evaluations = [row for row in read_jsonl(run / "metrics.jsonl") if "eval/loss" in row]
  assert results["eval/loss"] == pytest.approx(evaluations[-1]["eval/loss"], rel=1e-6)
  assert math.isfinite(results["train/loss"])


@pytest.mark.tf
@pytest.mark.filterwarnings("default")  # those of TensorFlow and TensorBoard
def test_a_run_through_clus_own_writer_feeds_the_orchestrator(tmp_path):
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

  changes = {
    "log.writers": ("clu",),
    "num_steps": 8,
    "orchestrator.mode": "act",
    "orchestrator.check_interval": 2,
    "mod.routing": "none",
    "mod.capacity": 0.125,
  }
  run = sparse_run(tmp_path, changes)
  assert not (run / "metrics.jsonl").exists()
  events = EventAccumulator(str(run), {"tensors": 0}).Reload()
  steps = lambda tag: [event.step for event in events.Tensors(tag)]
  assert steps("train/loss") == list(range(2, 9, 2))
  assert "reflex/z_loss" in events.Tags()["tensors"]
  # The supervisor looked at them, and its own went through the same writer.
  looks = [json.loads(line) for line in (run / "decisions.jsonl").read_text().splitlines()]
  assert looks and steps("orchestrator/probe_loss")
  assert steps("sample") == [8] and "config" not in events.Tags()["tensors"]
