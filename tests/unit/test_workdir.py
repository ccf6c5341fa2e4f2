"""A workdir belongs to one run: what is accepted, what is refused, and what is left on disk."""

import dataclasses
import json

import pytest
from helpers import tiny_config

from ats_jax import runtime, workdir
from ats_jax.config import Config


@pytest.fixture
def folder(tmp_path):
  return tmp_path / "runs" / "one"


def changed(cfg, section, **values):
  return dataclasses.replace(cfg, **{section: dataclasses.replace(getattr(cfg, section), **values)})


def test_a_config_comes_back_as_it_went_in(folder):
  cfg = changed(tiny_config(), "data", paths="a.txt,b.txt")
  workdir.claim(folder, cfg)
  assert workdir.load_config(folder) == cfg
  workdir.claim(folder, cfg)
  assert [p.name for p in folder.iterdir()] == ["config.json"]


def test_free_settings_may_change_and_the_new_ones_are_kept(folder):
  workdir.claim(folder, Config())
  new = dataclasses.replace(changed(Config(), "step", remat="full"), num_steps=9)
  workdir.claim(folder, new)
  assert workdir.load_config(folder) == new


def test_fixed_settings_must_not_change(folder):
  workdir.claim(folder, Config())
  other = changed(changed(Config(), "model", num_layers=5), "optimizer", b1=0.5)
  other = dataclasses.replace(other, num_steps=9)
  with pytest.raises(ValueError, match="other settings") as error:
    workdir.claim(folder, other)
  lines = [line for line in str(error.value).splitlines() if "->" in line]
  assert lines == ["  model.num_layers: 4 -> 5", "  optimizer.b1: 0.9 -> 0.5"]
  assert workdir.load_config(folder) == Config()  # nothing was overwritten


def test_a_config_from_before_a_setting_existed_counts_its_default(folder):
  workdir.claim(folder, Config())
  path = folder / workdir.CONFIG
  old = json.loads(path.read_text())
  del old["model"]["qk_norm"], old["mesh"]
  path.write_text(json.dumps(old))
  workdir.claim(folder, Config())
  path.write_text(json.dumps(old))
  with pytest.raises(ValueError, match=r"model.qk_norm: False -> True"):
    workdir.claim(folder, changed(Config(), "model", qk_norm=True))


def test_checkpoints_without_a_config_are_not_taken_over(folder):
  (folder / workdir.CHECKPOINTS / "200").mkdir(parents=True)
  with pytest.raises(ValueError, match=r"holds checkpoints but no config.json"):
    workdir.claim(folder, Config())


def test_a_file_in_the_way_is_named(folder):
  folder.parent.mkdir()
  folder.write_text("")
  with pytest.raises(ValueError, match=r"cannot be used: .*Choose another --workdir"):
    workdir.claim(folder, Config())


def test_no_run_no_config(folder):
  with pytest.raises(ValueError, match=r"holds no run .*Train one there first"):
    workdir.load_config(folder)


def test_other_data_is_refused(folder):
  workdir.check_data(folder, "same", "same")
  with pytest.raises(ValueError, match="fingerprint old, now new"):
    workdir.check_data(folder, "old", "new")


def test_write_json_replaces_in_one_step(tmp_path):
  path = tmp_path / "x.json"
  workdir.write_json(path, {"a": 1})
  with pytest.raises(TypeError):
    workdir.write_json(path, {"a": object()})
  assert json.loads(path.read_text()) == {"a": 1}
  assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_where_compiled_programs_are_kept(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  cache = lambda value: runtime.cache_folder(dataclasses.replace(Config(), compilation_cache=value))
  assert cache("auto") == tmp_path / "ats_jax" / "xla"
  assert cache("/some/where").as_posix() == "/some/where"
  monkeypatch.setenv("HOME", "/home/someone")
  assert cache("~/x").as_posix() == "/home/someone/x"
  monkeypatch.delenv("XDG_CACHE_HOME")
  assert cache("auto").as_posix() == "/home/someone/.cache/ats_jax/xla"


def test_a_missing_flag_is_explained():
  assert runtime.require("x", "config", "c.py") == "x"
  with pytest.raises(ValueError, match=r"--config is missing. Example: --config=c.py"):
    runtime.require(None, "config", "c.py")
