"""What the program says: whether a message that a document quotes can be one of its own."""

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def programs_texts() -> str:
  """All texts in the source of the program, a line each; a value in a text is a null character."""
  texts = [(ROOT / "Makefile").read_text(encoding="utf-8")]
  for path in ROOT.glob("ats_jax/**/*.py"):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
        texts.append("".join(map(str, parts)))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        texts.append(node.value)
  return "\n".join(" ".join(text.split()) for text in texts)


def is_said(quote: str, program: str) -> bool:
  """Whether a quoted message can be one of the program's.

  What looks like a value is left out: `...`, a word with a digit or a sign, and a name in capitals.
  Of what stands between values, two words or more must be in the program.
  """
  parts = [" ".join(words).strip(" :,.") for words in split_at_values(quote.split())]
  return all(part in program for part in parts if " " in part)


def split_at_values(words: list[str]) -> Iterator[list[str]]:
  """The runs of words that are no values."""
  is_value = lambda word: bool(re.search(r"\d|[=/.'\"](?!$)|\.\.\.|^\W?[A-Z_]{3,}\W?$", word))
  return (list(run) for value, run in itertools.groupby(words, is_value) if not value)
