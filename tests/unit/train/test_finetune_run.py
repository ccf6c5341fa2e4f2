"""Runs with adapters: from another run's weights, resumed bit for bit, exported and begun again."""

import shutil

import jax
import numpy as np
import pytest
from in_process import printed_by
from train_helpers import assert_same, on_texts

from ats_jax.bridge.convert import load_model
from ats_jax.bridge.folder import open_model_folder
from ats_jax.checkpoint import CheckpointManager, abstract_like
from ats_jax.checkpoint.integrity import read_manifest
from ats_jax.inference.load import load_run
from ats_jax.model.adapters import merged
from ats_jax.model.layout import stacks
from ats_jax.model.param import Frozen, is_variable, params_of
from ats_jax.store.paths import parse
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.loop import train
from ats_jax.train.open import open_run
from ats_jax.verbs.evaluate import evaluate_run

LORA = {"finetune__adapter__name": "lora", "finetune__adapter__rank": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """The configs of runs, a base, and a run with adapters on it with its last state."""
  folder = tmp_path_factory.mktemp("finetune")
  config = on_texts(folder, {"checkpoint.every_steps": 3, "checkpoint.keep": 3})
  train(config(), folder / "base")
  state = train(config(**LORA), folder / "tuned", InitialWeights.of(str(folder / "base")))
  return config, folder, state


def test_it_begins_with_the_weights_and_resumes_bit_for_bit(runs):
  config, folder, state = runs
  with load_run(folder / "base") as base:
    frozen = [v for v in leaves(state.model) if isinstance(v, Frozen)]
    for old, new in zip(leaves(base.model), frozen, strict=True):
      np.testing.assert_array_equal(old[...], new[...])
  assert any(np.any(np.asarray(param[...])) for param in params_of(state.model))
  log = (folder / "tuned" / "log.txt").read_text()
  assert "trains: adapter 7 tensors, " in log and "adapted: 7 matrices of " in log
  assert_same(train(config(**LORA), folder / "tuned", resume_step=3), state)


def test_checkpoints_leave_the_frozen_weights_out(runs):
  _, folder, state = runs
  names = read_manifest(folder / "tuned" / "checkpoints" / "6")["leaves"]
  of_model = {name.partition("/adapter/")[2] for name in names if name.startswith("model/")}
  needed_by = (folder / "base" / "checkpoints" / "6" / "kept_for").read_text()
  assert needed_by == f"the frozen weights of {folder / 'tuned'}\n"
  assert of_model == {"a", "b"} and "opt_state/1/mu/layers/0/attn/q/adapter/a" in names
  with load_run(folder / "tuned") as run:
    assert_same(run.model, state.model)


def test_the_engine_of_an_adapted_run_is_compiled_while_weights_are_read(runs, compiled_names):
  _, folder, _ = runs
  meanwhile = lambda run: run.compile(max_tokens=2)
  with load_run(folder / "tuned", devices=1, meanwhile=meanwhile) as run:
    assert {"jit(chunk)", "jit(decode)"} <= set(compiled_names)
    compiled_names.clear()
    assert list(run.generate(0, max_tokens=2))
  assert {"jit(chunk)", "jit(decode)", "jit(_pack)"}.isdisjoint(compiled_names)


@pytest.mark.parametrize(("base", "tensor"), [("plain", 2), ("nf4", 1)])
def test_what_was_left_out_is_read_again_onto_any_mesh(base, tensor, runs, tmp_path):
  """With the average that a run keeps, and where an earlier version saved all of it."""
  config, folder, _ = runs
  changes = LORA | {"finetune__adapter__base": base, "optimizer__ema_decay": 0.5}
  initial = InitialWeights.of(str(folder / "base"))
  state = train(config(**changes), tmp_path / "run", initial)
  shutil.copytree(tmp_path / "run", tmp_path / "other")
  mesh = {"mesh__fsdp": 2, "mesh__tensor": tensor}
  with open_run(config(**changes, **mesh), parse(tmp_path / "other")) as run:
    assert_same(run.state, state)
    whole = CheckpointManager(tmp_path / "whole", run.cfg.checkpoint, stacks=stacks(run.cfg))
    with whole:
      whole.save(6, run.state, {}, wait=True)
      assert_same(whole.restore_latest(run.state)[1], state)
  of_part, of_whole = (folder_bytes(tmp_path / name / "6") for name in ("run/checkpoints", "whole"))
  assert of_part < of_whole


def folder_bytes(folder):
  return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["a run", "a folder"])
def test_a_base_that_is_gone_or_another_one_is_one_clear_line(kind, runs, tmp_path):
  config, folder, _ = runs
  base, tuned, other = tmp_path / "base", tmp_path / "tuned", tmp_path / "other"
  is_run = kind == "a run"
  name = "step 6 of " if is_run else ""
  train(config(seed=1), other)
  if is_run:
    shutil.copytree(folder / "base", base)
  else:
    for source, to in ((folder / "base", base), (other, tmp_path / "exported")):
      printed_by("bridge", "export", f"--workdir={source}", f"--folder={to}")
    other = tmp_path / "exported"
    shutil.copy(base / "tokenizer.json", tmp_path)
  tokenizer = {} if is_run else {"data__tokenizer": f"{tmp_path}/tokenizer.json"}
  made = config(**LORA | tokenizer)
  state = train(made, tuned, InitialWeights.of(str(base)))
  moved = base.rename(tmp_path / "moved")
  gone = f"leave out its frozen weights, those of {name}{base}, which cannot be read: "
  for use in (lambda: train(made, tuned), lambda: evaluate_run(parse(tuned), "latest")):
    with pytest.raises(ValueError, match=gone) as error:
      use()
    assert "\n" not in str(error.value) and f"make {tuned}/base a copy" in str(error.value)
  assert_same(train(made, tuned, InitialWeights.of(str(moved))), state)
  (tuned / "base").symlink_to(moved)
  with load_run(parse(tuned)) as run:
    assert_same(run.model, state.model)
  shutil.rmtree(moved)
  other.rename(moved)
  with pytest.raises(ValueError, match=r"moved, which have changed .* expected [0-9a-f]{12}\. Put"):
    train(made, tuned, InitialWeights.of(str(moved)))


def test_adapters_of_random_weights_are_refused(runs, tmp_path):
  config, *_ = runs
  with (
    pytest.raises(ValueError, match=r"adapter\.name=lora trains beside .* with --init_from"),
    open_run(config(**LORA), parse(tmp_path / "run")),
  ):
    pass


def leaves(model):
  found = jax.tree.leaves(model, is_leaf=is_variable)
  return [v for v in found if is_variable(v)]


def test_an_export_for_peft_begins_another_run(runs):
  config, folder, state = runs
  out = folder / "adapters"
  told = printed_by(
    "bridge", "export", f"--workdir={folder}/tuned", f"--folder={out}", "--format=peft"
  )
  assert told.endswith("14 tensors of adapters\n")
  initial = InitialWeights.of(str(folder / "base"), adapter=str(out))
  with open_run(config(**LORA), parse(folder / "again"), initial=initial) as run:
    assert_same(run.state.model, state.model)
  wanted = "--config.finetune.adapter.alpha=32 --config.finetune.adapter.scale=lora"
  for changes, message in (
    ({"finetune__adapter__alpha": 3.0}, wanted),
    ({"finetune__adapter__targets": ("down",)}, "begin with the model that it belongs to"),
  ):
    with (
      pytest.raises(ValueError, match=message),
      open_run(config(**LORA | changes), parse(folder / message[:5]), initial=initial),
    ):
      pass


def test_a_quantised_base_is_read_a_layer_at_a_time_and_resumes_bit_for_bit(runs):
  config, folder, _ = runs
  made = config(**LORA, finetune__adapter__base="nf4")
  state = train(made, folder / "narrow", InitialWeights.of(str(folder / "base")))
  assert_same(train(made, folder / "narrow", resume_step=3), state)
  printed_by("bridge", "export", f"--workdir={folder}/narrow", f"--folder={folder}/widened")
  with load_run(folder / "base") as run:
    abstract = abstract_like(run.program.abstract_base(), jax.sharding.get_mesh())
    model = load_model(open_model_folder(folder / "widened"), run.program.cfg, abstract)
    assert_same(model, merged(state.model))
  twice = InitialWeights.of(str(folder / "narrow"))
  with (
    pytest.raises(ValueError, match=r"has adapters \(finetune\.adapter\.name=lora\) on a base"),
    open_run(made, parse(folder / "twice"), initial=twice),
  ):
    pass


def test_an_export_of_the_model_is_merged(runs):
  _, folder, state = runs
  out = folder / "merged"
  printed_by("bridge", "export", f"--workdir={folder}/tuned", f"--folder={out}")
  with load_run(folder / "base") as run:
    abstract = abstract_like(run.program.abstract_base(), jax.sharding.get_mesh())
    model = load_model(open_model_folder(out), run.program.cfg, abstract)
    assert_same(model, merged(state.model))
  assert not [path for path in folder.iterdir() if ".merged" in path.name]
