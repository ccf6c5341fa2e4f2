"""Look at configs, compare two, or make one from a file of another trainer.

python -m ats_jax config import FILE [--to=configs/mine.py]
python -m ats_jax config show configs/b1.py:moe
python -m ats_jax config diff configs/b1.py runs/b1

FILE is a config.json of a Hugging Face model, a DeepSpeed JSON, torchtitan's TOML, or its
config_registry.py:FUNCTION, which is read and not run. `show` and `diff` take config files of ours,
with a variant after a colon, and workdirs.
"""

from pathlib import Path

from absl import flags

from ats_jax import cli, workdir
from ats_jax.config import Config, from_config_dict, importers
from ats_jax.config.build import differences, flatten
from ats_jax.config.file import load_file

_TO = flags.DEFINE_string(
  "to", "", "Config file to write, e.g. configs/mine.py; without it the file is printed."
)


def _import(name: str) -> None:
  """Prints what became of each name, and writes or prints the config file."""
  target = Path(_TO.value) if _TO.value else None
  if target and target.suffix != ".py":
    raise ValueError(f"--to={target}: a config file is Python and ends in .py.")
  if target and target.exists():
    raise ValueError(f"--to={target} is there already. Name another file, or remove it.")
  found = importers.read(name)
  text = importers.source(found, name, str(target or "configs/mine.py"))
  print(importers.table(found))
  if target is None:
    print(f"\n{text}", end="")
    return
  target.parent.mkdir(parents=True, exist_ok=True)
  target.write_text(text, encoding="utf-8")
  print(f"\nwrote {target}")


def _load(name: str) -> Config:
  if Path(name).is_dir():
    return workdir.load_config(Path(name))
  return from_config_dict(load_file(name))


def _show(name: str) -> None:
  """Prints the settings that are not at their defaults."""
  for setting, (usual, value, _) in differences(flatten(Config()), flatten(_load(name))).items():
    print(f"{setting} = {value!r} (default {usual!r})")


def _diff(first: str, second: str) -> None:
  """Prints the settings in which two configs differ."""
  found = differences(flatten(_load(first)), flatten(_load(second)))
  for setting, (old, new, free) in found.items():
    print(f"{setting}: {old!r} -> {new!r}{'' if free else ' (fixed for a workdir)'}")
  if not found:
    print("no setting differs")


_COMMANDS = {"import": (_import, 1), "show": (_show, 1), "diff": (_diff, 2)}


def main(argv: list[str]) -> None:
  """Runs a command.

  Raises:
    ValueError: for an unknown command, a wrong number of files, or a file that is wrong.
  """
  word, *names = argv[1:] or [""]
  if word not in _COMMANDS:
    raise ValueError(f"expected one command of {', '.join(_COMMANDS)}, got {argv[1:]}.")
  command, number = _COMMANDS[word]
  if len(names) != number:
    raise ValueError(f"config {word} takes {number} file{'s' * (number > 1)}, got {names}.")
  command(*names)


if __name__ == "__main__":
  cli.run(main, operands=True)
