"""Which test files a change can affect, on a small repository and on this one."""

import subprocess
from pathlib import Path

import pytest

from lab.affected import Repository, affected, since

FILES = {
  "ats_jax/__init__.py": "def __getattr__(name):\n  import ats_jax.api\n",
  "ats_jax/api.py": "import ats_jax.loop\n",
  "ats_jax/leaf.py": 'MESSAGE = "See docs/guide.md."\n',
  "ats_jax/loop.py": "def train():\n  from ats_jax import leaf\n",
  "ats_jax/kinds.py": 'HOMES = {"one": "ats_jax.kind_one"}\n',
  "ats_jax/kind_one.py": "",
  "ats_jax/verbs/__init__.py": 'def find(verb):\n  return load(f"ats_jax.verbs.{verb}")\n',
  "ats_jax/verbs/plan.py": "",
  "README.md": "",
  "docs/guide.md": "python -m lab.table",
  "kernels_cuda/csrc/own.cuh": "",
  "kernels_cuda/library.py": 'SOURCES = FOLDER / "csrc"\n',
  "lab/table.py": "",
  "docs/other.md": "",
  "launch/job.sh": "",
  "tests/helpers.py": "",
  "tests/unit/commands/conftest.py": "from ats_jax import leaf\n",
  "tests/unit/commands/test_readme.py": 'pages = ROOT.glob("*.md")\n',
  "tests/unit/test_cuda.py": "from kernels_cuda import library\n",
  "tests/unit/beside.py": "from ats_jax import leaf\n",
  "tests/unit/numbers.json": "",
  "tests/unit/test_beside.py": '"""Not of ats_jax.loop."""\nimport beside\n',
  "tests/unit/test_docs.py": 'text = open("docs/guide.md").read()\n',
  "tests/unit/test_kinds.py": "from ats_jax import kinds\n",
  "tests/unit/test_leaf.py": "from ats_jax.leaf import name\n",
  "tests/unit/test_loop.py": "from ats_jax.loop import train\n",
  "tests/unit/test_verbs.py": "from ats_jax.verbs import find\n",
  "tests/e2e/test_all.py": 'import subprocess\nfiles = ROOT.glob("docs/*.md")\n',
}


@pytest.fixture
def root(tmp_path):
  for name, text in FILES.items():
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  return tmp_path


def names(found):
  assert isinstance(found, dict), found
  return {Path(name).stem.removeprefix("test_") for name in found}


AFFECTED = [
  (
    "ats_jax/leaf.py",
    {"beside", "leaf", "loop", "readme", "all"},
  ),  # in functions, by a conftest
  ("ats_jax/loop.py", {"loop", "all"}),  # nothing here asks a package for its attributes
  ("ats_jax/kind_one.py", {"kinds", "all"}),  # by its name in a registry
  ("ats_jax/verbs/plan.py", {"verbs", "all"}),  # by the start of a name
  ("tests/unit/test_loop.py", {"loop"}),
  ("tests/unit/beside.py", {"beside"}),
  ("docs/guide.md", {"docs", "all"}),
  ("docs/other.md", {"all"}),
  ("README.md", {"readme"}),
  ("lab/table.py", {"docs", "all"}),  # by a document
  ("kernels_cuda/csrc/own.cuh", {"cuda", "all"}),  # by the name of its folder
  ("tests/unit/numbers.json", {"beside", "cuda", "docs", "kinds", "leaf", "loop", "verbs"}),
  (".gitignore", set()),
  ("ats_jax/gone.py", set()),
]


def test_what_a_file_affects(root):
  repository = Repository(root, FILES)
  found = {changed: names(affected(repository, [changed])) for changed, _ in AFFECTED}
  assert found == dict(AFFECTED)


EVERYTHING = [
  ("pyproject.toml", "pyproject.toml has changed, which all tests share"),
  (".ci/run", ".ci/run has changed, which all tests share"),
  ("tests/helpers.py", "tests/helpers.py has changed, which all tests share"),
  ("launch/job.sh", "launch/job.sh has changed, and no test that depends on it is known"),
  ("docs/gone.md", "docs/gone.md is gone, and who read it is not known"),
]


def test_what_affects_everything(root):
  repository = Repository(root, FILES)
  found = [(name, affected(repository, [name, "ats_jax/leaf.py"])) for name, _ in EVERYTHING]
  assert found == EVERYTHING


def test_changes_since_a_commit(root):
  def git(*words):
    own = "-c", "user.name=a", "-c", "user.email=a@example.org"
    done = subprocess.run(
      ["git", *own, *words], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()

  git("init", "--quiet")
  git("add", ".")
  git("commit", "--quiet", "--message=one")
  first = git("rev-parse", "HEAD")
  assert since(root, first) == {}
  (root / "ats_jax/loop.py").write_text("")
  (root / "tests/unit/test_new.py").write_text("")
  assert names(since(root, first)) == {"loop", "new", "all"}
  git("add", ".")
  git("commit", "--quiet", "--message=two")
  assert names(since(root, first)) == {"loop", "new", "all"}
  assert since(root, "0" * 40) == f"{'0' * 40} is not an ancestor of this commit"


@pytest.mark.thorough
def test_of_this_repository():
  """Few tests depend on the planner, nearly all on the settings."""
  root = Path(__file__).parents[3]
  listed = subprocess.run(
    ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False
  )
  if listed.returncode:
    pytest.skip("not a checkout")
  files = [name for name in listed.stdout.split("\n") if name and (root / name).is_file()]
  repository = Repository(root, files)
  fit = affected(repository, ["ats_jax/planner/fit.py"])
  settings = affected(repository, ["ats_jax/config/schema/model.py"])
  assert isinstance(fit, dict) and isinstance(settings, dict)
  assert "tests/unit/planner/test_fit.py" in fit and "tests/unit/store/test_lease.py" not in fit
  assert 0 < 2 * len(fit) < len(settings) < len(repository.tests())
