import contextlib

import jax.numpy as jnp
import pytest

from ats_jax.metrics.files import JsonlWriter
from ats_jax.metrics.progress import ProgressBar
from ats_jax.metrics.rows import read_jsonl
from ats_jax.metrics.steplog import StepLog
from ats_jax.metrics.throughput import Throughput
from ats_jax.step.state import StepMetrics

NAMES = ("train/loss", "train/other")


@pytest.fixture
def path(tmp_path):
  return tmp_path / "metrics.jsonl"


@pytest.fixture
def log(path):
  speed = Throughput(
    num_devices=1, peak=None, rows_per_step=1, tokens_per_step=8, flops_per_token={}
  )
  with (
    contextlib.closing(JsonlWriter(path)) as writer,
    StepLog(writer, speed, ProgressBar(9, enabled=False), 2) as log,
  ):
    yield log


def push(log, step, loss):
  log.after(step, None, StepMetrics(jnp.array([loss, step]), {}, NAMES))


def test_a_row_is_written_when_the_next_one_comes(log, path):
  for step in (1, 2, 3):
    push(log, step, 0.5)
  assert read_jsonl(path) == []
  push(log, 4, 0.5)
  assert [row["step"] for row in read_jsonl(path)] == [2]
  with log.pause(4, "eval"):
    first, second = read_jsonl(path)
  assert (first["step"], second["step"]) == (2, 4)
  assert (first["train/loss"], first["train/other"]) == (0.5, 2.0)
  assert first["train/perplexity"] == pytest.approx(1.6487212707)
  assert second["train/tokens_per_sec"] == 8 * second["train/steps_per_sec"] > 0


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run(log, loss):
  push(log, 2, loss)
  with (
    pytest.raises(FloatingPointError, match=r"train/loss is (nan|inf) at step 2"),
    log.pause(2, "checkpoint"),
  ):
    pytest.fail("a checkpoint would be saved here")
