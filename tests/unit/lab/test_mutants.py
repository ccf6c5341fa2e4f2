"""Mutants: drawn alike from one seed, applied to the package, and caught by tests."""

import ast
import fcntl
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from lab import mutants
from lab.mutants import Mutant, Suite, generate, read, rows, run, table

ROOT = Path(__file__).parents[3]
SIZES = '''"""Sizes."""
import logging


def half(n: int = 1, *, up: bool = False) -> int:
  """Half of it, 1 for 2."""
  if n < 10:
    logging.info("small %d", n + 1)
  return (n + 3) // 5 if up else n // 5


def told(n: int) -> str:
  return "one" if n == 1 else "several"


def checked(n):
  if n > 7:
    raise ValueError(f"{n + 1} exceeds 7")
  return half(n, up=True)
'''
FILES = {
  "ats_jax/__init__.py": "",
  "ats_jax/config/__init__.py": "",
  "ats_jax/config/sizes.py": SIZES,
  "ats_jax/config/unseen.py": SIZES,
  "ats_jax/data/unreached.py": SIZES,
  "tests/unit/config/test_sizes.py": """import pathlib
import pytest
from ats_jax.config import sizes

def test_checked():
  assert sizes.checked(7) == 2

def test_of_the_environment():
  assert pathlib.Path("missing").exists()
""",
  "tests/unit/config/test_extra.py": "import no_such_package\nfrom ats_jax.config import sizes\n",
  "tests/e2e/test_story.py": "import os\ndef test_story():\n  assert os.name\n",
}


def row(mutant, outcome, test=""):
  area = mutant.split("-")[0]
  values = (mutant, area, "a.py", "3", outcome, "1.4", test, "0.0")
  return dict(zip(mutants._COLUMNS, values, strict=True))


CHECKED = Mutant(
  "config-1", "config", "ats_jax/config/sizes.py", 17, "boundary", "  if n > 7:", "  if n >= 7:"
)


@pytest.fixture
def root(tmp_path, monkeypatch):
  monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a second to start
  for name, text in FILES.items():
    path = tmp_path / "checkout" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  subprocess.run(["git", "init", "-q"], cwd=tmp_path / "checkout", check=True)
  return tmp_path / "checkout"


def test_generation_is_deterministic_and_leaves_words_alone(root, monkeypatch):
  monkeypatch.setattr(mutants, "AREAS", {"config": 1})
  drawn = [generate(root, FILES, seed)[0] for seed in range(60)]
  assert drawn == [generate(root, FILES, seed)[0] for seed in range(60)]
  assert {one.file for one in drawn} == {"ats_jax/config/sizes.py"}  # no test reaches the others
  changed = {(one.kind, one.before, one.after) for one in drawn}
  assert ("boundary", "  if n > 7:", "  if n >= 7:") in changed
  assert ("argument", "  return half(n, up=True)", "  return half(n)") in changed
  assert not [one for one in drawn if one.line in (1, 5, 7, 8, 13, 18)]


def test_the_list_has_thirty_and_most_still_apply():
  listed = read()
  assert Counter(one.area for one in listed) == mutants.AREAS
  assert sum(mutants.AREAS.values()) == 30
  assert len({one.kind for one in listed}) == len(mutants.KINDS)
  applied = 0
  for one in listed:
    path = ROOT / one.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (mutated := one.apply(text)) is not None:
      assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text)), one.id
      applied += 1
  assert applied >= 20, "the package has changed: make the list anew, by `generate --commit=...`"


def test_lines_are_found_where_they_have_moved_to():
  one = Mutant("config-1", "config", "a.py", 2, "constant", "  x = 1", "  x = 2")
  assert one.apply("def f():\n  x = 1\n  x = 1\n") == "def f():\n  x = 2\n  x = 1\n"
  assert one.apply("\n\ndef f():\n  x = 1\n") == "\n\ndef f():\n  x = 2\n"
  assert one.apply("\n\ndef f():\n  x = 1\n  x = 1\n") is None
  assert one.apply("def f():\n  x = 3\n") is None


@pytest.mark.thorough
def test_a_mutant_is_caught_only_by_a_test_that_passes_without_it(root, tmp_path):
  kept = Mutant("config-2", "config", CHECKED.file, 1, "", "import logging", "import os, logging")
  gone = Mutant("config-3", "config", CHECKED.file, 1, "", "no such line", "pass")
  (tmp_path / "tests").mkdir()
  suite = Suite(root, tmp_path / "tests", 60, selected=True)
  out = tmp_path / "out.csv"
  run(suite, [CHECKED], out)
  run(suite, [CHECKED, kept, gone], out)
  test = "tests/unit/config/test_sizes.py::test_checked"
  found = [(row["mutant"], row["outcome"], row["test"]) for row in rows(out)]
  assert found == [
    ("config-1", "caught", test),
    ("config-2", "missed", ""),
    ("config-3", "gone", ""),
  ]
  assert (root / CHECKED.file).read_text() == SIZES


@pytest.mark.thorough
def test_the_processes_of_a_test_end_with_the_time(root, tmp_path):
  lock = tmp_path / "lock"
  (root / "tests/e2e/test_story.py").write_text(f"""
import fcntl, subprocess, sys
def test_story():
  with open({str(lock)!r}, "w") as held:
    fcntl.flock(held, fcntl.LOCK_EX)
    words = [sys.executable, "-c", "import signal; signal.pause()"]
    subprocess.run(words, pass_fds=[held.fileno()])
""")
  for test in (root / "tests/unit").rglob("*.py"):
    test.unlink()
  (tmp_path / "tests").mkdir()
  suite = Suite(root, tmp_path / "tests", 2, selected=False)
  outcome, seconds, test = suite.try_mutant(CHECKED)
  assert (outcome, test) == ("time over", "stories") and seconds >= 2
  with lock.open("w") as free:
    fcntl.flock(free, fcntl.LOCK_EX)  # would wait for a process that is left


def test_the_table_compares_two_suites():
  old = [
    row("model-1", "caught", "test_a"),
    row("model-2", "missed"),
    row("data-1", "caught", "test_b"),
  ]
  new = [
    row("model-1", "time over"),
    row("model-2", "caught", "test_c"),
    row("data-1", "caught", "x"),
  ]
  lines = table(old, new).split("\n")
  assert "| model | old | 2 | 1 | 1 | 0 | 3 |" in lines
  assert "| model | new | 2 | 1 | 0 | 1 | 3 |" in lines
  assert "| total | old | 3 | 2 | 1 | 0 | 4 |" in lines
  assert [line for line in lines if line.startswith("- ")] == [
    "- model-1 (a.py:3): old caught test_a; new time over",
    "- model-2 (a.py:3): old missed; new caught test_c",
  ]
