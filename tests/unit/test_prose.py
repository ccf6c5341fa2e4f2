"""Documents are wrapped, and no text says how it was made."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = ("ats_jax", "configs", "kernels_cuda", "kernels_metal", "kernels_pallas", "lab")
SUFFIXES = {".py", ".cu", ".cuh"}
SOURCES = sorted(
  p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES
)
COLUMNS = 120
URL = re.compile(r"https?://\S+")
# What says how the text came about, or points at something that no reader has.
FORBIDDEN = (
  r"given out another time",
  r"while others trained",
  r"second GPU of the machine|machine's second GPU",
  r"other processes (were|on)",
  r"names of the description",
  r"\bFEATURES:",
  r"\bseed 00\d\b",
  r"not part of this repository",
  r"their own program|program that they were published with",
  r"\ba review(er)? (had|found|counted)\b",
)


def identify(path: Path) -> str:
  return str(path.relative_to(ROOT))


def wide_lines(text: str) -> list[int]:
  """Numbers of the lines over `COLUMNS`, outside of code and tables and without their URLs."""
  found, fenced = [], False
  for number, line in enumerate(text.splitlines(), 1):
    if line.lstrip().startswith("```"):
      fenced = not fenced
    elif not fenced and not line.startswith("|") and len(URL.sub("", line)) > COLUMNS:
      found.append(number)
  return found


def forbidden(text: str) -> list[str]:
  """The phrases of `FORBIDDEN` in a text, however its lines are broken."""
  joined = re.sub(r"\s+(?:#|//)?\s*", " ", text)
  return [match.group() for phrase in FORBIDDEN for match in re.finditer(phrase, joined)]


def test_documents_are_wrapped():
  texts = {identify(path): path.read_text(encoding="utf-8") for path in DOCUMENTS}
  wide = [f"{name}:{number}" for name, text in texts.items() for number in wide_lines(text)]
  assert not wide, "\n".join(wide)


def test_no_text_says_how_it_was_made():
  phrases = [
    f"{identify(path)}: {phrase}"
    for path in (*DOCUMENTS, *SOURCES)
    for phrase in forbidden(path.read_text(encoding="utf-8"))
  ]
  assert not phrases, "\n".join(phrases)


def test_the_rules_find_what_they_forbid():
  long = "word " * 30
  assert wide_lines(f"{long}\n```\n{long}\n```\nsee https://example.org/{'x' * 200}\n{long}") == [
    1,
    6,
  ]
  assert wide_lines(f"| {long}|\n{long}") == [2]
  assert forbidden("a machine that was given\n  # out another time") == ["given out another time"]
  assert forbidden("trained on seed 0, seed 100 and seed 00") == []
