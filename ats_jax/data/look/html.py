"""Templates of HTML pages in which every text is escaped, and shows what it holds."""

import unicodedata
from pathlib import Path

import jinja2
from markupsafe import Markup

_HERE = Path(__file__).parent


def templates(folder: Path = _HERE) -> jinja2.Environment:
  """The templates of a folder, and `style.css`, which all pages share."""
  return jinja2.Environment(
    loader=jinja2.FileSystemLoader([folder, _HERE]),
    autoescape=True,
    finalize=lambda value: visible(value) if isinstance(value, str) else value,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )


def visible(text: str) -> str:
  """Text in which what cannot be seen is seen: controls, and what turns text around."""
  if isinstance(text, Markup):
    return text
  return "".join(
    c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else f"[U+{ord(c):04X}]"
    for c in text
  )
