"""How large the package is, and how many files one thing goes through.

  python -m lab.structure                          # this checkout
  python -m lab.structure --checkout=../before     # another one, e.g. an earlier commit
  python -m lab.structure --static --checkout=../torchtitan --package=torchtitan --entry=train

Static figures are read off the source: imports, definitions, names. Traced figures come from a run
of `configs/debug.py` for a few steps on the CPU, in a process of its own: the orchestrator is off,
metrics go to TensorBoard and JSON lines, and there is one save and one evaluation.

loaded: files of the package that a process has imported at the end of such a run.
batch: files of which a function is entered while the step is traced and while steps are made,
  from the loader's threads to the row of the log.
save: files of which a function is entered by the thread that saves a checkpoint.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

# The names of a data option that is off in most runs, to see how many files ask for it.
OPTION = {"chat_template", "format"}
# Settings that were small languages in strings, each with a parser of its own.
LANGUAGES = (
  "data.paths",
  "data.mixture",
  "data.validation_paths",
  "data.filters",
  "data.chat_weights",  # now data.format.weights and data.format.sources
  "data.chat_sources",
  "optimizer.phases",
  "step.compiler_options",
  "ops.kernels",
  "log.writers",
  "sample.stop",
  "extensions",
)
KINDS_OF_ROWS = {"Dataset", "Joined", "Mixture", "Buckets", "Stream", "NoRows"}


class Source(NamedTuple):
  """A Python package as text.

  Attributes:
    folder: of the package.
    files: by dotted name.
    trees: the same, parsed.
  """

  folder: Path
  files: dict[str, Path]
  trees: dict[str, ast.Module]


def read(folder: Path) -> Source:
  """Parse all files of a package."""
  files = {}
  for path in sorted(folder.rglob("*.py")):
    if "tests" not in path.relative_to(folder).parts:
      parts = (folder.name, *path.relative_to(folder).with_suffix("").parts)
      files[".".join(part for part in parts if part != "__init__")] = path
  return Source(folder, files, {m: ast.parse(p.read_text("utf-8")) for m, p in files.items()})


def imports(source: Source, module: str, *, late: bool) -> set[str]:
  """The modules of the package that a module imports; with `late` also inside of functions."""
  nodes: Iterable[ast.AST] = ast.walk(source.trees[module])
  if not late:
    nodes = (n for top in source.trees[module].body for n in _unless_function(top))
  is_package = source.files[module].name == "__init__.py"
  targets = set()
  for node in nodes:
    if isinstance(node, ast.Import):
      targets |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        above = module.split(".")[: None if is_package and node.level == 1 else -node.level]
        base = ".".join(filter(None, (".".join(above), base)))
      for alias in node.names:
        full = f"{base}.{alias.name}"
        targets.add(full if full in source.files else base)
  return {name for target in targets for name in _with_packages(target) if name in source.files}


def _unless_function(node: ast.AST) -> Iterable[ast.AST]:
  """What runs when a module is imported."""
  if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
    return
  if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
    return
  yield node
  for child in ast.iter_child_nodes(node):
    yield from _unless_function(child)


def _with_packages(module: str) -> Iterable[str]:
  parts = module.split(".")
  return (".".join(parts[: n + 1]) for n in range(len(parts)))


def closure(source: Source, entry: str) -> set[str]:
  """What importing a module loads of its package."""
  loaded, waiting = set(), [entry]
  while waiting:
    module = waiting.pop()
    if module not in loaded:
      loaded.add(module)
      waiting += imports(source, module, late=False)
  return loaded


def circles(source: Source) -> list[str]:
  """Modules in a circle of imports, or between two circles."""
  below = {m: imports(source, m, late=True) - {m} for m in source.files}
  below = {m: {n for n in names if not m.startswith(f"{n}.")} for m, names in below.items()}
  for _ in range(2):  # from both ends
    while leaves := {module for module, names in below.items() if not names}:
      below = {module: names - leaves for module, names in below.items() if module not in leaves}
    turned = {module: set[str]() for module in below}
    for module, names in below.items():
      for name in names:
        turned[name].add(module)
    below = turned
  return sorted(below)


def lines_of(source: Source, modules: Iterable[str]) -> int:
  """Lines of some files together."""
  return sum(len(source.files[m].read_text("utf-8").splitlines()) for m in modules)


def static(source: Source, entry: str) -> dict[str, Any]:
  """The figures that need no run."""
  loaded = closure(source, entry)
  entries = [p for p in source.folder.iterdir() if p.suffix == ".py" or p.is_dir()]
  return {
    "entries of the package": len([p for p in entries if p.name[:2] != "__" or p.suffix]),
    "files (lines) of the package": _count(len(source.files), lines_of(source, source.files)),
    f"files (lines) that importing {entry} loads": _count(len(loaded), lines_of(source, loaded)),
    "modules in circles of imports": len(circles(source)),
  }


def of_ats_jax(source: Source) -> dict[str, Any]:
  """Figures that have a meaning for this package alone."""
  names = lambda tree: {
    n.attr
    for n in ast.walk(tree)
    if isinstance(n, ast.Attribute) and ast.unparse(n.value) in ("cfg", "data", "cfg.data")
  }
  asked = [m for m, tree in source.trees.items() if OPTION & names(tree)]
  kinds = 0
  for tree in source.trees.values():
    for node in ast.walk(tree):
      if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        kinds += bool(KINDS_OF_ROWS & set(re.findall(r"\w+", ast.unparse(node.args[1]))))
  settings = json.loads(_python(source.folder.parent, "-c", SETTINGS).splitlines()[-1])
  languages = [name for name in LANGUAGES if settings["types"].get(name) == "str"]
  return {
    "files that read whether a text is of conversations": len(asked),
    "isinstance on kinds of rows": kinds,
    "settings of all kinds": settings["all"],
    "settings of the default kinds": len(settings["types"]),
    "settings that have an effect before another is changed": settings["met"],
    "settings that are languages in strings": len(languages),
  }


# Prints how many settings there are, and the types of those of the default kinds.
SETTINGS = """
import json
from ats_jax.config import Config
try:
  from ats_jax.config.names import all_settings, flatten, settings, unmet
  own, flat = settings(), flatten(Config())
  every, met = len(all_settings()), sum(unmet(name, own, flat) is None for name in own)
except ImportError:  # before sections had kinds
  from ats_jax.config.build import settings
  own = settings()
  every = met = len(own)
types = {name: getattr(field.type, "__name__", str(field.type)) for name, field in own.items()}
print(json.dumps({"types": types, "all": every, "met": met}))
"""
# Runs in a process of its own, with either commit's names.
TRACED = """
import importlib, json, os, sys, threading
from pathlib import Path

folder, package = Path(sys.argv[1]), Path(sys.argv[2])

def either(*names):
  for name in names:
    module, _, attribute = name.partition(":")
    try:
      return getattr(importlib.import_module(module), attribute), importlib.import_module(module)
    except (ImportError, AttributeError):
      pass
  raise SystemExit(f"none of {names}")

texts = folder / "texts"
texts.mkdir()
for number in range(40):
  (texts / f"{number}.txt").write_text("some words that come again and again. " * 20)

from ats_jax.config.file import load_file
from ats_jax.config import Config, from_config_dict
updated, _ = either("ats_jax.config.tree:updated", "ats_jax.config.build:updated")
in_text = isinstance(Config().data.paths, str)  # lists were text with commas
values = updated(load_file("configs/debug.py").to_dict(), {
  "num_steps": 4, "compilation_cache": "off", "model.num_layers": 2, "model.d_model": 32,
  "model.num_heads": 2, "model.num_kv_heads": 2, "model.d_ff": 64,
  "data.paths": str(texts) if in_text else (str(texts),),
  "data.seq_len": 32, "data.batch_size": 8, "data.tokenizer": "bytes", "data.num_workers": 0,
  "data.validation_fraction": 0.3, "data.cache_dir": str(folder / "cache"),
  "optimizer.warmup_steps": 1, "eval.bigram_baseline": False, "eval.every_steps": 4,
  "sample.max_tokens": 0, "log.progress": False,
  "log.writers": "tensorboard,jsonl" if in_text else ("tensorboard", "jsonl"),
  "log.every_steps": 2, "orchestrator.mode": "off", "checkpoint.every_steps": 4,
})
either("ats_jax.verbs.train:main", "ats_jax.train:main")  # as the command does
train, loop_module = either("ats_jax.train.loop:train", "ats_jax.train:train")
Run, _ = either("ats_jax.train.run:Run", "ats_jax.run:Run")
Program, _ = either("ats_jax.step.program:Program")
journeys, main = [], threading.get_ident()  # what is being done, the innermost last
entered = {"batch": set(), "save": set()}

def look(frame, event, arg):
  name = frame.f_code.co_filename
  if event == "call" and journeys and name.startswith(str(package)):
    own = threading.get_ident() == main or journeys[-1] == "batch"
    if own and frame.f_code.co_name != "<module>" and journeys[-1] in entered:
      entered[journeys[-1]].add(os.path.relpath(name, package))

def during(owner, name, journey):
  original = getattr(owner, name)
  def traced(*args, **kwargs):
    journeys.append(journey)
    sys.setprofile(look)
    try:
      return original(*args, **kwargs)
    finally:
      journeys.remove(journey)
  setattr(owner, name, traced)

threading.setprofile(look)
during(loop_module, "loop", "batch")
during(Program, "compile_train_step", "batch")
during(Run, "evaluate", "evaluation")
during(Run, "save", "save")
StorePath, _ = either("ats_jax.store.paths:Path", "ats_jax.paths:Path")
train(from_config_dict(values), StorePath(folder / "run"))
sys.setprofile(None)
threading.setprofile(None)
loaded = sorted(os.path.relpath(m.__file__, package) for n, m in list(sys.modules.items())
                if n.split(".")[0] == package.name and getattr(m, "__file__", None))
print("FIGURES " + json.dumps({"loaded": loaded, **{k: sorted(v) for k, v in entered.items()}}))
"""


def traced(source: Source) -> dict[str, list[str]]:
  """Files loaded and entered in a run, by journey."""
  with tempfile.TemporaryDirectory() as folder:
    out = _python(source.folder.parent, "-c", TRACED, folder, str(source.folder))
  (line,) = [line for line in out.splitlines() if line.startswith("FIGURES ")]
  return json.loads(line.removeprefix("FIGURES "))


def _python(checkout: Path, *words: str) -> str:
  env = {**os.environ, "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, *words], cwd=checkout, env=env, capture_output=True, text=True, check=False
  )
  if done.returncode:
    raise SystemExit(f"a run in {checkout} failed:\n{done.stderr[-3000:]}")
  return done.stdout


def _count(files: int, lines: int) -> str:
  return f"{files} ({lines / 1000:.1f}k)"


def main() -> None:
  """Print a table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[1])
  parser.add_argument("--package", default="ats_jax")
  parser.add_argument("--entry", default="train.loop", help="module below the package")
  parser.add_argument("--static", action="store_true", help="nothing is run")
  parser.add_argument("--files", action="store_true", help="list the files of each journey")
  given = parser.parse_args()
  source = read(given.checkout.resolve() / given.package)
  entry = f"{given.package}.{given.entry}"
  if entry not in source.files:
    parser.error(f"--entry={given.entry}: there is no {entry} in {given.checkout}")
  figures = static(source, entry)
  journeys: dict[str, list[str]] = {}
  if not given.static:
    journeys = traced(source)
    paths = {str(p.relative_to(source.folder)): m for m, p in source.files.items()}
    loaded = [paths[name] for name in journeys["loaded"]]
    figures |= {
      "files (lines) loaded by a plain run": _count(len(loaded), lines_of(source, loaded)),
      "files entered for a batch": len(journeys["batch"]),
      "files entered by a save": len(journeys["save"]),
    }
    figures |= of_ats_jax(source)
  print("| measure | value |\n|---|--:|")
  for name, value in figures.items():
    print(f"| {name} | {value} |")
  if given.files:
    print(f"\ncircles: {' '.join(circles(source))}")
    for name, files in journeys.items():
      print(f"\n{name}: {' '.join(files)}")


if __name__ == "__main__":
  main()
