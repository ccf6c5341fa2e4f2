"""The Metal shaders compiled by the host's C++ compiler, called as PyTorch calls compiled shaders.

`compile_shader(source).rms_norm(y, x, scale, 64, 1e-5, threads=..., group_size=...)`, with numpy
arrays or tensors on the CPU. The rules are those of PyTorch 2.11's own binding: a tensor becomes a
buffer that begins at its offset, an int 64 bits, a float 32, in the order of the kernel's
parameters; `threads` is the whole grid, whose last threadgroup may be smaller.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SHIM = (FOLDER / "metal_on_host", FOLDER / "on_host")
ORDERS = {"forward": 0, "reverse": 1, "shuffled": 2, "one SIMD group ahead": 3}
# What a parameter with this attribute is, of thread `threadIdx` of threadgroup `blockIdx`.
POSITIONS = {
  "thread_position_in_grid": "blockIdx.x * blockDim.x + threadIdx.x",
  "threadgroup_position_in_grid": "blockIdx.x",
  "thread_position_in_threadgroup": "threadIdx.x",
  "threads_per_threadgroup": "blockDim.x",
  "thread_index_in_simdgroup": "threadIdx.x % 32",
  "simdgroup_index_in_threadgroup": "threadIdx.x / 32",
  "simdgroups_per_threadgroup": "blockDim.x / 32",
}
KERNEL = re.compile(r"kernel void (\w+)\((.*?)\) \{", re.DOTALL)
SHARED = re.compile(r"\bthreadgroup (\w+ \w+\[)")
ATTRIBUTE = re.compile(r"\s*\[\[(\w+)\]\]")


class Kernel:
  """A function of a `Library`.

  Attributes:
    max_threads_per_threadgroup: of this kernel; Metal allows 1,024 at most.
  """

  def __init__(self, call):
    self._call, self.max_threads_per_threadgroup = call, 1024

  def __call__(self, *args, threads=None, group_size=None):
    """Run it, as PyTorch's binding would."""
    assert (group_size or 1) <= self.max_threads_per_threadgroup
    self._call(*args, threads=threads, group_size=group_size)


class Library:
  """What `torch.mps.compile_shader` returns."""

  def __init__(self, path: Path, kernels: dict[str, list[str]]):
    self.dll = ctypes.CDLL(str(path))
    self._kernels = kernels
    self._functions = {name: Kernel(functools.partial(self._call, name)) for name in kernels}

  def __getattr__(self, name: str):
    if name not in self._functions:
      raise RuntimeError(f"no kernel {name}")
    return self._functions[name]

  def _call(self, name, *args, threads, group_size):
    kinds = self._kernels[name]
    assert len(args) == len(kinds), (name, len(args), kinds)
    values = [
      _value(arg, kind, f"{name}, {i}")
      for i, (arg, kind) in enumerate(zip(args, kinds, strict=True))
    ]
    threads = threads if threads is not None else _size(args[0])
    assert threads > 0, f"{name}: Metal refuses an empty grid"
    group = group_size if group_size is not None else min(1024, (threads + 31) // 32 * 32)
    pointers = (ctypes.c_void_p * len(values))(*[p for p, _ in values])
    getattr(self.dll, f"launch_{name}")(pointers, ctypes.c_uint(threads), ctypes.c_uint(group))

  @contextlib.contextmanager
  def order(self, name: str):
    """Run the threadgroups, and the threads of each, in another order."""
    self.dll.set_order(ORDERS[name])
    try:
      yield
    finally:
      self.dll.set_order(ORDERS["forward"])


@functools.cache
def compile_shader(source: str) -> Library:
  """Compile a Metal text as C++, or find it beside the kept programs; skip without a compiler."""
  compiler = shutil.which("g++")
  if compiler is None:
    pytest.skip("no g++")
  kernels, launchers = {}, []
  for name, text in KERNEL.findall(source):
    kinds, arguments = [], []
    for parameter in text.split(","):
      if attribute := ATTRIBUTE.search(parameter):
        arguments.append(POSITIONS[attribute[1]])
        continue
      index, kind = len(kinds), _kind(parameter)
      kinds.append(kind)
      cast = f"({kind})args[{index}]"
      arguments.append(cast if kind.endswith("*") else f"*(const {kind}*)args[{index}]")
    kernels[name] = kinds
    launchers.append(
      f'extern "C" void launch_{name}(void** args, uint threads, uint group) {{\n'
      "  host::launch(dim3((threads + group - 1) / group), dim3(group), 1, 0, [=] {\n"
      "    if (blockIdx.x * blockDim.x + threadIdx.x >= threads) return;\n"
      f"    {name}({', '.join(arguments)});\n  }});\n}}\n"
    )
  text = ATTRIBUTE.sub("", SHARED.sub(r"static \1", source)) + "\n" + "\n".join(launchers)
  options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unused-function"]
  options += ["-U_FORTIFY_SOURCE"]  # setjmp moves between stacks
  command = [compiler, *options, *(f"-I{folder}" for folder in SHIM)]
  shim = [p.read_text() for folder in SHIM for p in sorted(folder.iterdir())]
  key = hashlib.sha256("\0".join([compiler, *options, text, *shim]).encode()).hexdigest()[:32]
  kept = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "metal" / f"{key}.so"
  if not kept.exists():
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
      file, made = Path(scratch) / "kernels.cc", Path(scratch) / "k.so"
      file.write_text(text)
      run = subprocess.run([*command, file, "-o", made], capture_output=True, text=True)
      assert run.returncode == 0, run.stderr
      made.rename(kept)
  return Library(kept, kernels)


def _kind(parameter: str) -> str:
  """`const device half* x` is `half*`, `constant long& width` is `long`."""
  kind, name = parameter.replace("const ", "").split()[-2:]
  assert kind[-1] in "*&" and name.isidentifier(), parameter
  assert ("constant " in parameter) == kind.endswith("&"), parameter
  return kind.rstrip("&")


def _value(arg, kind: str, where: str):
  """An address, and what keeps it alive."""
  if kind.endswith("*"):
    if hasattr(arg, "data_ptr"):
      assert arg.is_contiguous(), where
      return arg.data_ptr(), arg
    assert arg.flags.c_contiguous, where
    return arg.ctypes.data, arg
  ctype, expected = {"long": (ctypes.c_int64, int), "float": (ctypes.c_float, float)}[kind]
  assert type(arg) is expected, f"{where}: PyTorch would not pass {arg!r} as {kind}"
  held = ctype(arg)
  return ctypes.addressof(held), held


def _size(array) -> int:
  return array.numel() if hasattr(array, "numel") else array.size
