"""The machine without its GPUs: versions, variables, memory, limits."""

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import psutil

from ats_jax.cluster.preflight.results import CheckResult, CheckVerdict, check_result
from ats_jax.metrics.environment import public_variables
from ats_jax.metrics.memory import GIB

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
# The oldest driver that runs the CUDA of a plugin.
_OLDEST_DRIVER = {"jax-cuda13-plugin": 580, "jax-cuda12-plugin": 525}
# What slows collectives down, or stops them, where it is set to that.
_COSTLY = {
  "NCCL_P2P_DISABLE": "1",
  "NCCL_SHM_DISABLE": "1",
  "NCCL_IB_DISABLE": "1",
  "NCCL_SOCKET_IFNAME": "lo",
  "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
}
_VARIABLES = re.compile("NCCL_|XLA_|JAX_|ATS_|CUDA_VISIBLE_DEVICES$|GLOO_")
MIN_FILES = 4096  # that a process may open
MIN_SHM_GIB = 1.0  # of /dev/shm
Limit = tuple[int, int]


def version_rows() -> list[CheckResult]:
  """Python and packages; jax and jaxlib must be of one release."""
  versions = {name: _version(name) for name in _PACKAGES}
  text = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
  problems = []
  if missing := [name for name, version in versions.items() if version is None]:
    problems.append(f"Install {', '.join(missing)}: pip install ats_jax.")
  minor = lambda name: (versions[name] or "").split(".")[:2]
  if minor("jax") != minor("jaxlib"):
    problems.append("jax and jaxlib are of two releases: pip install --upgrade jax jaxlib.")
  python = f"Python {platform.python_version()}, {platform.platform()}"
  return [CheckResult("system", python), check_result("packages", text, problems, bad=True)]


def device_row(driver: str | None, gpus: int) -> CheckResult:
  """What jax computes on.

  Args:
    driver: NVIDIA's version; None = there is none.
    gpus: number of GPUs that the driver shows.
  """
  devices = jax.local_devices()
  kind = devices[0].device_kind
  text = f"{len(devices)} x {kind} ({jax.default_backend()})"
  plugins = {name: version for name in _PLUGINS if (version := _version(name))}
  text += "".join(f", {name} {version}" for name, version in plugins.items())
  if driver:
    text += f", driver {driver}"
  problems = cuda_problems(driver, gpus, list(plugins), jax.default_backend())
  return check_result("devices", text, problems, bad=True)


def cuda_problems(driver: str | None, gpus: int, plugins: list[str], backend: str) -> list[str]:
  """Why jax does not use the GPUs that there are, in words."""
  if not gpus or driver is None:
    return []
  major = int(driver.partition(".")[0])
  if not plugins:
    extra = "cuda" if major >= _OLDEST_DRIVER["jax-cuda13-plugin"] else "cuda12"
    return [f"jax has no CUDA: pip install 'ats_jax[{extra}]' (driver {driver})."]
  if all(major < _OLDEST_DRIVER[plugin] for plugin in plugins):
    needs = min(_OLDEST_DRIVER[plugin] for plugin in plugins)
    return [f"Driver {driver} is too old for {', '.join(plugins)}: it needs {needs} or newer."]
  if backend == "cpu":
    return ["jax computes on the CPU: unset JAX_PLATFORMS, and see what `import jax` warns of."]
  return []


def nccl_rows(environ: Mapping[str, str], gpus: int) -> list[CheckResult]:
  """The library of collectives, and variables that are in force."""
  version = next(filter(None, map(_version, _NCCL)), None)
  library = CheckResult(
    "NCCL", version or "not installed", CheckVerdict.OK if version else CheckVerdict.NONE
  )
  if gpus > 1 and version is None:
    library = CheckResult(
      "NCCL", "not installed", CheckVerdict.BAD, "Several GPUs need it: ats_jax[cuda]."
    )
  shown = public_variables(environ, _VARIABLES)
  costly = [name for name, value in _COSTLY.items() if environ.get(name) == value]
  problems = [f"{name}={environ[name]} makes collectives slow: unset it." for name in costly]
  text = " ".join(f"{name}={value}" for name, value in shown.items())
  return [library, check_result("variables", text or "none is set", problems)]


def memory_row(root: Path = Path("/")) -> CheckResult:
  """Memory and processors of the host, or of the container if that has less.

  Args:
    root: of the file system; another one in tests.
  """
  memory, cores = psutil.virtual_memory(), len(os.sched_getaffinity(0))
  limit = container_limit(root)
  text = f"{cores} of {os.cpu_count()} cores, {memory.total / GIB:,.1f} GiB of memory"
  text += f", {memory.available / GIB:,.1f} GiB available"
  if limit is not None and limit < memory.total:
    text += f", {limit / GIB:,.1f} GiB for this container"
  available = min(memory.available, memory.total if limit is None else limit)
  problems = []
  if available < 2 * GIB:
    problems.append("Less than 2 GiB: compiling alone may take that much.")
  return check_result("host", text, problems)


def container_limit(root: Path = Path("/")) -> int | None:
  """Bytes that the control group of this process and those above it may use; None = no limit.

  Version 2 has one hierarchy ("0::/a/b" in /proc/self/cgroup), version 1 one for memory
  ("5:memory:/a/b"). In a container the group's own folder may be mounted as the root of them.
  """
  try:
    lines = (root / "proc/self/cgroup").read_text().splitlines()
  except OSError:
    return None
  limits = []
  for line in lines:
    _, controllers, group = line.split(":", 2)
    if controllers == "":
      top, name = root / "sys/fs/cgroup", "memory.max"
    elif "memory" in controllers.split(","):
      top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
    else:
      continue
    own = top / group.strip("/")
    for folder in (own, *own.parents):
      if folder.is_relative_to(top):
        with contextlib.suppress(OSError):
          text = (folder / name).read_text().strip()
          limits += [int(text)] if text.isdecimal() else []  # "max" = none
  return min(limits, default=None)


def limit_row(limits: Mapping[str, Limit], gpus: int) -> CheckResult:
  """Limits of a process.

  Args:
    limits: soft and hard, as `current_limits`.
    gpus: number of GPUs of the machine.
  """
  files, size, locked = limits["files"], limits["file size"], limits["locked memory"]
  show = lambda n: "unlimited" if n == resource.RLIM_INFINITY else f"{n:,}"
  text = ", ".join(f"{name} {show(soft)}" for name, (soft, _) in limits.items())
  problems = []
  if resource.RLIM_INFINITY != files[0] < MIN_FILES:
    problems.append(f"Few open files: `ulimit -n {min(65536, files[1])}`.")
  if size[0] != resource.RLIM_INFINITY:
    problems.append("Files may not grow at will, checkpoints neither: `ulimit -f unlimited`.")
  if gpus and locked[0] != resource.RLIM_INFINITY:
    problems.append("InfiniBand and pinned memory want `ulimit -l unlimited`.")
  return check_result("limits", text, problems)


def current_limits() -> dict[str, Limit]:
  """Soft and hard limits of this process."""
  of = resource.getrlimit
  return {
    "files": of(resource.RLIMIT_NOFILE),
    "file size": of(resource.RLIMIT_FSIZE),
    "locked memory": of(resource.RLIMIT_MEMLOCK),
    "processes": of(resource.RLIMIT_NPROC),
  }


def shared_memory_row(gpus: int, folder: Path = Path("/dev/shm")) -> CheckResult:
  """The memory that processes share as files: NCCL and the loaders pass data through it."""
  if not folder.is_dir():
    return CheckResult("shared memory", f"no {folder}", CheckVerdict.NONE)
  total, _, free = shutil.disk_usage(folder)
  problems = []
  if gpus > 1 and free < MIN_SHM_GIB * GIB:
    problems.append(
      f"NCCL wants more than {free / 2**20:,.0f} MiB: `docker run --shm-size=16g`, or an emptyDir "
      "of medium Memory in Kubernetes."
    )
  text = f"{folder} {total / GIB:,.1f} GiB, {free / GIB:,.1f} GiB free"
  return check_result("shared memory", text, problems)


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None
