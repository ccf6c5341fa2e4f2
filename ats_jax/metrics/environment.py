"""What a run ran on: versions, devices, environment variables and the commit of this package."""

import datetime
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from ats_jax.store.secrets import SECRET_NAME, masked

_PACKAGES = (
  "ats_jax",
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "orbax-checkpoint",
  "grain",
  "numpy",
  "tokenizers",
)
_VARIABLES = re.compile("XLA_FLAGS$|JAX_|ATS_")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def environment() -> dict[str, Any]:
  """Returns a JSON-ready description of the software, the devices and the source.

  It initialises the jax backend. Variables whose names look like those of secrets are left out.
  What cannot be found (a package, a driver, a git checkout) is None.
  """
  devices = jax.devices()
  driver = _NVIDIA_DRIVER.read_text().splitlines()[0] if _NVIDIA_DRIVER.exists() else None
  return {
    "time": datetime.datetime.fromtimestamp(time.time(), datetime.UTC).isoformat(),
    "hostname": socket.gethostname(),
    "platform": platform.platform(),
    "folder": os.getcwd(),  # where relative paths of the settings begin
    "python": sys.version,
    "packages": {name: _version(name) for name in _PACKAGES},
    "process_count": jax.process_count(),
    "backend": jax.default_backend(),
    "backend_version": devices[0].client.platform_version,  # names CUDA's or libtpu's version
    "device_count": len(devices),
    "device_kinds": sorted({device.device_kind for device in devices}),
    "nvidia_driver": driver,
    "variables": public_variables(os.environ),
    "git": _git(Path(__file__)),
  }


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def public_variables(
  environ: Mapping[str, str], wanted: re.Pattern[str] = _VARIABLES
) -> dict[str, str]:
  """Variables whose names begin with `wanted`, without secrets, by their names or in addresses."""
  return {
    name: masked(value)
    for name, value in sorted(environ.items())
    if wanted.match(name) and not SECRET_NAME.search(name)
  }


def _git(file: Path) -> dict[str, Any] | None:
  """Commit of the checkout that tracks `file`, and whether tracked files differ from it."""
  # An installed package may lie inside somebody's repository (a .venv): that one is not its source.
  if _run_git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
    return None
  described = _run_git(file.parent, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
  if described is None:
    return None
  return {"commit": described.removesuffix("-dirty"), "dirty": described.endswith("-dirty")}


def _run_git(directory: Path, *args: str) -> str | None:
  """The output of git, or None where git, the repository or an answer within 5 s is missing."""
  try:
    result = subprocess.run(
      ["git", *args], cwd=directory, capture_output=True, text=True, timeout=5, check=False
    )
  except (OSError, subprocess.TimeoutExpired):
    return None
  return result.stdout.strip() if result.returncode == 0 else None
