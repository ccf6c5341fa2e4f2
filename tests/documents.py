"""What the documents show: fenced blocks, the commands in them, and those commands made small.

A document's commands run one after the other in a folder of their own, as a reader would run them.
Sizes are cut down, paths of texts and workdirs are replaced by small ones, and nothing else.
"""

import json
import math
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

from absl import flags
from commands import Result, called, forked
from program_cache import user_cache
from xla_flags import QUICK, devices

from ats_jax.config import from_config_dict
from ats_jax.config.names import flatten, settings, unmet
from ats_jax.config.text import text_of
from ats_jax.verbs.cli import ConfigFlag

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SHELL = ("bash", "console")  # of a console, only what follows a `$`

_FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
_STARTS = ("python -m ", ".venv/bin/", "ats-jax ", "make ", "pip ")

# What makes a run of any config small. Settings that are shown but named here are not tried.
TOY = {
  "num_steps": "2",
  "data.seq_len": "16",
  "data.batch_size": "16",
  "data.tokenizer": "bytes",
  "data.validation_fraction": "0.3",
  "model.num_layers": "2",
  "model.d_model": "32",
  "model.num_heads": "4",
  "model.num_kv_heads": "4",
  "model.d_ff": "32",
  "model.vocab_size": "0",
  "moe.d_ff": "16",
  "step.loss_chunk_tokens": "64",
  "optimizer.warmup_steps": "1",
  "optimizer.warmup_fraction": "0.0",
  "checkpoint.every_steps": "2",
  "eval.every_steps": "2",
  "eval.num_batches": "1",
  "eval.bigram_baseline": "false",
  "orchestrator.check_interval": "2",
  "orchestrator.snapshot_gb": "0.1",
  "sample.max_tokens": "4",
}
# The run that readers of workdirs are given: its curve can be extrapolated.
TRAINED = {n: v for n, v in TOY.items() if n not in ("moe.d_ff", "orchestrator.snapshot_gb")} | {
  "num_steps": "200",
  "data.tokenizer": "bpe",
  "data.bpe_vocab_size": "300",
  "optimizer.schedule": "wsd",
  "checkpoint.every_steps": "100",
  "eval.every_steps": "4",
  "log.every_steps": "2",
  "orchestrator.mode": "observe",
  "orchestrator.check_interval": "20",
}
# Of settings, those whose sections make another program. A run is traced for 5 s, so of all that a
# training shows only what no training before it has shown is run; all settings are checked.
SECTIONS = ("mesh", "moe", "mod", "orchestrator", "extensions", "data.format", "data.mixture")
PATHS = (
  "--config.data.paths", "--config.data.sources", "--config.data.validation_paths",
  "--config.data.validation_sets", "--paths",
)  # fmt: skip
OWN_CODE = ("--config=", "--config.extensions=")  # it stays in the process that loads it
MIXED = ("data.mixture", "data.format.sources")  # each shows something of its own


_CONFIG_FILE = """
from ats_jax.config import base_config
from ats_jax.config.text import text_of


def get_config(variant: str = ""):
  return base_config()
"""


# What verbs take when they are told nothing.
DEFAULTS = {
  "train": ("--config=configs/debug.py", "--workdir=runs/debug"),
  "data": ("--config=configs/debug.py",),
  "bench": ("--config=configs/debug.py",),
}


class Block(NamedTuple):
  """A fenced block.

  Attributes:
    language: the word behind the fence; "" if there is none.
    text: what stands between the fences.
  """

  language: str
  text: str


def blocks(path: Path) -> list[Block]:
  """The fenced blocks of a document."""
  found = _FENCE.findall(path.read_text(encoding="utf-8"))
  return [
    Block(language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE))
    for indent, language, text in found
  ]


class Shown(NamedTuple):
  """A command as it stands in a document.

  Attributes:
    line: the whole command, continued lines joined.
    error: how it is refused, if the line of a console below it begins with `error:`; else "".
    output: the other lines of a console below it, without `...`.
  """

  line: str
  error: str = ""
  output: tuple[str, ...] = ()


def shown(path: Path) -> list[Shown]:
  """The commands that a document shows in fenced blocks."""
  found = []
  for language, text in blocks(path):
    if language not in ("", *SHELL):
      continue
    for line in text.replace("\\\n", " ").splitlines():
      asked = line.removeprefix("$ ")
      is_command = asked != line or line.startswith(_STARTS)
      if language == "bash":
        is_command = bool(line.strip()) and not line.lstrip().startswith("#")
      if is_command:
        found += [Shown(" ".join(one.split())) for one in asked.split(" && ")]
      elif line.startswith("error: ") and language == "console":
        found[-1] = found[-1]._replace(error=line)
      elif language == "console" and line.strip() not in ("", "..."):
        found[-1] = found[-1]._replace(output=(*found[-1].output, line))
  return found


def unlike(sample: tuple[str, ...], output: str) -> list[str]:
  """The lines of a sample that an output lacks; numbers may be 5 % off."""
  real = [_with_numbers(line) for line in output.splitlines()]
  return [line for line in sample if not any(_is_like(_with_numbers(line), r) for r in real)]


def _with_numbers(line: str) -> tuple[str, list[float]]:
  words = " ".join(line.split())
  return _NUMBER.sub("#", words), [float(n.replace(",", "")) for n in _NUMBER.findall(words)]


def _is_like(one: tuple[str, list[float]], other: tuple[str, list[float]]) -> bool:
  close = (math.isclose(a, b, rel_tol=0.05) for a, b in zip(one[1], other[1], strict=False))
  return one[0] == other[0] and all(close)


class Command(NamedTuple):
  """A command that is shown, taken apart.

  Attributes:
    env: assignments in front of it.
    program: what runs: `ats_jax`, `lab.NAME`, or another word.
    words: all that follows.
  """

  env: dict[str, str]
  program: str
  words: list[str]


def parse(line: str) -> Command:
  """Take a command apart; a comment at its end is left out."""
  words, env = shlex.split(line, comments=True), {}
  while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
    name, _, value = words.pop(0).partition("=")
    env[name] = value
  if not words:
    return Command(env, "export", [])
  program, *rest = words
  program = program.removeprefix(".venv/bin/")
  if program in ("python", "python3") and rest:
    if rest[0] == "-m":
      return Command(env, rest[1], rest[2:])
    if rest[0].endswith(".py"):
      return Command(env, rest[0], rest[1:])
  return Command(env, "ats_jax" if program == "ats-jax" else program, rest)


class Reader:
  """Somebody who runs the commands of a document, in a folder of their own.

  Attributes:
    folder: where workdirs and files go.
    trained: workdir of a small run that is there already.
    seen: what trainings and timings of any document have shown so far.
  """

  def __init__(self, folder: Path, trained: Path, seen: set[str], document: Path | None = None):
    """Make the files that a document takes for granted, and those that it shows.

    A Python block that begins with `# NAME.py` is such a file.
    """
    self.folder, self.trained, self.seen = folder, trained, seen
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder / "text")
    write_chats(folder / "chats.jsonl")
    (folder / "my.py").write_text(_CONFIG_FILE)
    for _, text in blocks(document) if document else []:
      if named := re.match(r"# (\w+\.py)\n", text):
        (folder / named[1]).write_text(text)

  def run(self, command: Command, *, refused: bool = False) -> Result | None:
    """Run a command of `ats_jax`, made small; None if it shows nothing new.

    Args:
      command: taken apart.
      refused: it is to be run, and to fail.

    Raises:
      ValueError: for settings that contradict each other at the size that is shown.
    """
    verb, *words = command.words or [""]
    if verb == "launch" and words[0] != "local":
      assert "--dry_run" in words, "submits a job"
      return forked("ats_jax", verb, *words)
    if verb == "launch":  # tests/multidevice/test_job.py runs processes
      verb = "train"
      words = [w for w in words[1:] if not re.match("--(processes|restarts)=", w)]
    if verb in DEFAULTS and not any(re.match("--(config|explain|help)\\b", w) for w in words):
      words = [*words, *DEFAULTS[verb]]
    new = verb in ("train", "bench") and not refused  # of a run that is there
    words = [self._replaced(word, new=new) for word in words]
    if any(word.startswith("--config=") for word in words) and not refused:
      check_settings(words)
    if verb in ("train", "data", "bench"):
      if not (refused or self._shows_more(verb, words)):
        return None
      words = self._small(words)
    if verb == "bench":
      words = self._short(words)
    words = [*filter(None, (verb,)), *words]
    env = {"XDG_CACHE_HOME": str(user_cache(self.folder / "cache"))}
    if "mesh." in " ".join(words):
      return forked("ats_jax", *words, XLA_FLAGS=f"{QUICK} {devices(8)}", **env)
    own_code = any(str(self.folder) in w for w in words if w.startswith(OWN_CODE))
    return forked("ats_jax", *words, **env) if own_code else called(*words)

  def _shows_more(self, verb: str, words: list[str]) -> bool:
    """Whether a command has anything that no command before had."""
    shows = {" ".join([verb, *(w for w in words if not w.startswith("-"))])}
    for word in words:
      flag, _, value = word.partition("=")
      setting = flag.removeprefix("--config.")
      if flag == "--config":
        shows.add(value.partition(":")[2] or "plain")
      elif setting == flag:
        shows.add(flag)
      elif setting not in TOY and setting.startswith(SECTIONS):
        shows.add(setting if setting in MIXED else setting.partition(".")[0])
    more = not shows <= self.seen
    self.seen |= shows
    return more

  def _replaced(self, word: str, *, new: bool) -> str:
    """A word with texts that are there, and workdirs too unless the command makes a `new` one."""
    flag, _, value = word.partition("=")
    if flag in ("--config", "--config.extensions"):
      file = self.folder / value.partition(":")[0]
      return f"{flag}={self.folder}/{value}" if file.is_file() else word
    if flag in PATHS:
      entries = [e.rpartition("=") for e in value.split(",")]
      return f"{flag}=" + ",".join(f"{n}{eq}{self._text(path)}" for n, eq, path in entries)
    if flag == "--config.data.tokenizer" and "/" in value:
      return f"{flag}={self._workdir(value.rpartition('/')[0])}/tokenizer.json"
    if flag == "--hardware" or (flag == "--out" and value.endswith(".html")):
      return f"{flag}={self._path(value)}"
    if flag in ("--workdir", "--out"):
      return f"{flag}={self._path(value) if new else self._workdir(value)}"
    if flag in ("--init_from", "--reference"):
      return f"{flag}={self._workdir(value)}"
    return str(self._workdir(word)) if word.startswith("runs/") else word

  def _text(self, shown: str) -> Path:
    return self.folder / (shown if shown.endswith(".jsonl") else "text")

  def _path(self, shown: str) -> Path:
    return self.folder / re.sub(r"^(\w+:/)?/", "", shown)

  def _workdir(self, shown: str) -> Path:
    """A workdir that a command reads; a small run if no command before has made it."""
    path = self._path(shown)
    if not path.exists():
      shutil.copytree(self.trained, path)
    return path

  def _small(self, words: list[str]) -> list[str]:
    """Flags of a config with all sizes cut down."""
    if not any(word.startswith("--config=") for word in words):
      return words
    kept = [w for w in words if w.partition("=")[0].removeprefix("--config.") not in TOY]
    if not any("data.paths=" in w or "data.sources=" in w for w in kept):
      kept.append(f"--config.data.paths={self.folder}/text")
    sizes = dict(TOY)
    if any(w == "--config.data.format=chat" for w in words):
      sizes["data.seq_len"] = "64"  # that a conversation fits into a row
    tokenizer = [w for w in words if w.startswith(f"--config.data.tokenizer={self.folder}")]
    if tokenizer:
      kept, _ = [*kept, *tokenizer], sizes.pop("data.tokenizer")
    return kept + [
      f"--config.{name}={text_of(value)}" for name, value in with_effect(kept, sizes).items()
    ]

  def _short(self, words: list[str]) -> list[str]:
    """Flags of a benchmark with few steps, and of a sweep with one candidate."""
    sweep = "sweep" in words
    words = [w.partition(",")[0] if w.startswith("--try=") else w for w in words]
    words = [w for w in words if not re.match("--(steps|segments)=", w)] + ["--steps=2"]
    return (
      [*words, "--try=step.accum_steps=1"] if sweep and "--try=" not in " ".join(words) else words
    )


def with_effect(words: list[str], sizes: dict[str, str]) -> dict[str, str]:
  """Those of `sizes` that have an effect in the run that a command asks for."""
  values = flags.FlagValues()
  config = ConfigFlag(values)
  values(["train", *(word for word in words if word.startswith("--config"))])
  flat = flatten(config.nested())
  fields = settings(flat)
  return {n: v for n, v in sizes.items() if n not in fields or unmet(n, fields, flat) is None}


def check_settings(words: list[str]) -> None:
  """Read a config with all that a command sets, at the size that is shown.

  Raises:
    ValueError: for what is not legal.
  """
  values = flags.FlagValues()
  config = ConfigFlag(values)
  values(["", *(word for word in words if word.startswith("--config"))])
  from_config_dict(config.nested())


def write_texts(folder: Path) -> None:
  """Some documents of words."""
  if folder.exists():
    return
  folder.mkdir(parents=True)
  words = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
  for i in range(10):
    text = " ".join(words[(i * k + k // 7) % len(words)] for k in range(300))
    (folder / f"{i}.txt").write_text(text)


def write_chats(path: Path) -> None:
  """Some conversations, one a line."""
  lines = (json.dumps({"prompt": f"{i}+1?", "completion": f"{i + 1}"}) for i in range(30))
  path.write_text("\n".join(lines))
