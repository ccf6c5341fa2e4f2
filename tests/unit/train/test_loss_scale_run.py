"""A run in float16: resume, what the ledger and the log say, and other formats after training."""

import dataclasses
import shutil

import pytest
from train_helpers import assert_same, logged, on_texts

from ats_jax.checkpoint import load_extra, workdir
from ats_jax.inference.load import load_run
from ats_jax.ops.requirements import Device
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.narrate import tell
from ats_jax.train import open as open_module
from ats_jax.train.loop import train
from ats_jax.verbs.evaluate import evaluate_run

STEPS = 12
# The first scales overflow; then it grows fast.
SCALE = {"name": "dynamic", "initial": 2.0**24, "growth_interval": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The config of a run, its workdir, and its last state."""
  settings = {
    "num_steps": STEPS,
    "precision.compute_dtype": "float16",
    "precision.loss_scale": SCALE,
    "checkpoint.every_steps": 6,
    "orchestrator.mode": "act",
    "orchestrator.check_interval": 2,
  }
  folder = tmp_path_factory.mktemp("half")
  cfg = on_texts(folder, settings)()
  return cfg, folder / "run", train(cfg, folder / "run")


def test_a_run_goes_on_with_its_scale_to_the_bit(run, tmp_path):
  cfg, folder, state = run
  killed = shutil.copytree(folder, tmp_path / "killed")
  shutil.rmtree(killed / workdir.CHECKPOINTS / str(STEPS))
  assert_same(train(cfg, killed), state)
  assert load_extra(folder / workdir.CHECKPOINTS, STEPS)["compute_dtype"] == "float16"


def test_auto_goes_on_in_the_format_in_which_it_began(run, tmp_path, monkeypatch):
  cfg, _, state = run
  auto = dataclasses.replace(
    cfg, precision=dataclasses.replace(cfg.precision, compute_dtype="auto")
  )
  with monkeypatch.context() as on_a_t4:
    on_a_t4.setattr(open_module, "this_device", lambda: Device("gpu", "7.5", "Tesla T4"))
    assert_same(train(auto, tmp_path / "run"), state)
  shutil.rmtree(tmp_path / "run" / workdir.CHECKPOINTS / str(STEPS))
  assert_same(train(auto, tmp_path / "run"), state)


def test_overflows_at_the_start_are_told_and_no_fault(run):
  _, folder, state = run
  skipped = logged(folder, "train/skipped")
  number = sum(skipped.values())
  assert skipped[1] and number == int(state.loss_scale.skipped) < STEPS
  lines = ledger.read_lines(folder / workdir.DECISIONS)
  of_scale = [line for line in lines if line["kind"] == "loss_scale"]
  assert sum(len(line["left_out"]) for line in of_scale) == number
  assert of_scale[-1]["scale"] == float(state.loss_scale.scale)
  assert any("loss scale: " in line for line in tell(folder / workdir.DECISIONS))
  assert not [line for line in lines if line["kind"] in ("decision", "bounded", "comparison")]
  checks = [line for line in lines if line["kind"] == "check"]
  assert not [line for line in checks if line["reading"]["nonfinite"]]


def test_a_run_is_used_in_another_format(run):
  _, folder, _ = run
  half, wide = (evaluate_run(folder, "latest", (), dtype)[1] for dtype in ("", "float32"))
  assert half["eval/loss"] != wide["eval/loss"] == pytest.approx(half["eval/loss"], abs=5e-3)
  with load_run(folder, compute_dtype="auto") as loaded:
    assert loaded.program.cfg.precision.compute_dtype == "bfloat16"
    assert "".join(loaded.generate(0, max_tokens=2)) is not None
