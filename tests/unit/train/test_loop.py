"""The training loop in this process: its numbers against a plain loop, evaluation, divergence."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from helpers import CACHED, make_test_mesh, tiny_config
from train_helpers import logged, on_texts

from ats_jax.checkpoint import committed_steps, load_extra
from ats_jax.checkpoint.integrity import read_manifest
from ats_jax.data.splits import open_datasets
from ats_jax.metrics.goodput import Goodput
from ats_jax.model.stats import by_layer
from ats_jax.sharding.mesh import make_mesh
from ats_jax.step.program import make_program, predicted_bytes
from ats_jax.train.evaluate import check_fp8, score
from ats_jax.train.loop import due, train
from ats_jax.train.open import speed
from ats_jax.train.report import performance, performance_stats, shorten

RTOL = 1e-5


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  return on_texts(tmp_path_factory.mktemp("loop"), {})


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
    halves = dataclasses.replace(cfg, eval=two, step=dataclasses.replace(cfg.step, accum_steps=2))
    part = score(make_program(halves), model, valid, 0)
    batches = [{k: v[i : i + 8] for k, v in rows.items()} for i in (0, 8)]
    first = sum(np.asarray(program.eval_step(model, b, program.rules(1))) for b in batches)
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


def test_scores_tell_what_each_skipping_layer_takes(config):
  cfg = config(model__num_layers=4, model__init_std=0.3, mod__routing="learned")
  _, valid = open_datasets(cfg.data, cfg.seed)
  rows = valid.read_once(range(valid.info.num_rows))
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program = make_program(cfg)
    model = program.init().model
    found = score(program, model, valid, 0)
    places = {"positions_BT": rows["positions"], "segment_ids_BT": rows["segment_ids"]}
    _, stats = model(rows["tokens"], **places, rules=program.rules(0))
    mod = by_layer(stats, model.layout, "mod")
  shares = np.asarray(mod.routed) / np.asarray(mod.tokens)
  names = [f"eval/mod/layer_routed/layer_{number:02d}" for number in range(len(shares))]
  assert [name for name in found if "/mod/" in name] == names and len(names) >= 1
  np.testing.assert_allclose([found[name] for name in names], shares, RTOL)


@pytest.mark.thorough
def test_the_loop_equals_a_plain_loop(config, tmp_path):
  changes = {"model__dropout": 0.1, "step__accum_steps": 2, "data__batch_size": 16}
  cfg = config(eval__every_steps=3, **changes)
  state = train(cfg, tmp_path)
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
  np.testing.assert_allclose(list(logged(tmp_path, "train/loss").values()), losses, RTOL)
  np.testing.assert_allclose(list(logged(tmp_path, "eval/loss").values()), evaluations, 1e-4)
  checkpoints = tmp_path / "checkpoints"
  assert committed_steps(checkpoints) == [cfg.num_steps]
  extra = load_extra(checkpoints)
  assert extra["position"] == {"row": 6 * 16, "data": dataset.info.fingerprint}
  assert extra["held_out"] == {"": valid.info.fingerprint}
  assert extra["devices"]["count"] == 8
  assert extra.keys() == {"position", "devices", "held_out"}


def test_a_run_ends_with_what_it_took(config, tmp_path, caplog):
  cfg = config()
  with caplog.at_level("INFO", logger="absl"):
    train(cfg, tmp_path)
  stats = json.loads((tmp_path / "performance.json").read_text())
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
def test_a_run_goes_on_in_another_number_format(config, tmp_path):
  """From float32 to 8 bits; without a scan where there was one."""
  layers, run = {"model__num_layers": 3}, tmp_path / "run"
  train(config(precision__fp8=False, step__scan_unroll=1, num_steps=3, **layers), run)
  cfg = config(precision__fp8=True, step__scan_unroll=3, **layers)
  assert int(train(cfg, run).step) == 6
  losses = logged(run, "train/loss")
  assert list(losses) == list(range(1, 7)) and losses[4] < losses[1]
  names = read_manifest(run / "checkpoints" / "6")["leaves"]
  for layer in range(3):
    assert {f"model/layers/{layer}/attn/q", f"model/layers/{layer}/mlp/down"} <= names.keys()
    assert sum(n.endswith(f"/mu/layers/{layer}/attn/q") for n in names) == 1
  assert not any("segments" in name for name in names)


@pytest.mark.parametrize("gap, kept", [(-0.1, True), (0.009, True), (0.011, False)])
def test_the_band_is_a_share_of_the_loss(gap, kept):
  cfg = tiny_config({"model.num_layers": 3, "precision.fp8": True, "precision.fp8_band": 0.005})
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program = make_program(cfg)
  assert check_fp8(program, {"eval/loss": 2.0, "eval/fp8_gap": gap}).fp8 is kept
  assert check_fp8(program, {"eval/loss": 2.0}).fp8  # nothing was compared


def test_weights_that_are_not_finite_are_never_saved(config, tmp_path):
  """Not even where the step was not logged, or its loss was still finite."""
  cfg = config(optimizer__learning_rate=1e30, checkpoint__every_steps=1, log__every_steps=5)
  with pytest.raises(FloatingPointError, match="after step 1, which was not saved"):
    train(cfg, tmp_path)
  assert committed_steps(tmp_path / "checkpoints") == []


def test_what_is_due_and_how_numbers_are_shown():
  assert [s for s in range(1, 10) if due(s, 3)] == [3, 6, 9]
  assert not any(due(s, 0) for s in range(1, 10))
  assert [shorten(x) for x in (3.174751, 0.30686, 175542)] == ["3.1748", "0.30686", "175,542"]
