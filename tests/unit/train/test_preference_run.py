"""Runs on pairs of answers: the reference is what they began with, also after a kill."""

import json
import math
import shutil

import numpy as np
import pytest
from commands import called
from train_helpers import assert_same, configs, logged

from ats_jax.bridge.safetensors_file import read_header
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.loop import train
from ats_jax.train.reference import FOLDER
from ats_jax.train.run import Run

pytestmark = pytest.mark.thorough


class Killed(BaseException):
  """Ends a run as a signal that nobody can catch does."""


LORA = {"finetune__adapter__name": "lora", "finetune__adapter__rank": 4}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """Runs that are to prefer small letters to large ones."""
  folder = tmp_path_factory.mktemp("pairs")
  letters = [(letter, n) for letter in "abcdefghijklmnop" for n in (1, 2, 3)]
  records = [
    {"prompt": f"{x}{n}", "chosen": x * n, "rejected": x.upper() * (4 - n)} for x, n in letters
  ]
  path = folder / "pairs.jsonl"
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  return configs({
    "data.paths": (str(path),),
    "data.cache_dir": str(folder / "cache"),
    "data.format": "preference",
    "data.tokenizer": "bytes",
    "data.seq_len": 128,
    "data.batch_size": 8,
    "data.validation_fraction": 0.2,
    "optimizer.learning_rate": 1e-2,
    "optimizer.warmup_steps": 0,
    "eval.bigram_baseline": True,
    "step.loss": "dpo",
    "checkpoint.every_steps": 4,
    "num_steps": 12,
  })  # fmt: skip


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
  """The workdir of a run, and its last state."""
  folder = tmp_path_factory.mktemp("whole") / "run"
  return folder, train(config(), folder)


def test_it_learns_from_no_difference_on(whole, caplog):
  folder, _ = whole
  loss, margin = logged(folder, "train/loss"), logged(folder, "preference/margin")
  assert loss[1] == pytest.approx(math.log(2), abs=1e-6) and margin[1] == pytest.approx(0, abs=1e-6)
  assert loss[12] < 0.5 and margin[12] > 0.5 and logged(folder, "train/accuracy")[12] == 1
  held_out = {name: logged(folder, f"eval/{name}")[12] for name in ("loss", "accuracy", "pairs")}
  assert held_out["pairs"] > 0 and held_out["loss"] < 0.6
  assert not logged(folder, "train/perplexity") and not logged(folder, "eval/perplexity")
  shown = called("evaluate", f"--workdir={folder}").out
  assert f"eval/loss {held_out['loss']:.6g}" in shown and "bits" not in shown


def test_a_killed_run_goes_on_with_its_reference(whole, config, tmp_path, monkeypatch):
  finish_update = Run.finish_update

  def dying(run, step, *args):
    if step == 7:
      raise Killed
    finish_update(run, step, *args)

  with monkeypatch.context() as patch, pytest.raises(Killed):
    patch.setattr(Run, "finish_update", dying)
    train(config(), tmp_path)
  assert_same(train(config(), tmp_path), whole[1])


def test_a_run_without_its_reference_does_not_go_on(whole, config, tmp_path):
  folder = tmp_path / "run"
  shutil.copytree(whole[0], folder)
  files = sorted((folder / FOLDER).iterdir())
  assert len(files) == 2 and all(np.load(file).shape[1] == 2 for file in files)
  for file in files:
    file.unlink()
  with pytest.raises(ValueError, match="cannot be read"):
    train(config(num_steps=14), folder)


def test_the_reference_of_adapters_is_their_base(whole, config, tmp_path):
  """It is that of a run which trains all of the same weights."""
  initial = InitialWeights.of(str(whole[0]))
  for name, changes in {"all": {"num_steps": 1}, "adapters": LORA}.items():
    train(config(orchestrator__mode="off", **changes), tmp_path / name, initial)
  of_all, of_adapters = (
    {file.name: np.load(file) for file in (tmp_path / name / FOLDER).iterdir()}
    for name in ("all", "adapters")
  )
  assert of_all.keys() == of_adapters.keys()
  for name, values in of_all.items():
    np.testing.assert_allclose(of_adapters[name], values, rtol=1e-5)
  loss = logged(tmp_path / "adapters", "train/loss")
  assert loss[1] == pytest.approx(math.log(2), abs=1e-6) and loss[12] < 0.69


@pytest.mark.parametrize(
  "changes",
  [
    {"moe__num_experts": 4, "moe__top_k": 2, "moe__d_ff": 16, "moe__aux_loss": 0.01},
    {"precision__compute_dtype": "float16", "precision__loss_scale": "dynamic"},
  ],
  ids=["experts", "float16"],
)
def test_other_models_prefer_too(changes, config, tmp_path):
  """At first the loss is that of no difference, as far as rounding goes."""
  train(config(**changes), tmp_path)
  loss, margin = logged(tmp_path, "train/loss"), logged(tmp_path, "preference/margin")
  half = "precision__compute_dtype" in changes
  assert loss[1] == pytest.approx(math.log(2), abs=1e-2 if half else 1e-6)
  assert margin[12] > 0.3 and logged(tmp_path, "eval/accuracy")[12] > 0.8


def test_labels_alone_teach_the_same(config, tmp_path):
  """Each pair is two answers with a label, and the reference says nothing of a difference yet."""
  changes = {"step__loss": "kto", "data__format": "labelled", "orchestrator__mode": "off"}
  train(config(**changes), tmp_path)
  loss, margin = logged(tmp_path, "train/loss"), logged(tmp_path, "preference/margin")
  assert loss[1] == pytest.approx(0.5, abs=1e-6) and margin[1] == pytest.approx(0, abs=1e-6)
  assert loss[12] < 0.45 and margin[12] > 0.3 and logged(tmp_path, "eval/accuracy")[12] > 0.8
  shown = called("evaluate", f"--workdir={tmp_path}").out
  assert f"eval/answers {logged(tmp_path, 'eval/answers')[12]:.6g}" in shown


def test_a_model_that_rates(config, whole, tmp_path):
  """Its head trains beside adapters on the weights of another run, and it writes no text."""
  initial = InitialWeights.of(str(whole[0]))
  cfg = config(step__loss="reward", sample__max_tokens=4, **LORA)
  state = train(cfg, tmp_path / "run", initial)
  assert not any((tmp_path / "run").glob("samples/*")) and state.model.head.weight.shape[0] == 1
  held_out = logged(tmp_path / "run", "eval/margin")[12]
  assert held_out > 0 and logged(tmp_path / "run", "eval/accuracy")[12] > 0.8
  shown = called("evaluate", f"--workdir={tmp_path}/run").out
  assert f"eval/margin {held_out:.4g}" in shown and "eval/accuracy" in shown
  assert (
    "rates texts and writes none"
    in called("generate", f"--workdir={tmp_path}/run", "--prompt=a").err
  )
  assert_same(train(cfg, tmp_path / "run", resume_step=8), state)
  called("bridge", "export", f"--workdir={tmp_path}/run", f"--folder={tmp_path}/out")
  fields = json.loads((tmp_path / "out" / "config.json").read_text())
  assert fields["architectures"] == ["LlamaForSequenceClassification"]
  tensors = read_header(tmp_path / "out" / "model.safetensors")
  assert "score.weight" in tensors and "lm_head.weight" not in tensors


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_losses_without_a_reference_learn_too(config, loss, tmp_path):
  train(config(step__loss=loss, orchestrator__mode="off"), tmp_path)
  margin = logged(tmp_path, "preference/margin")
  assert margin[12] > margin[1] and not (tmp_path / FOLDER).exists()
