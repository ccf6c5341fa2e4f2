"""Runs that learn from a larger model: they come nearer to it, also after a kill."""

import shutil

import pytest
from train_helpers import assert_same, logged, on_texts

from ats_jax.train.loop import train
from ats_jax.train.teacher import FOLDER

pytestmark = pytest.mark.thorough
STEPS = 12


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
  """The configs of runs, the folder of a teacher and a student, and the student's last state."""
  folder = tmp_path_factory.mktemp("distill")
  settings = {
    "data.tokenizer": "bytes", "num_steps": STEPS, "optimizer.learning_rate": 1e-2,
    "checkpoint.every_steps": 4, "checkpoint.keep": 3, "orchestrator.mode": "act",
    "orchestrator.check_interval": 4,
  }  # fmt: skip
  config = on_texts(folder, settings)
  train(config(model__num_layers=2, model__d_model=64, num_steps=30), folder / "teacher")
  loss = {"name": "distill", "teacher": str(folder / "teacher"), "top_k": 8, "labels": 0.1}
  return config, folder, loss, train(config(step__loss=loss), folder / "student")


def test_a_student_comes_nearer_to_its_teacher(taught):
  _, folder, *_ = taught
  apart, loss = (logged(folder / "student", f"train/{x}") for x in ("divergence", "loss"))
  assert apart[STEPS] < 0.5 * apart[1] and loss[STEPS] < loss[1]
  assert logged(folder / "student", "eval/loss")[STEPS] > 0  # of the text alone


def test_it_resumes_bit_for_bit_and_not_without_its_files(taught, tmp_path):
  config, folder, loss, state = taught
  again = shutil.copytree(folder / "student", tmp_path / "again")
  assert_same(train(config(step__loss=loss), again, resume_step=8), state)
  shutil.rmtree(again / FOLDER)
  with pytest.raises(ValueError, match="what its teacher says of the rows"):
    train(config(step__loss=loss, num_steps=STEPS + 2), again)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model__vocab_size": 512}, "The two sizes must be equal"),
    ({"data__tokenizer": "bpe", "data__bpe_vocab_size": 300}, "its tokenizer is not the one"),
  ],
)
def test_another_vocabulary_is_refused(taught, changes, message, tmp_path):
  config, _, loss, _ = taught
  with pytest.raises(ValueError, match=message):
    train(config(step__loss=loss, **changes), tmp_path / "run")
