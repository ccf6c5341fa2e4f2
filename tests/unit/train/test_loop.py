"""The training loop in this process: its numbers against a plain loop, evaluation, divergence."""

import dataclasses
import json
import random
import shutil

import jax
import numpy as np
import pytest
from helpers import CACHED, make_test_mesh, tiny_config

from ats_jax.checkpoint import committed_steps, load_extra
from ats_jax.checkpoint.integrity import read_manifest
from ats_jax.data.splits import open_datasets
from ats_jax.inference.load import load_run
from ats_jax.metrics.goodput import Goodput
from ats_jax.metrics.rows import read_jsonl
from ats_jax.sharding.mesh import make_mesh
from ats_jax.step.program import make_program, predicted_bytes
from ats_jax.train.evaluate import check_fp8, score
from ats_jax.train.loop import due, train
from ats_jax.train.open import speed
from ats_jax.train.report import performance, performance_stats, shorten

RTOL = 1e-5
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")


@pytest.fixture
def config(tmp_path):
  """A function that gives the config of a run on thirty small texts."""
  texts, rng = tmp_path / "texts", random.Random(0)
  texts.mkdir()
  for i in range(30):
    (texts / f"{i}.txt").write_text(" ".join(rng.choices(WORDS, k=rng.randint(5, 60))))

  def make(changes=()):
    return tiny_config(
      {
        **CACHED,
        "num_steps": 6,
        "model.vocab_size": 384,
        "data.paths": (str(texts),),
        "data.validation_fraction": 0.3,
        "data.cache_dir": str(tmp_path / "cache"),
        "log.writers": ("jsonl",),
        "log.every_steps": 1,
        "log.progress": False,
        "sample.max_tokens": 0,
        **dict(changes),
      }
    )

  return make


def test_scores_are_means_over_tokens_of_the_whole_split(config):
  cfg = config()
  _, valid = open_datasets(cfg.data, cfg.seed)
  assert valid.info.num_rows % 8  # the last batch is padded
  rows = valid.read_once(range(valid.info.num_rows))
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program = make_program(cfg)
    model = program.init().model
    whole = np.asarray(program.eval_step(model, rows, program.rules(1)), np.float64)
    found = score(program, model, valid, 0)
    two = dataclasses.replace(cfg.eval, num_batches=2)
    part = score(make_program(dataclasses.replace(cfg, eval=two)), model, valid, 0)
    first = program.eval_step(model, {k: v[:16] for k, v in rows.items()}, program.rules(1))
  loss, correct, tokens = whole
  assert tokens == valid.info.num_tokens == found["eval/tokens"]
  np.testing.assert_allclose(found["eval/loss"], loss / tokens, RTOL)
  np.testing.assert_allclose(found["eval/perplexity"], np.exp(loss / tokens), RTOL)
  np.testing.assert_allclose(found["eval/accuracy"], correct / tokens, RTOL)
  text_bytes = tokens - valid.info.num_documents  # a byte is a token; each document has an eos too
  np.testing.assert_allclose(found["eval/bits_per_byte"], loss / np.log(2) / text_bytes, RTOL)
  np.testing.assert_allclose(part["eval/loss"], first[0] / first[2], RTOL)
  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    program = make_program(cfg)
    many = score(program, program.init().model, valid, 0)
  assert many.keys() == found.keys()
  for name, value in found.items():
    np.testing.assert_allclose(many[name], value, 1e-4, err_msg=name)


@pytest.mark.thorough
def test_the_loop_equals_a_plain_loop(config, tmp_path):
  cfg = config({"model.dropout": 0.1, "step.accum_steps": 2, "data.batch_size": 16})
  cfg = dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, every_steps=3))
  state = train(cfg, tmp_path / "run")
  assert int(state.step) == cfg.num_steps

  dataset, valid = open_datasets(cfg.data, cfg.seed)
  with jax.set_mesh(make_mesh(cfg)):
    program = make_program(cfg)
    plain, losses, evaluations = program.init(), [], []
    for step in range(cfg.num_steps):
      rows = np.arange(step * 16, (step + 1) * 16).reshape(2, 8)
      plain, metrics = program.train_step(plain, dataset.read(rows), program.training_rules(1))
      losses.append(float(metrics["train/loss"]))
      if (step + 1) % 3 == 0:
        evaluations.append(score(program, plain.model, valid, step + 1)["eval/loss"])
  for a, b in zip(*(jax.tree.leaves(s.model) for s in (state, plain)), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
  logged = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
  np.testing.assert_allclose([r["train/loss"] for r in logged if "train/loss" in r], losses, RTOL)
  np.testing.assert_allclose(
    [r["eval/loss"] for r in logged if "eval/loss" in r], evaluations, 1e-4
  )
  checkpoints = tmp_path / "run" / "checkpoints"
  assert committed_steps(checkpoints) == [cfg.num_steps]
  extra = load_extra(checkpoints)
  assert extra["position"] == {"row": 6 * 16, "data": dataset.info.fingerprint}
  assert extra["devices"]["count"] == 8 and extra.keys() == {"position", "devices"}


def test_a_run_ends_with_what_it_took(config, tmp_path, caplog):
  cfg = config()
  with caplog.at_level("INFO", logger="absl"):
    train(cfg, tmp_path / "run")
  stats = json.loads((tmp_path / "run" / "performance.json").read_text())
  assert stats["train/step_secs_p50"] <= stats["train/step_secs_max"]
  tokens = cfg.data.batch_size * cfg.data.seq_len
  assert stats["train/tokens_per_sec"] == pytest.approx(tokens * stats["train/steps_per_sec"])
  shares = [value for name, value in stats.items() if name.endswith("_share")]
  assert sum(shares) == pytest.approx(1.0)
  assert stats["kernels"]["attention"] == "xla" and stats["compilation_cache"].startswith(
    CACHED["compilation_cache"]
  )
  with jax.set_mesh(make_mesh(cfg)):
    program = make_program(cfg)
    step = program.compile_train_step(program.init(), program.training_rules(1))
  assert stats["memory/predicted_gib"] == predicted_bytes(step) / 2**30
  assert performance(stats) in caplog.text
  speed_line = (
    f"{stats['train/tokens_per_sec']:,.0f} tokens/s, {stats['train/tflops_per_device']:,.3g}"
  )
  assert f"speed on 8 x cpu: {speed_line} TFLOP/s a device\n" in caplog.text
  summaries = [Goodput().summary(), speed(program).summary()]
  again = performance_stats(summaries, None, {"kernels": {}, "compilation_cache": "off"})
  assert "memory/predicted_gib" not in again
  assert "too few steps to time" in performance(again)


@pytest.mark.thorough
def test_eight_bits_that_cost_too_much_are_switched_off_for_good(config, tmp_path, caplog):
  eight = {"model.num_layers": 3, "precision.fp8": True, "precision.fp8_band": 0.0}
  changes = {"eval.every_steps": 2, "checkpoint.every_steps": 2, "optimizer.learning_rate": 0.03}
  cfg = config(eight | changes | {"num_steps": 4})
  train(cfg, tmp_path / "run")
  assert (gaps := fp8_gaps(tmp_path))[2] > 0.0 and gaps[4] is None
  assert f"they raise the validation loss by {gaps[2]:.4f}" in caplog.text
  assert load_extra(tmp_path / "run" / "checkpoints")["fp8"] is False
  caplog.clear()
  train(dataclasses.replace(cfg, num_steps=6), tmp_path / "run")
  assert "switched off for the rest" not in caplog.text
  assert fp8_gaps(tmp_path) == gaps | {6: None}


@pytest.mark.thorough
def test_a_run_goes_on_in_another_number_format(config, tmp_path):
  """From float32 to 8 bits; without a scan where there was one."""
  layers = {"model.num_layers": 3}
  wide = {"precision.fp8": False, "step.scan_unroll": 1, "num_steps": 3}
  train(config(layers | wide), tmp_path / "run")
  other = {"precision.fp8": True, "step.scan_unroll": 3, "num_steps": 6}
  assert int(train(config(layers | other), tmp_path / "run").step) == 6
  rows = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "train/loss" in row]
  assert [row["step"] for row in rows] == list(range(1, 7))
  assert rows[3]["train/loss"] < rows[0]["train/loss"]
  names = read_manifest(tmp_path / "run/checkpoints/6")["leaves"]
  for layer in range(3):
    assert {f"model/layers/{layer}/attn/q", f"model/layers/{layer}/mlp/down"} <= names.keys()
    assert sum(n.endswith(f"/mu/layers/{layer}/attn/q") for n in names) == 1
  assert not any("segments" in name for name in names)


def fp8_gaps(folder):
  rows = read_jsonl(folder / "run" / "metrics.jsonl")
  return {r["step"]: r.get("eval/fp8_gap") for r in rows if "eval/loss" in r}


@pytest.mark.parametrize("gap, kept", [(-0.1, True), (0.009, True), (0.011, False)])
def test_the_band_is_a_share_of_the_loss(gap, kept):
  cfg = tiny_config({"model.num_layers": 3, "precision.fp8": True, "precision.fp8_band": 0.005})
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program = make_program(cfg)
  assert check_fp8(program, {"eval/loss": 2.0, "eval/fp8_gap": gap}).fp8 is kept
  assert check_fp8(program, {"eval/loss": 2.0}).fp8  # nothing was compared


def test_weights_that_are_not_finite_are_never_saved(config, tmp_path):
  """Not even where the step was not logged, or its loss was still finite."""
  cfg = config(
    {
      "optimizer.learning_rate": 1e30,
      "checkpoint.every_steps": 1,
      "log.every_steps": 5,
    }
  )
  with pytest.raises(FloatingPointError, match="after step 1, which was not saved"):
    train(cfg, tmp_path / "run")
  assert committed_steps(tmp_path / "run" / "checkpoints") == []


@pytest.mark.thorough
def test_a_checkpoint_of_another_run_with_the_same_settings_is_refused(config, tmp_path):
  cfg = config({"checkpoint.every_steps": 3})
  one, other = tmp_path / "one", tmp_path / "other"
  for folder in (one, other):
    train(dataclasses.replace(cfg, num_steps=3), folder)
  train(dataclasses.replace(cfg, num_steps=4), other)
  moved = (other / "checkpoints" / "4").rename(one / "checkpoints" / "4")
  found, expected = ((folder / "run_id").read_text().strip() for folder in (other, one))
  says = f"{moved} is of another run: {found}, expected {expected}"
  with pytest.raises(ValueError, match=says):
    train(cfg, one)
  with pytest.raises(ValueError, match=says), load_run(one):
    pass
  shutil.rmtree(moved)
  assert int(train(cfg, one).step) == cfg.num_steps


def test_due():
  assert [s for s in range(1, 10) if due(s, 3)] == [3, 6, 9]
  assert not any(due(s, 0) for s in range(1, 10))


@pytest.mark.parametrize(
  ("value", "text"), [(3.174751, "3.1748"), (0.30686, "0.30686"), (175542, "175,542")]
)
def test_a_score_is_short_and_a_count_whole(value, text):
  assert shorten(value) == text
