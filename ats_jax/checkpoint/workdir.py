"""The folder of a run: its config, environment and tokenizer. One workdir = one run."""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from ats_jax.config.build import from_config_dict
from ats_jax.config.identity import RunIdentity, fixed_settings_hash
from ats_jax.config.names import differences, flatten, to_dict
from ats_jax.config.schema import Config
from ats_jax.store import lease, paths, shared_folder
from ats_jax.store.paths import Path
from ats_jax.store.secrets import masked_values

# Files and folders of a workdir.
CONFIG = "config.json"
RUN_ID = "run_id"
METADATA = "metadata.json"  # versions, machine and facts about the run
DATA = "data.json"  # what the run reads, as it was at its start
TOKENIZER = "tokenizer.json"
CHECKPOINTS = "checkpoints"
LAYERS = "layers.jsonl"  # arrays of sparse layers
DECISIONS = "decisions.jsonl"  # ledger of the orchestrator
PERFORMANCE = "performance.json"
PROFILES = "profile"  # traces by their first steps, with what each came to
LOCK = ".lock"  # of the process that has claimed the workdir
RUN_ID_BYTES = 8
FORMAT = 3  # of config.json, where it says "format"; raised when settings get other names
# Settings that config.json of this format may hold and this version does not have, by section. A
# run that left one at this value is computed as it was.
REMOVED = {
  "mesh": {"context_ring": False, "shard_residuals": False},
  "orchestrator": {"confidence": 0.75, "branch_steps": 0},
}
# Kinds of a section that were removed, by its path, each with the one that takes its place.
REMOVED_KINDS = {("moe", "exchange"): {"bins": "allgather"}}


@contextlib.contextmanager
def claim(workdir: Path, cfg: Config) -> Iterator[RunIdentity]:
  """Make `workdir` the folder of a run with `cfg`, or check that it is; keep others out meanwhile.

  Before its first checkpoint a run has nothing to lose: its settings may still change, all of them.
  In a multi-process job all processes must call this together; all get the same.

  Yields:
    Which run it is: made at the first claim, and found again at each later one.

  Raises:
    ValueError: if it cannot be written, another process trains in it, its files cannot be read, or
      it holds a run whose settings differ in more than what may change on resume; if the processes
      of a job do not see the same folder.
  """
  workdir = Path(workdir)
  with contextlib.ExitStack() as lock:
    try:
      paths.make_folder(workdir)
      if jax.process_index() == 0:
        lock.enter_context(lease.held(workdir / LOCK))
      run = _open_claimed(workdir, cfg)
    except BlockingIOError as e:
      raise ValueError(
        f"another process trains in {workdir} now: two would damage its files. "
        "Wait for it, stop it, or use another --workdir."
      ) from e
    except paths.errors() as e:
      why = "it is a file" if os.path.isfile(workdir) else paths.reason(e)
      raise ValueError(f"workdir {workdir} cannot be used: {why}. Choose another --workdir.") from e
    yield RunIdentity(run, fixed_settings_hash(cfg))


def _open_claimed(workdir: Path, cfg: Config) -> str:
  """Write what a claimed workdir holds; return the id of its run."""
  path = workdir / CONFIG
  has_checkpoints = any((workdir / CHECKPOINTS).glob("[0-9]*"))
  if path.exists():
    _compare(workdir, _read_config(path), cfg, all_free=not has_checkpoints)
  elif has_checkpoints:
    raise ValueError(
      f"{workdir} holds checkpoints but no {CONFIG}, so nobody can say whether they fit. "
      "Restore the file or use another --workdir."
    )
  if jax.process_index() == 0:
    if not has_checkpoints and not (workdir / RUN_ID).exists():
      paths.write(workdir / RUN_ID, secrets.token_hex(RUN_ID_BYTES) + "\n")
    run = bytes.fromhex(_read_run_id(workdir))
    _write_config(path, cfg)
  else:
    run = bytes(RUN_ID_BYTES)
  if jax.process_count() > 1:
    run = multihost_utils.broadcast_one_to_all(np.frombuffer(run, np.uint8)).tobytes()
    shared_folder.check_folder(workdir / RUN_ID, run.hex() + "\n")
    shared_folder.check_clocks()
  return run.hex()


def _read_run_id(workdir: Path) -> str:
  path = Path(workdir) / RUN_ID
  if not path.exists():
    raise ValueError(
      f"{workdir} holds no {RUN_ID}, so nobody can say whether its checkpoints are of this run. "
      "Restore the file (the manifest.json of each checkpoint says it) or use another --workdir."
    )
  text = paths.read(path).decode(errors="replace").removesuffix("\n")
  if not re.fullmatch(f"[0-9a-f]{{{2 * RUN_ID_BYTES}}}", text):
    raise ValueError(
      f"{path} holds {text[:40]!r}, not the {2 * RUN_ID_BYTES} hexadecimal digits of a run. "
      "Restore the file or use another --workdir."
    )
  return text


def _compare(workdir: Path, previous: Mapping[str, Any], cfg: Config, *, all_free: bool) -> None:
  changed = differences(flatten(previous), flatten(cfg))
  if cfg.counts_epochs:
    changed.pop("num_steps", None)
  fixed = [f"  {n}: {a!r} -> {b!r}" for n, (a, b, free) in changed.items() if not free]
  if fixed and not all_free:
    lines = "\n".join(fixed)
    raise ValueError(
      f"{workdir} holds a run with other settings:\n{lines}\n"
      "Use another --workdir for the new settings, or the old settings to go on."
    )
  if all_free and changed:
    logging.info("changed since the last start, which saved nothing: %s", ", ".join(changed))
    return
  for name, (was, now, _) in changed.items():
    logging.info("changed since the last start: %s: %r -> %r", name, was, now)


def write_config(workdir: Path, cfg: Config) -> None:
  """Replace the settings of a claimed workdir, as more is known of them."""
  if jax.process_index() == 0:
    _write_config(workdir / CONFIG, cfg)


def load_config(workdir: Path) -> Config:
  """Read the config of a run.

  Raises:
    ValueError: if there is no run, or the file cannot be read.
  """
  path = Path(workdir) / CONFIG
  if not path.exists():
    raise ValueError(f"{workdir} holds no run ({CONFIG} is missing). Train one there first.")
  return from_config_dict(_read_config(path))


def stored_settings(workdir: Path) -> dict[str, Any]:
  """The flat settings of the run in a folder, unchecked; {} if it holds none.

  Raises:
    ValueError: if its config cannot be read.
  """
  path = Path(workdir) / CONFIG
  return flatten(_read_config(path)) if path.exists() else {}


def started_in(workdir: Path) -> str:
  """The current folder of the last start of a run; "an unknown folder" where nothing says it."""
  try:
    metadata = paths.parse_json(paths.read(Path(workdir) / METADATA))
  except (OSError, ValueError):
    metadata = None
  folder = metadata.get("folder") if isinstance(metadata, dict) else None
  return repr(folder) if folder else "an unknown folder"


def load_identity(workdir: Path) -> RunIdentity:
  """Return which run a workdir holds.

  Of a run with extensions, which are not loaded to read it, the settings are not all known: any
  will do.

  Raises:
    ValueError: if there is no run, or its files cannot be read.
  """
  cfg = load_config(workdir)
  has_extensions = bool(_read_config(Path(workdir) / CONFIG).get("extensions"))
  return RunIdentity(_read_run_id(workdir), "" if has_extensions else fixed_settings_hash(cfg))


def _read_config(path: Path) -> dict[str, Any]:
  try:
    values = paths.parse_json(paths.read(path))
    if not isinstance(values, dict):
      raise ValueError(f"it holds no settings but {values!r:.40}")
  except (OSError, ValueError) as e:
    raise ValueError(f"{path} cannot be read: {e}. Restore it or use another --workdir.") from e
  if kind := values.get("model_type"):
    raise ValueError(
      f"{path} is that of a model of Hugging Face ({kind!r:.40}), and none of a run. `ats-jax "
      f"bridge import --folder={path.parent} --workdir=OTHER` makes a run of it."
    )
  if (written := values.pop("format", 1)) != FORMAT:
    raise ValueError(
      f"{path} is of format {written}, and this version of ats_jax reads format {FORMAT}: settings "
      f"had other names. Go on with the version that wrote it ({METADATA} names it), or use "
      "another --workdir."
    )
  for section, removed in REMOVED.items():
    of_section = values.get(section)
    for name in removed.keys() & (of_section if isinstance(of_section, dict) else ()):
      was, now = (json.dumps(value) for value in (values[section].pop(name), removed[name]))
      if was != now:
        raise ValueError(
          f"{path} has {section}.{name}={was}, a setting that was removed. Go on with the version "
          f"that wrote it ({METADATA} names it), or write {now} there to go on without it."
        )
  for (section, field), kinds in REMOVED_KINDS.items():
    of_section = values.get(section)
    kind = of_section.get(field) if isinstance(of_section, dict) else None
    name = kind.get("name") if isinstance(kind, dict) else None
    if isinstance(name, str) and name in kinds:
      raise ValueError(
        f'{path} has {section}.{field}.name="{name}", a kind that was removed. Go on with the '
        f'version that wrote it ({METADATA} names it), or write "{kinds[name]}" there.'
      )
  return values


def _write_config(path: Path, cfg: Config) -> None:
  # With the credentials in addresses of text, which a resume needs.
  values = {"format": FORMAT, **to_dict(cfg)}
  write_json(path, values, is_private=masked_values(values) != values)


def write_json(path: Path, value: Any, *, is_private: bool = False) -> None:
  """Replace `path` by a value, in one step; a private file is for its owner alone."""
  paths.write(path, json.dumps(value, indent=2) + "\n", is_private=is_private)
