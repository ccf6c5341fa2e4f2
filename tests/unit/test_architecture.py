"""Who imports whom, and the other rules of the house that can be read off the source."""

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quick import is_quick

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ats_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
KERNELS = sorted(p for folder in ROOT.glob("kernels_*") for p in folder.rglob("*.py"))

# What a package of ats_jax may import of ats_jax besides itself, lowest package first.
# docs/internals/architecture.md says what each is for.
MODEL = {"config", "sharding", "ops"}
STEP = MODEL | {"model", "data", "extensions"}
ALLOWED = {
  "exits": set(),
  "extensions": set(),  # it names the modules that register built-in parts, and imports them late
  "store": {"exits"},
  "config": {"store", "extensions"},
  "sharding": {"config"},
  "metrics": {"config", "store", "extensions"},
  "data": {"config", "store", "extensions", "exits"},
  "checkpoint": {"config", "store", "exits"},
  "ops": {"config", "sharding"},  # and kernels_*
  "model": MODEL | {"extensions"},
  "step": STEP,
  "planner": STEP | {"step", "metrics"},
  "pytorch": set(),
  "bridge": MODEL | {"store", "model", "checkpoint", "data", "pytorch", "exits"},
  "orchestrator": STEP | {"step", "store", "metrics"},
  "report": {"config", "store", "metrics", "data", "checkpoint", "orchestrator"},
  "cluster": {"config", "store", "exits", "metrics", "planner", "ops"},
  "inference": STEP | {"step", "store", "checkpoint", "cluster", "bridge"},
  "train": STEP
  | {"store", "metrics", "checkpoint", "step", "planner", "bridge", "orchestrator", "cluster"}
  | {"inference"},
  "pytorch.training": STEP
  | {"store", "metrics", "checkpoint", "step", "bridge", "pytorch", "train"},
}
# The doors stand above everything and are imported by nothing below.
DOORS = {"verbs", "api", "__main__"}
MESH_AXES = {"stage", "data", "fsdp", "expert", "context", "tensor"}


def package_of(module: str) -> str:
  """The entry of the table that a module, named without `ats_jax.`, belongs to."""
  return "pytorch.training" if module.startswith("pytorch.training") else module.split(".")[0]


def module_of(path: Path) -> str:
  parts = path.relative_to(PACKAGE).with_suffix("").parts
  return ".".join(part for part in parts if part != "__init__")


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


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.Call):
      yield ast.unparse(node.func), node


def name_of(path: Path) -> str:
  return str(path.relative_to(ROOT))


def test_imports_go_downwards():
  offenders = []
  for path in FILES:
    here = package_of(module_of(path))
    if here in DOORS or path.name == "__main__.py":
      continue
    for name in imports(path):
      if name.startswith("kernels_") and here not in ("ops", "pytorch"):
        offenders.append(f"{name_of(path)} imports {name}")
      target = name.removeprefix("ats_jax.")
      if target == name or target == "__version__":
        continue
      if not here or package_of(target) not in ALLOWED[here] | {here}:
        offenders.append(f"{name_of(path)} imports {name}")
  assert not offenders


def test_the_table_itself_has_no_cycle():
  order = list(ALLOWED)
  assert all(allowed <= set(order[: order.index(name)]) for name, allowed in ALLOWED.items())
  assert {package_of(module_of(path)) for path in FILES} - {""} == set(ALLOWED) | DOORS


def test_modules_import_each_other_in_no_circle():
  modules = {f"ats_jax.{module_of(path)}".rstrip("."): path for path in FILES}
  below = {}
  for module, path in modules.items():
    names = {name if name in modules else name.rpartition(".")[0] for name in imports(path)}
    below[module] = names & set(modules) - {module}
  while leaves := {module for module, names in below.items() if not names}:
    below = {module: names - leaves for module, names in below.items() if module not in leaves}
  assert not below, f"in a circle, or above one: {sorted(below)}"


def test_kernels_know_their_libraries_only():
  offenders = []
  for path in KERNELS:
    own = path.relative_to(ROOT).parts[0]
    known = {"jax", "numpy", "torch", "triton", own}
    if own == "kernels_triton":  # which is compiled into the same folder, for the same GPU
      known.add("kernels_cuda")
    others = {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names
    offenders += [f"{name_of(path)} imports {name}" for name in others - known]
  assert not offenders


def test_the_model_names_no_mesh_axis():
  offenders = [
    f"{name_of(path)}:{node.lineno}"
    for path in (PACKAGE / "model").rglob("*.py")
    for node in ast.walk(tree(path))
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in MESH_AXES
  ]
  assert not offenders


def test_no_handler_catches_everything():
  offenders = []
  for path in [*FILES, *KERNELS]:
    for node in ast.walk(tree(path)):
      if isinstance(node, ast.ExceptHandler):
        names = ast.walk(node.type) if node.type else ()
        caught = {n.id for n in names if isinstance(n, ast.Name)}
        if node.type is None or caught & {"Exception", "BaseException"}:
          offenders.append(f"{name_of(path)}:{node.lineno}")
  assert not offenders


@pytest.mark.parametrize(
  ("module", "only"),
  [("clu", "ats_jax/metrics/builtin.py"), ("jax._src", "ats_jax/ops/_compat.py")],
)
def test_fragile_modules_have_one_door(module, only):
  users = {
    name_of(path)
    for path in [*FILES, *KERNELS]
    if any(f"{name}.".startswith(f"{module}.") for name in imports(path))
  }
  assert users == {only}


@pytest.mark.parametrize("folder", ["sharding", "ops", "model", "step"])
def test_what_is_traced_asks_for_no_backend(folder):
  """`step.program.make_program` looks at the device once and hands down what it found."""
  files = (PACKAGE / folder).rglob("*.py")
  assert not [path for path in files if "default_backend" in path.read_text(encoding="utf-8")]


def test_random_keys_are_folded_never_split():
  """Nor with bare numbers: the purposes are `model.random.Purpose`, each with its own."""
  offenders = [
    f"{name_of(path)}:{call.lineno}"
    for path in FILES
    for name, call in calls(path)
    if name == "jax.random.split"
    or (name == "jax.random.fold_in" and isinstance(call.args[1], ast.Constant))
  ]
  assert not offenders


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
  offenders = [
    name_of(path)
    for path in quick
    if slow & {n.id for n in ast.walk(tree(path)) if isinstance(n, ast.Name)}
  ]
  assert not offenders
