"""What the documents show: commands that run, and links, files and settings that exist."""

import functools
import inspect
import re
from pathlib import Path

import pytest

from ats_jax import api
from ats_jax.config.names import KINDS, all_settings
from ats_jax.verbs import VERBS
from lab import pages

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SOURCES = sorted(p for d in ("ats_jax", "configs", "lab") for p in ROOT.glob(f"{d}/**/*.py"))
MOST_WORDS, MOST_WORDS_OF_README = 50_000, 900
# Names that look like settings: placeholders, and those of an extension or of another trainer.
OTHER_NAMES = {
  "section.name", "data.name", "optimizer.momentum",
  "optimizer.lr", "optimizer.beta1", "optimizer.beta2",
  "optimizer.params.lr", "optimizer.params.betas",
}  # fmt: skip
FILES = (".txt", ".md", ".py", ".json", ".jsonl", ".csv", ".gguf")
SPEED = re.compile(
  r"\d[\d.,]*\s(?:%\s)?(?:tokens/s|tokens\sa\ssecond|tokens\sper\ssecond|tok/s|MFU)\b"
  r"|\d[\d.,]*\s(?:%|times)\s(?:faster|slower|as\sfast|less\stime)\b|\b\d+\.\d+x\b"
)
# Generated parts that links may lead into.
WITH_HEADINGS = {"settings": pages.settings_part, "commands": pages.commands_part}
COMMAND = re.compile(r"python -m (ats_jax|lab)([. ])(\w+)((?:[^\n`#\\]|\\\n)*)")


def commands() -> list[tuple[str, str, str, str]]:
  """File, package, verb or module, and flags of each command that is shown."""
  return [
    (str(path.relative_to(ROOT)), package + dot, verb, flags)
    for path in (*DOCUMENTS, *SOURCES)
    for package, dot, verb, flags in COMMAND.findall(path.read_text(encoding="utf-8"))
  ]


def identify(path: Path) -> str:
  return str(path.relative_to(ROOT))


def test_commands_exist():
  for path, package, verb, _ in commands():
    if verb.isupper():  # a placeholder
      continue
    if package == "ats_jax ":
      assert verb in VERBS, f"{path}: python -m ats_jax {verb}"
    else:
      module = ROOT / package.rstrip(". ") / verb
      assert module.with_suffix(".py").is_file() or module.is_dir(), f"{path}: {package}{verb}"


def test_links_lead_to_files_and_to_their_headings():
  dead = [f"{identify(path)}: {link}" for path in DOCUMENTS for link in dead_links(path)]
  assert not dead, "\n".join(dead)


def dead_links(path: Path) -> list[str]:
  """The links of a document that lead to no file of the repository, or to no heading of one."""
  dead = []
  for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", without_blocks(path)):
    if target.startswith("http"):
      continue
    other = path.parent / target if target else path
    if not other.exists() or (anchor and anchor not in anchors(other)):
      dead.append(f"{target}#{anchor}" if anchor else target)
  return dead


@functools.cache
def without_blocks(path: Path) -> str:
  """The text of a document, what is fenced left out."""
  text = path.read_text(encoding="utf-8")
  return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(path: Path) -> set[str]:
  """What links may name in a document: its headings, as GitHub and mkdocs write them."""
  text = pages.fill(without_blocks(path), WITH_HEADINGS)
  headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
  words = [re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings]
  return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in words}


def test_documents_are_short():
  """Words as `wc -w` counts them, generated parts left out."""
  words = {path: len(path.read_text(encoding="utf-8").split()) for path in DOCUMENTS}
  assert words[ROOT / "README.md"] <= MOST_WORDS_OF_README
  longest = sorted(words, key=lambda path: -words[path])[:10]
  assert sum(words.values()) <= MOST_WORDS, [(identify(path), words[path]) for path in longest]


def test_the_site_lists_every_page():
  """Decisions are reached from their index."""
  nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
  listed = re.findall(r"[\w/-]+\.md", nav)
  pages = {str(p.relative_to(ROOT / "docs")) for p in ROOT.glob("docs/**/*.md")}
  assert len(set(listed)) == len(listed)
  assert set(listed) == {page for page in pages if not re.search(r"/\d{4}-", page)}


def test_settings_that_are_named_exist():
  names = {*KINDS, *all_settings()}
  sections = {name.rpartition(".")[0] for name in names}
  tops = {section.partition(".")[0] for section in sections}
  known = names | sections | OTHER_NAMES
  unknown = [
    f"{identify(path)}: {name}"
    for path in DOCUMENTS
    if path.name != "CHANGELOG.md"  # it has names of earlier versions
    for name in re.findall(r"`([a-z_]+\.[a-z_0-9.]*[a-z_0-9])(?:=[^`]*)?`", without_blocks(path))
    if name.partition(".")[0] in tops
    and not (name in known or name.endswith(FILES) or is_in_module(name))
  ]
  unknown += [
    f"{identify(path)}: {name}"
    for path in (*DOCUMENTS, *SOURCES)
    for name in re.findall(r"--config\.([a-z_0-9.]+)=", path.read_text(encoding="utf-8"))
    if name not in known
  ]
  assert not unknown, "\n".join(unknown)


def is_in_module(name: str) -> bool:
  """Whether a name is that of a module of the package, or of something in one."""
  section, _, rest = name.partition(".")
  return (ROOT / "ats_jax" / section / f"{rest.partition('.')[0]}.py").is_file()


def test_speed_is_claimed_in_tables_only():
  """A figure in a sentence has no command, commit and date."""
  claims = [
    f"{identify(path)}: {claim}"
    for path in DOCUMENTS
    if path.name == "README.md" or path.parent.name in ("guides", "start")
    for claim in claims_of_speed(path)
  ]
  assert not claims, "\n".join(claims)
  assert SPEED.findall("it is 1.3 times faster, 4 % slower, 12,000 tokens/s, 1.17x and 40 % MFU")
  assert not SPEED.findall("2 x cpu, 4 times as many, 30 % of the tokens, MFU of 989 TFLOP/s")


def claims_of_speed(path: Path) -> list[str]:
  """The figures of speed in the sentences of a document."""
  lines = without_blocks(path).splitlines()
  return SPEED.findall("\n".join(line for line in lines if not line.startswith("|")))


def test_generated_parts_are_those_of_the_code():
  text = pages.settings_part()
  listed = re.findall(r"^- \*\*`(.+?)`", text, re.MULTILINE)
  assert sorted(listed) == sorted(name for name, known in all_settings().items() for _ in known)
  text = pages.commands_part()
  for name, command in pages.commands().items():
    section = text.partition(f"## `{name}`\n")[2].partition("\n## ")[0]
    flags = re.findall(r"^\| `--(?:\[no\])?(\w+)`", section, re.MULTILINE)
    assert flags == [flag.name for flag in command.own_flags()], name
    assert section.count("```") == 2, name


def test_names_in_the_reference_are_those_of_the_code():
  """Functions with their arguments, and constants."""
  text = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
  shown = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", text, re.MULTILINE))
  assert shown.keys() == set(api.__all__)
  for name, arguments in shown.items():
    words = [word for word in re.split(r"[, ]+", arguments) if word != "*"]
    parameters = inspect.signature(getattr(api, name)).parameters.values()
    named = [one.name for one in parameters if one.kind != one.VAR_KEYWORD]
    assert words[: len(named)] == named, name
  text = (ROOT / "docs/reference/orchestrator.md").read_text(encoding="utf-8")
  constants = set(re.findall(r"`([A-Z][A-Z_]{3,})`", text))
  listed = set(re.findall(r"^\| `([A-Z_]+)`", pages.thresholds_part(), re.MULTILINE))
  assert len(constants) > 10 and constants - listed == set()


def test_generated_parts_have_a_place_and_places_have_parts():
  places = [name for path in DOCUMENTS for name in pages.parts_in(path.read_text("utf-8"))]
  assert sorted(places) == sorted(pages.PARTS)
  with pytest.raises(ValueError, match=r"no generated part .'nothing'"):
    pages.fill("<!-- generated: nothing -->\nin the code\n<!-- end -->")


def test_numbers_of_decisions_are_unique_and_indexed():
  names = [p.name for p in (ROOT / "docs/internals/adr").glob("0*.md")]
  assert len({name[:4] for name in names}) == len(names)
  index = (ROOT / "docs/internals/adr/README.md").read_text(encoding="utf-8")
  assert all(f"({name})" in index for name in names)
