"""The files of `launch/`: read, and set for a job."""

import re
from collections.abc import Mapping
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]
# What stands before a value: `key: ` of YAML, `name=` of a shell, an option of sbatch.
_MARKED = re.compile(r"^(\s*(?:#SBATCH --)?[\w./-]+(?:: |=))(.*)  # <(\w+)>$")


def folder() -> Path:
  """Where the files are: in a wheel `ats_jax/_data/launch`, in a checkout `launch/`."""
  of_wheel = _PACKAGE / "_data" / "launch"
  return of_wheel if of_wheel.is_dir() else _PACKAGE.parent / "launch"


def render(name: str, values: Mapping[str, str | int | None]) -> str:
  """A file with the values of a job.

  Args:
    name: name of the template's file.
    values: by the word in the mark at the end of a line, what the line gets in place of its
      example; None leaves the line out.

  Returns:
    The text, without marks.
  """
  lines, used = [], set()
  for line in (folder() / name).read_text(encoding="utf-8").splitlines():
    marked = _MARKED.match(line)
    if marked is None:
      lines.append(line)
      continue
    start, _, key = marked.groups()
    used.add(key)
    if values[key] is not None:
      lines.append(f"{start}{values[key]}")
  assert used == set(values), f"{name}: {used ^ set(values)}"
  return "\n".join(lines) + "\n"
