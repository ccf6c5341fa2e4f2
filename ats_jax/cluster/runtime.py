"""The process: what is set before jax touches a device, its compiled programs."""

import collections
import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from ats_jax.config.schema import Config

# Of the GPU's memory, what jax takes at its start; its own default leaves a quarter unused.
GPU_MEMORY_FRACTION = "0.92"
_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_FLAGS")
# With XLA's own choice, a program of several devices of a CPU that is loaded from the cache begins
# its collectives in another order on each, and all wait for one another (jaxlib 0.12.0.1).
_IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler"
_SEVERAL_CPU_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(?!1\b)\d")
_OPTIONS = (
  "jax_enable_compilation_cache",
  "jax_compilation_cache_dir",
  "jax_persistent_cache_min_compile_time_secs",
  "jax_persistent_cache_min_entry_size_bytes",
)


@contextlib.contextmanager
def configured(cfg: Config) -> Iterator[None]:
  """As `configure`, until the end of the block: then all is as it was before.

  Flags of the compiler and memory take effect only if no device was used before.
  """
  variables = {name: os.environ.get(name) for name in _VARIABLES}
  options = {name: getattr(jax.config, name) for name in _OPTIONS}
  try:
    configure(cfg)
    yield
  finally:
    _set_options(options)
    for name, value in variables.items():
      os.environ.pop(name, None)
      if value is not None:
        os.environ[name] = value


def configure(cfg: Config) -> None:
  """Set compiler flags, memory and the compilation cache. Call before any device is used.

  Raises:
    ValueError: if the cache's folder cannot be made.
  """
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_FRACTION)
  if cfg.precision.deterministic:
    _add_flag("--xla_gpu_deterministic_ops=true")
  given = os.environ.get("XLA_FLAGS", "")
  if _SEVERAL_CPU_DEVICES.search(given) and _IN_ORDER not in given:
    _add_flag(f"{_IN_ORDER}=false")
  _count_cache_events()
  if cfg.compilation_cache == "off":
    _set_options({"jax_enable_compilation_cache": False})
    return
  folder = cache_folder(cfg)
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise ValueError(
      f"the compilation cache {folder} cannot be made: {e.strerror}. Set XDG_CACHE_HOME or "
      "compilation_cache to a folder that can be written, or compilation_cache to 'off'."
    ) from e
  _set_options(dict(zip(_OPTIONS, (True, str(folder), 0.0, 0), strict=True)))


def _add_flag(flag: str) -> None:
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def _set_options(options: Mapping[str, Any]) -> None:
  """Set options of jax; its cache opens the folder that they name when it is used next."""
  for name, value in options.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def cache_folder(cfg: Config) -> Path:
  """Where compiled programs are kept."""
  if cfg.compilation_cache != "auto":
    return Path(cfg.compilation_cache).expanduser()
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return Path(base).expanduser() / "ats_jax" / "xla"


def cache_use(cfg: Config) -> str:
  """Where the cache is, how large, and how often this process found a program in it."""
  if cfg.compilation_cache == "off":
    return "off"
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
