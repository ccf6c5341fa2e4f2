"""What is set before jax starts, and how an entry point ends."""

import errno
import logging
import os
import re
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import Result, forked

from ats_jax.cluster import runtime
from ats_jax.config import Config, base_config, from_config_dict
from ats_jax.exits import REFUSED
from ats_jax.verbs import cli


def config(**changes) -> Config:
  base = base_config()
  base.update_from_flattened_dict(changes)
  return from_config_dict(base)


@pytest.fixture(autouse=True)
def jax_and_environment_stay(monkeypatch):
  for name in (
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_ENABLE_COMPILATION_CACHE",
  ):
    monkeypatch.setenv(name, "")  # so that it is put back
    monkeypatch.delenv(name)
  with runtime.configured(config(compilation_cache="off")):  # which puts back what it finds
    yield


class TestConfigure:
  def test_cache_in_a_folder(self, tmp_path):
    runtime.configure(config(compilation_cache=f"{tmp_path}/a/b"))
    assert (tmp_path / "a" / "b").is_dir()
    assert jax.config.jax_compilation_cache_dir == f"{tmp_path}/a/b"
    assert jax.config.jax_enable_compilation_cache
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0

  def test_cache_off_is_off_whatever_the_environment_says(self):
    jax.config.update("jax_compilation_cache_dir", "/from/the/environment")
    runtime.configure(config(compilation_cache="off"))
    assert not jax.config.jax_enable_compilation_cache

  def test_float32_matmuls_are_in_float32_only_if_asked(self):
    full = {"precision.compute_dtype": "float32", "precision.tf32": False}
    before = jax.config.jax_default_matmul_precision
    runtime.configure(config(compilation_cache="off"))
    assert jax.config.jax_default_matmul_precision == before
    with runtime.configured(config(compilation_cache="off", **full)):
      assert jax.config.jax_default_matmul_precision == "highest"
    assert jax.config.jax_default_matmul_precision == before

  def test_cache_that_cannot_be_made(self, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cache .*/file/x cannot be made: Not a directory.*'off'"):
      runtime.configure(config(compilation_cache=f"{tmp_path}/file/x"))

  def test_where_the_cache_is(self, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert runtime.cache_folder(config()) == tmp_path / "ats_jax" / "xla"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert runtime.cache_folder(config()) == Path.home() / ".cache" / "ats_jax" / "xla"
    assert runtime.cache_folder(config(compilation_cache="~/c")) == Path.home() / "c"

  @pytest.mark.parametrize(
    ("variable", "setting", "where"),
    [
      ({"JAX_COMPILATION_CACHE_DIR": "{tmp}/mine"}, "auto", "{tmp}/mine"),
      ({"JAX_COMPILATION_CACHE_DIR": "{tmp}/mine"}, "{tmp}/set", "{tmp}/set"),
      ({"JAX_COMPILATION_CACHE_DIR": "{tmp}/mine"}, "off", "off"),
      ({"JAX_ENABLE_COMPILATION_CACHE": "0"}, "auto", "off, as JAX_ENABLE_COMPILATION_CACHE says"),
      ({"JAX_ENABLE_COMPILATION_CACHE": "False"}, "{tmp}/set", "{tmp}/set"),
      ({"JAX_ENABLE_COMPILATION_CACHE": "true"}, "auto", "{tmp}/ats_jax/xla"),
    ],
  )
  def test_variables_of_the_cache(self, monkeypatch, tmp_path, variable, setting, where):
    filled = lambda text: text.format(tmp=tmp_path)
    for name, value in {"XDG_CACHE_HOME": "{tmp}", **variable}.items():
      monkeypatch.setenv(name, filled(value))
    cfg = config(compilation_cache=filled(setting))
    runtime.configure(cfg)
    assert runtime.cache_use(cfg).partition(", 0")[0] == filled(where)
    assert jax.config.jax_enable_compilation_cache == (not where.startswith("off"))

  def test_a_cache_on_a_store(self, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/xla")
    with pytest.raises(ValueError, match=r"JAX_COMPILATION_CACHE_DIR=gs://bucket/xla: .* Unset"):
      runtime.configure(config())

  @pytest.mark.parametrize(
    ("option", "value"),
    [
      ("jax_disable_jit", True),
      ("jax_numpy_rank_promotion", "raise"),
      ("jax_numpy_rank_promotion", "warn"),
      ("jax_numpy_dtype_promotion", "strict"),
    ],
  )
  def test_a_switch_for_debugging_is_named(self, option, value):
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
      with pytest.raises(ValueError, match=f"{option.upper()} is {value}: .* Unset the variable"):
        runtime.configure(config())
    finally:
      jax.config.update(option, getattr(before, "value", before))

  def test_what_changes_a_run_is_named(self, caplog):
    jax.config.update("jax_default_matmul_precision", "float32")
    try:
      runtime.configure(config(compilation_cache="off"))
    finally:
      jax.config.update("jax_default_matmul_precision", None)
    assert "JAX_DEFAULT_MATMUL_PRECISION is float32: it changes what is computed." in caplog.text

  def test_random_keys_are_of_one_kind_in_any_shell(self):
    jax.config.update("jax_default_prng_impl", "rbg")
    with runtime.configured(config(compilation_cache="off")):
      assert str(jax.random.key_impl(jax.random.key(0))) == "threefry2x32"
    assert jax.config.jax_default_prng_impl == "rbg"

  @pytest.mark.parametrize("length", [0, 50])
  def test_a_cut_entry_of_the_cache_is_replaced(self, tmp_path, length):
    def use():
      jax.clear_caches()
      jax.jit(lambda x: x * 7 + 1)(np.float32(1))

    whole, cut = (lambda: {p: p.read_bytes() for p in tmp_path.glob("*-cache")}), {}
    with warnings.catch_warnings():
      warnings.simplefilter("always")
      runtime.configure(config(compilation_cache=str(tmp_path)))
      use()
      sizes = {path: len(data) for path, data in whole().items()}
      cut = next(path for path in sizes if "lambda" in path.name)
      cut.write_bytes(cut.read_bytes()[:length])
      (tmp_path / "jit_other-1-cache").write_bytes(b"of another program")
      use()
    assert len(cut.read_bytes()) > length
    assert (tmp_path / "jit_other-1-cache").read_bytes() == b"of another program"

  def test_how_the_cache_was_used(self, tmp_path):
    cfg = config(compilation_cache=str(tmp_path))
    runtime.configure(cfg)
    count = lambda: [int(n) for n in re.findall(r"(\d+) programs found, (\d+)", use())[0]]
    use = lambda: runtime.cache_use(cfg)
    (tmp_path / "program").write_bytes(bytes(2**20))
    assert use().startswith(f"{tmp_path}, 1.0 MiB; ")
    found, added = count()
    for name in ("cache_hits", "cache_misses", "cache_misses"):
      jax.monitoring.record_event(f"/jax/compilation_cache/{name}")
    runtime.configure(cfg)  # listens once, however often it is called
    assert count() == [found + 1, added + 2]
    assert runtime.cache_use(config(compilation_cache="off")) == "off"

  def test_memory_fraction_of_the_user_stays(self, monkeypatch):
    runtime.configure(config(compilation_cache="off"))
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == runtime.GPU_MEMORY_FRACTION
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    runtime.configure(config(compilation_cache="off"))
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"

  def test_deterministic_adds_to_the_flags_of_the_user(self, monkeypatch):
    changes = {"compilation_cache": "off", "precision.deterministic": True}
    runtime.configure(config(**changes))
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_deterministic_ops=true"
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    runtime.configure(config(**changes))
    assert os.environ["XLA_FLAGS"] == "--xla_a=1 --xla_gpu_deterministic_ops=true"

  @pytest.mark.parametrize("count", [0, 1, 2, 16])
  def test_several_devices_of_a_cpu_keep_their_order(self, count, monkeypatch):
    in_order = "--xla_cpu_enable_concurrency_optimized_scheduler"
    given = f"--xla_force_host_platform_device_count={count}" if count else ""
    monkeypatch.setenv("XLA_FLAGS", given)
    runtime.configure(config(compilation_cache="off"))
    assert os.environ["XLA_FLAGS"] == (f"{given} {in_order}=false" if count > 1 else given)
    monkeypatch.setenv("XLA_FLAGS", f"{given} {in_order}=true")  # the user's own choice stays
    runtime.configure(config(compilation_cache="off"))
    assert os.environ["XLA_FLAGS"] == f"{given} {in_order}=true"


def test_a_missing_flag():
  assert cli.require("x", "workdir", "runs/debug") == "x"
  for missing in (None, ""):
    with pytest.raises(ValueError, match=r"--workdir is missing\. Example: --workdir=runs/debug"):
      cli.require(missing, "workdir", "runs/debug")


SCRIPT = """
import logging
from absl import logging as absl_logging
from ats_jax.verbs import cli
from ats_jax.cluster import runtime

def library_warns():
  code = "log.warning('look out', exc_info=True); log.info('a step of mine')"
  try:
    raise RuntimeError("deep inside")
  except RuntimeError:
    exec(compile(code, "/site-packages/orbax/x.py", "exec"), {"log": logging.getLogger("absl")})

def main(argv):
  absl_logging.info("not of ats_jax")
  library_warns()
  raise {error}

cli.run(main)
"""
ERRORS = {
  "ValueError('model.x=3 is wrong. Use 4.')": "error: model.x=3 is wrong. Use 4.\n",
  "FloatingPointError('train/loss is nan')": "error: train/loss is nan\n",
  f"OSError({errno.ENOSPC}, 'No space left on device', 'm.jsonl')": (
    f"error: a file could not be used: [Errno {errno.ENOSPC}] No space left on device: 'm.jsonl'"
    ". Free space on the disk"
  ),
}


@pytest.fixture
def run_script(tmp_path):
  def run(error: str, **env: str) -> Result:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("{error}", error))
    return forked(str(path), **env)

  return run


class TestRun:
  def test_a_users_error_is_a_message(self, run_script):
    for error, message in ERRORS.items():
      code, _, err = run_script(error)
      assert code == REFUSED
      assert message in err
      assert "Traceback" not in err and "deep inside" not in err
      assert "look out" in err  # a library's warning, without its traceback
      assert "a step of mine" not in err and "not of ats_jax" not in err

  def test_ctrl_c_outside_the_steps(self, run_script):
    code, _, err = run_script("KeyboardInterrupt()")
    assert code == 130 and err.endswith("interrupted\n") and "Traceback" not in err

  def test_a_fault_of_ours_and_a_request_show_the_traceback(self, run_script):
    code, _, err = run_script("KeyError('oops')")
    assert code == 1 and "Traceback" in err and "KeyError: 'oops'" in err
    code, _, err = run_script("ValueError('wrong')", ATS_TRACEBACK="1")
    assert code == 1 and "Traceback" in err and "ValueError: wrong" in err
    assert "RuntimeError: deep inside" in err


def test_our_own_lines_are_shown():
  record = lambda path, level: logging.LogRecord("absl", level, path, 1, "m", (), None)
  ours = os.sep.join(("", "x", "ats_jax", "report.py"))
  assert cli._shorten(record(ours, logging.INFO))
  assert not cli._shorten(record("/x/orbax/y.py", logging.INFO))
  assert cli._shorten(record("/x/orbax/y.py", logging.WARNING))
