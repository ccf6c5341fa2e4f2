"""The notebooks are what `make notebooks` makes of the scripts; `.ci/notebooks` executes them."""

import ast
import json
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
CHECK = runpy.run_path(str(FOLDER / "colab" / "check.py"))


def load(script: Path) -> dict:
  return json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))


def test_each_script_has_its_notebook():
  assert SCRIPTS and sorted(p.stem for p in FOLDER.glob("*.ipynb")) == [p.stem for p in SCRIPTS]


def test_the_short_ones_begin_alike():
  """What installs the package and runs a command is one text in all but the two longer ones."""
  short = [load(p)["cells"] for p in SCRIPTS if p.stem not in ("experts", "quickstart")]
  assert len({"".join(cells[1]["source"]) for cells in short}) == 1


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_script_and_notebook_agree(script):
  jupytext = pytest.importorskip("jupytext")  # of the dev extra
  made = [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
  kept = [(cell["cell_type"], "".join(cell["source"])) for cell in load(script)["cells"]]
  assert kept == made, "run `make notebooks`"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_a_notebook(script):
  """It has no outputs, says what was not run, and imports no jax.

  So its process keeps no GPU memory, and may install another jax.
  """
  cells = load(script)["cells"]
  code = [cell for cell in cells if cell["cell_type"] == "code"]
  assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)
  text = "".join("".join(c["source"]) for c in cells if c["cell_type"] != "code")
  assert "**What was not:** Colab itself, its T4 and its TPUs." in " ".join(
    text.replace("\n# ", " ").split()
  )
  tree = ast.parse(script.read_text(encoding="utf-8"))
  plain = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
  named = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
  assert not {str(name).split(".")[0] for name in plain | named} & {"jax", "flax", "ats_jax"}


@pytest.mark.parametrize(
  ("found", "wrong"),
  [
    ({"flax": ("0.11.2", "0.12.12"), "tensorboardx": (None, "2.6.5")}, []),
    ({"jax": ("0.7.2", "0.11.2"), "numpy": ("2.0.2", "2.1.3")}, []),
    ({"jax": ("0.7.2", "0.12.0"), "numpy": ("2.1.3", "2.5.5")}, ["numpy"]),
    ({"protobuf": ("5.29.6", "7.36.2"), "psutil": ("5.9.5", "7.2.2")}, ["protobuf", "psutil"]),
  ],
)
def test_what_an_install_on_colab_may_change(found, wrong):
  assert CHECK["refused"](found) == wrong
