"""Show a config, compare two, or make one from a `config.json` of Hugging Face."""

from collections.abc import Callable
from pathlib import Path

from absl import flags

from ats_jax.bridge import config_import
from ats_jax.checkpoint import workdir
from ats_jax.config import Config
from ats_jax.config.extend import build
from ats_jax.config.file import load_file
from ats_jax.config.names import differences, flatten
from ats_jax.store import paths
from ats_jax.store.secrets import masked
from ats_jax.verbs import cli

IMPORT = """make a config from the config.json of a Hugging Face model, and list what is missing

  ats-jax config import config.json --to=configs/mine.py
"""
SHOW = """the settings of a config or of a run that are not at their defaults

  ats-jax config show b1:moe
  ats-jax config show runs/debug
"""
DIFF = """the settings in which two configs, or runs, differ

  ats-jax config diff b1 b7:moe
  ats-jax config diff configs/debug.py runs/debug
"""
IMPORT_FLAGS, SHOW_FLAGS, DIFF_FLAGS = (flags.FlagValues() for _ in range(3))
_TO = flags.DEFINE_string(
  "to",
  "",
  "Config file to write, e.g. configs/mine.py; without it the file is printed.",
  flag_values=IMPORT_FLAGS,
)


def _import(name: str) -> None:
  """Prints what became of each field, and writes or prints the config file."""
  target = Path(_TO.value) if _TO.value else None
  if target and target.suffix != ".py":
    raise ValueError(f"--to={target}: a config file is Python and ends in .py.")
  if target and target.exists():
    raise ValueError(f"--to={target} is there already. Name another file, or remove it.")
  report = config_import.read(name)
  text = config_import.config_file_text(report, name, str(target or "configs/mine.py"))
  print(report.table())
  if target is None:
    print(f"\n{text}", end="")
    return
  target.parent.mkdir(parents=True, exist_ok=True)
  target.write_text(text, encoding="utf-8")
  print(f"\nwrote {target}")


def _load(name: str) -> Config:
  if Path(name).is_dir():
    return workdir.load_config(paths.parse(name))
  return build(load_file(name).to_dict())


def _show(name: str) -> None:
  """Prints the settings that are not at their defaults."""
  for setting, (usual, value, _) in differences(flatten(Config()), flatten(_load(name))).items():
    print(masked(f"{setting} = {value!r} (default {usual!r})"))


def _diff(first: str, second: str) -> None:
  """Prints the settings in which two configs differ."""
  found = differences(flatten(_load(first)), flatten(_load(second)))
  for setting, (old, new, free) in found.items():
    print(masked(f"{setting}: {old!r} -> {new!r}{'' if free else ' (fixed for a workdir)'}"))
  if not found:
    print("no setting differs")


def _command(
  do: Callable[..., None], flag_values: flags.FlagValues, about: str, operand: str
) -> cli.Command:
  return cli.Command(lambda argv: do(*argv), flag_values, about, operand)


COMMANDS = {
  "import": _command(_import, IMPORT_FLAGS, IMPORT, "file"),
  "show": _command(_show, SHOW_FLAGS, SHOW, "config"),
  "diff": _command(_diff, DIFF_FLAGS, DIFF, "config config"),
}
