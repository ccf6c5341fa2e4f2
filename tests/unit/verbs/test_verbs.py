"""`ats-jax VERB`: the table of verbs, their help, their flags in the reference, their examples."""

import asyncio
import functools
import importlib
import io
import re
import shlex
import subprocess
import sys
import threading
import tomllib

import pytest
from absl import flags
from commands import REPOSITORY, called, started

from ats_jax.config.names import KINDS, settings
from ats_jax.verbs import GROUPS, VERBS, cli, listing

COMMANDS = {
  f"{verb} {word}".strip(): command
  for verb, row in VERBS.items()
  for word, command in importlib.import_module(f"ats_jax.verbs.{verb}").COMMANDS.items()
}
REFERENCE = (REPOSITORY / "docs/reference/cli.md").read_text(encoding="utf-8")


def test_the_list_of_verbs():
  for verb, row in VERBS.items():
    assert row.group in GROUPS and row.summary[0].islower() and len(row.summary) < 80
    assert f"  {verb:<10} {row.summary}\n" in listing() + "\n"
  assert called().out == listing() + "\n" == called("--help").out


def test_what_starts_at_once_imports_no_jax():
  verbs = ", ".join(f"ats_jax.verbs.{name}" for name in ("launch", "generate", "chat"))
  code = f"import sys, ats_jax.__main__, {verbs}; assert 'jax' not in sys.modules"
  assert started("timeit", "-n1", "-r1", code).code == 0


def test_the_console_script_is_the_same_door():
  project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
  module, _, function = project["scripts"][cli.PROGRAM].partition(":")
  assert getattr(importlib.import_module(module), function) is sys.modules["ats_jax.__main__"].main


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name):
  verb, *word = name.split()
  out = called(verb, *word, "--help")
  assert out.code == 0 and out.err == ""
  text = out.out
  assert f"ats-jax {name}" in text and "Exit codes\n  0        done\n" in text
  listed = re.findall(r"^  --(?:\[no\])?(\w+):", text, re.MULTILINE)
  assert listed == [flag.name for flag in COMMANDS[name].own_flags()]
  assert len(listed) < 20  # its own, not those of libraries
  teaches = "--config.section.name=value changes a setting" in text
  assert teaches == ("config" in listed)
  if teaches:
    assert {*re.findall(r"--config\.([a-z_.]+)=", text)} <= {*settings(), *KINDS, "section.name"}


def test_help_of_a_verb_that_needs_a_word_lists_them():
  out = called("data", "--help")
  assert out.code == 0 and "ats-jax data stats: " in out.out and "ats-jax data audit: " in out.out


def examples() -> list[str]:
  """Each command line that a help text or the reference shows."""
  texts = [REFERENCE, cli.SETTINGS_HELP, *(c.about or "" for c in COMMANDS.values())]
  joined = "\n".join(texts).replace("\\\n", " ")
  found = re.findall(r"^ *(?:\$ )?ats-jax ([^\n#]+)", joined, re.MULTILINE)
  return sorted({" ".join(line.split()) for line in found if "VERB" not in line})


def test_examples_are_understood():
  for line in examples():
    verb, *rest = shlex.split(line)
    if "--help" in rest:
      continue
    word = [w for w in rest[:1] if f"{verb} {w}" in COMMANDS]
    name = " ".join([verb, *word])
    command = COMMANDS[name]
    try:
      command.parse(name, rest[len(word) :])
      if verb != "launch" and "config" in command.flags and command.flags["config"].value:
        file = command.flags["config"].value.partition(":")[0]
        assert (REPOSITORY / file).exists() or not file.startswith("configs/"), line
    finally:
      for flag in command.flags:
        command.flags[flag].unparse()


def test_no_verb_defines_a_flag_of_the_whole_process():
  """A program that imports this package may define flags of the same names."""
  ours = {flag.name for command in COMMANDS.values() for flag in command.own_flags()}
  assert len(ours) > 30
  modules = ", ".join(f"ats_jax.verbs.{verb}" for verb in VERBS)
  found = f"[n for n in flags.FLAGS if n in {ours!r} or n.startswith('config.')]"
  code = f"import {modules}; from absl import flags; found = {found}; assert not found, found"
  assert started("timeit", "-n1", "-r1", code).code == 0


def test_a_value_that_is_no_number_is_refused_in_plain_words():
  for name, flag, says in (
    ("plan", "--devices=x", "--devices=x: 'x' is no whole number"),
    ("train", "--config.num_steps=abc", "--config.num_steps=abc: 'abc' is no whole number"),
    ("train", "--config.optimizer.learning_rate=fast", "'fast' is no number"),
  ):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
      COMMANDS[name].parse(name, [flag])
    assert "invalid literal" not in str(caught.value) and "convert" not in str(caught.value)


def test_what_a_terminal_cannot_show_is_escaped(monkeypatch):
  """Text of a user, and the name of a file that is not UTF-8."""
  screen = io.BytesIO()
  monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii"))
  for name in ("excepthook", "unraisablehook"):
    monkeypatch.setattr(sys, name, getattr(sys, name))  # put back, as a command sets them
  main = lambda _: print("caf\u00e9 \u6f22 a\udcff")
  cli.dispatch("x", {"": cli.Command(main, flags.FlagValues(), "")}, [])
  assert screen.getvalue() == rb"caf\xe9 \u6f22 a\udcff" + b"\n"


def test_an_error_does_not_wait_for_the_compiler():
  """Python's exit would, for minutes where the model is large."""
  program = """
import threading
from concurrent.futures import ThreadPoolExecutor
from absl import flags
from ats_jax.train import compiled
from ats_jax.verbs.cli import Command

def main(argv):
  raise ValueError("it is wrong")

pool = ThreadPoolExecutor(1, thread_name_prefix=compiled.THREAD)
pool.submit(threading.Event().wait)
Command(main, flags.FlagValues(), "").run("x", [])
"""
  command = [sys.executable, "-c", program]
  ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
  assert (ended.returncode, ended.stderr.splitlines()[0]) == (2, "error: it is wrong")


class TestPlatforms:
  """Devices by JAX_PLATFORMS that this machine does not have."""

  SAYS = "error: jax finds no devices by JAX_PLATFORMS=gpuu: "

  @pytest.mark.parametrize(
    ("program", "of", "found"),
    [
      ("import jax; jax.devices('gpuu')", "test", "Unknown backend gpuu"),
      ("assert None is not None", "jax._src.xla_bridge", "there are none. Unset"),
      ("raise RuntimeError('no. (set JAX_PLATFORMS=)')", "jax._src.xla_bridge", "no. Unset"),
    ],
  )
  def test_what_jax_does_not_find_is_one_line(self, monkeypatch, capsys, program, of, found):
    monkeypatch.setenv("JAX_PLATFORMS", "gpuu")
    with pytest.raises(SystemExit) as ended, cli.user_errors():
      exec(program, {"__name__": of})
    assert ended.value.code == cli.exits.REFUSED
    assert capsys.readouterr().err.startswith(self.SAYS + found)

  @pytest.mark.parametrize("kind", [AssertionError, RuntimeError])
  def test_other_errors_stay(self, monkeypatch, kind):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(kind, match=r"^a fault$"), cli.user_errors():
      raise kind("a fault")

  @pytest.mark.thorough
  def test_a_training(self, tmp_path):
    ended = started("ats_jax", "train", f"--workdir={tmp_path}/run", JAX_PLATFORMS="gpuu")
    assert ended.error().startswith(self.SAYS.removeprefix("error: "))


class TestUncaughtErrors:
  """What is shown of errors that nobody catches."""

  @staticmethod
  def of_closed_loop():
    loop = asyncio.new_event_loop()
    loop.close()
    try:
      loop.call_soon(print)
    except RuntimeError as error:
      return error
    raise AssertionError("a closed loop takes no calls")

  @pytest.mark.parametrize(
    ("make", "in_thread", "is_shown"),
    [
      (of_closed_loop, True, False),
      (of_closed_loop, False, True),
      (lambda: RuntimeError("Event loop is closed"), True, True),
    ],
    ids=["of a closed loop", "of a closed loop in the main thread", "of other code"],
  )
  def test_only_those_of_a_closed_event_loop_are_left_out(
    self, monkeypatch, capsys, make, in_thread, is_shown
  ):
    error = make()
    monkeypatch.delenv("ATS_TRACEBACK", raising=False)
    show = functools.partial(cli._show_uncaught, type(error), error, error.__traceback__)
    if in_thread:
      thread = threading.Thread(target=show)
      thread.start()
      thread.join()
    else:
      show()
    assert capsys.readouterr().err.endswith("RuntimeError: Event loop is closed\n") == is_shown

  def test_credentials_are_masked(self, capsys):
    error = RuntimeError("https://me:hush@host does not answer")
    cli._show_uncaught(RuntimeError, error, None)
    assert capsys.readouterr().err == "RuntimeError: https://***@host does not answer\n"
