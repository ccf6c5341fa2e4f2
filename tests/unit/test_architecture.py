"""Who imports whom, and the other rules of the house that can be read off the source."""

import ast
import functools
import sys
from pathlib import Path

import pytest
from quick import is_quick

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ats_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 500

KERNELS = sorted(p for folder in ROOT.glob("kernels_*") for p in folder.rglob("*.py"))

# What a part may import of ats_jax besides itself; a trailing * matches any ending. A file that
# lies directly in ats_jax/ is a part of its own. The order is that of the design, lowest first.
MODEL = {"config", "sharding", "ops"}
STEP = MODEL | {"model", "data.batch", "extensions"}
ALLOWED = {
  "paths": set(),
  "exits": set(),
  "extensions": set(),  # it names the homes of what is built in, and imports them when asked
  "config": {"paths", "extensions"},
  "data": {"config", "extensions", "paths"},
  "metrics": {"config", "extensions", "paths"},
  "together": {"paths"},
  "checkpoint": {"config", "exits", "paths", "together"},
  "sharding": {"config"},
  "ops": {"config", "sharding"},  # and kernels_*
  "model": MODEL,
  "step": STEP,
  "planner": STEP | {"step", "metrics.memory*", "data.tokenizer*"},
  "orchestrator": STEP
  | {"step", "metrics.rows*", "metrics.transfer*", "metrics.clock*"}
  | {"paths"},
  # Shared by all entry points; they know nothing of what is trained.
  "cli": {"config", "exits"},
  "launch": {"cli", "exits"},  # starts before jax is imported
  "rollcall": {"exits"},  # likewise
  "preflight": {
    "paths",
    "rollcall",
    "planner.hardware*",
    "metrics.environment*",
    "metrics.memory*",
  },
  "runtime": {"config"},
  "job": {"config", "rollcall"},
  "lease": {"exits", "paths"},
  "workdir": {"config", "lease", "paths", "together"},
  "logfile": {"config", "paths"},
  "liveness": {"config", "exits", "paths", "metrics.goodput*", "ops._compat"},
  "feed": {"config", "sharding", "data"},
  "scoring": {"feed", "data", "sharding", "model", "step"},
  "bridge": {"config", "sharding", "model", "checkpoint", "data.tokenizer*", "workdir", "paths"},
  "importers": {"config", "bridge.families*", "bridge.family*"},
  "inference": {"config", "sharding", "model", "step", "checkpoint", "data.tokenizer*"}
  | {"data.chat", "cli", "runtime", "workdir", "paths"},
}
# The entry points and what they share stand above everything and are imported by nothing below.
TOP = {"train", "run", "announce", "evaluate", "generate", "bench", "plan"}
TOP |= {"forecast", "decisions", "api", "length", "fitting", "torch_run", "check_env"}
MESH_AXES = {"stage", "data", "fsdp", "expert", "context", "tensor"}
TOP |= {"compiled"}


def part(path: Path) -> str:
  return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def tree(path: Path) -> ast.Module:
  return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> list[str]:
  """Full names of all that a file imports, wherever in the file: `a.b` and `a.b.name`."""
  names = []
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      names += [f"{node.module}.{alias.name}" for alias in node.names]
  return names


def is_allowed(target: str, allowed: set[str]) -> bool:
  return any(
    target.startswith(rule[:-1]) if rule.endswith("*") else f"{target}.".startswith(f"{rule}.")
    for rule in allowed
  )


def identify(path: Path) -> str:
  return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=identify)
def test_imports_go_downwards(path):
  here = part(path)
  if here == "__init__":
    assert not [n for n in imports(path) if n.startswith("ats_jax")]
    return
  if here in TOP or path.name == "__main__.py":  # an entry point
    return
  assert here in ALLOWED, f"{here} has no place in the table above"
  for name in imports(path):
    assert here == "ops" or not name.startswith("kernels_"), f"{here} must not import {name}"
    if name.split(".")[0] == "ats_jax":
      target = name.removeprefix("ats_jax").removeprefix(".")
      assert target == "__version__" or is_allowed(target, ALLOWED[here] | {here}), (
        f"{here} must not import {name}"
      )


@pytest.mark.parametrize("path", KERNELS, ids=identify)
def test_kernels_know_their_libraries_only(path):
  known = {"jax", "numpy", "torch", "triton", "jax_triton", path.relative_to(ROOT).parts[0]}
  others = {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names
  assert others <= known


def test_the_table_itself_has_no_cycle():
  order = list(ALLOWED)
  for index, (name, allowed) in enumerate(ALLOWED.items()):
    lower = {rule.split(".")[0] for rule in allowed}
    assert lower <= set(order[:index]), name
    assert not lower & TOP


@pytest.mark.parametrize("path", [p for p in FILES if part(p) == "model"], ids=identify)
def test_the_model_names_no_mesh_axis(path):
  strings = {
    n.value for n in ast.walk(tree(path)) if isinstance(n, ast.Constant) and type(n.value) is str
  }
  assert not strings & MESH_AXES


SOURCES = sorted(
  p
  for folder in (
    PACKAGE,
    ROOT / "benchmarks",
    ROOT / "configs",
    ROOT / "experiments",
    ROOT / "tests",
    *ROOT.glob("kernels_*"),
  )
  for p in folder.rglob("*.py")
)


@pytest.mark.parametrize("path", SOURCES, ids=identify)
def test_no_file_is_longer_than_500_lines(path):
  assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", [*FILES, *KERNELS], ids=identify)
def test_no_handler_catches_everything(path):
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.ExceptHandler):
      assert node.type is not None, f"{path}:{node.lineno}: bare except"
      caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
      assert not caught & {"Exception", "BaseException"}, f"{path}:{node.lineno}"


@pytest.mark.parametrize(
  ("module", "only"),
  [("clu", "ats_jax/metrics/builtin.py"), ("jax._src", "ats_jax/ops/_compat.py")],
)
def test_fragile_modules_have_one_door(module, only):
  users = {
    identify(path)
    for path in [*FILES, *KERNELS]
    if any(f"{name}.".startswith(f"{module}.") for name in imports(path))
  }
  assert users == {only}


@pytest.mark.parametrize("folder", ["sharding", "ops", "model", "step"])
def test_what_is_traced_asks_for_no_backend(folder):
  """`step.program.make_program` looks at the device once and hands down what it found."""
  for path in (PACKAGE / folder).rglob("*.py"):
    assert "default_backend" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("path", FILES, ids=identify)
def test_random_keys_are_folded_never_split(path):
  """Nor with bare numbers: the purposes are `model.random.Purpose`, each with its own."""
  calls = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Call)]
  for called, *arguments in ((ast.unparse(n.func), *n.args) for n in calls):
    assert called != "jax.random.split"
    if called == "jax.random.fold_in":
      assert not isinstance(arguments[1], ast.Constant)


def test_test_files_have_unique_names_and_no_packages():
  files = [p for p in (ROOT / "tests").rglob("*.py") if p.name != "conftest.py"]
  assert len({p.name for p in files}) == len(files)
  assert not list((ROOT / "tests").rglob("__init__.py"))


def test_the_quick_tests_compile_nothing_and_are_many():
  """What jit, a program or a process is made of is in files that `pytest --quick` leaves out."""
  files = sorted((ROOT / "tests").rglob("test_*.py"))
  quick = [path for path in files if is_quick(path)]
  assert 20 < len(quick) < len(files) / 2
  slow = {"jit", "make_program", "make_decoder", "forked", "started", "Popen"}
  for path in quick:
    assert not slow & {n.id for n in ast.walk(tree(path)) if isinstance(n, ast.Name)}, path
