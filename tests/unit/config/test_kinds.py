"""Sections of several kinds: files, flags, --explain, config.json, comparison, resume."""

import json
import operator

import pytest
from absl import flags
from refusals import wrongly_refused

from ats_jax.checkpoint import workdir
from ats_jax.config import Config, base_config, from_config_dict
from ats_jax.config.build import with_settings
from ats_jax.config.explain import explain
from ats_jax.config.file import load_file
from ats_jax.config.identity import fixed_settings_hash
from ats_jax.config.names import KINDS, all_settings, differences, flatten, to_dict
from ats_jax.config.schema.rope import Yarn
from ats_jax.config.tree import updated
from ats_jax.verbs import cli

# What a kind cannot be without.
NEEDED = {kind: {"model.rope_scaling.original_len": 64} for kind in ("llama3", "yarn")}
NEEDED["schedule_free"] = {"optimizer.schedule": "constant"}
NEEDED |= {kind: {"data.format": "preference"} for kind in ("dpo", "orpo", "simpo", "reward")}
NEEDED |= {"preference": {"step.loss": "dpo"}, "labelled": {"step.loss": "kto"}}
NEEDED["distill"] = {"step.loss.teacher": "teacher"}
NEEDED["kto"] = {"data.format": "labelled"}
EVERY = [(path, kind) for path, kinds in KINDS.items() for kind in kinds]
YARN = {"model.rope_scaling.factor": 4.0, "model.rope_scaling.original_len": 64}


# Without which the section has no effect, or a kind of it is refused.
BESIDE = {
  "moe.exchange": {"moe.num_experts": 8},
  "precision.loss_scale": {"precision.compute_dtype": "float16"},
  "data.reading": {"data.validation_fraction": 0.0, "eval.bigram_baseline": False},
}


FILE = """
from ats_jax.config import base_config
def get_config():
  config = base_config()
  {}
  return config
"""


def of_kind(path, kind):
  return with_settings(of_default(path), {f"{path}.name": kind} | NEEDED.get(kind, {}))


def of_default(path):
  return with_settings(Config(), BESIDE.get(path, {}))


def parsed(*words):
  """The config that a command with these flags gets."""
  values = flags.FlagValues()
  config = cli.ConfigFlag(values)
  cli.Command(lambda argv: None, values, "about").parse("train", ["--config=debug", *words])
  return config.value


@pytest.mark.parametrize(("path", "kind"), EVERY)
def test_every_kind_in_files_and_commands(path, kind, tmp_path):
  cfg = of_kind(path, kind)
  section = operator.attrgetter(path)(cfg)
  assert type(section) is KINDS[path][kind]
  # A config file: by name, and by an instance of the class.
  for changes in ({path: kind} | NEEDED.get(kind, {}), {path: section} | NEEDED.get(kind, {})):
    config = base_config()
    config.update_from_flattened_dict(BESIDE.get(path, {}) | changes)
    assert from_config_dict(config) == cfg
  # config.json, and the run that goes on with it.
  workdir.write_config(tmp_path, cfg)
  again = workdir.load_config(tmp_path)
  assert again == cfg and fixed_settings_hash(again) == fixed_settings_hash(cfg)
  written = json.loads((tmp_path / workdir.CONFIG).read_text())
  del written["format"]
  assert differences(flatten(written), flatten(cfg)) == {}
  # --explain says of which kinds a setting is.
  lines = explain(path)
  for name in KINDS[path].own(kind):
    assert f"{path}.{name} (" in lines
    assert any(kind in known.kinds for known in all_settings()[f"{path}.{name}"])
  # What differs from the default config, for `config show` and `config diff`.
  changed = differences(flatten(of_default(path)), flatten(cfg))
  is_default = kind == KINDS[path].default_name
  assert (f"{path}.name" in changed) != is_default
  is_same = is_default or path == "moe.exchange"  # which may change on resume
  assert (fixed_settings_hash(cfg) == fixed_settings_hash(of_default(path))) == is_same


def test_flags_choose_a_kind_in_either_order():
  for tag in ("model.rope_scaling", "model.rope_scaling.name"):
    words = [f"--config.{name}={value}" for name, value in ({tag: "yarn"} | YARN).items()]
    for turned in (words, reversed(words)):
      assert parsed(*turned).model.rope_scaling == Yarn(factor=4.0, original_len=64)


def test_a_new_kind_drops_the_settings_of_the_old_one():
  config = base_config()
  config.model.rope_scaling = Yarn(factor=4.0, original_len=64, whole_pairs=False)
  config.model.rope_scaling.name = "llama3"
  assert set(config.model.rope_scaling) == {
    "name", "factor", "original_len", "slow_turns", "fast_turns",
  }  # fmt: skip
  assert config.model.rope_scaling.factor == 1.0
  config.model.rope_scaling = "none"
  assert from_config_dict(config) == Config()
  # What a file sets before it chooses the kind is kept.
  config.model.rope_scaling.factor, config.model.rope_scaling.original_len = 4.0, 64
  config.model.rope_scaling.name = "yarn"
  assert from_config_dict(config).model.rope_scaling == Yarn(factor=4.0, original_len=64)
  # A flag that goes back to another kind of what a file has chosen needs nothing besides.
  nested = updated(to_dict(Config()), {"model.rope_scaling": "yarn"} | YARN)
  assert from_config_dict(updated(nested, {"model.rope_scaling": "none"})) == Config()


def test_what_a_flag_leaves_without_effect_is_said(tmp_path, caplog):
  wsd = "config.optimizer.schedule = {'name': 'wsd', 'decay_fraction': 0.5}"
  mod = "config.mod.routing, config.mod.capacity = 'learned', 0.25"
  (tmp_path / "wsd.py").write_text(FILE.format(f"{wsd}; {mod}"))
  words = ("--config.optimizer.schedule=cosine", "--config.mod.routing=none")
  with caplog.at_level("INFO"):
    cfg = parsed(f"--config={tmp_path}/wsd.py", *words)
  assert cfg == Config()
  said = "flags leave without effect, and reset: "
  assert said + "mod.capacity=0.25, optimizer.schedule.decay_fraction=0.5" in caplog.text
  caplog.clear()
  with caplog.at_level("INFO"):
    parsed(f"--config={tmp_path}/wsd.py", "--config.mod.capacity=0.5")
  assert said not in caplog.text


def test_a_setting_of_another_kind_names_both():
  cases = [
    (
      {"model.rope_scaling.whole_pairs": False},
      "model.rope_scaling.whole_pairs is a setting of model.rope_scaling.name=yarn, and "
      "model.rope_scaling.name is none. Choose that, or leave",
    ),
    (
      {"model.rope_scaling": "linear", "model.rope_scaling.slow_turns": 2.0},
      "slow_turns is a setting of model.rope_scaling.name=llama3 and yarn, and .* is linear",
    ),
    (
      {"model.rope_scaling": "yarn", "model.rope_scaling.facto": 2.0},
      r"unknown key model.rope_scaling.facto. Did you mean model.rope_scaling.factor\?",
    ),
    ({"model.rope_scaling": "yarm"}, "model.rope_scaling.name='yarm' is unknown. Choose one of: "),
    ({"optimizer": "adam"}, "optimizer.name='adam' is unknown. .* Did you mean 'adamw'"),
  ]
  assert not wrongly_refused(
    lambda changes: from_config_dict(updated(to_dict(Config()), changes)), cases
  )
  config = base_config()
  with pytest.raises(ValueError, match=r"rope_scaling is a section, got 4\. Assign the name of a "):
    config.model.rope_scaling = 4
  with pytest.raises(ValueError, match=r"model\.rope_scaling is a section, got 4"):
    from_config_dict({"model": {"rope_scaling": 4}})


EXTENSION = """
import dataclasses
from ats_jax.config.schema.optimizer import OptimizerConfig
from ats_jax.config.schema.setting import setting
from ats_jax.extensions import optimizers

@dataclasses.dataclass(frozen=True)
class Sign(OptimizerConfig):
  momentum: float = setting(0.9, "decay of the average whose sign is taken", low=0.0, high=1.0)
  eps: str = setting("none", "a word here, a number in adamw", choices=("none", "some"))

optimizers.register("sign", settings=Sign)(None)
"""


@pytest.fixture
def extension(tmp_path):
  from ats_jax import extensions

  (tmp_path / "mine.py").write_text(EXTENSION)
  yield str(tmp_path / "mine.py")
  for registry in extensions.ALL:
    registry.forget(registry.owner("sign") if "sign" in registry else "nobody")
  extensions.loaded.clear()


def test_a_kind_of_an_extension_brings_its_settings(extension, tmp_path):
  words = ["--config.optimizer.momentum=0.8", "--config.optimizer.name=sign"]
  words += ["--config.optimizer.eps=some", f"--config.extensions={extension}"]
  cfg = parsed(*words)
  assert (cfg.optimizer.momentum, cfg.optimizer.eps) == (0.8, "some")
  assert parsed("--config.optimizer.eps=1e-6").optimizer.eps == 1e-6  # of adamw a number
  with pytest.raises(ValueError, match=r"--config\.optimizer\.eps: 'none' is no float"):
    parsed("--config.optimizer.eps=none")
  apart = [part for word in words for part in word.split("=")]  # --name value, as absl takes it
  assert parsed(*apart) == cfg
  with pytest.raises(ValueError, match=r"--config\.optimizer\.momentun: there is no such setting"):
    parsed("--config", "debug", "--config.optimizer.momentun=0.8")
  file = tmp_path / "config.py"
  of_file = f"config.extensions = ({extension!r},)"
  file.write_text(FILE.format(f"{of_file}; config.optimizer = {{'name': 'sign', 'momentum': 0.7}}"))
  assert parsed(f"--config={file}").optimizer.momentum == 0.7
  assert load_file(str(file)).optimizer.momentum == 0.7


def test_values_of_many_sections_at_once():
  config = base_config()
  config.update({"num_steps": 7, "optimizer": {"schedule": {"decay_fraction": 0.1, "name": "wsd"}}})
  found = (
    config.num_steps,
    config.optimizer.schedule.name,
    config.optimizer.schedule.decay_fraction,
  )
  assert found == (7, "wsd", 0.1)
