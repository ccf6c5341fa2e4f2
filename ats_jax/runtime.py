"""What must be set before jax touches a device, and what every entry point does first."""

import logging as std_logging
import os
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from ats_jax.config.schema import Config

# Of the GPU's memory, what jax takes at its start; its own default leaves a quarter unused.
GPU_MEMORY_FRACTION = "0.92"


def define_config_flag() -> flags.FlagHolder:
  """Define `--config`, with overrides `--config.section.name=value`."""
  return config_flags.DEFINE_config_file(
    "config", None, "Config file, e.g. configs/debug.py; a variant follows a colon."
  )


def define_workdir_flag() -> flags.FlagHolder:
  """Define `--workdir`."""
  return flags.DEFINE_string("workdir", None, "Folder of the run, e.g. runs/debug.")


def run(main: Any) -> None:
  """Run `main(argv)` under absl, with short log lines and user errors without a traceback."""

  def guarded(argv: list[str]) -> int | None:
    logging.set_verbosity(logging.INFO)
    handler = logging.get_absl_handler()
    handler.setFormatter(std_logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.addFilter(_is_ours_or_warning)
    try:
      return main(argv)
    except (ValueError, FloatingPointError) as error:
      if os.environ.get("ATS_TRACEBACK"):
        raise
      raise SystemExit(f"error: {error}\n(ATS_TRACEBACK=1 shows where.)") from None
    except KeyboardInterrupt:  # before or after the steps, which finish first (StopSignal)
      raise SystemExit("interrupted") from None

  app.run(guarded)


def _is_ours_or_warning(record: std_logging.LogRecord) -> bool:
  """Libraries that log through absl (Orbax, jax) describe internal steps at INFO."""
  return record.levelno >= std_logging.WARNING or f"{os.sep}ats_jax{os.sep}" in record.pathname


def configure(cfg: Config) -> None:
  """Set compiler flags, memory and the compilation cache. Call before any device is used."""
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_FRACTION)
  if cfg.precision.deterministic:
    flag = "--xla_gpu_deterministic_ops=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
  if cfg.compilation_cache != "off":
    folder = cache_folder(cfg)
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def cache_folder(cfg: Config) -> Path:
  """Where compiled programs are kept."""
  if cfg.compilation_cache != "auto":
    return Path(cfg.compilation_cache).expanduser()
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return Path(base).expanduser() / "ats_jax" / "xla"


def require(value: Any, flag: str, example: str) -> Any:
  """Return `value`; if the flag was not given, say so and how."""
  if not value:
    raise ValueError(f"--{flag} is missing. Example: --{flag}={example}")
  return value
