"""The presets' config files, as a user names them."""

from pathlib import Path

import pytest
from ml_collections.config_flags import config_flags

from ats_jax.config import from_config_dict
from ats_jax.config.build import resolve
from ats_jax.config.presets import PRESETS, VARIANTS, preset
from ats_jax.planner.describe import describe

CONFIGS = Path(__file__).parents[3] / "configs"


def load(name, tmp_path, monkeypatch):
  """The config file as the flag loads it, from some other folder."""
  monkeypatch.chdir(tmp_path)
  return config_flags.ConfigFileFlagParser("config").parse(str(CONFIGS / name)).to_dict()


def test_every_preset_has_a_file():
  files = {p.stem for p in CONFIGS.glob("*.py")} - {"debug", "dense_1_5b"}
  assert files == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_the_file_gives_its_preset_from_any_folder(name, tmp_path, monkeypatch):
  assert load(f"{name}.py", tmp_path, monkeypatch) == preset(name).to_dict()
  assert load(f"{name}.py:hybrid", tmp_path, monkeypatch) == preset(name, "hybrid").to_dict()


@pytest.mark.parametrize("name", PRESETS)
def test_it_can_be_trained_with_the_tokenizer_it_names(name):
  for variant in VARIANTS:
    cfg = from_config_dict(preset(name, variant))
    cfg = resolve(cfg, cfg.data.bpe_vocab_size)
    assert cfg.model.vocab_size == PRESETS[name].vocab_size
    assert (cfg.moe.num_experts > 0) == (variant in ("moe", "hybrid"))
    assert (cfg.mod.routing == "learned") == (variant in ("mod", "hybrid"))
    assert cfg.model.d_ff == PRESETS[name].d_ff
    assert cfg.moe.d_ff == (cfg.model.d_ff if cfg.moe.num_experts else 0)


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIGS.glob("*.py")))
def test_weights_are_float32(name, tmp_path, monkeypatch):
  assert load(f"{name}.py", tmp_path, monkeypatch)["precision"]["param_dtype"] == "float32"


def test_the_one_for_a_card_of_80_gb_fits_there(tmp_path, monkeypatch):
  plan = describe(from_config_dict(load("dense_1_5b.py", tmp_path, monkeypatch)))
  needs = sum((plan["device_bytes_exact"] | plan["device_bytes_estimated"]).values())
  assert plan["run"]["formats"]["weights"] == "float32" and plan["run"]["devices"] == 1
  assert needs < 0.9 * 80e9  # XLA and cuDNN want some of it


def test_every_dimension_is_used():
  config, dims = preset("p828_60m"), PRESETS["p828_60m"]
  assert config.model.norm_eps == dims.norm_eps == 1e-5
  assert config.moe.num_shared == dims.num_shared == 1
  assert (config.data.seq_len, config.data.batch_size) == (2048, 16)
  assert (config.step.remat, config.optimizer.learning_rate) == ("none", 3e-4)
  settings = {k for s in ("model", "moe", "data", "optimizer", "step") for k in config[s]}
  assert vars(dims).keys() - settings == {"variant"}


def test_what_the_name_alone_stands_for():
  sparse = {name for name in PRESETS if preset(name).moe.num_experts}
  assert sparse == {"moe_200m", "p828_60m", "p828_800m", "moe_small"}
  assert preset("moe_small", "dense").moe.num_experts == 0


def test_an_unknown_variant():
  with pytest.raises(ValueError, match=r"configs/b7.py: unknown variant 'big'.*'dense'.*'hybrid'"):
    preset("b7", "big")
