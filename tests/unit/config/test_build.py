"""Files and mappings -> typed settings; --explain; comparison of two configs; derived sizes."""

import dataclasses
from pathlib import Path
from typing import get_origin

import pytest
from refusals import wrongly_refused

from ats_jax.config import Config, base_config, from_config_dict
from ats_jax.config.build import resolve
from ats_jax.config.explain import explain
from ats_jax.config.names import default_of, differences, flatten, in_words, settings, to_dict

SETTINGS = settings()
ROOT = Path(__file__).parents[3]


def config_with(**changes):
  config = base_config()
  named = {name.replace("__", "."): value for name, value in changes.items()}
  config.update_from_flattened_dict(named)
  return from_config_dict(config)


def test_defaults_survive_the_round_trip():
  assert from_config_dict(base_config()) == Config()
  assert from_config_dict(to_dict(Config())) == Config()
  assert from_config_dict({}) == Config()
  assert hash(from_config_dict({})) == hash(Config())

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
    ({"model": {"num_layers": True}}, "model.num_layers must be int, got True"),
    ({"model": {"qk_norm": 1}}, "model.qk_norm must be bool, got 1"),
    ({"optimizer": {"b1": "0.9"}}, "optimizer.b1 must be float, got '0.9'"),
    ({"data": {"paths": "a"}}, "data.paths must be a list of str, got 'a'"),
  ]
  assert not wrongly_refused(from_config_dict, cases, lambda words: f"config: {words}")
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
  apart = [name for name in SETTINGS if name.startswith(("finetune.", "sample."))]
  assert 60 < len(SETTINGS) - len(apart) < 200 and 0 < len(apart) < 20
  assert set(SETTINGS) == set(flatten(Config()))


def explanation_lacks(name):
  """Whether `--explain` leaves something of a setting out."""
  field = SETTINGS[name]
  text, meta = explain(name), field.metadata
  ranged = meta["low"] is not None and not meta["choices"]
  on_resume = {"free": "may change on resume", "fixed": "fixed for a workdir"}
  parts = [f"{name} ({in_words(field.type)}): ", meta["doc"], on_resume[meta["resume"]]]
  parts += [f"default {default_of(name, field)!r}", *meta["choices"]]
  parts += [f"range [{meta['low']:g}, "] if ranged else []
  is_of_type = type(field.default) is (get_origin(field.type) or field.type)
  return not (is_of_type and len(meta["doc"]) > 8 and all(part in text for part in parts))


def test_every_setting_is_explained():
  assert not [name for name in SETTINGS if explanation_lacks(name)]
  text = explain("data.filters")
  assert "data.filters (list of Filter): " in text
  assert "\n  near: Drops near copies" in text
  assert "\n    threshold (float): " in text and "default 0.8; range [0.3, 1]" in text


def test_a_section_is_explained_and_a_typo_has_a_suggestion():
  assert explain("mesh").count("\n") == 21
  cases = [
    ("model.num_layer", "no setting 'model.num_layer'. Did you mean model.num_layers"),
    ("qqqqqqqq", r"no setting 'qqqqqqqq'\. The sections are checkpoint, data, "),
  ]
  assert not wrongly_refused(explain, cases)


def test_differences_say_what_may_change():
  old = flatten(Config())
  new = flatten(config_with(num_steps=7, model__num_layers=9, log__every_steps=3))
  assert differences(old, new) == {
    "num_steps": (400, 7, True),
    "model.num_layers": (4, 9, False),
    "log.every_steps": (10, 3, True),
  }
  # A setting that one side lacks counts as its default.
  del old["model.qk_norm"], old["model.dropout"]
  assert differences({**old, "model.of_the_future": 3}, flatten(Config())) == {}
  changed = flatten(config_with(model__dropout=0.5))
  assert differences(old, changed) == {"model.dropout": (0.0, 0.5, False)}


def test_resolve_derives_sizes():
  sizes = {1: 128, 128: 128, 129: 256, 259: 384, 2048: 2048}
  assert {tokens: resolve(Config(), tokens).model.vocab_size for tokens in sizes} == sizes
  for d_model, d_ff in ((96, 256), (128, 512), (768, 2048), (4096, 11008)):
    cfg = resolve(config_with(model__d_model=d_model), 256)
    assert (cfg.model.d_ff, cfg.model.head_dim) == (d_ff, d_model // 4)
  # It keeps what is set.
  cfg = config_with(model__d_ff=40, model__head_dim=6, model__vocab_size=300)
  assert resolve(cfg, 300) == cfg and resolve(resolve(cfg, 300), 300) == cfg

  words = "model.vocab_size=200 is smaller than the tokenizer's 256 tokens"
  with pytest.raises(ValueError, match=words):
    resolve(config_with(model__vocab_size=200), 256)
