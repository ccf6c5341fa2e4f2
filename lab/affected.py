"""Which test files a change can affect.

  python -m lab.affected                  # since the commit named in .ci/last-full-run
  python -m lab.affected --since=COMMIT

Prints the test files, one per line, or the single line `everything`; the reasons go to stderr.

A test file is affected if one of the files that it depends on has changed: the modules that it
imports, at the top or inside of functions; what those import in turn; the modules whose dotted name
is written in a string there, as registries do; and the data files whose name, or whose folder's
name, is written there. A test that starts a process depends on the whole package, and one that
reads a document on the modules that are named in it.

Everything is affected if the commit is not an ancestor, if what all tests share has changed, or if
a file has changed of which no reader is known. Needs git and the standard library alone.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

MARK = ".ci/last-full-run"
EVERYTHING = "everything"
# What all tests share: how they are run and installed, and the helpers of more than one folder.
SHARED = re.compile(r"\.ci/(?!last-full-run)|Makefile|pyproject\.toml|constraints|tests/[^/]+\.py$")
# What no test depends on, or only a quick one on its name.
IGNORED = re.compile(
  r"docs/lab/records/|\.github/|\.gitignore$|\.pre-commit|LICENSE$|CITATION|\.ci/last-full-run$"
)
# Folders of modules: those that `ats-jax` may import, and all.
INSTALLED = (
  "ats_jax",
  "configs",
  "kernels_cuda",
  "kernels_metal",
  "kernels_pallas",
  "kernels_triton",
)
PACKAGES = (*INSTALLED, "lab")
_DOTTED = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)*\.\w*")
_INSTALLED = {(name,) for name in INSTALLED}
_STARTS_PROCESSES = {"subprocess", "multiprocessing"}


class Repository:
  """The files under version control, and what each Python file refers to.

  Attributes:
    files: all files, relative to the root.
  """

  def __init__(self, root: Path, files: Iterable[str]):
    self._root, self.files = root, set(files)
    self._modules = {_dotted(name): name for name in self.files if name.endswith(".py")}
    self._data = defaultdict[str, set[str]](set)  # data files by path, name and folder
    for name in self.files:
      path = Path(name)
      if path.suffix != ".py" or path.parts[0] == "configs":
        keys = {name, path.name}
        if path.parts[0] != "ats_jax":  # a folder there has the name of a package, or of settings
          keys |= {key for parent in path.parents for key in (str(parent), parent.name)}
        if len(path.parts) == 1:
          keys.add(f"*{path.suffix}")
        for key in keys - {".", ""}:
          self._data[key].add(name)
    self._references: dict[tuple[str, bool], set[tuple[str, bool]]] = {}
    self._closures = {test: self._closure(test) for test in self.tests()}

  def dependencies(self, test: str) -> set[str]:
    """A test file and all that it depends on, directly or not."""
    return self._closures[test]

  def tests(self) -> list[str]:
    """All test files."""
    return sorted(n for n in self.files if re.fullmatch(r"tests/(?:.*/)?test_\w+\.py", n))

  def _closure(self, test: str) -> set[str]:
    # pytest loads the conftest of each folder; that of all tests counts by `SHARED` alone.
    above = (f"{folder}/conftest.py" for folder in list(Path(test).parents)[:-2])
    known = set[tuple[str, bool]]()
    waiting = [(test, True), *((name, True) for name in above if name in self.files)]
    while waiting:
      current = waiting.pop()
      if current not in known:
        known.add(current)
        waiting += self._refer(*current)
    return {name for name, _ in known}

  def _refer(self, name: str, late: bool) -> set[tuple[str, bool]]:
    """What a file refers to: names of files, and whether the insides of functions count there.

    They do not in a package that is imported because one of its modules is.
    """
    if (name, late) not in self._references:
      self._references[name, late] = {*self._parse(name, late)}
    return self._references[name, late]

  def _parse(self, name: str, late: bool) -> Iterator[tuple[str, bool]]:
    folder = Path(name).parent
    if name.endswith(".md"):  # its commands are run
      for dotted in _DOTTED.findall((self._root / name).read_text(encoding="utf-8")):
        yield from self._files_of(dotted.rstrip("."), folder)
    if not name.endswith(".py"):
      return
    nodes = list(_nodes(ast.parse((self._root / name).read_text(encoding="utf-8")), late))
    for module in _imported(folder.parts, nodes):
      if module.split(".")[0] in _STARTS_PROCESSES and folder.parts[0] == "tests":
        yield from ((file, True) for file in self.files if file.split("/")[0] in INSTALLED)
      yield from self._files_of(module, folder)
    if len(folder.parts) > 1 and folder.parts[0] == "tests":  # the data of tests stand with them
      yield from ((file, True) for file in self._data.get(str(folder), ()))
    for node in nodes:
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from self._named_in(node.value, folder)

  def _named_in(self, text: str, folder: Path) -> Iterator[tuple[str, bool]]:
    """The files that a string names: modules by dotted name, data files, and folders of these."""
    for dotted in _DOTTED.findall(text):
      if dotted.endswith("."):  # the start of a name that is completed when the program runs
        start = dotted.replace(".", "/")
        yield from ((file, True) for file in self.files if file.startswith(start))
      yield from self._files_of(dotted.rstrip("."), folder)
    for word in set(re.findall(r"(?:^\*)?[\w./-]+", text)):
      path = word.strip("/")
      key = path if path in self._data else path.rsplit("/", 1)[-1]
      if "." in key or "/" in word or word == text:  # a word of a sentence is not a folder
        files = self._data.get(key, ())
        if folder.parts[:1] in _INSTALLED:  # its messages name documents, which it does not read
          files = (file for file in files if not file.endswith(".md"))
        yield from ((file, True) for file in files)

  def _files_of(self, module: str, folder: Path) -> Iterator[tuple[str, bool]]:
    """The file of a module and of its packages; tests import helpers beside them by a bare name."""
    parts = module.split(".")
    names = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    files = [self._modules[name] for name in names if name in self._modules]
    yield from ((file, file == files[-1]) for file in files)
    for place in (folder, Path("tests")):
      if file := self._modules.get(".".join([*place.parts, parts[0]])):
        yield file, True


def _dotted(name: str) -> str:
  return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _nodes(node: ast.AST, late: bool) -> Iterator[ast.AST]:
  """The nodes of a module but for its docstrings; unless `late`, those outside of functions."""
  if not late and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
    return
  yield node
  for child in ast.iter_child_nodes(node):
    if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
      yield from _nodes(child, late)


def _imported(package: tuple[str, ...], nodes: Iterable[ast.AST]) -> Iterator[str]:
  for node in nodes:
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      above = package[: len(package) + 1 - node.level] if node.level else ()
      base = ".".join([*above, *([node.module] if node.module else [])])
      yield from (f"{base}.{alias.name}" for alias in node.names)


def affected(repository: Repository, changed: Iterable[str]) -> dict[str, str] | str:
  """Test files by name, each with a changed file that it depends on; or why it is everything.

  Args:
    repository: the files as they are now.
    changed: names of the files that were changed, added or deleted.
  """
  changed = {name for name in changed if not IGNORED.match(name)}
  if shared := sorted(name for name in changed if SHARED.match(name)):
    return f"{shared[0]} has changed, which all tests share"
  tests = repository.tests()
  present = changed & repository.files
  read = set[str]().union(*map(repository.dependencies, tests))
  for name in sorted(present - {*tests, *read}):
    return f"{name} has changed, and no test that depends on it is known"
  for name in sorted(changed - repository.files):
    if not name.endswith(".py"):  # whoever imported a module that is gone has changed too
      return f"{name} is gone, and who read it is not known"
  causes = {test: repository.dependencies(test) & present for test in tests}
  return {test: min(names) for test, names in causes.items() if names}


def _git(root: Path, *words: str) -> str:
  done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
  if done.returncode:
    raise ChildProcessError(done.stderr.strip())
  return done.stdout


def since(root: Path, commit: str) -> dict[str, str] | str:
  """What `affected` says of the changes since a commit, those not yet committed included."""
  try:
    _git(root, "merge-base", "--is-ancestor", commit, "HEAD")
  except ChildProcessError:
    return f"{commit} is not an ancestor of this commit"
  changed = _git(root, "diff", "--name-only", "--no-renames", commit).split("\n")
  untracked = _git(root, "ls-files", "--others", "--exclude-standard").split("\n")
  files = {*_git(root, "ls-files").split("\n"), *untracked} - {""}
  present = {name for name in files if (root / name).is_file()}
  return affected(Repository(root, present), {*changed, *untracked} - {""})


def main() -> None:
  """Print the test files, or `everything`."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--since", help=f"a commit; by default the one that {MARK} names")
  given = parser.parse_args()
  root = Path(__file__).resolve().parents[1]
  mark = root / MARK
  commit = given.since or (mark.read_text(encoding="utf-8").strip() if mark.is_file() else "")
  found = since(root, commit) if commit else f"there is no {MARK}"
  if isinstance(found, str):
    print(f"everything is tested: {found}", file=sys.stderr)
    print(EVERYTHING)
    return
  for test, cause in found.items():
    print(f"{test}: depends on {cause}", file=sys.stderr)
  print(f"{len(found)} test files depend on what has changed since {commit}", file=sys.stderr)
  print("\n".join(found))


if __name__ == "__main__":
  main()
