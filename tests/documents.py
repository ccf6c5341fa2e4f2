"""What the documents show: fenced blocks, the commands in them, and what these print.

A document's commands run one after the other in a folder of their own, as a reader would run them.
Paths of texts and workdirs are replaced by those of the folder. Trainings have small sizes; what is
planned or refused and what reads texts has the sizes that are shown.
"""

import importlib
import itertools
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
from ats_jax.sharding.mesh import mesh_sizes
from ats_jax.sharding.rules import MESH_AXES
from ats_jax.verbs.cli import Command as Verb
from ats_jax.verbs.cli import ConfigFlag

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SHELL = ("bash", "console")  # of a console, only what follows a `$`

_FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
_HASH = r"\b(?=\d*[a-f])(?=[a-f]*\d)[\da-f]{8,}\b"
_VALUE = re.compile(rf"(\.\.\.)|({_HASH})|({_NUMBER})")
_TIME = re.compile(r"^\d\d:\d\d:\d\d ")  # in front of a line of a log
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
  "step.loss_chunk_tokens": "64",
  "optimizer.warmup_steps": "1",
  "optimizer.warmup_fraction": "0.0",
  "checkpoint.every_steps": "2",
  "eval.every_steps": "2",
  "eval.num_batches": "1",
  "eval.bigram_baseline": "false",
  "sample.max_tokens": "4",
}
# The run that readers of workdirs are given: its curve can be extrapolated.
TRAINED = TOY | {
  "num_steps": "60",
  "data.tokenizer": "bpe",
  "data.bpe_vocab_size": "300",
  "optimizer.schedule": "wsd",
  "checkpoint.every_steps": "30",
  "eval.every_steps": "2",
  "eval.bigram_baseline": "true",
  "log.every_steps": "2",
}
# A training is run if its output is shown, and the first that names a file for one of these flags.
# Of the others all flags, settings and meshes are checked: tests/e2e and tests/multidevice train.
OWN_PARTS = ("--init_from", "--config.extensions")
PATHS = (
  "--config.data.paths", "--config.data.sources", "--config.data.validation_paths",
  "--config.data.validation_sets", "--paths",
)  # fmt: skip
OWN_CODE = ("--config=", "--config.extensions=")  # it stays in the process that loads it
# What is not run either: it takes long, or needs what the small run does not have.
ONLY_CHECKED = ("plan", "bench", "tune", "bridge", "config", "decisions", "report",
                "compare")  # fmt: skip
# Samples that no small run prints, by document and first words, and what it would take. Their words
# are those of the program.
NOT_PRODUCED = {
  ("guides/jobs.md", "job: 2 processes"): "several processes",
  ("guides/jobs.md", "2 devices instead of 4"): "another number of devices",
  ("guides/jobs.md", "launch: process 1 was killed"): "a process that is killed",
  ("guides/jobs.md", "orchestrator: the device is out of memory"): "too little memory",
  ("guides/hugging_face.md", "step 0 of runs/qwen"): "a published model",
  ("reference/checkpoints.md", "checkpoint 400 is damaged"): "a damaged checkpoint",
  ("reference/checkpoints.md", "no intact checkpoint"): "the same",
  ("reference/checkpoints.md", "checkpoint runs/debug/checkpoints"): "one of another run",
  ("reference/checkpoints.md", "error: s3://bucket/run needs s3fs"): "a missing package",
}

_CONFIG_FILE = """
from ats_jax.config import base_config


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
    line: the whole command, continued lines joined; "" above the first command.
    samples: what it prints: the lines below it in a console, and each `text` block that follows.
  """

  line: str
  samples: tuple[tuple[str, ...], ...] = ()

  def without_excused(self, path: Path) -> "Shown":
    """The command with those samples that a small run can print; `path` is the document."""
    samples = (sample for sample in self.samples if not is_excused(path, sample))
    return self._replace(samples=tuple(samples))

  @property
  def is_refused(self) -> bool:
    """Whether it is shown to end with an error."""
    return any(sample[0].startswith("error: ") for sample in self.samples)


def shown(path: Path) -> list[Shown]:
  """The commands that a document shows in fenced blocks, in order."""
  found = [Shown("")]
  for language, text in blocks(path):
    if language not in ("", "text", *SHELL):
      continue
    sample = []
    for line in text.replace("\\\n", " ").splitlines():
      asked = line.removeprefix("$ ")
      is_command = asked != line or line.startswith(_STARTS)
      if language == "bash":
        is_command = bool(line.strip()) and not line.lstrip().startswith("#")
      if is_command and language != "text":
        found += [Shown(" ".join(one.split())) for one in asked.split(" && ")]
      elif language in ("console", "text") and line.strip():
        sample.append(line)
    if sample:
      found[-1] = found[-1]._replace(samples=(*found[-1].samples, tuple(sample)))
  return found[0 if found[0].samples else 1 :]


def is_excused(path: Path, sample: tuple[str, ...]) -> bool:
  """Whether a sample of a document is one of NOT_PRODUCED."""
  first = _TIME.sub("", sample[0])
  return any(
    path == ROOT / "docs" / name and first.startswith(words) for name, words in NOT_PRODUCED
  )


def missing(sample: tuple[str, ...], output: str, *, exactly: bool) -> str:
  """The lines of a sample that an output lacks, or "".

  `...` stands for any lines, or for any words of a line. Before the sample and after it the output
  may have other lines. Numbers are those of the sample if `exactly`, but for 5 %.
  """
  real = [_TIME.sub("", " ".join(line.split())) for line in output.splitlines() if line.strip()]
  at = 0
  for gap, group in itertools.groupby(sample, lambda line: line.strip() == "..."):
    if gap:
      continue
    lines = list(group)
    for first in range(at, len(real) - len(lines) + 1):
      pairs = zip(lines, real[first:], strict=False)
      if all(_is_like(line, other, exactly=exactly) for line, other in pairs):
        at = first + len(lines)
        break
    else:
      return "\n".join(lines)
  return ""


def _is_like(shown: str, real: str, *, exactly: bool) -> bool:
  """Whether a real line has the words of one that is shown, and numbers at the same places."""
  shown = _TIME.sub("", " ".join(shown.split()))
  pattern, end, numbers = "", 0, []
  for value in _VALUE.finditer(shown):
    anything, digest, number = value.groups()
    pattern += re.escape(shown[end : value.start()])
    pattern += ".*" if anything else _HASH if digest else f"({_NUMBER})"
    numbers += [number] if number else []
    end = value.end()
  match = re.fullmatch(pattern + re.escape(shown[end:]), real)
  if not match or not exactly:
    return bool(match)
  as_number = lambda text: float(text.replace(",", ""))
  pairs = zip(map(as_number, numbers), map(as_number, match.groups()), strict=True)
  return all(math.isclose(one, other, rel_tol=0.05) for one, other in pairs)


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


def flags_of(values: dict[str, str]) -> list[str]:
  """Flags that give settings values."""
  return [f"--config.{name}={value}" for name, value in values.items()]


class SmallRun(NamedTuple):
  """A small training of configs/debug.py.

  Attributes:
    workdir: of the run.
    text: what it was trained on.
    result: what it printed.
  """

  workdir: Path
  text: Path
  result: Result


def make_small_run(folder: Path) -> SmallRun:
  """Train on some texts, in a folder of its own."""
  text, run = folder / "text", folder / "run"
  write_texts(text)
  words = flags_of(TRAINED | {"data.paths": str(text)})
  result = called("train", "--config=configs/debug.py", f"--workdir={run}", *words)
  assert result.code == 0, result.err
  return SmallRun(run, text, result)


class Reader:
  """Somebody who runs the commands of a document, in a folder of their own.

  Attributes:
    folder: where workdirs and files go.
    small: a small run that is there already.
    seen: those of `OWN_PARTS` that trainings of any document have shown so far.
  """

  def __init__(self, folder: Path, small: SmallRun, seen: set[str], document: Path | None = None):
    """Make the files that a document takes for granted, and those that it shows.

    A Python block that begins with `# NAME.py` is such a file.
    """
    self.folder, self.small, self.seen = folder, small, seen
    self._shown_paths: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    write_chats(folder / "chats.jsonl")
    (folder / "my.py").write_text(_CONFIG_FILE)
    for _, text in blocks(document) if document else []:
      if named := re.match(r"# (\w+\.py)\n", text):
        (folder / named[1]).write_text(text)

  def run(self, command: Command, *, sampled: bool = False, refused: bool = False) -> Result | None:
    """Check the flags of a command of `ats_jax`, and run it; None if it is checked only.

    Args:
      command: taken apart.
      sampled: its output is needed.
      refused: it is to fail.

    Raises:
      ValueError: for flags that do not exist, or contradict each other at the size that is shown.
    """
    verb, *words = command.words or ["--help"]
    if verb == "launch" and words[0] == "local":  # tests/multidevice/test_job.py runs processes
      verb, words = "train", [w for w in words[1:] if not re.match("--(processes|restarts)=", w)]
    asks = any(re.match("--(explain|help)\\b", w) for w in words)
    if verb in DEFAULTS and not asks and not any(w.startswith("--config=") for w in words):
      words = [*words, *DEFAULTS[verb]]
    goes_on = refused or (sampled and "--config.mesh." in " ".join(words))
    words = [
      self._replaced(word, new=verb in ("train", "finetune", "data") and not goes_on)
      for word in words
    ]
    if not (refused or asks):
      check(verb, words, _virtual_devices(command))
    if verb == "train" and sampled and not any(w.startswith("--config.") for w in words):
      return self._as_shown(self.small.result)
    if not (sampled or asks or self._is_run(verb, words)):
      return None
    if verb == "forecast":
      self._forget_later_half(words)
    if verb == "train" and not asks:
      words = self._as_small_run(words) if goes_on else self._small(words)
    return self._as_shown(self._result(verb, words))

  def _is_run(self, verb: str, words: list[str]) -> bool:
    if verb == "launch":
      assert "--dry_run" in words, "submits a job"
    named = (word.partition("=") for word in words)
    own = {flag for flag, _, value in named if flag in OWN_PARTS and Path(value).exists()}
    is_new = not own <= self.seen
    self.seen |= own
    return is_new if verb == "train" else verb not in ONLY_CHECKED and "--measure" not in words

  def _result(self, verb: str, words: list[str]) -> Result:
    env = {"XDG_CACHE_HOME": str(user_cache(self.folder / "cache"))}
    if "mesh." in " ".join(words) and verb == "train":
      return forked("ats_jax", verb, *words, XLA_FLAGS=f"{QUICK} {devices(8)}", **env)
    own_code = any(str(self.folder) in w for w in words if w.startswith(OWN_CODE))
    own_process = own_code or verb == "launch"
    return forked("ats_jax", verb, *words, **env) if own_process else called(verb, *words)

  def _as_shown(self, result: Result) -> Result:
    """What was printed, with the paths that the document has."""
    texts = [result.out, result.err]
    for real, path in sorted(self._shown_paths.items(), key=lambda pair: -len(pair[0])):
      texts = [text.replace(real, path) for text in texts]
    cache = r"[^\s=]*/ats_jax/data/"
    return Result(result.code, *(re.sub(cache, "~/.cache/ats_jax/data/", text) for text in texts))

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
    if flag in ("--init_from", "--reference") and value.startswith("runs/"):
      return f"{flag}={self._workdir(value)}"
    return str(self._workdir(word)) if word.startswith("runs/") else word

  def _text(self, shown: str) -> Path:
    if shown.startswith("configs/"):  # of the repository
      return ROOT / shown
    path = self.folder / shown if shown.endswith(".jsonl") else self.small.text
    self._shown_paths[str(path)] = shown
    return path

  def _path(self, shown: str) -> Path:
    path = self.folder / re.sub(r"^(\w+:/)?/", "", shown)
    self._shown_paths[str(path)] = shown
    return path

  def _workdir(self, shown: str) -> Path:
    """A workdir that a command reads; the small run if no command before has made it."""
    path = self._path(shown)
    if not path.exists():
      shutil.copytree(self.small.workdir, path)
    return path

  def _forget_later_half(self, words: list[str]) -> None:
    """Leave of the rows of `--workdir` those of a run that is still training."""
    (workdir,) = (w.partition("=")[2] for w in words if w.startswith("--workdir="))
    rows = Path(workdir, "metrics.jsonl")
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(lines[: len(lines) // 2]))

  def _as_small_run(self, words: list[str]) -> list[str]:
    """Flags of a training that goes on with the small run: it is complete, so it takes no step."""
    sizes = TRAINED | {"data.paths": str(self.small.text), "sample.prompt": ""}
    return flags_of(sizes) + words

  def _small(self, words: list[str]) -> list[str]:
    """Flags of a training with all sizes cut down."""
    kept = [w for w in words if w.partition("=")[0].removeprefix("--config.") not in TOY]
    if not any("data.paths=" in w or "data.sources=" in w for w in kept):
      kept.append(f"--config.data.paths={self.small.text}")
    sizes = dict(TOY)
    if any(w == "--config.data.format=chat" for w in words):
      sizes["data.seq_len"] = "64"  # that a conversation fits into a row
    tokenizer = [w for w in words if w.startswith(f"--config.data.tokenizer={self.folder}")]
    if tokenizer:
      kept, _ = [*kept, *tokenizer], sizes.pop("data.tokenizer")
    return kept + flags_of(sizes)


def _virtual_devices(command: Command) -> int:
  """The number of devices that a command asks XLA for; 0 if it does not."""
  found = re.search(r"device_count=(\d+)", command.env.get("XLA_FLAGS", ""))
  return int(found[1]) if found else 0


def check(verb: str, words: list[str], num_devices: int = 0) -> None:
  """Read the flags of a command, and its config at the size that is shown.

  Args:
    verb: of the command.
    words: all that follows.
    num_devices: there are; 0 = as many as the mesh needs, unless --devices says it.

  Raises:
    ValueError: for what does not exist, is not legal or does not fit the devices.
  """
  verbs: dict[str, Verb] = importlib.import_module(f"ats_jax.verbs.{verb}").COMMANDS
  name = words[0] if words and words[0] in verbs else ""
  command = verbs[name]
  try:
    command.parse(f"{verb} {name}".strip(), words[1:] if name else words)
  finally:
    command.flags.unparse_flags()
  if verb not in ("train", "plan", "bench", "data") or not any("--config" in w for w in words):
    return
  values = flags.FlagValues()
  config = ConfigFlag(values)
  values(["", *(word for word in words if word.startswith("--config"))])
  cfg = from_config_dict(config.nested())
  asked = [int(w.partition("=")[2]) for w in words if w.startswith("--devices=")]
  sizes = (max(1, getattr(cfg.mesh, axis)) for axis in MESH_AXES)
  if "--fit" not in words:
    mesh_sizes(cfg, *asked or [num_devices or math.prod(sizes)])


def write_texts(folder: Path) -> None:
  """Some documents of words, and three records that are none."""
  folder.mkdir(parents=True)
  words = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
  text = lambda i: " ".join(words[(i * k + k // 7) % len(words)] for k in range(300))
  for i in range(10):
    (folder / f"{i}.txt").write_text(text(i))
  records = [json.dumps({"text": text(i)}) for i in range(10, 17)]
  records += ['{"text": "no end', json.dumps({"content": "of another name"})]
  (folder / "a.jsonl").write_text("\n".join(records))
  (folder / "c.txt").write_bytes("un café".encode("latin-1"))


def write_chats(path: Path) -> None:
  """Some conversations, one a line."""
  lines = (json.dumps({"prompt": f"{i}+1?", "completion": f"{i + 1}"}) for i in range(200))
  path.write_text("\n".join(lines))
