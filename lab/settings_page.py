"""Write docs/reference/settings.md: every setting with its default, meaning and range.

python -m lab.settings_page
"""

import itertools
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from ats_jax.config import Config
from ats_jax.config.explain import describe
from ats_jax.config.names import Known, all_settings, flatten, in_words, settings, unmet
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
  return "\n".join([OPENING, _counts(), *_sections()])


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


def main(argv: list[str]) -> None:
  """Write it."""
  del argv
  PAGE.write_text(page(), encoding="utf-8")
  print(f"wrote {PAGE}")


if __name__ == "__main__":
  cli.run(main)
