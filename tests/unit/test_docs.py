"""What the documents show: commands that run, and links, files and settings that exist."""

import functools
import re
import shlex
from pathlib import Path

import pytest
from commands import forked

from ats_jax.config.names import KINDS, all_settings
from ats_jax.verbs import VERBS
from lab import settings_page

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SOURCES = sorted(p for d in ("ats_jax", "configs", "lab") for p in ROOT.glob(f"{d}/**/*.py"))
COMMAND = re.compile(r"python -m (ats_jax|lab)([. ])(\w+)((?:[^\n`#\\]|\\\n)*)")


def commands() -> list[tuple[str, str, str, str]]:
  """File, package, verb or module, and flags of each command that is shown."""
  return [
    (str(path.relative_to(ROOT)), package + dot, verb, flags)
    for path in (*DOCUMENTS, *SOURCES)
    for package, dot, verb, flags in COMMAND.findall(path.read_text(encoding="utf-8"))
  ]


def plans() -> list[str]:
  """Flags of each `plan` that is shown whole: no placeholder, no choice of flags."""
  found = {
    " ".join(flags.replace("\\\n", " ").replace("[--json]", "").split())
    for _, _, verb, flags in commands()
    if verb == "plan" and re.search(r"--config=\w", flags)
  }
  return sorted(flags for flags in found if not set("[|") & set(flags))


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


@pytest.mark.parametrize("flags", plans())
@pytest.mark.thorough
def test_plans_that_are_shown_can_be_made(flags):
  result = forked("ats_jax", "plan", *shlex.split(flags))
  assert result.code == 0, result.err


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
  headings = re.findall(r"^#+ (.*)", without_blocks(path), re.MULTILINE)
  words = [re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings]
  return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in words}


def test_the_readme_is_short():
  assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_the_site_lists_every_page():
  """Decisions are reached from their index."""
  nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
  listed = re.findall(r"[\w/-]+\.md", nav)
  pages = {str(p.relative_to(ROOT / "docs")) for p in ROOT.glob("docs/**/*.md")}
  assert len(set(listed)) == len(listed)
  assert set(listed) == {page for page in pages if not re.search(r"/\d{4}-", page)}


OF_EXTENSION = "optimizer.momentum"  # of the guide's own optimizer


def test_settings_that_are_set_exist():
  names = {*KINDS, *all_settings(), "section.name", "data.name", OF_EXTENSION}
  unknown = [
    f"{identify(path)}: {name}"
    for path in (*DOCUMENTS, *SOURCES)
    for name in re.findall(r"--config\.([a-z_0-9.]+)=", path.read_text(encoding="utf-8"))
    if name not in names
  ]
  assert not unknown, "\n".join(unknown)


def test_the_page_of_settings_is_up_to_date():
  text = settings_page.PAGE.read_text(encoding="utf-8")
  assert text == settings_page.page(), "run: python -m lab.settings_page"
  listed = re.findall(r"^- \*\*`(.+?)`", text, re.MULTILINE)
  assert sorted(listed) == sorted(name for name, known in all_settings().items() for _ in known)


def test_numbers_of_decisions_are_unique_and_indexed():
  names = [p.name for p in (ROOT / "docs/internals/adr").glob("0*.md")]
  assert len({name[:4] for name in names}) == len(names)
  index = (ROOT / "docs/internals/adr/README.md").read_text(encoding="utf-8")
  assert all(f"({name})" in index for name in names)
