"""The command line: what a verb is, flags that several share, errors without a traceback."""

import contextlib
import dataclasses
import difflib
import errno
import faulthandler
import io
import itertools
import logging as std_logging
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn

from absl import flags, logging

from ats_jax import exits
from ats_jax.config import Config
from ats_jax.config.build import extensions_of
from ats_jax.config.extend import build, load
from ats_jax.config.file import load_file
from ats_jax.config.names import KINDS, all_settings
from ats_jax.config.schema.setting import Kinds
from ats_jax.config.text import parse
from ats_jax.config.tree import dropped, updated
from ats_jax.config.validate import check_given
from ats_jax.store.secrets import MaskingFormatter, masked

DEFAULT_CONFIG = "debug"
PROGRAM = "ats-jax"
SETTINGS_HELP = """\
--config.section.name=value changes a setting of the config, as often as needed:
  --config.num_steps=2000 --config.optimizer.learning_rate=1e-3
  --config.data.paths=/path/to/text --config.data.validation_fraction=0.05
  --config.moe.num_experts=8 --config.step.remat=full
`ats-jax train --explain=optimizer` lists the settings of a section.
"""
_EXHAUSTED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE)
_FAILING = (errno.EIO, errno.ESTALE)  # which may pass
# Files that are not what the user took them for; other errors of files may pass.
_WRONG_FILE = (
  errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EROFS,
  errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
_GLOO = re.compile(r"\bGloo\b.*failed")  # a collective between processes without GPUs
_DEFINE = {
  bool: flags.DEFINE_boolean,
  int: flags.DEFINE_integer,
  float: flags.DEFINE_float,
  str: flags.DEFINE_string,
}
Flag = flags.Flag
_CONFIG_FLAGS: dict[int, "ConfigFlag"] = {}  # by the id of the flags that they are among
flags.disclaim_key_flags()  # a flag that is defined here belongs to the module that asked for it


class ConfigFlag:
  """`--config`, and `--config.section.name` for each setting of each kind of section."""

  def __init__(self, flag_values: flags.FlagValues = flags.FLAGS):
    """Define them."""
    self._flags = flag_values
    text = (
      "Packaged config or config file, e.g. debug, llama_7b:moe, my.py; default: "
      f"{DEFAULT_CONFIG}. See Settings."
    )
    self._file = flags.DEFINE_string("config", None, text, flag_values=flag_values)
    for name, kinds in KINDS.items():
      about = f"which kind {name} is, as --config.{name}.{kinds.TAG}"
      flags.DEFINE_string(f"config.{name}", None, about, flag_values=flag_values)
    self._define_settings()
    _CONFIG_FLAGS[id(flag_values)] = self

  def _define_settings(self) -> None:
    """Define a flag for each setting that has none: of its type, or of any text that is read later.

    Texts are lists, tables, and settings of kinds beside which an extension may put one that
    declares the same name with another type.
    """
    for name, known in all_settings().items():
      if f"config.{name}" in self._flags:
        continue
      types = {one.field.type for one in known}
      may_differ = any(one.kinds and one.section and one.section.is_open for one in known)
      define = None if may_differ or len(types) > 1 else _DEFINE.get(types.pop())
      about = "; or ".join(one.field.metadata["doc"] for one in known)
      (define or flags.DEFINE_string)(f"config.{name}", None, about, flag_values=self._flags)

  def read_ahead(self, argv: list[str]) -> None:
    """Define the settings that extensions bring.

    They are looked for on the command line; in the config file, which takes a while, only where the
    command line has a setting that nobody knows.

    Raises:
      ValueError: as `load_file` and `load`.
    """
    known = {f"config.{name}" for name in (*KINDS, *all_settings())}
    names = [re.match(r"--?(config\.[\w.]+)", word) for word in argv]
    if (extensions := _value_of("config.extensions", argv)) is not None:
      load(parse("extensions", extensions, {}))
    elif all(name is None or name[1] in known for name in names):
      return
    else:
      load(extensions_of(_values_of_file(_value_of("config", argv) or DEFAULT_CONFIG)))
    self._define_settings()

  @property
  def file(self) -> str:
    """The config that was asked for, or else the default."""
    return DEFAULT_CONFIG if self._file.value is None else self._file.value

  def given(self) -> dict[str, Any]:
    """The settings that flags name, by dotted name; lists and tables are still text."""
    names = [*KINDS, *all_settings()]
    flag_of = {name: f"config.{name}" for name in names}
    # Settings of an extension that the config file names have no flags if none was given.
    found = {name: self._flags[flag] for name, flag in flag_of.items() if flag in self._flags}
    return {name: flag.value for name, flag in found.items() if flag.present}

  def nested(self) -> dict[str, Any]:
    """Its values with the changed settings, unchecked: {section: {name: value}}.

    Raises:
      ValueError: as `load_file`, and for a text that is not of its setting's type.
    """
    if self._file.value is None:
      logging.info("no --config is given: this is --config=%s", DEFAULT_CONFIG)
    return self.applied(_values_of_file(self.file))

  def applied(self, values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values with the settings that flags name, those first that choose kinds of sections.

    What has no effect any more because of a flag gets its default, with a line in the log.

    Raises:
      ValueError: for a text that is not of its setting's type.
    """
    given = self.given()
    chosen = updated(values, {name: v for name, v in given.items() if _chooses(name)})
    result = updated(chosen, {name: parse(name, v, chosen) for name, v in given.items()})
    if lost := dropped(values, result, given):
      logging.info("flags leave without effect, and reset: %s", ", ".join(lost))
    return result

  @property
  def value(self) -> Config:
    """The run that was asked for.

    Raises:
      ValueError: as `load_file`, `load_extensions` and `check_given`.
    """
    cfg = build(self.nested())
    check_given(cfg, self.given())
    return cfg


def _values_of_file(name: str) -> dict[str, Any]:
  """The nested values of `--config`.

  Raises:
    ValueError: as `load_file`.
  """
  try:
    return load_file(name).to_dict()
  except ValueError as error:
    raise ValueError(f"--config={name}: {error}") from error


def _value_of(name: str, argv: list[str]) -> str | None:
  """The last value that a command line gives a flag, as `--name=value` or `--name value`."""
  value = None
  for word, following in itertools.zip_longest(argv, argv[1:]):
    key, equals, text = word.partition("=")
    if key in (f"--{name}", f"-{name}"):
      value = text if equals else following
  return value


def _chooses(name: str) -> bool:
  """Whether a setting says of which kind a section is."""
  return name in KINDS or name.removesuffix(f".{Kinds.TAG}") in KINDS


def define_workdir_flag(flag_values: flags.FlagValues) -> flags.FlagHolder:
  """Define `--workdir`."""
  text = "Folder of the run, e.g. runs/debug."
  return flags.DEFINE_string("workdir", None, text, flag_values=flag_values)


def define_step_flag(flag_values: flags.FlagValues) -> flags.FlagHolder:
  """Define `--step`."""
  text = "Checkpoint: a step, 'latest' or 'best'."
  return flags.DEFINE_string("step", "latest", text, flag_values=flag_values)


def define_compute_dtype_flag(flag_values: flags.FlagValues) -> flags.FlagHolder:
  """Define `--compute_dtype`."""
  return flags.DEFINE_enum(
    "compute_dtype",
    "",
    ["", "float32", "bfloat16", "float16", "auto"],
    "Of matmuls; by default that of the training. As precision.compute_dtype.",
    flag_values=flag_values,
  )


def define_ignored_fields_flag(flag_values: flags.FlagValues) -> flags.FlagHolder:
  """Define `--ignore_fields`."""
  text = "Unknown fields of a folder's config.json that change nothing that its model computes."
  return flags.DEFINE_list("ignore_fields", [], text, flag_values=flag_values)


@dataclasses.dataclass(frozen=True)
class Command:
  """Something that the program does, and the flags that say how.

  Attributes:
    main: gets the arguments that are no flags; returns an exit code, or None for `exits.DONE`.
    flags: its own.
    about: what it does in a line, then examples and the rest.
    operand: what the one argument is that is no flag, e.g. "workdir"; "" = there is none, two words
      are two arguments, and "workdir ..." is one or more.
    passes_on: flags that are not known go to `main` too.
  """

  main: Callable[[list[str]], int | None]
  flags: flags.FlagValues
  about: str | None
  operand: str = ""
  passes_on: bool = False

  def run(self, name: str, argv: list[str]) -> int:
    """Parse, do it, and return the exit code.

    Args:
      name: what the user called it, e.g. "plan budget".
      argv: the words behind that.
    """
    if {"-h", "--help", "--helpfull", "--helpshort"} & set(argv):
      print(self.help(name), flush=True)
      return exits.DONE
    faulthandler.enable()
    sys.excepthook, sys.unraisablehook = _show_uncaught, _show_unraisable
    _log_short_lines()
    with contextlib.ExitStack() as stack:
      stack.push(_leave_at_once)
      stack.enter_context(user_errors())
      code = self.main(self.parse(name, argv))
      sys.stdout.flush()  # here: a reader that has gone away is no fault
      return code or exits.DONE

  def parse(self, name: str, argv: list[str]) -> list[str]:
    """Set the flags; return the other arguments.

    Raises:
      ValueError: for what is unknown, missing or of the wrong type, with what was expected.
    """
    if config := _CONFIG_FLAGS.get(id(self.flags)):
      config.read_ahead(argv)
    try:
      rest = self.flags([name, *argv], known_only=self.passes_on)[1:]
    except flags.UnrecognizedFlagError as e:
      raise ValueError(f"--{e.flagname}: {_unknown(name, e.flagname, self.flags)}") from e
    except flags.Error as e:
      from ats_jax.config.explain import explain  # here: few command lines are wrong

      wrong = [n for n in all_settings() if f"--config.{n}=" in str(e)]
      raise ValueError("\n".join([_plain(str(e)), *map(explain, wrong)])) from e
    for flag in (self.flags[name] for name in self.flags):
      if flag.present and isinstance(flag.value, float) and not math.isfinite(flag.value):
        raise ValueError(f"--{flag.name}={flag.value} is not a finite number: {flag.help}")
    first, *others = self.operand.split() or [""]
    if first and (not rest if others == ["..."] else len(rest) != 1 + len(others)):
      wanted = " and ".join(f"one {operand}" for operand in (first, *others))
      wanted = wanted.replace("and one ...", "or several")
      got = " ".join(rest) or "none"
      raise ValueError(f"expected {wanted}, got {got}. {PROGRAM} {name} --help has examples.")
    if rest and not (self.operand or self.passes_on):
      raise ValueError(
        f"unexpected argument {rest[0]!r}. Everything is a flag: --name=value (see --help)."
      )
    return rest

  def help(self, name: str) -> str:
    """What it does, its flags, how to change settings, exit codes."""
    title = f"{PROGRAM} {name}" + (f" {self.operand.upper()}" if self.operand else "")
    lines = [f"{title}: {(self.about or '').strip()}", "", "Flags"]
    lines += [_flag_help(flag) for flag in self.own_flags()]
    if "config" in self.flags:
      lines += ["", "Settings", textwrap.indent(SETTINGS_HELP.rstrip(), "  ")]
    return "\n".join([*lines, "", exit_codes()])

  def own_flags(self) -> list[Flag]:
    """The flags without those of single settings, and without those of libraries."""
    of_module = self.flags.get_key_flags_for_module(sys.argv[0])
    known = of_module if self.flags is flags.FLAGS else [self.flags[n] for n in sorted(self.flags)]
    return [flag for flag in known if not flag.name.startswith("config.")]


def exit_codes() -> str:
  """The table of exit codes, as `--help` shows it."""
  return "\n".join(["Exit codes", *(f"  {c:<8} {text}" for c, text in exits.MEANINGS.items())])


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
  """Say in a line what a user can mend, and leave with its exit code."""
  try:
    yield
  except (ValueError, FloatingPointError, MemoryError, OverflowError) as error:
    _leave_broken(error)
    _leave(error, str(error) or "out of memory", "\n(ATS_TRACEBACK=1 shows where.)")
  except exits.FaultError as error:
    _leave(error, str(error), code=exits.FAULT)
  except AssertionError as error:
    _leave_without_devices(error)
    raise
  except RuntimeError as error:
    _leave_broken(error)
    _leave_without_devices(error)
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    advice = "A smaller micro-batch (step.accum_steps), step.remat=full or more devices need less."
    text = f"the device is out of memory: {str(error).splitlines()[0]}\n{advice}"
    _leave(error, text, code=exits.FAULT)
  except BrokenPipeError:  # a reader like `head` has enough; Python would flush again at its exit
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise SystemExit(128 + signal.SIGPIPE) from None
  except OSError as error:
    if error.errno in (*_EXHAUSTED, *_FAILING):
      from ats_jax.store.paths import advice  # here: a launcher starts at once

      _leave(
        error,
        f"a file could not be used: {error}. {advice(error)} Then start the same command again: "
        "it goes on from the newest checkpoint.",
        code=exits.FAULT if error.errno in _FAILING else exits.REFUSED,
      )
    if error.errno in _WRONG_FILE and error.filename:
      _leave(error, f"{error.filename!s}: {error.strerror}.", "\n(ATS_TRACEBACK=1 shows where.)")
    raise
  except KeyboardInterrupt:  # before or after the steps, which finish first (StopSignal)
    print("interrupted", file=sys.stderr)
    raise SystemExit(128 + signal.SIGINT) from None


@user_errors()
def dispatch(verb: str, commands: Mapping[str, Command], argv: list[str]) -> int:
  """Run one of the commands of a verb.

  Args:
    verb: what the user called.
    commands: by the word that follows; "" = none does.
    argv: the words behind the verb.
  """
  if isinstance(sys.stdout, io.TextIOWrapper):  # not what a notebook has put in its place
    sys.stdout.reconfigure(errors="backslashreplace")  # as Python does for stderr
  words = {w: (c.about or "").strip().splitlines()[0] for w, c in commands.items() if w}
  listing = "\n".join(f"  {PROGRAM} {verb} {w}: {what}" for w, what in words.items())
  word = argv[0] if words and argv and not argv[0].startswith("-") else ""
  wants_help = not word and bool({"-h", "--help"} & set(argv))
  if wants_help and words:
    print(f"Commands (--help behind each says more)\n{listing}\n")
  if word in commands:
    return commands[word].run(f"{verb} {word}".strip(), argv[bool(word) :])
  if wants_help:
    print(exit_codes(), flush=True)
    return exits.DONE
  got = repr(word) if word else "none"
  print(
    f"error: expected one command of {', '.join(words)}, got {got}.\n{listing}", file=sys.stderr
  )
  return exits.REFUSED


def run(main: Callable[[list[str]], int | None], commands: tuple[str, ...] = ()) -> None:
  """Run a program whose flags are absl's global ones.

  Args:
    main: as of `Command`; gets the word too, if there is one.
    commands: words one of which must come first, if there are any.
  """
  about = sys.modules["__main__"].__doc__
  with_word = lambda word: lambda rest: main([*([word] if word else []), *rest])
  found = {w: Command(with_word(w), flags.FLAGS, about) for w in commands or ("",)}
  sys.exit(dispatch(os.path.basename(sys.argv[0]), found, sys.argv[1:]))


def main(verb: str, commands: Mapping[str, Command]) -> None:
  """Run `python -m ats_jax.VERB` as `ats-jax VERB`."""
  sys.exit(dispatch(verb, commands, sys.argv[1:]))


def require(value: Any, flag: str, example: str) -> Any:
  """Return `value`; if the flag was not given, say so and how."""
  if not value:
    raise ValueError(f"--{flag} is missing. Example: --{flag}={example}")
  return value


def nearest(word: str, known: Mapping[str, Any] | list[str]) -> str:
  """What was probably meant, or ""."""
  return "".join(difflib.get_close_matches(word, list(known), n=1))


def _unknown(verb: str, name: str, known: flags.FlagValues) -> str:
  """Why a flag is refused, and what was probably meant."""
  what = "setting" if name.startswith("config.") else "flag"
  near = nearest(name, [n for n in known if n.startswith("config.") == (what == "setting")])
  hint = f"Did you mean --{near}?" if near else f"{PROGRAM} {verb} --help lists them."
  return f"there is no such {what}. {hint}"


def _plain(error: str) -> str:
  """What absl says of a value that it cannot read, without Python's words."""
  error = re.sub(
    r"invalid literal for int\(\) with base \d+: (.*)", r"\1 is no whole number", error
  )
  error = re.sub(r"could not convert string to float: (.*)", r"\1 is no number", error)
  return error.removeprefix("flag ")


def meaning(flag: flags.Flag) -> str:
  """The help of a flag, without the line that absl adds to one that may come several times."""
  return str(flag.help).partition(";\n")[0]


def _flag_help(flag: flags.Flag) -> str:
  """A flag, its default and its meaning, wrapped to the terminal."""
  name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
  shown = flag.default not in (None, False, "", [])
  text = f"{meaning(flag)} (default: {flag.default})" if shown else meaning(flag)
  width = min(100, shutil.get_terminal_size().columns)
  return textwrap.fill(f"{name}: {text}", width, initial_indent="  ", subsequent_indent="      ")


def _leave(error: BaseException, text: str, hint: str = "", code: int = exits.REFUSED) -> NoReturn:
  if _shows_tracebacks():
    raise error
  line = masked(f"error: {text}{hint}")
  print(line.encode(errors="backslashreplace").decode(), file=sys.stderr)
  raise SystemExit(code) from None


def _leave_broken(error: BaseException) -> None:
  """If it is an error of a collective, say that another process is gone, and leave.

  jax makes a ValueError of some. Those of GPUs raise none: they wait, and `liveness` ends them.
  """
  if _GLOO.search(str(error)):
    line = str(error).splitlines()[0]
    _leave(error, f"another process of the job is gone: {line}", code=exits.LEFT)


def _leave_without_devices(error: BaseException) -> None:
  """If jax cannot start on what JAX_PLATFORMS names, say so, and leave.

  Its error is an assertion without a text where the plugin of a platform is not installed.
  """
  names = os.environ.get("JAX_PLATFORMS")
  *_, (frame, _) = traceback.walk_tb(error.__traceback__)
  if names and frame.f_globals.get("__name__") == "jax._src.xla_bridge":
    found = str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".") or "there are none"
    text = f"jax finds no devices by JAX_PLATFORMS={names}: {found}. Unset the variable for those "
    _leave(error, text + "that this machine has.")


def _compiles() -> bool:
  """Whether a thread compiles a train step."""
  compiled = sys.modules.get("ats_jax.train.compiled")
  names = [thread.name for thread in threading.enumerate()]
  return compiled is not None and any(name.startswith(compiled.THREAD) for name in names)


def _leave_at_once(
  kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
  """After an error, end at once a process that would wait at its exit for nothing.

  In a job jax would wait for the other processes, and those wait for what this one does not
  compute. Python waits for threads, and one that compiles a large model takes minutes.
  """
  jax = sys.modules.get("jax")  # a launcher never imports it
  if kind is None or error is None or jax is None:
    return
  if not (jax.distributed.is_initialized() or _compiles()):
    return
  if not isinstance(error, SystemExit):
    sys.excepthook(kind, error, trace)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def _log_short_lines() -> None:
  """Log to stderr: lines of this package, and warnings of libraries."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # those of libraries keep their defaults
  # After a failed write, of Orbax's: the error itself is said.
  warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
  logging.use_absl_handler()
  logging.set_verbosity(logging.INFO)
  handler = logging.get_absl_handler()
  handler.setFormatter(MaskingFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
  handler.addFilter(_shorten)


@contextlib.contextmanager
def short_log() -> Iterator[None]:
  """Within it, what libraries log through absl is left out as on the command line."""
  logger = logging.get_absl_logger()
  logger.addFilter(_shorten)
  try:
    yield
  finally:
    logger.removeFilter(_shorten)


def _show_uncaught(
  kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
  """Show an uncaught error, unless it is that of a write which failed before and is said.

  After a failed save Orbax closes its event loop, and each array that TensorStore still writes
  finds it closed: a traceback each, from threads of its own.
  """
  frames = list(traceback.walk_tb(trace))
  of_loop = bool(frames) and frames[-1][0].f_globals.get("__name__") == "asyncio.base_events"
  is_main = threading.current_thread() is threading.main_thread()
  if is_main or not (of_loop and str(error) == "Event loop is closed") or _shows_tracebacks():
    text = "".join(traceback.format_exception(kind, error, trace))
    print(masked(text).encode(errors="backslashreplace").decode(), end="", file=sys.stderr)


def _show_unraisable(args: Any) -> None:
  """The same for what an event loop raises that could not be made, for want of open files."""
  of_loop = getattr(args.object, "__module__", "") == "asyncio.base_events"
  if not of_loop or _shows_tracebacks():
    sys.__unraisablehook__(args)


def _shorten(record: std_logging.LogRecord) -> bool:
  """Keep warnings of libraries (Orbax, jax), without tracebacks: they precede an error of ours.

  With `log.level=debug` all is kept.
  """
  if f"{os.sep}ats_jax{os.sep}" in record.pathname or logging.get_verbosity() >= logging.DEBUG:
    return True
  if not _shows_tracebacks():
    record.exc_info = None
  return record.levelno >= std_logging.WARNING


def _shows_tracebacks() -> bool:
  return bool(os.environ.get("ATS_TRACEBACK"))
