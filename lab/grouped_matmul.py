r"""The grouped matmul kernels and the 8-bit matmul on one Hopper GPU: checked first, then timed.

Prints JSON lines: `check` (worst relative error of a group against float32; reruns bitwise equal),
`time` (median of rounds that go round robin over all variants of a shape; `share` is of the batched
einsum with equal groups in the same rounds), `clock` (of the SMs and the power while a shape ran).
A variant that does not compile, or is wrong, gives a line with `error` and is not timed. `run` says
what is about to run; if it never returns, the process ends itself with a line `hang` (exit code 3).

Command: PYTHONPATH=. python -m lab.grouped_matmul [--out=lines.jsonl] [--limit=270]
  [--cases=E64,E8,...] [--variants=base,strip8,...]. With --tiny and JAX_PLATFORMS=cpu it checks
itself in the simulator.
"""

import concurrent.futures
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.experimental.pallas import mosaic_gpu as plgpu

from ats_jax.ops.fp8_matmul import fp8_matmul
from ats_jax.ops.quantise import E4M3, E5M2, cast, scale_of
from kernels_pallas.grouped_matmul.forward import grouped_matmul, grouped_swiglu
from kernels_pallas.grouped_matmul.wgrad import align_rows, grouped_matmul_dw
from kernels_pallas.grouped_matmul.worklist import Tiling
from lab.grouped_matmul_checks import EINSUM, Checker, edges, spread

_OUT = flags.DEFINE_string("out", "", "File that the JSON lines are appended to.")
_LIMIT = flags.DEFINE_float("limit", 270, "Seconds after which nothing new is started.")
_CASES = flags.DEFINE_list("cases", [], "Only these shapes.")
_VARIANTS = flags.DEFINE_list("variants", [], "Only these variants.")
_TINY = flags.DEFINE_bool("tiny", False, "Small shapes in the simulator, to try the script.")

START = time.time()
failed = []  # lines that say so: the exit status is 1
BF16, F32 = jnp.bfloat16, jnp.float32
largest = lambda a: jnp.max(jnp.abs(a)).astype(F32)
FAILURES = (ValueError, NotImplementedError, RuntimeError)  # of a variant that does not compile
VARIANTS = {
  "base": {},
  "stages3": dict(stages=3),
  "strip8": dict(strip=8),
  "strip32": dict(strip=32),
  "tall": dict(block_m=256, block_n=128),
}
FEW = {"base": {}}
# Name, groups, N, how the rows are spread, which variants; M = 65536, K = 2048.
CASES = [
  ("E64", 64, 1024, "uneven", VARIANTS),
  ("E8", 8, 5632, "uneven", VARIANTS),
  ("E64eq", 64, 1024, "equal", FEW),
  ("E64r8", 64, 1024, "eights", FEW),
  ("E64third", 64, 1024, "third", FEW),
  ("E16", 16, 2816, "uneven", FEW),
  ("E128", 128, 768, "uneven", FEW),
  ("E16one90", 16, 2816, "one90", FEW),
]


def emit(**line):
  """One JSON line, to the terminal and to the file."""
  if "error" in line or not line.get("ok", True):
    failed.append(line)
  text = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in line.items()})
  print(text, flush=True)
  if _OUT.value:
    with open(_OUT.value, "a", encoding="utf-8") as f:
      f.write(text + "\n")


def time_is_up() -> bool:
  """Whether to start nothing new."""
  return time.time() - START > _LIMIT.value


def tiling(changes: dict) -> Tiling:
  """A variant's tiling; two thread blocks in the simulator."""
  return Tiling(**changes, **(dict(num_blocks=2) if _TINY.value else {}))


def simulate():
  """For `interpret=`."""
  return plgpu.InterpretGPUParams() if _TINY.value else None


@contextlib.contextmanager
def watched(what: str, seconds: float = 45):
  """Says what runs, and ends the process if it takes longer: a deadlocked kernel never returns."""

  def give_up():
    emit(kind="hang", what=what, seconds=seconds)
    os._exit(3)

  emit(kind="run", what=what)
  timer = threading.Timer(seconds, give_up)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


# ---- what is timed


def measure(jobs: dict, rounds: int = 7, calls: int = 10) -> dict:
  """Median seconds of a call of each `(f, args)`, all of them taking turns."""
  if _TINY.value:
    rounds = calls = 1
  seconds = {name: [] for name in jobs}
  for f, args in jobs.values():
    jax.block_until_ready(f(*args))
  for _ in range(rounds):
    for name, (f, args) in jobs.items():
      begin, y = time.perf_counter(), None
      for _ in range(calls):
        y = f(*args)
      jax.block_until_ready(y)
      seconds[name].append((time.perf_counter() - begin) / calls)
  return {name: float(np.median(s)) for name, s in seconds.items()}


def compile_all(jobs: dict, **labels) -> dict:
  """Compiled functions by name, of `name -> (f, args)`; what fails is reported and left out."""
  compiled = {}
  with concurrent.futures.ThreadPoolExecutor(1 if _TINY.value else 12) as pool:
    make = lambda f, args: jax.jit(f).lower(*args).compile()
    futures = {name: pool.submit(make, f, args) for name, (f, args) in jobs.items()}
    for name, future in futures.items():
      try:
        compiled[name] = future.result()
      except FAILURES as e:
        emit(kind="check", **labels, variant=str(name), error=f"{type(e).__name__}: {e}"[:400])
  return compiled


class Clock:
  """Asks nvidia-smi for clock and power while a case runs."""

  def __enter__(self):
    self.samples, self.done = [], threading.Event()
    self.thread = threading.Thread(target=self._watch, daemon=True)
    if shutil.which("nvidia-smi") and not _TINY.value:
      self.thread.start()
    return self

  def _watch(self):
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    while not self.done.wait(0.2):
      found = re.findall(r"[\d.]+", subprocess.run(query, capture_output=True, text=True).stdout)
      if len(found) >= 2:
        self.samples.append([float(a) for a in found[:2]])

  def __exit__(self, *_):
    self.done.set()

  def report(self, **labels):
    """Medians of what was seen."""
    if self.samples:
      clock, power = np.median(np.array(self.samples), axis=0)
      emit(kind="clock", **labels, mhz=float(clock), watts=float(power))


def operands(m, k, n, groups):
  """x, w and dy as normal numbers."""
  x = jax.random.normal(jax.random.key(0), (m, k), BF16)
  w = (jax.random.normal(jax.random.key(1), (groups, k, n)) * k**-0.5).astype(BF16)
  return x, w, jax.random.normal(jax.random.key(2), (m, n), BF16)


# The operands of an op out of (x, w, dy, sizes).
TAKE = dict(
  fwd=lambda x, w, dy, sizes: (x, w),
  dgrad=lambda x, w, dy, sizes: (dy, w),
  wgrad=lambda x, w, dy, sizes: (x, dy),
)


def kernel(op, changes):
  """`f(a, b, sizes)` of 16 bits."""
  run = dict(tiling=tiling(changes), interpret=simulate())
  if op == "wgrad":
    return functools.partial(grouped_matmul_dw, **run)
  return functools.partial(grouped_matmul, transpose_w=op == "dgrad", **run)


def chosen(variants: dict) -> dict:
  """Those that the flag asks for."""
  return {v: c for v, c in variants.items() if v in (_VARIANTS.value or variants)}


def run_case(name, groups, n, kind, variants, m=65536, k=2048):
  """Checks and times the 16-bit variants of one shape."""
  variants = chosen(variants)
  patterns = {"timed": spread(kind, groups, m)}
  if name in ("E64", "E8"):
    patterns["edges"] = edges(groups, m)
  x, w, dy = operands(m, k, n, groups)
  sizes = spread(kind, groups, m)
  flops = 2 * m * k * n
  check, jobs, where = Checker(x, w, dy), {}, {}
  plain = lambda op: TAKE[op](x, w, dy, None)
  for op in TAKE:
    for variant, changes in variants.items():
      jobs[op, variant] = kernel(op, changes), (*plain(op), jnp.array(sizes))
  compiled = compile_all(jobs, case=name)
  for op in TAKE:
    for pattern, these in patterns.items():
      for variant in variants:
        f = compiled.get((op, variant))
        if f is None:
          continue
        with watched(f"{name} {op} {variant} {pattern}"):
          right, worst, equal = check(op, f, TAKE[op], these, 5e-3)
        emit(kind="check", case=name, op=op, variant=variant, pattern=pattern, ok=right,
             worst=worst, bitwise=equal)  # fmt: skip
        if not right:
          del compiled[op, variant]
  del check
  equal_groups = lambda a: a.reshape(groups, -1, a.shape[1]) if a.ndim == 2 else a
  for op, formula in EINSUM.items():
    einsum = jax.jit(functools.partial(jnp.einsum, formula))
    where[op, "einsum"] = einsum, [equal_groups(a) for a in plain(op)]
    for variant in variants:
      if (op, variant) in compiled:
        where[op, variant] = compiled[op, variant], jobs[op, variant][1]
  with Clock() as clock, watched(f"{name} timing"):
    seconds = measure(where)
  report(seconds, flops, case=name, N=n, E=groups, sizes=kind)
  clock.report(case=name)
  if name in ("E64", "E8"):  # Zeros draw little power, so the clock stays up: what latency costs.
    few = {
      key: (f, [jnp.zeros_like(a) if a.ndim > 1 else a for a in args])
      for key, (f, args) in where.items()
      if key[1] in ("einsum", *FEW)
    }
    with watched(f"{name} timing of zeros"):
      seconds = measure(few)
    report(seconds, flops, case=name + "zeros", N=n, E=groups, sizes=kind)


def report(seconds: dict, flops: float, **labels):
  """One line a variant, with its share of `einsum` of the same op."""
  for (op, variant), s in seconds.items():
    base = seconds.get((op, "einsum"))
    emit(kind="time", **labels, op=op, variant=variant, ms=s * 1e3, tflops=flops / s / 1e12,
         share=base / s if base else None)  # fmt: skip


# ---- 8 bits


EIGHT_BITS = dict(
  fwd=lambda x, w, dy, sizes: (x, w.swapaxes(1, 2)),
  dgrad=lambda x, w, dy, sizes: (dy, w),
  wgrad=lambda x, w, dy, sizes: (align_rows(x, sizes).T, align_rows(dy, sizes).T),
)


def run_eight_bits(name, groups, n, kind, variants, m=65536, k=2048):
  """Checks and times the 8-bit kernels of one shape, and what making their operands costs."""
  variants = chosen(variants)
  x, w, dy = operands(m, k, n, groups)
  sizes, flops = spread(kind, groups, m), 2 * m * k * n
  x8, w8, dy8 = x.astype(E4M3), (w * k**0.5).astype(E4M3), dy.astype(E5M2)
  one = jnp.ones(1, F32)
  prepare = {op: jax.jit(f) for op, f in EIGHT_BITS.items()}
  args = {op: (*f(x8, w8, dy8, jnp.array(sizes)), jnp.array(sizes)) for op, f in prepare.items()}
  jobs = {}
  for op in EIGHT_BITS:
    for variant, changes in variants.items():
      run = dict(tiling=tiling(dict(block_k=128) | changes), interpret=simulate(), scale=one)
      f = (
        grouped_matmul_dw if op == "wgrad" else functools.partial(grouped_matmul, transpose_w=True)
      )
      jobs[op, variant] = functools.partial(f, **run), args[op]
  compiled, check = compile_all(jobs, case=name + "fp8"), Checker(x8, w8, dy8)
  for op in EIGHT_BITS:
    for pattern, these in (("timed", sizes), ("edges", edges(groups, m))):
      for variant in variants:
        if (op, variant) not in compiled:
          continue
        f = compiled[op, variant]
        with watched(f"{name} fp8 {op} {variant} {pattern}"):
          right, worst, equal = check(op, f, prepare[op], these, 1e-2)
        emit(kind="check", case=name + "fp8", op=op, variant=variant, pattern=pattern, ok=right,
             worst=worst, bitwise=equal)  # fmt: skip
        if not right:
          del compiled[op, variant]
  del check
  where = {key: (f, jobs[key][1]) for key, f in compiled.items()}
  bits16 = {("bf16_" + op, "base"): (kernel(op, {}), (*TAKE[op](x, w, dy, None), jnp.array(sizes)))
            for op in TAKE}  # fmt: skip
  where |= {key: (f, bits16[key][1]) for key, f in compile_all(bits16, case=name).items()}
  device_sizes = jnp.array(sizes)
  scaled = lambda a, dtype: cast(a, scale_of(dtype, largest(a)), dtype)
  delayed = lambda a, dtype: cast(a, scale_of(dtype, jnp.float32(4)), dtype)
  copies = {
    "x": lambda a: scaled(a, E4M3),
    "x_delayed": lambda a: delayed(a, E4M3),
    "x_and_aligned_transpose": lambda a: (lambda q: (q, align_rows(q, device_sizes).T))(
      scaled(a, E4M3)
    ),
    "x_and_transpose": lambda a: (lambda q: (q, q.T))(scaled(a, E4M3)),
  }
  of_w = {"w_and_transpose": lambda a: (lambda q: (q, q.swapaxes(1, 2)))(scaled(a, E4M3))}
  of_dy = {"dy": lambda a: scaled(a, E5M2)}
  of_dy["dy_and_aligned_transpose"] = lambda a: (lambda q: (q, align_rows(q, device_sizes).T))(
    scaled(a, E5M2)
  )
  for those, a in ((copies, x), (of_w, w), (of_dy, dy)):
    where |= {("make_" + what, "xla"): (jax.jit(f), [a]) for what, f in those.items()}
  with Clock() as clock, watched(f"{name} fp8 timing"):
    seconds = measure(where)
  for (op, variant), s in seconds.items():
    bf16 = seconds.get(("bf16_" + op, "base"))
    emit(kind="time", case=name + "fp8", E=groups, N=n, sizes=kind, op=op, variant=variant,
         ms=s * 1e3, tflops=None if op.startswith("make") else flops / s / 1e12,
         speedup=bf16 / s if bf16 else None)  # fmt: skip
  clock.report(case=name + "fp8")


# ---- SwiGLU


def run_swiglu(name, groups, n, kind, variants, m=65536, k=2048):
  """SwiGLU in the epilogue against a grouped matmul and XLA's fusion; N = gate and up together."""
  x, w, _ = operands(m, k, n, groups)
  sizes = jnp.array(spread(kind, groups, m))
  half = (256 if not _TINY.value else 128) // 2

  def split(y):
    y = y.reshape(y.shape[0], -1, 2, half)
    return (jax.nn.silu(y[:, :, 0].astype(F32)) * y[:, :, 1]).astype(BF16).reshape(y.shape[0], -1)

  small = dict(block_n=128) if _TINY.value else {}
  jobs = {}
  for variant, changes in variants.items():
    run = dict(tiling=tiling(changes | small), interpret=simulate())
    plain = functools.partial(grouped_matmul, **run)
    jobs["matmul_then_xla", variant] = lambda x, w, s, f=plain: split(f(x, w, s))
    jobs["matmul_then_xla_keep", variant] = lambda x, w, s, f=plain: (lambda y: (split(y), y))(
      f(x, w, s)
    )
    jobs["swiglu", variant] = functools.partial(grouped_swiglu, **run)
    jobs["swiglu_keep", variant] = functools.partial(grouped_swiglu, keep=True, **run)
  args = x, w, sizes
  compiled = compile_all({key: (f, args) for key, f in jobs.items()}, case=name + "swiglu")
  want = compiled["matmul_then_xla", "base"](*args).astype(F32)
  for key in list(compiled):
    with watched(f"{name} {key[0]} {key[1]}"):
      got = compiled[key](*args)
      got = (got[0] if isinstance(got, tuple) else got).astype(F32)
      worst = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    emit(
      kind="check", case=name + "swiglu", op=key[0], variant=key[1], ok=worst < 1e-2, worst=worst
    )
    if not worst < 1e-2:
      del compiled[key]
  with watched(f"{name} swiglu timing"):
    seconds = measure({key: (f, args) for key, f in compiled.items()})
  for (op, variant), s in seconds.items():
    emit(kind="time", case=name + "swiglu", op=op, variant=variant, E=groups, N=n, ms=s * 1e3,
         tflops=2 * m * k * n / s / 1e12)  # fmt: skip


# ---- dense layers


def run_dense(m=32768, k=4096, n=14336):
  """The 8-bit matmul of dense layers against bfloat16: forward, and forward with backward."""
  if _TINY.value:
    m, k, n = 64, 128, 64
  x, w, dy = operands(m, k, n, 1)
  w = w[0]
  wide = lambda a: a.astype(BF16)

  def dequantised(x, w):  # the other pattern that XLA knows: scales as arguments of cuBLASLt
    sx, sw = (scale_of(E4M3, largest(a)) for a in (x, w))
    x8, w8 = cast(x, sx, E4M3), cast(w, sw, E4M3)
    return (wide(x8) * wide(sx)) @ (wide(w8) * wide(sw))

  def with_gradients(f):
    def both(x, w, dy):
      y, pull = jax.vjp(f, x, w)
      return y, *pull(dy)

    return both

  jobs = {
    ("fwd", "bf16"): (jnp.matmul, (x, w)),
    ("fwd", "fp8"): (fp8_matmul, (x, w)),
    ("fwd", "fp8 dequantised pattern"): (dequantised, (x, w)),
    ("fwd+bwd", "bf16"): (with_gradients(jnp.matmul), (x, w, dy)),
    ("fwd+bwd", "fp8"): (with_gradients(fp8_matmul), (x, w, dy)),
  }
  compiled = compile_all(jobs, case="dense")
  want = jnp.matmul(x, w, preferred_element_type=F32)
  for (op, variant), f in compiled.items():
    got = f(*jobs[op, variant][1])
    got = got if op == "fwd" else got[0]
    worst = float(jnp.linalg.norm(got.astype(F32) - want) / jnp.linalg.norm(want))
    calls = re.findall(r'custom_call_target="(__cublas[^"]*)"', f.as_text())
    emit(kind="check", case="dense", op=op, variant=variant, ok=worst < 0.05, worst=worst,
         calls={c: calls.count(c) for c in sorted(set(calls))})  # fmt: skip
  seconds = measure({key: (f, jobs[key][1]) for key, f in compiled.items()}, rounds=5, calls=5)
  for (op, variant), s in seconds.items():
    flops = 2 * m * k * n * (1 if op == "fwd" else 3)
    emit(kind="time", case="dense", op=op, variant=variant, ms=s * 1e3, tflops=flops / s / 1e12,
         speedup=seconds[op, "bf16"] / s)  # fmt: skip


def run_small():
  """Arrays narrower than a tile."""
  for m, k, n in ((61, 192, 128), (200, 128, 192), (136, 64, 64)):
    x, w, dy = operands(m, k, n, 3)
    sizes = np.array([3, 0, m - 20], np.int32)
    jobs = {(op, "base"): (kernel(op, {}), (*TAKE[op](x, w, dy, None), jnp.array(sizes)))
            for op in TAKE}  # fmt: skip
    for (op, _), f in compile_all(jobs, case="small").items():
      with watched(f"small {m}x{k}x{n} {op}"):
        right, worst, equal = Checker(x, w, dy)(op, f, TAKE[op], sizes, 5e-3)
      emit(kind="check", case=f"small {m}x{k}x{n}", op=op, variant="base", ok=right, worst=worst,
           bitwise=equal)  # fmt: skip


def main(argv):
  """Runs the cases in the order of what matters, until the time is up."""
  del argv
  if _TINY.value:
    os.environ["NPROC"] = "16"  # The simulator hangs with fewer threads in XLA than in the kernel.
  device = jax.devices()[0]
  emit(kind="start", jax=jax.__version__, device=device.device_kind)
  tiny = dict(m=272, k=128) if _TINY.value else {}
  cases = [("E64", 4, 256, "uneven", FEW)] if _TINY.value else CASES
  first = [c[:4] for c in cases[:2]]
  work = [(c[0], functools.partial(run_case, *c, **tiny)) for c in cases[:2]]
  add = lambda suffix, do, variants: work.extend(
    (c[0] + suffix, functools.partial(do, *c, variants, **tiny)) for c in first
  )
  add("fp8", run_eight_bits, FEW)
  work += [("dense", run_dense), ("small", run_small)]
  add("swiglu", run_swiglu, FEW)
  work += [(c[0], functools.partial(run_case, *c, **tiny)) for c in cases[2:]]
  for name, do in work:
    if _CASES.value and name not in _CASES.value:
      continue
    if time_is_up():
      emit(kind="skipped", case=name)
      continue
    try:
      do()
    except FAILURES as e:  # The next case may still work.
      emit(kind="error", case=name, error=f"{type(e).__name__}: {e}"[:600])
    emit(kind="done", case=name, seconds=time.time() - START)
  if failed:
    raise SystemExit(f"{len(failed)} checks failed: {failed[0]}")


if __name__ == "__main__":
  app.run(main)
