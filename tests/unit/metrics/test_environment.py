import json
import subprocess

import jax
import numpy as np

from ats_jax.metrics import environment as module
from ats_jax.metrics.environment import environment


def test_the_facts_are_right_and_fit_json(monkeypatch):
  jax.devices()  # started here, the backend would take the flags below for the whole session
  monkeypatch.setenv("ATS_DEBUG", "1")
  monkeypatch.setenv("JAX_TEST_SETTING", "x")
  monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
  for secret in ("ATS_API_KEY", "ATS_HF_TOKEN", "JAX_PASSWORD", "ATS_Client_Secret"):
    monkeypatch.setenv(secret, "hush-hush")
  monkeypatch.setenv("JAX_CACHE", "https://me:hush-hush@host/x?sig=hush-hush")
  monkeypatch.setenv("HOME_SWEET_HOME", "not ours")
  facts = json.loads(json.dumps(environment()))
  variables = facts["variables"]
  assert variables["ATS_DEBUG"] == "1" and variables["JAX_TEST_SETTING"] == "x"
  assert variables["XLA_FLAGS"] == "--xla_dump_to="
  assert "hush-hush" not in json.dumps(facts) and "HOME_SWEET_HOME" not in variables
  assert variables["JAX_CACHE"] == "https://***@host/x?sig=***"
  assert facts["packages"]["jax"] == jax.__version__
  assert facts["packages"]["numpy"] == np.__version__
  assert facts["device_count"] == jax.device_count() and facts["process_count"] == 1
  assert facts["device_kinds"] == [jax.devices()[0].device_kind]
  assert facts["time"].startswith("20") and facts["time"].endswith("+00:00")


def git(directory, *args):
  who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
  result = subprocess.run(["git", *who, *args], cwd=directory, check=True, capture_output=True)
  return result.stdout.decode().strip()


def test_commit_and_dirt_of_a_checkout(tmp_path, monkeypatch):
  file = tmp_path / "a.py"
  file.write_text("1")
  assert module._git(file) is None  # no repository
  git(tmp_path, "init")
  assert module._git(file) is None  # a repository that does not track the file
  git(tmp_path, "add", "a.py")
  git(tmp_path, "commit", "-m", "x")
  git(tmp_path, "tag", "v1")
  commit = git(tmp_path, "rev-parse", "HEAD")
  assert module._git(file) == {"commit": commit, "dirty": False}
  (tmp_path / "untracked").write_text("")
  assert module._git(file) == {"commit": commit, "dirty": False}
  file.write_text("2")
  assert module._git(file) == {"commit": commit, "dirty": True}
  monkeypatch.setenv("PATH", str(tmp_path))  # no git is no error
  assert environment()["git"] is None
