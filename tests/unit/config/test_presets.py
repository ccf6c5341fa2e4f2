"""Presets, as a user names them, and the packaged files."""

import itertools

import pytest

from ats_jax.config import from_config_dict
from ats_jax.config.build import resolve
from ats_jax.config.file import load_file, packaged
from ats_jax.config.presets import PRESETS, VARIANTS, preset
from ats_jax.planner.describe import describe
from ats_jax.step.schedule import warmup_steps
from lab.model_tables import sizes


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
  """A folder without config files."""
  monkeypatch.chdir(tmp_path)


def test_a_name_gives_its_preset_from_any_folder():
  assert packaged().keys() == {"card", "debug", "dense_1_5b", "finetune", "modes"}
  assert not packaged().keys() & PRESETS.keys()
  for name in PRESETS:
    assert load_file(name) == load_file(f"{name}:") == preset(name)
  assert load_file("b7:hybrid") == preset("b7", "hybrid") != preset("b7")


def test_each_can_be_trained_with_the_tokenizer_it_names():
  for name, variant in itertools.product(PRESETS, VARIANTS):
    cfg = from_config_dict(preset(name, variant))
    cfg = resolve(cfg, cfg.data.bpe_vocab_size)
    assert cfg.model.vocab_size == PRESETS[name].vocab_size
    assert (cfg.moe.num_experts > 0) == (variant in ("moe", "hybrid"))
    assert (cfg.mod.routing == "learned") == (variant in ("mod", "hybrid"))
    assert cfg.model.d_ff == PRESETS[name].d_ff
    assert cfg.moe.d_ff == (cfg.model.d_ff if cfg.moe.num_experts else 0)


def test_the_one_for_a_card_of_80_gb_fits_there():
  plan = describe(from_config_dict(load_file("dense_1_5b")))
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


# Exact parameters, and those that a token is multiplied with; `models.md` has those of all.
COUNTS = {
  "b7:moe": (36_177_711_104, 10_206_580_736),
  "b300:moe": (3_358_175_744_000, 934_706_892_800),
  "demo_14m:moe": (14_043_776, 8_440_448),
  "p828_60m:moe": (56_888_832, 54_529_536),
  "llama_7b:dense": (8_030_261_248, 8_030_261_248),
}


def test_parameters_are_counted_from_the_model():
  found = {name: sizes(from_config_dict(preset(*name.split(":"))))[1] for name in COUNTS}
  assert {name: (c.parameters, round(c.active)) for name, c in found.items()} == COUNTS


def test_weights_are_float32_and_a_warm_up_fits_any_number_of_steps():
  for name in [*packaged(), *PRESETS]:
    config = load_file(name)
    if name not in ("card", "finetune"):  # which are made to fit
      assert config.precision.param_dtype == "float32", name
    if name == "modes":  # its phases are of sources
      config.data.sources = {"base": ["text"], "chat": ["chats.jsonl"]}
    config.num_steps = 20
    assert warmup_steps(from_config_dict(config)) <= 5, name
  debug = from_config_dict(load_file("debug"))
  assert (debug.num_steps, warmup_steps(debug)) == (400, 50)


def test_variants():
  sparse = {name for name in PRESETS if preset(name).moe.num_experts}
  assert sparse == {"demo_14m", "moe_200m", "p828_60m", "p828_800m", "moe_small"}
  assert preset("moe_small", "dense").moe.num_experts == 0

  with pytest.raises(ValueError, match=r"^unknown variant 'big' of b7\. .*'dense'.*'hybrid'"):
    load_file("b7:big")
