"""What a wheel holds, read off pyproject.toml."""

import fnmatch
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_all_packages_are_found():
  named = SETUPTOOLS["packages"]["find"]["include"]
  for package in ("ats_jax", "ats_jax.ops", "kernels_cuda", "kernels_pallas.grouped_matmul"):
    assert (ROOT / package.replace(".", "/") / "__init__.py").exists()
    assert any(fnmatch.fnmatch(package, pattern) for pattern in named)


def test_data_is_declared():
  data = SETUPTOOLS["package-data"]
  files = [p for p in (ROOT / "kernels_cuda").iterdir() if p.is_file() and p.suffix != ".py"]
  assert {p.suffix for p in files} == {".cu", ".cuh"}
  assert all(any(fnmatch.fnmatch(p.name, d) for d in data["kernels_cuda"]) for p in files)
  assert "tuning/**/*.json" in data["ats_jax.ops"]
