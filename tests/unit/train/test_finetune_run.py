"""Runs with adapters: from another run's weights, resumed bit for bit, exported and begun again."""

import jax
import numpy as np
import pytest
from in_process import printed_by
from train_helpers import assert_same, on_texts

from ats_jax.bridge.convert import load_model
from ats_jax.bridge.folder import open_model_folder
from ats_jax.checkpoint import abstract_like
from ats_jax.inference.load import load_run
from ats_jax.model.adapters import merged
from ats_jax.model.param import Frozen, is_variable, params_of
from ats_jax.store.paths import parse
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.loop import train
from ats_jax.train.open import open_run

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
    pytest.raises(ValueError, match=r"its base is quantised already .*=nf4"),
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
