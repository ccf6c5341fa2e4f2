"""Every command that the documents show has flags that exist, and prints what is shown below it.

Every Python block runs. `documents.Reader` says which commands are run and how they are made small.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from commands import forked
from documents import (
  DOCUMENTS,
  NOT_PRODUCED,
  ROOT,
  SHELL,
  Command,
  Reader,
  Shown,
  blocks,
  is_excused,
  make_small_run,
  missing,
  parse,
  shown,
)
from messages import is_said, programs_texts

from ats_jax.exits import DONE, FAULT, REFUSED
from ats_jax.metrics.files import JsonlWriter
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
  "pre-commit": "edits the repository's hooks",
  ".ci/run": "runs this test",
}
PLACEHOLDER = re.compile(
  r"(?<![\w=/])(VERB|FILE|RUN|FOLDER|WORKDIR|OTHER)(?!\w)|\.\.\.|\[-|\||\$[A-Z]"
)
# Documents whose Python is run elsewhere.
RUN_ELSEWHERE = {
  "docs/reference/api.md": "tests/unit/test_api.py",
  "docs/guides/hugging_face.md": "it needs torch and models; tests/bridge does the same",
}
# Messages that the guide explains and that are the system's, or consist of values alone.
UNCHECKED = {"Bus error", "devices: ... x cpu", "attention: xla"}
# Verbs that are run at the size that is shown, so that numbers are compared too.
TRUE_SIZE = ("plan", "data")


def identify(path):
  return str(path.relative_to(ROOT))


WITH_COMMANDS = [path for path in DOCUMENTS if shown(path)]
WITH_PYTHON = [path for path in DOCUMENTS if any(b.language == "python" for b in blocks(path))]


@pytest.fixture(autouse=True)
def _no_hook_stays():
  """A config that a page shows registers hooks, which would steer the runs of later tests."""
  before = tuple(hooks._registered)
  yield
  hooks._registered[:] = before


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  """The small run for the commands that read one."""
  return make_small_run(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def seen():
  """The lines and the `OWN_PARTS` that documents before this one have shown."""
  return set()


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=identify)
@pytest.mark.thorough
def test_commands_that_are_shown_run_and_print_what_is_shown(path, small, seen, tmp_path):
  reader = Reader(tmp_path, small, seen, path)
  for command in (whole.without_excused(path) for whole in shown(path)):
    if PLACEHOLDER.search(command.line) or (command.line in seen and not command.samples):
      continue
    follow(reader, command)
    seen.add(command.line)


def follow(reader: Reader, asked: Shown) -> None:
  """Run a command and compare what it prints, or see that what it names exists."""
  line = asked.line
  command = parse(line)
  kind = re.split(r"[./]", command.program)[0] or command.program
  if kind == "ats_jax":
    module, dot, verb = command.program.partition(".")
    words = [verb, *command.words] if dot else command.words
    verb = words[0] if words else "--help"
    assert verb in VERBS or verb.startswith("--"), f"{line}: there is no such verb"
    if verb.startswith("--"):
      return
    result = reader.run(
      command._replace(program=module, words=words),
      sampled=bool(asked.samples),
      refused=asked.is_refused,
    )
    if result is None:
      return
    finds_fault = words[:2] == ["data", "validate"]  # the texts have records that are none
    wanted = REFUSED if asked.is_refused else FAULT if finds_fault else DONE
    assert result.code == wanted, f"{line}\nended with {result.code}:\n{result.err[-2000:]}"
    for sample in asked.samples:
      sample = row_names(sample) if verb == "check_env" else sample
      exactly = verb in TRUE_SIZE or asked.is_refused
      lacks = [missing(sample, text, exactly=exactly) for text in (result.out, result.err)]
      ends = f"{result.out[-4000:]}\n{result.err[-4000:]}"
      assert "" in lacks, f"{line}\ndoes not print\n{min(lacks, key=len)}\nbut\n{ends}"
  elif kind == "python":  # a line of Python that looks into a checkpoint, in its folder
    (folder, *_) = reader.small.workdir.glob("checkpoints/[0-9]*")
    done = subprocess.run(
      [sys.executable, *command.words], cwd=folder, capture_output=True, text=True, check=True
    )
    assert asked.samples, f"{line}: there is no sample"
    for sample in asked.samples:
      assert not missing(sample, done.stdout, exactly=False), done.stdout
  elif kind == "make":
    made = make(command.words)
    for words in re.findall(r"^\S*python (-m ats_jax .*)", made, re.MULTILINE):
      follow(reader, Shown(f"python {words}"))
  else:
    assert not asked.samples, f"{line or 'no command'}: what prints {asked.samples}?"
    assert kind in NOT_RUN or command.program in NOT_RUN, f"{line}: nothing says how to run this"
    check_names(kind, command, line)


def row_names(sample: tuple[str, ...]) -> tuple[str, ...]:
  """Of a table of what a machine is, the first column: all else depends on the machine."""
  names = (line.partition("  ")[0] for line in sample if line[0] not in " .")
  return tuple(part for name in names for part in (f"{name} ...", "..."))


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
def test_python_that_is_shown_runs(path, small, tmp_path):
  if identify(path) in RUN_ELSEWHERE:
    return
  shutil.copytree(small.workdir, tmp_path / "runs" / "debug")
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
  """The tables of reasons hold no more than is needed."""
  whole = {parse(command.line).program for path in WITH_COMMANDS for command in shown(path)}
  programs = whole | {re.split(r"[./]", program)[0] for program in whole}
  assert set(NOT_RUN) <= programs, set(NOT_RUN) - programs
  assert len(excused_samples()) == len(NOT_PRODUCED) + 1  # one row has two messages


def excused_samples():
  """What no small run prints."""
  samples = [(path, one) for path in WITH_COMMANDS for c in shown(path) for one in c.samples]
  return [sample for path, sample in samples if is_excused(path, sample)]


def test_messages_that_are_quoted_exist():
  """Those of samples that are not compared, and of the guide to messages."""
  text = (ROOT / "docs/guides/troubleshooting.md").read_text(encoding="utf-8")
  entries = re.findall(r"^- \*\*(.*?)\*\*", text, re.MULTILINE | re.DOTALL)
  quotes = {quote for entry in entries for quote in re.findall(r"`([^`]+)`", entry)} - UNCHECKED
  lines = (line.strip() for sample in excused_samples() for line in sample)
  messages = (re.sub(r"^(\d\d:\d\d:\d\d )?(\w+: )?", "", line) for line in lines)
  quotes |= {message for message in messages if "  " not in message}  # no row of a table
  program = programs_texts()
  unknown = [quote for quote in quotes if not is_said(" ".join(quote.split()), program)]
  assert not unknown, unknown
  assert is_said("runs/a holds a run with other settings:", program)
  assert not is_said("runs/a contains a run with other settings:", program)


def test_a_command_that_fails_is_noticed(small, tmp_path):
  reader = Reader(tmp_path, small, set())
  train = "python -m ats_jax train --config=configs/debug.py --workdir=runs/x"
  devices = "XLA_FLAGS=--xla_force_host_platform_device_count=8"
  with pytest.raises(ValueError, match="does not divide the 8 devices"):
    follow(reader, Shown(f"{devices} {train} --config.mesh.fsdp=3"))
  with pytest.raises(ValueError, match="seed_of"):
    follow(reader, Shown(f"{train} --seed_of=3"))
  with pytest.raises(AssertionError, match="there is no such verb"):
    follow(reader, Shown("python -m ats_jax trian --workdir=runs/x"))
  with pytest.raises(AssertionError, match="nothing says how"):
    follow(reader, Shown("wget something"))
  with pytest.raises(AssertionError, match="no extra"):
    follow(reader, Shown("pip install 'ats_jax[nothing]'"))
  with pytest.raises(AssertionError, match=r"does not print\s+total: 1 weights"):
    follow(reader, Shown(train, (("total: 1 weights",),)))
  with pytest.raises(AssertionError, match="what prints"):
    follow(reader, Shown("pip install torch", (("Installed",),)))


@pytest.mark.parametrize(
  ("sample", "lacks"),
  [
    (("fits: 12.4 of 74.0 GiB",), ""),
    (("fits: 13.9 of 74.0 GiB",), "fits: 13.9 of 74.0 GiB"),  # more than 5 % off
    (("12:00:00 begins  at step 0",), ""),
    (("run 03be5d61c29a4f78 ...",), ""),
    (("run 03be5d61c29a4f78",), "run 03be5d61c29a4f78"),
    (("begins at step 0", "run ... of a log"), ""),
    (("begins at step 0", "...", "fits: 12.4 of 74.0 GiB"), ""),
    (
      ("begins at step 0", "fits: 12.4 of 74.0 GiB"),
      "begins at step 0\nfits: 12.4 of 74.0 GiB",
    ),
    (("fits: 12.4 of 74.0 GiB", "...", "begins at step 0"), "begins at step 0"),
    (("step at begins 0",), "step at begins 0"),
  ],
)
def test_the_words_of_a_sample_are_compared(sample, lacks):
  output = "09:10:11 begins at step 0\nrun 9f2c4e01d7a85b36 of a log\n\n  fits: 12.5 of 74.0 GiB\n"
  assert missing(sample, output, exactly=True) == lacks
  if "13.9" in lacks:
    assert not missing(sample, output, exactly=False)


def test_languages_of_fences_are_known():
  """What has no language is commands, so that no sample escapes the comparison."""
  known = {"", *SHELL, "text", "python", "json", "toml", "yaml", "mermaid"}
  for path in DOCUMENTS:
    for language, text in blocks(path):
      assert language in known, path
      listing = text.startswith(("workdir/", "GLIBC_", "RUN="))
      assert language or listing or text.startswith(("ats-jax", "python", "pip")), text


def test_a_row_with_a_number_that_is_none(tmp_path):
  (row,) = (b.text for b in blocks(ROOT / "docs/reference/metrics.md") if b.language == "json")
  writer = JsonlWriter(tmp_path / "metrics.jsonl")
  writer.write_scalars(90, {"train/loss": float("nan")})
  writer.close()
  written = json.loads((tmp_path / "metrics.jsonl").read_text())
  assert written | {"wall_time": json.loads(row)["wall_time"]} == json.loads(row)
