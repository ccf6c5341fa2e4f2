"""docs/reference/metrics.md names every metric that runs write, and no other."""

import re
from pathlib import Path

import pytest
from helpers import tiny_config
from test_events import TEXT, sparse_run

from ats_jax.metrics.goodput import CATEGORIES
from ats_jax.metrics.memory import _DEVICE_STATS
from ats_jax.metrics.rows import read_jsonl
from ats_jax.train.loop import train

pytestmark = pytest.mark.thorough

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
FIELDS = {"step", "wall_time", "sample"}
# A device's alone: `Throughput` and `memory_metrics` are tested to write them.
NOT_ON_A_CPU = {"train/mfu", "train/mfu_6n", *_DEVICE_STATS.values()}
NOT_ALONE = {"hosts/slowest", "hosts/slowest_ratio"}  # of jobs: tests/multidevice has them


def on_the_page():
  """Name -> (unit, when, meaning), placeholders filled in."""
  found = {}
  rows = re.findall(r"^\| `([^`]+)` \|(.*)\|(.*)\|(.*)\|$", PAGE.read_text(), re.MULTILINE)
  for name, *columns in rows:
    if re.match(r"[a-z]+/", name) and len(columns) == 3:
      for category in (*CATEGORIES, "other") if "CATEGORY" in name else ("",):
        found[name.replace("CATEGORY", category)] = [column.strip() for column in columns]
  return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Names that a sparse run under an orchestrator wrote, and one in 8 bits."""
  folder = tmp_path_factory.mktemp("page")
  changes = {
    "orchestrator.mode": "observe",
    "orchestrator.check_interval": 2,
    "data.validation_paths": (f"{folder}/other.txt",),
    "data.validation_sets": {"code": (f"{folder}/text.txt",)},
  }
  runs = [sparse_run(folder, changes)]
  (folder / "eight.txt").write_text(TEXT)
  eight = {
    "num_steps": 2,
    "model.num_layers": 3,
    "model.vocab_size": 384,
    "precision.fp8": True,
    "data.paths": (f"{folder}/eight.txt",),
    "data.validation_paths": (f"{folder}/other.txt",),
    "data.cache_dir": f"{folder}/cache",
    "log.progress": False,
    "log.writers": ("jsonl",),
    "sample.max_tokens": 0,
  }
  train(tiny_config(eight), folder / "eight")
  runs.append(folder / "eight")
  return {name for run in runs for row in read_jsonl(run / "metrics.jsonl") for name in row}


def test_every_metric_that_is_written_is_on_the_page(written):
  named = {name.replace("eval/code/", "eval/") for name in written} - FIELDS
  assert any(name.startswith("eval/code/") for name in written)
  assert named - on_the_page().keys() == set()


def test_every_metric_on_the_page_is_written(written):
  assert on_the_page().keys() - written == NOT_ON_A_CPU | NOT_ALONE


def test_the_page_says_when_each_is_written():
  for name, (_, when, meaning) in on_the_page().items():
    assert when in ("log", "eval", "save", "look", "end") and meaning, name
