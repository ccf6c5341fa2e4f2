"""How the CUDA kernels are built: which compiler, which GPU, which cache; nvcc if there is one."""

import ctypes
import fcntl
import os
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from kernels_cuda import library
from kernels_cuda.library import KernelsUnavailableError

# A compiler that says who called it, and copies its source to the output.
FAKE = """#!/bin/sh
[ "$1" = --version ] && { echo fake 1.0; exit 0; }
echo "$@" >> "$(dirname "$0")/calls"
for last; do :; done
cp "$0" "$last"
"""


@pytest.fixture
def fake(tmp_path):
  return make_compiler(tmp_path / "cuda" / "bin" / "nvcc", FAKE)


def make_compiler(path: Path, text: str) -> Path:
  path.parent.mkdir(parents=True)
  path.write_text(text)
  path.chmod(path.stat().st_mode | stat.S_IXUSR)
  return path


def environment(fake: Path, cache: Path, **others: str) -> dict[str, str]:
  return {"CUDA_HOME": str(fake.parents[1]), "XDG_CACHE_HOME": str(cache), **others}


def calls(fake: Path) -> list[str]:
  return (fake.parent / "calls").read_text().splitlines()


def test_targets_in_order(monkeypatch):
  assert library.target({"CUDA_TARGET_SM": "90", "TORCH_CUDA_ARCH_LIST": "8.0"}) == "90"
  assert library.target({"TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX"}) == "8.0;9.0+PTX"
  assert library.target({}) == "7.5+PTX"  # no GPU here

  class Gpu:
    compute_capability = "9.0"

  monkeypatch.setattr(jax, "local_devices", lambda: [Gpu()])
  assert library.target({}) == "9.0"


def test_gencode():
  for targets, codes in (
    ("90", ["compute_90,code=[sm_90]"]),
    ("sm_90a", ["compute_90a,code=[sm_90a]"]),
    ("8.0;9.0+PTX", ["compute_80,code=[sm_80]", "compute_90,code=[sm_90,compute_90]"]),
    ("7.5 12.0", ["compute_75,code=[sm_75]", "compute_120,code=[sm_120]"]),
  ):
    assert library.gencode(targets) == [f"-gencode=arch={code}" for code in codes]


def test_the_newest_target():
  assert library.newest_target({"CUDA_TARGET_SM": "8.0;sm_100a 9.0+PTX"}) == "10.0"


def test_a_target_that_is_none():
  with pytest.raises(KernelsUnavailableError, match="'Hopper' is no compute capability; set CUDA"):
    library.gencode("Hopper")


def test_no_nvcc_is_one_line(monkeypatch):
  monkeypatch.setattr(library.os, "access", lambda *_: False)
  with pytest.raises(KernelsUnavailableError) as error:
    library.build({"CUDA_HOME": "/nowhere", "PATH": ""})
  message = str(error.value)
  assert "\n" not in message
  for word in ("CUDA_HOME (/nowhere)", "PATH", "/usr/local/cuda", "pip install nvidia-cuda-nvcc"):
    assert word in message


def test_nvcc_of_cuda_home_comes_first_then_the_path(fake, tmp_path):
  other = make_compiler(tmp_path / "other" / "nvcc", FAKE)
  path = str(other.parent)
  assert library.find_nvcc({"CUDA_HOME": str(fake.parents[1]), "PATH": path}) == fake.resolve()
  assert library.find_nvcc({"PATH": path}) == other.resolve()


def test_nvcc_of_the_pip_packages(tmp_path, monkeypatch):
  nvcc = make_compiler(tmp_path / "nvidia" / "cu13" / "bin" / "nvcc", FAKE)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "nvidia", raising=False)
  assert nvcc in library.pip_nvcc()


def test_what_is_built_is_kept(fake, tmp_path):
  env = environment(fake, tmp_path / "cache", CUDA_TARGET_SM="90")
  first = library.build(env)
  assert first.parent == tmp_path / "cache" / "ats_jax" / "kernels"
  assert library.build(env) == first
  assert len(calls(fake)) == 1
  assert "code=[sm_90]" in calls(fake)[0]
  assert library.build({**env, "CUDA_TARGET_SM": "80"}) != first
  make_newer = FAKE.replace("fake 1.0", "fake 1.1")
  fake.write_text(make_newer)
  assert library.build(env) != first
  assert len(calls(fake)) == 3


def test_without_nvcc_what_was_built_will_do(fake, tmp_path, monkeypatch):
  env = environment(fake, tmp_path / "cache", CUDA_TARGET_SM="9.0")
  built = library.build(env)
  monkeypatch.setattr(library.os, "access", lambda *_: False)
  assert library.build(env) == built
  for other in ({"CUDA_TARGET_SM": "8.0"}, {"XDG_CACHE_HOME": str(tmp_path / "empty")}):
    with pytest.raises(KernelsUnavailableError, match="need nvcc"):
      library.build(env | other)


def test_who_waits_for_another_process_does_not_build(fake, tmp_path, monkeypatch):
  env = environment(fake, tmp_path / "cache", CUDA_TARGET_SM="90")
  made = library.build(env)
  made.unlink()
  flock, waits = fcntl.flock, threading.Event()

  def told(*args):
    waits.set()
    flock(*args)

  with made.with_suffix(".lock").open("w") as lock, ThreadPoolExecutor() as pool:
    flock(lock, fcntl.LOCK_EX)  # the other process
    monkeypatch.setattr(library.fcntl, "flock", told)
    waiting = pool.submit(library.build, env)
    assert waits.wait(60)
    made.write_text("of the other process")
    flock(lock, fcntl.LOCK_UN)
    assert waiting.result() == made
  assert made.read_text() == "of the other process"
  assert len(calls(fake)) == 1


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path):
  text = FAKE.replace("cp ", "echo 'kernels.cu(3): error: no such thing' >&2; exit 2 # ")
  bad = make_compiler(tmp_path / "cuda" / "bin" / "nvcc", text)
  env = environment(bad, tmp_path / "cache", CUDA_TARGET_SM="90")
  with pytest.raises(
    KernelsUnavailableError, match=r"error: no such thing \(run `.*kernels.cu` to"
  ):
    library.build(env)
  assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.slow
def test_nvcc_compiles_for_the_oldest_and_the_newest_gpu():
  try:
    library.find_nvcc()
  except KernelsUnavailableError as reason:
    pytest.skip(str(reason))
  built = library.build({**os.environ, "CUDA_TARGET_SM": "7.5+PTX;9.0"})
  handle = ctypes.CDLL(str(built))  # the CUDA runtime is linked in: it loads without a driver
  for name in library.TARGETS:
    assert hasattr(handle, name)
