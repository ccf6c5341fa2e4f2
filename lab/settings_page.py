"""Write docs/reference/settings.md: every setting with its default, meaning and range.

python -m lab.settings_page
"""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path

from ats_jax.config.explain import explain
from ats_jax.config.names import settings
from ats_jax.verbs import cli

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
COLUMNS = 120
TOP = "Whole run"  # settings without a section
OPENING = """\
# All settings

<!-- written by: python -m lab.settings_page -->

Every setting with its default, its meaning and its range, by section. To read about one in a
terminal: `ats-jax train --explain=NAME`, with the name of a setting or a section. To set one: a
flag (`--config.model.num_layers=6`) or a config file ([configuration](config.md)).

A workdir keeps the settings of its run. A setting that *may change on resume* can have another
value when the run goes on; the others need a new workdir.
"""


def page() -> str:
  """The page, in Markdown."""
  return "\n".join([OPENING, *_sections()])


def _sections() -> Iterator[str]:
  section = lambda name: name.rpartition(".")[0] or TOP
  for title, names in itertools.groupby(sorted(settings(), key=_order), section):
    yield f"## {title}\n"
    for name in names:
      yield textwrap.fill(
        _item(name),
        COLUMNS,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
      )
    yield ""


def _order(name: str) -> tuple[bool, int]:
  """Settings without a section first; else as the schema has them."""
  return "." in name, list(settings()).index(name)


def _item(name: str) -> str:
  """One setting, as `--explain` describes it."""
  meaning, facts = explain(name).split("\n    ")
  kind = settings()[name].type
  assert isinstance(kind, type) and not dataclasses.is_dataclass(kind)
  meaning = meaning.removeprefix(f"{name} ({kind.__name__}): ")
  facts = facts.removesuffix("; fixed for a workdir").replace("inf]", "∞]")
  facts = facts.replace("may change on resume", "*may change on resume*")
  return f"- **`{name}`** ({kind.__name__}): {meaning}. {facts[0].upper()}{facts[1:]}."


def main(argv: list[str]) -> None:
  """Write it."""
  del argv
  PAGE.write_text(page(), encoding="utf-8")
  print(f"wrote {PAGE}")


if __name__ == "__main__":
  cli.run(main)
