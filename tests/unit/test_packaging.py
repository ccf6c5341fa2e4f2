"""What a wheel holds, read off pyproject.toml; `.ci/wheel` builds one and uses it."""

import re
import tomllib
from pathlib import Path

from ats_jax import __version__
from ats_jax.__main__ import main
from ats_jax.config import file
from kernels_cuda import library

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]


def test_all_that_the_package_imports_is_in_the_wheel():
  folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
  assert set(WHEEL["packages"]) == folders - {"lab"}


def test_what_is_no_python_is_in_the_data_folder():
  """In `ats_jax/_data` alone: a name like `configs` in site-packages would be everybody's."""
  data = {ROOT / source: target for source, target in WHEEL["force-include"].items()}
  assert all(target.startswith("ats_jax/_data/") for target in data.values())
  sources = {ROOT / kernels / "csrc": kernels for kernels in ("kernels_cuda", "kernels_metal")}
  assert library.SOURCES in sources
  assert all(data[folder] == f"ats_jax/_data/{name}" for folder, name in sources.items())
  assert {path.parent for path in file.packaged().values()} <= data.keys()
  kernels = [p for p in ROOT.glob("kernels_*/**/*") if p.is_file() and p.suffix != ".pyc"]
  beside = [p for p in kernels if p.suffix != ".py" and p.parent not in sources]
  assert not beside, "a wheel has them in a package of kernels; put them into csrc/"


def test_the_kernels_are_found_where_a_wheel_puts_them(tmp_path, monkeypatch):
  module = tmp_path / "kernels_cuda" / "library.py"
  monkeypatch.setattr(library, "__file__", str(module))
  assert library._sources_folder() == tmp_path / "ats_jax" / "_data" / "kernels_cuda"


def test_the_version_has_one_place(monkeypatch, capsys):
  assert "version" in PROJECT["project"]["dynamic"]
  assert PROJECT["tool"]["hatch"]["version"] == {"path": "ats_jax/__init__.py"}
  monkeypatch.setattr("sys.argv", ["ats-jax", "--version"])
  assert main() == 0
  assert capsys.readouterr().out == f"ats_jax {__version__}\n"


def test_the_version_is_the_newest_in_the_changelog():
  versions = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
  assert versions[0] == __version__


def test_the_source_archive_has_the_documents():
  included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
  for name in ("README.md", "CHANGELOG.md", "SECURITY.md"):
    assert (ROOT / name).is_file() and f"/{name}" in included
