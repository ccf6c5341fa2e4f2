"""The process: what is set before jax touches a device, its compiled programs."""

import collections
import contextlib
import functools
import glob
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from absl import logging
from jax.experimental.compilation_cache import compilation_cache

from ats_jax.config.schema import Config

# Of the GPU's memory, what jax takes at its start; its own default leaves a quarter unused.
GPU_MEMORY_FRACTION = "0.92"
_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_FLAGS")
# With XLA's own choice, a program of several devices of a CPU that is loaded from the cache begins
# its collectives in another order on each, and all wait for one another (jaxlib 0.12.0.1).
_IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler"
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
_SEVERAL_CPU_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(?!1\b)\d")
_OPTIONS = (
  "jax_enable_compilation_cache",
  "jax_compilation_cache_dir",
  "jax_persistent_cache_min_compile_time_secs",
  "jax_persistent_cache_min_entry_size_bytes",
)
# Whatever the shell says: random numbers are part of a run, which may go on in another shell.
_RANDOM = {"jax_default_prng_impl": "threefry2x32", "jax_threefry_partitionable": True}
# Switches for debugging with which no step can be made, by the values that they must have.
_NEEDED = {
  "jax_disable_jit": False,
  "jax_numpy_rank_promotion": "allow",
  "jax_numpy_dtype_promotion": "standard",
}
# Options that change what a run computes, and their defaults.
_MATMULS = "jax_default_matmul_precision"
_CHANGING = {"jax_enable_x64": False, _MATMULS: None}
_DAMAGED_ENTRY = re.compile("Error reading persistent compilation cache entry for '(.+?)'")
_CACHE_VARIABLE, _CACHE_SWITCH = "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"


@contextlib.contextmanager
def configured(cfg: Config) -> Iterator[None]:
  """As `configure`, until the end of the block: then all is as it was before.

  Flags of the compiler and memory take effect only if no device was used before.
  """
  options = {name: getattr(jax.config, name) for name in (*_OPTIONS, *_RANDOM, _MATMULS)}
  show_warning = warnings.showwarning
  with variables(cfg):
    try:
      configure(cfg)
      yield
    finally:
      warnings.showwarning = show_warning
      _set_options(options)


@contextlib.contextmanager
def variables(cfg: Config) -> Iterator[None]:
  """Set what a device takes at its start, memory and compiler flags, until the end of the block."""
  before = {name: os.environ.get(name) for name in _VARIABLES}
  try:
    _set_variables(cfg)
    yield
  finally:
    for name, value in before.items():
      os.environ.pop(name, None)
      if value is not None:
        os.environ[name] = value


def configure(cfg: Config) -> None:
  """Set compiler flags, memory, the kind of random keys and the compilation cache.

  Call before any device is used.

  Raises:
    ValueError: if the cache's folder cannot be made, or a switch of jax for debugging is on.
  """
  _look_at_options()
  if not cfg.precision.tf32:
    jax.config.update(_MATMULS, "highest")
  _set_variables(cfg)
  _count_cache_events()
  if _is_off(cfg):
    _set_options({**_RANDOM, "jax_enable_compilation_cache": False})
    return
  folder = cache_folder(cfg)
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise ValueError(
      f"the compilation cache {folder} cannot be made: {e.strerror}. Set XDG_CACHE_HOME or "
      "compilation_cache to a folder that can be written, or compilation_cache to 'off'."
    ) from e
  _set_options({**_RANDOM, **dict(zip(_OPTIONS, (True, str(folder), 0.0, 0), strict=True))})
  _mend_cache(folder)


def _set_variables(cfg: Config) -> None:
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_FRACTION)
  given = os.environ.get("XLA_FLAGS", "")
  if cfg.precision.deterministic and _DETERMINISTIC not in given:
    _add_flag(_DETERMINISTIC)
  if _SEVERAL_CPU_DEVICES.search(given) and _IN_ORDER not in given:
    _add_flag(f"{_IN_ORDER}=false")


def _look_at_options() -> None:
  """Name the options of jax, which variables set, that break or change a run.

  Raises:
    ValueError: for those that break it.
  """
  value = lambda name: getattr(getattr(jax.config, name), "value", getattr(jax.config, name))
  for name, needed in _NEEDED.items():
    if value(name) != needed:
      raise ValueError(
        f"{name.upper()} is {value(name)}: with this option of jax for debugging no train step can "
        f"be made. Unset the variable (or set {name} to {needed})."
      )
  for name, default in _CHANGING.items():
    if value(name) != default:
      logging.warning("%s is %s: it changes what is computed.", name.upper(), value(name))


def _mend_cache(folder: Path) -> None:
  """Have damaged entries of the cache removed when jax warns of them; it then writes them anew.

  jax writes an entry in place, so that a kill may cut it, and never replaces one that is there.
  """
  show = warnings.showwarning

  def shown(message: Warning | str, *args: Any, **kwargs: Any) -> None:
    if found := _DAMAGED_ENTRY.match(str(message)):
      _remove_damaged(folder, found[1])
    show(message, *args, **kwargs)

  warnings.showwarning = shown


def _remove_damaged(folder: Path, program: str) -> None:
  """Remove the entries of a program that cannot be decompressed.

  Those of zstd, which jax uses where it is installed, have no checksum: all of them are removed.
  """
  for entry in folder.glob(f"{glob.escape(program)}-*-cache"):
    try:
      zlib.decompress(entry.read_bytes())
    except FileNotFoundError:  # another process was faster
      continue
    except zlib.error as e:
      logging.warning("%s cannot be read (%s): compiled anew and replaced.", entry, e)
      entry.unlink(missing_ok=True)


def _add_flag(flag: str) -> None:
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def _set_options(options: Mapping[str, Any]) -> None:
  """Set options of jax; its cache opens the folder that they name when it is used next."""
  for name, value in options.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def cache_folder(cfg: Config) -> Path:
  """Where compiled programs are kept; where jax's own variable says, if no setting does.

  Raises:
    ValueError: if the variable names a store.
  """
  if cfg.compilation_cache != "auto":
    return Path(cfg.compilation_cache).expanduser()
  if given := os.environ.get(_CACHE_VARIABLE):
    if "://" in given:
      raise ValueError(
        f"{_CACHE_VARIABLE}={given}: the cache is a folder of this machine. Unset the variable, or "
        "set compilation_cache."
      )
    return Path(given).expanduser()
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return Path(base).expanduser() / "ats_jax" / "xla"


def _is_off(cfg: Config) -> bool:
  switch = os.environ.get(_CACHE_SWITCH, "").lower()
  by_variable = switch in ("0", "f", "false", "n", "no", "off")
  return cfg.compilation_cache == "off" or (cfg.compilation_cache == "auto" and by_variable)


def cache_use(cfg: Config) -> str:
  """Where the cache is, how large, and how often this process found a program in it."""
  if _is_off(cfg):
    return "off" if cfg.compilation_cache == "off" else f"off, as {_CACHE_SWITCH} says"
  folder = cache_folder(cfg)
  size = sum(map(_file_size, folder.glob("*")))
  events = _count_cache_events()
  hits, misses = (events[f"/jax/compilation_cache/cache_{kind}"] for kind in ("hits", "misses"))
  return f"{folder}, {size / 2**20:,.1f} MiB; {hits} programs found, {misses} added"


def _file_size(path: Path) -> int:
  try:
    return path.stat().st_size
  except FileNotFoundError:  # another process has just removed it
    return 0


@functools.cache
def _count_cache_events() -> collections.Counter[str]:
  """Events of jax in this process by name, from the first call on."""
  events = collections.Counter[str]()
  jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
  return events
