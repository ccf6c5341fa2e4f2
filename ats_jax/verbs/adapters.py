"""`--adapter` of verbs: adapters of peft in turn, on a base that is loaded once."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from ats_jax.config.names import flatten
from ats_jax.store import paths

if TYPE_CHECKING:  # it imports jax, for which the flag does not wait
  from ats_jax.inference.load import TrainedRun

BASE = "base"
_NAMED = re.compile("([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)")


def define_adapter_flag(flag_values: flags.FlagValues) -> flags.FlagHolder:
  """Define `--adapter`."""
  text = "Folders of peft's adapters, NAME=FOLDER or FOLDER: the base alone, then with each."
  return flags.DEFINE_list("adapter", [], text, flag_values=flag_values)


def by_name(given: Sequence[str]) -> dict[str, Path]:
  """The folders of `--adapter` by name, which is by default the last part of the path.

  Raises:
    ValueError: if a name is that of another.
  """
  result: dict[str, Path] = {}
  for one in given:
    match = _NAMED.fullmatch(one)
    name, folder = (match[1], match[2]) if match else (Path(one).name, one)
    if name in result or name == BASE or not name:
      taken = "the model alone" if name == BASE else f"another adapter or none ({name!r})"
      raise ValueError(f"--adapter={one}: its name is that of {taken}. Write NAME=FOLDER.")
    result[name] = Path(folder)
  return result


def each(
  run: "TrainedRun", folder: paths.Path, adapters: Mapping[str, Path]
) -> Iterator[tuple[str, "TrainedRun"]]:
  """The run as "base", then with each adapter merged into its weights; without any, as "".

  Args:
    run: a base.
    folder: its workdir.
    adapters: folders of peft's, by name.

  Raises:
    ValueError: if one is not for this base, before the first is given.
  """
  if not adapters:
    yield "", run
    return
  from ats_jax.bridge import peft_folder  # here: few use them
  from ats_jax.bridge.convert import COMPANIONS
  from ats_jax.bridge.export import choose_family
  from ats_jax.bridge.folder import imported_fields

  cfg, model = run.program.cfg, run.model
  if cfg.finetune.is_on:
    raise ValueError(
      f"--adapter: {folder} holds a run that fine-tunes (finetune.adapter.name="
      f"{cfg.finetune.adapter.name}), not a base. Name the run that it began with, or import what "
      "`ats-jax bridge export` writes of it."
    )
  theirs = imported_fields(folder / COMPANIONS)
  family = choose_family(cfg, imported=theirs.get("model_type", "")).fitted(flatten(cfg))
  configs = {n: peft_folder.config_with(f, cfg, family, model) for n, f in adapters.items()}
  yield BASE, run.sharing(model)
  for name, path in adapters.items():
    yield name, run.sharing(peft_folder.merged_with(path, configs[name], family, model))
