"""Config files: what is run, and what is said of one that fails."""

import pytest
from refusals import wrongly_refused

from ats_jax.config import base_config, file, from_config_dict
from ats_jax.config.file import load_file, packaged

RETURNS = "from ats_jax.config import base_config\ndef get_config(variant='dense'):\n"


@pytest.fixture
def load(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)

  def load(source, name="a.py"):
    (tmp_path / "a.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    return load_file(name)

  return load


def test_a_variant_is_what_follows_the_colon(load):
  source = f"{RETURNS}  config = base_config()\n  config.sample.prompt = variant\n  return config\n"
  for name, prompt in (("a.py", "dense"), ("a.py:x:y", "x:y"), ("a.py:", "")):
    assert from_config_dict(load(source, name)).sample.prompt == prompt


def test_a_file_that_was_changed_is_read_again(load):
  assert load(f"{RETURNS}  return base_config()\n") == base_config()
  changed = load(f"{RETURNS}  config = base_config()\n  config.seed = 5\n  return config\n")
  assert changed.seed == 5


def test_a_file_may_define_dataclasses(load):
  source = (
    "from __future__ import annotations\nimport dataclasses\n"
    f"{RETURNS.strip()}\n  return base_config()\n@dataclasses.dataclass\nclass A:\n  x: int\n"
  )
  assert load(source) == base_config()


def test_a_file_that_fails_is_named_with_its_line(load):
  cases = [
    ("x = 1\nx = (", r"^a\.py:2: SyntaxError: '\(' was never closed"),
    (b"x = 'caf\xe9'\n", r"^a\.py:1: SyntaxError: .*'utf-8' codec can't decode byte 0xe9"),
    ("import no_such_module", r"^a\.py:1: ModuleNotFoundError: No module named 'no_such_module'"),
    ("def get_config():\n  return {}['k']", r"^a\.py:2: KeyError: 'k'"),
    ("def get_config():\n  return open('no.txt')", r"^a\.py:2: FileNotFoundError: .*no\.txt"),
    ("def get_config():\n  return next(iter(()))", r"^a\.py:2: StopIteration: "),
    ("def f():\n  return f()\nf()", r"^a\.py:2: RecursionError: "),
    (f"{RETURNS}  base_config().seed = 'a'", r"^a\.py:3: TypeError: "),
    ("raise SystemExit", r"^a\.py:1: SystemExit: "),
    ("x = 1", r"^a\.py: AttributeError: .*get_config"),
    ("get_config = lambda: None", r"^a\.py: get_config\(\) returned None, not a ConfigDict\. "),
  ]
  assert not wrongly_refused(load, cases)

  with pytest.raises(ValueError, match=r"^a\.py: TypeError: get_config\(\) takes 0 positional"):
    load("def get_config():\n  pass", "a.py:moe")

  for name in ("", ":moe"):
    with pytest.raises(ValueError, match=r"name of the file is empty\. Example: configs/debug"):
      load("", name)


def test_a_packaged_config_is_found_by_name(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert from_config_dict(load_file("debug")).num_steps == 400
  assert from_config_dict(load_file("debug:moe")).moe.num_experts == 8


def test_a_wheel_has_its_configs_in_the_data_folder(tmp_path, monkeypatch):
  folder = tmp_path / "ats_jax" / "_data" / "configs"
  folder.mkdir(parents=True)
  (folder / "own.py").write_text(f"{RETURNS}  return base_config()\n")
  monkeypatch.setattr(file, "_PACKAGE", tmp_path / "ats_jax")
  assert packaged() == {"own": folder / "own.py"}
  assert load_file("own") == base_config()


@pytest.mark.parametrize("name", ["debug", "./debug", "b7.py"])
def test_a_file_wins_over_what_is_packaged(tmp_path, monkeypatch, name):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "b7").mkdir()  # a folder is no file that wins
  assert load_file("b7").model.num_layers == 32
  (tmp_path / name).write_text(f"{RETURNS}  return base_config()\n")
  assert load_file(name) == base_config()


def test_a_name_that_stands_for_nothing(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  cases = [
    ("debg:moe", r"no packaged config 'debg' .*Did you mean debug\? Packaged are card, .*, b1, "),
    ("zzz", r"no packaged config 'zzz' \(seen from /.*\)\. Packaged are card, debug, dense_1_5b, "),
    ("configs/b7.py", r"no file configs/b7\.py \(seen from /.*packaged config b7\?$"),
    ("debug.py", r"no file debug\.py .*packaged config debug\?$"),
    ("other/mine.py", r"^cannot be read, No such file or directory \(seen from /"),
  ]
  assert not wrongly_refused(load_file, cases)


def test_interruption_is_no_mistake_of_the_file(load):
  with pytest.raises(KeyboardInterrupt):
    load("raise KeyboardInterrupt")
