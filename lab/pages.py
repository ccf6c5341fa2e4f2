"""Write the documents with the parts that are generated from the code.

  python -m lab.pages --out=FOLDER

A document of the repository marks the place of a generated part by `<!-- generated: NAME -->` and
`<!-- end -->`, with a sentence between them that says where else a reader finds the same. The site
(`.ci/site.py`) and this program put the part in its place. `PARTS` lists the parts.
"""

import importlib
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from absl import flags

from ats_jax import exits
from ats_jax.bridge.families import CONFIGS, FAMILIES
from ats_jax.config import Config
from ats_jax.config.explain import describe
from ats_jax.config.names import KINDS, Known, all_settings, flatten, in_words, settings, unmet
from ats_jax.metrics.peaks import PEAKS
from ats_jax.ops.implementations import OPS
from ats_jax.verbs import VERBS, cli
from lab import hardware_tables, model_tables

_OUT = flags.DEFINE_string("out", None, "Folder to write.")
ROOT = Path(__file__).parents[1]
DOCS, PACKAGE = ROOT / "docs", ROOT / "ats_jax"
# Files whose constants decide what the orchestrator does.
THRESHOLDS = (
  "step/reflex",
  "orchestrator/constants",
  "orchestrator/signals/health",
)
COLUMNS = 120
TOP = "Whole run"  # settings without a section
_PART = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
_CONSTANT = re.compile(r"^([A-Z][A-Z_]+) = ([\w./-]+)  # (.*)$", re.MULTILINE)
_EXAMPLE = re.compile(r" *ats-jax ")


def parts_in(text: str) -> list[str]:
  """The names of the generated parts of a document."""
  return _PART.findall(text)


def fill(text: str, parts: Mapping[str, Callable[[], str]] | None = None) -> str:
  """A document with its generated parts.

  Args:
    text: the document as it is in the repository.
    parts: functions that make parts, by name; other parts stay as they are.

  Raises:
    ValueError: if no function has the name of a part.
  """
  if unknown := set(parts_in(text)) - PARTS.keys():
    raise ValueError(f"there is no generated part {unknown}. Choose from {', '.join(PARTS)}.")
  known = PARTS if parts is None else parts
  return _PART.sub(lambda m: known[m[1]]().strip() if m[1] in known else m[0], text)


def settings_part() -> str:
  """Every setting with its default, meaning and range, by section."""
  return "\n".join([_counts(), *_sections()])


def _counts() -> str:
  cfg = Config()
  flat, own = flatten(cfg), settings(cfg)
  met = [unmet(name, own, flat) is None for name in own]
  text = (
    f"There are {len(all_settings())} settings. A config has those of the kinds that it chooses, "
    f"{len(own)} with the default kind of each section, of which {sum(met)} have an effect "
    "before another setting is changed."
  )
  return textwrap.fill(text, COLUMNS) + "\n"


def _sections() -> Iterator[str]:
  section = lambda name: name.rpartition(".")[0] or TOP
  known = all_settings()
  for title, names in itertools.groupby(sorted(known, key=_order(known)), section):
    yield f"## {title}\n"
    for name in names:
      for one in known[name]:
        yield textwrap.fill(
          _item(name, one),
          COLUMNS,
          subsequent_indent="  ",
          break_long_words=False,
          break_on_hyphens=False,
        )
    yield ""


def _order(known: dict[str, list[Known]]) -> Callable[[str], tuple[bool, int, int]]:
  """Settings without a section first; then by section, each as the schema has them."""
  sections: dict[str, int] = {}
  for name in known:
    sections.setdefault(name.rpartition(".")[0], len(sections))
  places = {name: place for place, name in enumerate(known)}
  return lambda name: ("." in name, sections[name.rpartition(".")[0]], places[name])


def _item(name: str, known: Known) -> str:
  """One setting, as `--explain` describes it."""
  meaning, facts = describe(name, known).split("\n    ")
  kind = in_words(known.field.type)
  meaning = meaning.removeprefix(f"{name} ({kind}): ")
  facts = facts.removesuffix("; fixed for a workdir").replace("inf]", "∞]")
  facts = facts.replace("may change on resume", "*may change on resume*")
  return f"- **`{name}`** ({kind}): {meaning}. {facts[0].upper()}{facts[1:]}."


def commands() -> dict[str, cli.Command]:
  """All commands by what a user types, without second names of one command."""
  found: dict[str, cli.Command] = {}
  for verb in VERBS:
    for word, command in importlib.import_module(f"ats_jax.verbs.{verb}").COMMANDS.items():
      if command not in found.values():
        found[f"{verb} {word}".strip()] = command
  return found


def commands_part() -> str:
  """What each command does, with examples and flags."""
  return "\n".join(itertools.chain.from_iterable(_command(*item) for item in commands().items()))


def _command(name: str, command: cli.Command) -> Iterator[str]:
  summary, *rest = (command.about or "").strip().splitlines()
  yield f"## `{name}`\n"
  yield f"{summary[0].upper()}{summary[1:].removesuffix('.')}.\n"
  blocks = re.split(r"\n\n+", "\n".join(rest).strip("\n"))
  for is_example, group in itertools.groupby(blocks, lambda b: bool(_EXAMPLE.match(b))):
    if is_example:
      yield "\n".join(["```", *map(textwrap.dedent, group), "```\n"])
    else:
      yield from (f"{_with_code(text)}\n" for text in group if text)
  if flags_of := command.own_flags():
    yield from table(("flag", "default", "meaning"), map(_flag, flags_of))
    yield ""


def _with_code(text: str) -> str:
  """A text in which flags and names of settings are marked as code."""
  known = all_settings()

  def marked(match: re.Match[str]) -> str:
    is_name = match[0].startswith(("`", "--")) or match[0] in known
    return match[0] if match[0].startswith("`") or not is_name else f"`{match[0]}`"

  return re.sub(r"`[^`]*`|(?<![\w/-])--[a-z_]+|\b[a-z_]+\.[a-z_.]+[a-z]", marked, text)


def _flag(flag: cli.Flag) -> tuple[str, str, str]:
  name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
  if flag.name == "config":
    return f"`{name}`", f"`{cli.DEFAULT_CONFIG}`", "Packaged config or config file."
  default = flag.default if flag.default not in (None, False, "", [], 0) else ""
  shown = ",".join(default) if isinstance(default, list) else str(default)
  return f"`{name}`", shown and f"`{shown}`", cli.meaning(flag)


def exit_codes_part() -> str:
  """The exit codes of all commands."""
  return "\n".join(table(("code", "meaning"), exits.MEANINGS.items()))


def kinds_part() -> str:
  """The sections of which there are several kinds."""
  open_one = ", and those of [extensions](../guides/extending.md)"
  rows = (
    (f"`{name}`", ", ".join(f"`{kind}`" for kind in kinds) + open_one * kinds.is_open)
    for name, kinds in KINDS.items()
  )
  return "\n".join(table(("section", "kinds"), rows))


def families_part() -> str:
  """The Hugging Face families that `bridge` and `config import` read."""
  rows = (
    (f.name, f"`{name}`", f"`{f.architecture}`", "yes" if name in FAMILIES else "config only")
    for name, f in CONFIGS.items()
  )
  return "\n".join(table(("family", "`model_type`", "architecture", "weights"), rows))


def kernels_part() -> str:
  """The hand-written kernels, and where they are the default."""
  rows = (
    (f"`{op}`", f"`{kernel.name}`", _names(kernel.where), _names(kernel.default), kernel.why)
    for op, entry in OPS.items()
    for kernel in entry.kernels
  )
  return "\n".join(table(("op", "kernel", "slots", "default for", "reason"), rows))


def _names(slots: Iterable[str]) -> str:
  return ", ".join(slots) or "-"


def peaks_part() -> str:
  """The peak rates of devices that `train/mfu` uses."""
  rows = (
    (
      re.sub(r"\\b|\$", "", row.pattern),
      _rate(row.bfloat16),
      _rate(row.float16),
      _rate(row.bandwidth),
      row.source,
    )
    for row in PEAKS
    if row.bfloat16 or row.float16
  )
  header = ("device", "bfloat16 TFLOP/s", "float16 TFLOP/s", "memory GB/s", "source")
  return "\n".join(table(header, rows))


def _rate(number: float) -> str:
  return f"{number:,g}" if number else "-"


def thresholds_part() -> str:
  """The constants of the reflex and of the policy."""
  rows = (
    (f"`{name}`", f"`{value}`", comment[0].upper() + comment[1:], f"`{file}.py`")
    for file in THRESHOLDS
    for name, value, comment in _CONSTANT.findall((PACKAGE / f"{file}.py").read_text("utf-8"))
  )
  return "\n".join(table(("constant", "value", "meaning", "file of `ats_jax`"), rows))


def model_sizes_part() -> str:
  """Exact sizes of all presets."""
  return "\n".join(model_tables.tables())


def _part_of(lines: Callable[[], Iterator[tuple[str, ...]]]) -> Callable[[], str]:
  """A table of `hardware_tables`, which yields its heading first."""

  def part() -> str:
    header, *rows = lines()
    return "\n".join(table(header, rows))

  return part


PARTS: Mapping[str, Callable[[], str]] = {
  "settings": settings_part,
  "commands": commands_part,
  "exit_codes": exit_codes_part,
  "kinds": kinds_part,
  "families": families_part,
  "kernels": kernels_part,
  "peaks": peaks_part,
  "thresholds": thresholds_part,
  "model_sizes": model_sizes_part,
  "cards": _part_of(hardware_tables.cards),
  "compiled_steps": _part_of(hardware_tables.steps),
  "compiled_ops": _part_of(hardware_tables.ops),
}


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
  """Lines of a table in Markdown."""
  line = lambda cells: f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
  yield line(header)
  yield "|---" * len(header) + "|"
  yield from map(line, rows)


def main(argv: list[str]) -> None:
  """Write the documents that have generated parts."""
  del argv
  out = Path(cli.require(_OUT.value, "out", "pages"))
  for path in sorted(DOCS.rglob("*.md")):
    text = path.read_text(encoding="utf-8")
    if parts_in(text):
      target = out / path.relative_to(DOCS)
      target.parent.mkdir(parents=True, exist_ok=True)
      target.write_text(fill(text), encoding="utf-8")
      print(f"wrote {target}")


if __name__ == "__main__":
  cli.run(main)
