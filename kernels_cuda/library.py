"""Build the kernels on first use, for the GPU at hand, and register them with XLA."""

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax


def _sources_folder() -> Path:
  """`csrc/` beside this file, or where a wheel puts it: in the data folder of ats_jax."""
  folder = Path(__file__).parent
  beside = folder / "csrc"
  return beside if beside.is_dir() else folder.parent / "ats_jax" / "_data" / folder.name


SOURCES = _sources_folder()
ENTRY = SOURCES / "kernels.cu"
# Each is the name of an XLA target and of the C function that handles it.
TARGETS = (
  "ats_adamw",
  "ats_choose",
  "ats_cross_entropy",
  "ats_cross_entropy_gradient",
  "ats_grouped_matmul",
  "ats_grouped_matmul_dw",
  "ats_quantise_both",
  "ats_quantise_transposed",
  "ats_rms_norm_backward",
  "ats_rms_norm_forward",
  "ats_rope",
  "ats_sort_by_expert",
  "ats_sum_rows",
  "ats_sum_rows_backward",
  "ats_swiglu_backward",
  "ats_swiglu_forward",
  "ats_take_rows",
  "ats_take_rows_backward",
)
DEFAULT_TARGET = "7.5+PTX"  # PTX, so that a newer GPU can still run it

_registered: set[str] = set()  # platforms


class KernelsUnavailableError(RuntimeError):
  """The kernels cannot be had on this machine; the message says in one line why and what to do.

  The caller takes another implementation, or passes the message on if this one was asked for.
  """


def load() -> Path:
  """Build the library unless it is cached, and register its targets; cheap after the first call.

  Returns:
    The library.

  Raises:
    KernelsUnavailableError: no nvcc, or nvcc failed; or a setting names no GPU.
  """
  library = build()
  register(library, "CUDA")
  return library


def register(library: Path, platform: str) -> None:
  """Make a library's functions XLA targets of a platform ("CUDA", "cpu"), once a process."""
  if platform in _registered:
    return
  handle = ctypes.CDLL(str(library))
  for name in TARGETS:
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(handle, name)), platform=platform)
  _registered.add(platform)


def ensure_loaded() -> None:
  """Build and register unless some platform has its targets already."""
  if not _registered:
    load()


def build(environ: Mapping[str, str] = os.environ) -> Path:
  """Compile for `target()` with the nvcc of `find_nvcc()`, or find it in `cache_folder()`.

  Without nvcc, a library of the same sources and target that another nvcc has left there will do.

  Raises:
    KernelsUnavailableError: as `load`.
  """
  label = re.sub(r"[^\w.]+", "_", target(environ))
  try:
    nvcc = find_nvcc(environ)
  except KernelsUnavailableError:
    built = sorted(cache_folder(environ).glob(f"kernels-{label}-{_sources_key()}-*.so"))
    if not built:
      raise
    return built[-1]
  root = nvcc.parents[1]
  command = [str(nvcc), "-O3", "-lineinfo", "-Xcompiler", "-fPIC"]
  command += gencode(target(environ))
  # The nvcc of the pip packages does not find its own library folder.
  command += [f"-L{folder}" for folder in (root / "lib", root / "lib64") if folder.is_dir()]
  return compile_shared(command, environ, label=label)


def compile_shared(
  compiler: list[str],
  environ: Mapping[str, str] = os.environ,
  extra: tuple[Path, ...] = (),
  label: str = "host",
) -> Path:
  """Compile `kernels.cu` into a shared library, or find it in the cache.

  Two processes may do this at once: one waits for the other, and a library appears under its name
  only when it is complete.

  Args:
    compiler: the command with its options, to which C++17, include folders and files are added.
    environ: for the cache's place.
    extra: files outside `SOURCES` that the result depends on.
    label: for the library's name: what it is compiled for.

  Raises:
    KernelsUnavailableError: the compiler failed; the message has its first error.
  """
  headers = Path(jax.ffi.include_dir())
  command = [*compiler, "-std=c++17", "-shared", f"-I{SOURCES}", "-isystem", str(headers)]
  # Without folders: what is in them counts, not where they are.
  key = hashlib.sha256("\0".join(o for o in compiler if not o.startswith("-I")).encode())
  key.update(_version(compiler[0]))
  _add_files(key, extra)
  folder = cache_folder(environ)
  library = folder / f"kernels-{label}-{_sources_key()}-{key.hexdigest()[:16]}.so"
  if library.exists():
    return library
  folder.mkdir(parents=True, exist_ok=True)
  with open(library.with_suffix(".lock"), "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if library.exists():  # another process was first
      return library
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
      made = Path(scratch) / library.name
      run = subprocess.run([*command, str(ENTRY), "-o", str(made)], capture_output=True, text=True)
      if run.returncode:
        output = run.stderr + run.stdout
        lines = [line for line in output.splitlines() if "error" in line.lower()] or [
          output.strip()
        ]
        raise KernelsUnavailableError(
          f"{compiler[0]} could not compile the CUDA kernels: {lines[0]} "
          f"(run `{' '.join(command)} {ENTRY}` to see all of it)"
        )
      os.replace(made, library)
  return library


def _sources_key() -> str:
  headers = Path(jax.ffi.include_dir())
  key = hashlib.sha256()
  _add_files(key, sorted(SOURCES.glob("*.cu*")) + sorted(headers.rglob("xla/ffi/api/*.h")))
  return key.hexdigest()[:16]


def _add_files(key, paths) -> None:
  for path in paths:
    key.update(path.name.encode() + b"\0" + path.read_bytes())


def _version(compiler: str) -> bytes:
  try:
    return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
  except (OSError, subprocess.CalledProcessError) as error:
    raise KernelsUnavailableError(f"CUDA kernels: {compiler} does not run: {error}") from error


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
  """`$XDG_CACHE_HOME/ats_jax/kernels`, by default in ~/.cache."""
  home = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  return Path(home) / "ats_jax" / "kernels"


def find_nvcc(environ: Mapping[str, str] = os.environ) -> Path:
  """The CUDA compiler: of CUDA_HOME, on the PATH, in /usr/local/cuda, of the pip packages.

  Raises:
    KernelsUnavailableError: there is none.
  """
  candidates = []
  if environ.get("CUDA_HOME"):
    candidates.append(Path(environ["CUDA_HOME"]) / "bin" / "nvcc")
  on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
  if on_path:
    candidates.append(Path(on_path))
  candidates.append(Path("/usr/local/cuda/bin/nvcc"))
  candidates += pip_nvcc()
  for path in candidates:
    if os.access(path, os.X_OK):
      return path.resolve()
  raise KernelsUnavailableError(
    "CUDA kernels need nvcc, which is not in CUDA_HOME "
    f"({environ.get('CUDA_HOME') or 'not set'}), on PATH, in /usr/local/cuda or in the pip "
    "packages; install the CUDA toolkit, or: pip install nvidia-cuda-nvcc nvidia-cuda-cccl"
  )


def pip_nvcc() -> list[Path]:
  """Where the pip packages of CUDA 13 (nvidia/cu13) and 12 (nvidia/cuda_nvcc) put nvcc."""
  spec = importlib.util.find_spec("nvidia")
  folders = [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
  patterns = ("cu[0-9]*/bin/nvcc", "cuda_nvcc/bin/nvcc")
  return [path for folder in folders for p in patterns for path in sorted(folder.glob(p))]


def target(environ: Mapping[str, str] = os.environ) -> str:
  """What to compile for: CUDA_TARGET_SM, TORCH_CUDA_ARCH_LIST, the first GPU, or `DEFAULT_TARGET`.

  Returns:
    As in TORCH_CUDA_ARCH_LIST: "9.0" or "8.0;9.0+PTX".
  """
  if environ.get("CUDA_TARGET_SM"):
    return environ["CUDA_TARGET_SM"]
  if environ.get("TORCH_CUDA_ARCH_LIST"):
    return environ["TORCH_CUDA_ARCH_LIST"]
  return next(
    (d.compute_capability for d in jax.local_devices() if hasattr(d, "compute_capability")),
    DEFAULT_TARGET,
  )


def newest_target(environ: Mapping[str, str] = os.environ) -> str:
  """The highest compute capability of `target()`, like "9.0". Raises as `gencode`."""
  pairs = [(int(major), int(minor)) for major, minor, *_ in _parsed(target(environ))]
  return "{}.{}".format(*max(pairs))


def gencode(targets: str) -> list[str]:
  """Options of nvcc for "90", "sm_90a", "9.0", "8.0;9.0+PTX", "80,90".

  Raises:
    KernelsUnavailableError: a name that is no compute capability.
  """
  options = []
  for major, minor, suffix, ptx in _parsed(targets):
    number = f"{major}{minor}{suffix.lower()}"
    codes = [f"sm_{number}"] + ([f"compute_{number}"] if ptx else [])
    options += [f"-gencode=arch=compute_{number},code=[{','.join(codes)}]"]
  return options


def _parsed(targets):
  for name in re.split(r"[;,\s]+", targets.strip()):
    match = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)([af]?)(\+PTX)?", name, re.IGNORECASE)
    if not match:
      raise KernelsUnavailableError(
        f"CUDA kernels: {name!r} is no compute capability; set CUDA_TARGET_SM or "
        "TORCH_CUDA_ARCH_LIST to one like 9.0, or unset both"
      )
    yield match.groups()
