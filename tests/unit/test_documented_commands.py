"""Every command and every Python block that the documents show is run, at toy size."""

import os
import re
import shutil
import subprocess
import tomllib

import pytest
from commands import REFUSED, called, forked
from documents import (
  DOCUMENTS,
  ROOT,
  SHELL,
  TRAINED,
  Command,
  Reader,
  blocks,
  parse,
  shown,
  unlike,
  write_texts,
)

from ats_jax.config.text import text_of
from ats_jax.orchestrator import hooks
from ats_jax.verbs import VERBS

# What is not run, by program, and why. Files, flags and targets that are named exist all the same.
NOT_RUN = {
  "lab": "takes minutes to hours, some on a GPU; tests/e2e and tests/unit/lab run the smallest",
  "notebooks": "installs packages from a network; .ci/notebooks runs it",
  "pytest": "would run the tests from within a test",
  "pip": "needs a network; the extras exist, and .ci/run installs most of them",
  "venv": "the environment is there already",
  "source": "activates an environment",
  "export": "sets a variable; what sets one in front of a command is run",
  "tensorboard": "serves until it is stopped",
  "pre-commit": "edits the repository's hooks",
  ".ci/run": "runs this test",
}
PLACEHOLDER = re.compile(
  r"(?<![\w=/])(VERB|FILE|RUN|FOLDER|WORKDIR|OTHER)(?!\w)|\.\.\.|\[-|\||\$[A-Z]"
)
# Verbs likewise.
VERBS_NOT_RUN = {
  "config import": "needs a file of another program; tests/unit/bridge imports some",
  "bridge import": "needs a folder of another program; tests/unit/bridge imports some",
  "bridge export": "likewise",
  "bridge verify": "likewise, and torch; tests/bridge does",
  "bridge train": "needs torch; tests/bridge trains so",
}
# Documents whose commands and Python are run elsewhere.
RUN_ELSEWHERE = {
  "docs/reference/api.md": "tests/unit/test_api.py",
  "docs/guides/hugging_face.md": "it needs torch and models; tests/bridge does the same",
  "docs/reference/cli.md": "tests/unit/verbs/test_verbs.py parses each; guides show the same",
}


def identify(path):
  return str(path.relative_to(ROOT))


WITH_COMMANDS = [p for p in DOCUMENTS if shown(p) and identify(p) not in RUN_ELSEWHERE]
WITH_PYTHON = [path for path in DOCUMENTS if any(b.language == "python" for b in blocks(path))]


@pytest.fixture(autouse=True)
def _no_hook_stays():
  """A config that a page shows registers hooks, which would steer the runs of later tests."""
  before = tuple(hooks._registered)
  yield
  hooks._registered[:] = before


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """The workdir of a small run, for the commands that read one."""
  folder = tmp_path_factory.mktemp("small")
  write_texts(folder / "text")
  settings = TRAINED | {"data.paths": folder / "text"}
  flags = [f"--config.{name}={text_of(value)}" for name, value in settings.items()]
  result = called("train", "--config=configs/debug.py", f"--workdir={folder / 'run'}", *flags)
  assert result.code == 0, result.err
  return folder / "run"


@pytest.fixture(scope="module")
def seen():
  """What trainings of documents before this one have shown; the small run is the plainest.

  Variants that mix others are left to the tests of configs.
  """
  return {"train", "plain", "--workdir", "hybrid", "null"}


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=identify)
@pytest.mark.thorough
def test_commands_that_are_shown_run(path, trained, seen, tmp_path):
  reader = Reader(tmp_path, trained, seen, path)
  for line, error, output in shown(path):
    if (output or line not in seen) and not PLACEHOLDER.search(line):
      follow(reader, line, error, output)
      seen.add(line)


def follow(reader: Reader, line: str, error: str = "", output: tuple[str, ...] = ()) -> None:
  """Run a command, or see that what it names exists; compare the output of a plan."""
  command = parse(line)
  kind = re.split(r"[./]", command.program)[0] or command.program
  if kind == "ats_jax":
    module, dot, verb = command.program.partition(".")
    words = [verb, *command.words] if dot else command.words
    verb = words[0] if words else "--help"
    assert verb in VERBS or verb.startswith("--"), f"{line}: there is no such verb"
    if " ".join(words[:2]) in VERBS_NOT_RUN:
      return
    result = reader.run(command._replace(program=module, words=words), refused=bool(error))
    if result is None:
      return
    wanted = REFUSED if error else 0
    assert result.code == wanted, f"{line}\nended with {result.code}:\n{result.err[-2000:]}"
    assert error in result.err.replace(f"{reader.folder}/", ""), f"{line}\n{result.err[-2000:]}"
    if verb == "plan":  # the one that is run at the size that is shown
      assert not (lines := unlike(output, result.out)), f"{line}\nno longer prints {lines}"
  elif kind == "make":
    made = make(command.words)
    for words in re.findall(r"^\S*python (-m ats_jax .*)", made, re.MULTILINE):
      follow(reader, f"python {words}")
  else:
    assert kind in NOT_RUN or command.program in NOT_RUN, f"{line}: nothing says how to run this"
    check_names(kind, command, line)


def make(words: list[str]) -> str:
  """What `make` would do."""
  of_its_own = ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")  # of a make that runs the tests
  env = {name: value for name, value in os.environ.items() if name not in of_its_own}
  done = subprocess.run(
    ["make", "-n", *words],
    cwd=ROOT,
    env=env,
    capture_output=True,
    text=True,
    check=False,
    timeout=60,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def check_names(kind: str, command: Command, line: str) -> None:
  """What a command that is not run names exists: a file, its flags, an extra."""
  if kind == "lab":
    path = ROOT / command.program.removesuffix(".py").replace(".", "/")
    files = [*path.parent.glob(f"{path.name}.py"), *path.glob("*.py")]
    assert files, f"{line}: no such program"
    source = "".join(file.read_text() for file in files)
    for flag in re.findall(r"--([a-z_]+)(?==|\s|$)", " ".join(command.words)):
      known = flag == "config" or re.search(rf"""["'](--)?{flag}["']""", source)
      assert known, f"{line}: no --{flag}"
  elif kind == "pip":
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group in re.findall(r"\[([\w,]+)\]", " ".join(command.words)):
      missing = set(group.split(",")) - set(extras["optional-dependencies"])
      assert not missing, f"{line}: no extra {missing}"
  elif kind == "pytest":
    files = [word for word in command.words if word.startswith("tests/")]
    assert all((ROOT / file.partition("::")[0]).exists() for file in files), line


@pytest.mark.parametrize("path", WITH_PYTHON, ids=identify)
def test_python_that_is_shown_runs(path, trained, tmp_path):
  if identify(path) in RUN_ELSEWHERE:
    return
  shutil.copytree(trained, tmp_path / "runs" / "debug")
  code = [b.text.replace("/abs/", f"{tmp_path}/") for b in blocks(path) if b.language == "python"]
  script = tmp_path / "shown.py"
  script.write_text(
    "import doctest, os\n"
    f"os.chdir({str(tmp_path)!r})\n"
    f"names, code = {{}}, {code!r}\n"
    "for text in code:\n"
    "  names.pop('get_config', None)\n"
    "  if '>>> ' in text:\n"
    "    test = doctest.DocTestParser().get_doctest(text, names, 'shown', None, 0)\n"
    "    assert not doctest.DocTestRunner().run(test, clear_globs=False).failed\n"
    "    continue\n"
    "  exec(compile(text, 'shown', 'exec'), names)\n"
    "  if 'get_config' in names:\n"
    "    from ats_jax.config import from_config_dict\n"
    "    from_config_dict(names['get_config']())\n"
  )
  result = forked(str(script))
  assert result.code == 0, result.out + result.err


def test_what_is_not_run_is_shown_somewhere():
  """The table of reasons holds no more than is needed."""
  whole = {parse(command.line).program for path in WITH_COMMANDS for command in shown(path)}
  programs = whole | {re.split(r"[./]", program)[0] for program in whole}
  assert set(NOT_RUN) <= programs, set(NOT_RUN) - programs


def test_a_command_that_fails_is_noticed(trained, tmp_path):
  reader = Reader(tmp_path, trained, set())
  train = "python -m ats_jax train --config=configs/debug.py --workdir=runs/x"
  with pytest.raises(AssertionError, match="does not divide the 8 devices"):
    follow(reader, f"{train} --config.mesh.fsdp=3")
  with pytest.raises(AssertionError, match="there is no such verb"):
    follow(reader, "python -m ats_jax trian --workdir=runs/x")
  with pytest.raises(AssertionError, match="nothing says how"):
    follow(reader, "wget something")
  with pytest.raises(AssertionError, match="no extra"):
    follow(reader, "pip install 'ats_jax[nothing]'")
  assert unlike(("fits: 12.4 of 74.0 GiB",), "a\n  fits: 12.5 of 74.0 GiB\n") == []
  assert unlike(("fits: 12.4 of 74.0 GiB",), "fits: 13.9 of 74.0 GiB") != []


def test_languages_of_fences_are_known():
  known = {"", *SHELL, "text", "python", "json", "toml", "yaml", "mermaid"}
  for path in DOCUMENTS:
    assert {b.language for b in blocks(path)} <= known, path
