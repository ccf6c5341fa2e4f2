"""Files and mappings -> typed settings; --explain; comparison of two configs; derived sizes."""

import dataclasses
from pathlib import Path
from typing import get_origin

import pytest
from helpers import tiny_config
from refusals import wrongly_refused

from ats_jax.config import Config, base_config, from_config_dict
from ats_jax.config.build import resolve
from ats_jax.config.explain import explain
from ats_jax.config.names import default_of, differences, flatten, in_words, settings, to_dict

SETTINGS = settings()
ROOT = Path(__file__).parents[3]


def config_with(**changes):
  return from_config_dict(
    to_dict_with({name.replace("__", "."): value for name, value in changes.items()})
  )


def to_dict_with(changes):
  config = base_config()
  config.update_from_flattened_dict(changes)
  return config


def test_defaults_survive_the_round_trip():
  assert from_config_dict(base_config()) == Config()
  assert from_config_dict(to_dict(Config())) == Config()
  assert from_config_dict({}) == Config()
  assert hash(from_config_dict({})) == hash(Config())


def test_a_config_is_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    Config().model.num_layers = 3


def test_wrong_input_is_named():
  cases = [
    ({"model": {"num_layer": 3}}, r"unknown key model.num_layer. Did you mean model.num_layers\?"),
    ({"modle": {}}, r"unknown key modle. Did you mean model\?"),
    ({"model": {"zzz": 3}}, r"unknown key model.zzz. Known: activation, attn_out_bias, "),
    ({"model": 3}, "model is a section, got 3"),
    ([], r"it is a section, got \[\]"),
    ({"model": {"num_layers": 2.0}}, "model.num_layers must be int, got 2.0"),
    ({"model": {"num_layers": "2"}}, "model.num_layers must be int, got '2'"),
    ({"model": {"num_layers": True}}, "model.num_layers must be int, got True"),
    ({"model": {"num_layers": None}}, "model.num_layers must be int, got None"),
    ({"model": {"qk_norm": 1}}, "model.qk_norm must be bool, got 1"),
    ({"optimizer": {"b1": True}}, "optimizer.b1 must be float, got True"),
    ({"optimizer": {"b1": "0.9"}}, "optimizer.b1 must be float, got '0.9'"),
    ({"data": {"paths": "a"}}, "data.paths must be a list of str, got 'a'"),
    ({"seed": 1.5}, "seed must be int, got 1.5"),
  ]
  assert not wrongly_refused(from_config_dict, cases, lambda words: f"config: {words}")


def test_whole_numbers_are_floats_where_a_float_is_wanted():
  cfg = from_config_dict({"optimizer": {"grad_clip": 1}})
  assert isinstance(cfg.optimizer.grad_clip, float)


def test_config_files_cannot_invent_settings_or_change_types():
  config = base_config()
  with pytest.raises(TypeError):
    config.model.num_layers = "three"
  config.model.num_layer = 3
  with pytest.raises(ValueError, match=r"model.num_layer. Did you mean model.num_layers\?"):
    from_config_dict(config)


def test_there_are_fewer_than_200_settings():
  assert 60 < len(SETTINGS) < 200
  assert set(SETTINGS) == set(flatten(Config()))


def explanation_lacks(name):
  """Whether `--explain` leaves something of a setting out."""
  field = SETTINGS[name]
  text, meta = explain(name), field.metadata
  ranged = meta["low"] is not None and not meta["choices"]
  return not (
    text.startswith(f"{name} ({in_words(field.type)}): ")
    and meta["doc"] in text
    and f"default {default_of(name, field)!r}" in text
    and ("may change on resume" in text) == (meta["resume"] == "free")
    and ("fixed for a workdir" in text) == (meta["resume"] == "fixed")
    and type(field.default) is (get_origin(field.type) or field.type)
    and all(choice in text for choice in meta["choices"])
    and (not ranged or f"range [{meta['low']:g}, " in text)
    and len(meta["doc"]) > 8
    and meta["resume"] in ("fixed", "free")
  )


def test_every_setting_is_explained():
  assert not [name for name in SETTINGS if explanation_lacks(name)]


def test_options_of_the_elements_of_a_list_are_explained():
  text = explain("data.filters")
  assert "data.filters (list of Filter): " in text
  assert "\n  near: Drops near copies" in text
  assert "\n    threshold (float): " in text and "default 0.8; range [0.3, 1]" in text


def test_a_section_is_explained_and_a_typo_has_a_suggestion():
  assert explain("mesh").count("\n") == 25
  assert all(
    f"mesh.{axis} (int)" in explain("mesh")
    for axis in ("stage", "data", "fsdp", "expert", "tensor")
  )
  with pytest.raises(
    ValueError, match=r"no setting 'model.num_layer'. Did you mean model.num_layers"
  ):
    explain("model.num_layer")
  with pytest.raises(
    ValueError, match=r"no setting 'qqqqqqqq'\. The sections are checkpoint, data, "
  ):
    explain("qqqqqqqq")


def test_differences_say_what_may_change():
  old = flatten(Config())
  new = flatten(config_with(num_steps=7, model__num_layers=9, log__every_steps=3))
  assert differences(old, new) == {
    "num_steps": (400, 7, True),
    "model.num_layers": (4, 9, False),
    "log.every_steps": (10, 3, True),
  }
  assert differences(old, old) == {}


def test_a_setting_that_one_side_lacks_counts_as_its_default():
  old = flatten(Config())
  del old["model.qk_norm"], old["model.dropout"]
  assert differences(old, flatten(Config())) == {}
  changed = flatten(config_with(model__dropout=0.5))
  assert differences(old, changed) == {"model.dropout": (0.0, 0.5, False)}
  assert differences({**old, "model.of_the_future": 3}, flatten(Config())) == {}


def test_resolve_derives_sizes():
  sizes = {1: 128, 128: 128, 129: 256, 259: 384, 2048: 2048}
  assert {tokens: resolve(Config(), tokens).model.vocab_size for tokens in sizes} == sizes
  for d_model, d_ff in ((96, 256), (128, 512), (768, 2048), (4096, 11008)):
    cfg = resolve(config_with(model__d_model=d_model), 256)
    assert (cfg.model.d_ff, cfg.model.head_dim) == (d_ff, d_model // 4)
    assert d_ff >= 8 / 3 * d_model > d_ff - 256


def test_resolve_keeps_what_is_set():
  cfg = config_with(model__d_ff=40, model__head_dim=6, model__vocab_size=300)
  assert resolve(cfg, 300) == cfg and resolve(resolve(cfg, 300), 300) == cfg


def test_resolve_refuses_a_vocabulary_that_is_too_small():
  words = "model.vocab_size=200 is smaller than the tokenizer's 256 tokens"
  with pytest.raises(ValueError, match=words):
    resolve(config_with(model__vocab_size=200), 256)


def test_the_helper_of_these_tests_resolves():
  assert 0 not in (tiny_config().model.head_dim, tiny_config().model.d_ff)
