"""Every op at shapes of real models, in every slot that runs here: correct first, then timed.

`python -m lab.ops` prints a JSON line a measurement and a markdown table at the end; with
torch installed, torch eager and torch.compile run on the same GPU after jax. Nothing is tuned here
(`python -m ats_jax tune`), nothing is written but `--out`.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import jax
from absl import flags, logging

from ats_jax.ops import implementations
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.ops.requirements import this_device
from ats_jax.sharding.rules import MESH_AXES
from ats_jax.verbs import cli
from ats_jax.verbs.bench import cases
from ats_jax.verbs.bench.cases import Case
from ats_jax.verbs.bench.measure import device_secs, relative_errors
from lab import attention_cases, rivals

# Beside XLA's own error against float32, what a kernel may have: twice that, or one bfloat16
# rounding where XLA is exact.
ERROR_FACTOR, ERROR_FLOOR = 2.0, 4e-3

# Memory bytes/s and bfloat16 FLOP/s of the datasheets; docs/reference/performance.md says what is
# reached.
PEAKS = {"NVIDIA H200": (4.8e12, 989e12), "NVIDIA H100 80GB HBM3": (3.35e12, 989e12)}

Row = dict[str, Any]


def measure_case(
  case: Case, *, check_only: bool, with_torch: bool, with_xla: bool = True
) -> Iterator[Row]:
  """Rows of one case: each pass in each implementation, then the rivals.

  Without `with_xla`, results are compared with XLA's all the same, but its versions are not timed.
  """
  of_xla = {"xla", *(k.name for k in implementations.OPS[case.op].kernels if k.is_xla)}
  checked = case.check or case
  for name in case.passes:
    args = checked.arguments(name, seed=1)  # other inputs than the timed ones
    exact = _exact(checked, name, args)
    compiled = {"xla": jax.jit(checked.compute(name, XLA)).lower(*args).compile()}
    allowed = relative_errors(compiled["xla"](*args), exact)
    for implementation, chosen in variants(case, name):
      if not with_xla and implementation in of_xla:
        continue
      row = _row(case, name, implementation)
      try:
        if implementation not in compiled:
          f = jax.jit(checked.compute(name, chosen))
          compiled[implementation] = f.lower(*args).compile()
        once = compiled[implementation]
        row["errors"] = relative_errors(once(*args), exact)
        row["ok"] = all(
          e <= max(ERROR_FACTOR * a, ERROR_FLOOR)
          for e, a in zip(row["errors"], allowed, strict=True)
        )
        if row["ok"] and not check_only and (implementation != "xla" or case.has_xla):
          _time(case, name, chosen, row, once if checked is case else None)
      except (ValueError, RuntimeError) as e:  # said in the row, and the next one goes on
        row["failed"] = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
      yield row
    del args, exact, compiled
    if check_only:
      continue
    if not case.passes[name].wrt:
      for rival, f in case.rivals.items():
        row = _row(case, name, rival)
        _add_time(row, device_secs(f, case.arguments(name, 0)))
        yield row
    for rival, secs, peak in rivals.torch_times(case, name) if with_torch else []:
      row = _row(case, name, rival)
      _add_time(row, secs)
      yield row | {"peak_bytes": peak}


def variants(case: Case, pass_name: str) -> list[tuple[str, Kernels]]:
  """What can run in the slots of a pass: XLA's, then each kernel with its tuned tiles."""
  device, found = this_device(), [("xla", XLA)]
  for kernel in implementations.OPS[case.op].kernels:
    slots = [s for s in case.passes[pass_name].slots if s in kernel.where]
    if slots and not kernel.obstacle(case.cfg, device):
      names = tuple((f"{case.op}.{s}", kernel.name) for s in slots)
      asked = tuple(slot for slot, _ in names)
      found.append((kernel.name, Kernels(names, tuned_for=device.kind, asked=asked)))
  return found


def _exact(case: Case, name: str, args: tuple) -> Any:
  """XLA's results in float32."""
  widen = lambda x: x.astype("float32") if x.dtype == "bfloat16" else x
  with jax.default_matmul_precision("highest"):
    return jax.jit(case.compute(name, XLA))(*jax.tree.map(widen, args))


def _time(case: Case, name: str, chosen: Kernels, row: Row, once: Any) -> None:
  f, args = case.compute(name, chosen), case.arguments(name, 0)
  once = once or jax.jit(f).lower(*args).compile()
  row["peak_bytes"] = _peak_bytes(once)
  _add_time(row, device_secs(f, args, once, case.feed))
  kernels = _kernel_secs(once, args)
  row["kernel_ms"] = kernels and 1e3 * kernels


def _floor_secs(kind: str, bytes_moved: float, flops: float) -> float | None:
  """The time below which a device cannot finish; None if its peaks are not known."""
  if kind not in PEAKS:
    return None
  bandwidth, rate = PEAKS[kind]
  return max(bytes_moved / bandwidth, flops / rate)


def _kernel_secs(once: Callable, args: tuple, calls: int = 5) -> float | None:
  """Median sum of the times of the kernels of one call, as the GPU's profiler sees them.

  Without the gaps between kernels: a second opinion on `device_secs`. None where there is no GPU.
  """
  if jax.devices()[0].platform != "gpu":
    return None
  from jax.experimental.mosaic.gpu import profiler

  try:
    _, times_ms = profiler.measure(once, iterations=calls)(*args)
  except RuntimeError as e:  # a second opinion only; the first stands without it
    logging.warning("no kernel times: %s", e)
    return None
  return None if times_ms is None else statistics.median(times_ms) / 1e3


def _peak_bytes(once: jax.stages.Compiled) -> int | None:
  """Memory that one call takes beside its arguments: results and temporaries, as compiled."""
  analysis = once.memory_analysis()
  if analysis is None:
    return None
  return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def _row(case: Case, name: str, implementation: str) -> Row:
  work = case.passes[name]
  floor = _floor_secs(jax.devices()[0].device_kind, work.bytes, work.flops)
  return {
    "op": case.op,
    "shape": case.shape,
    "pass": name,
    "implementation": implementation,
    "floor_ms": floor and 1e3 * floor,
    "bytes": work.bytes,
    "flops": work.flops,
  }


def _add_time(row: Row, secs: float) -> None:
  row["ms"] = 1e3 * secs
  row["tb_per_sec"] = row["bytes"] / secs / 1e12
  row["tflop_per_sec"] = row["flops"] / secs / 1e12
  row["of_floor"] = row["floor_ms"] and row["floor_ms"] / row["ms"]


def markdown(rows: list[Row]) -> str:
  """A table with a line for each measurement; `vs xla` is XLA's time over this one's."""
  lines = [
    "| op | shape | pass | implementation | ms | kernels ms | of its floor | TB/s or TFLOP/s "
    "| vs xla | worst error | peak GiB |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
  ]
  key = lambda r: (r["op"], r["shape"], r["pass"])
  xla_ms = {key(r): r["ms"] for r in rows if r["implementation"] == "xla" and "ms" in r}
  for r in rows:
    cells = [r["op"], r["shape"], r["pass"], r["implementation"]]
    if "ms" not in r:
      cells += [r.get("failed") or ("checked" if r.get("ok") else "WRONG"), "", "", "", ""]
    else:
      rate = f"{r['tflop_per_sec']:.0f} TF" if r["flops"] else f"{r['tb_per_sec']:.2f} TB"
      of_floor = f"{100 * r['of_floor']:.0f} %" if r["of_floor"] else ""
      ratio = f"{xla_ms[key(r)] / r['ms']:.2f}x" if key(r) in xla_ms else ""
      kernels = f"{r['kernel_ms']:.4g}" if r.get("kernel_ms") else ""
      cells += [f"{r['ms']:.4g}", kernels, of_floor, rate, ratio]
    cells.append(f"{max(r['errors']):.1e}" if r.get("errors") else "")
    cells.append(f"{r['peak_bytes'] / 2**30:.2f}" if r.get("peak_bytes") else "")
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


_ONLY = flags.DEFINE_list("only", [], "Ops to measure; all without it.")
_SHAPES = flags.DEFINE_string("shapes", "", "Only cases whose shape, as it is printed, has this.")
_TOY = flags.DEFINE_bool("toy", False, "Tiny shapes: a test that everything runs.")
_CHECK = flags.DEFINE_bool("check_only", False, "Errors only, nothing is timed.")
_XLA = flags.DEFINE_bool("xla", True, "Time XLA's own versions, which take most of the time.")
_TORCH = flags.DEFINE_bool("torch", True, "Time torch too, if it is there.")
_OUT = flags.DEFINE_string(
  "out", None, "File for the JSON lines and, beside it, .md for the table."
)


def main(argv: list[str]) -> int:
  """Measure; exit with 1 if a result was wrong or a kernel failed."""
  del argv
  # torch wants memory on the same GPU.
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.45")
  if unknown := sorted(set(_ONLY.value) - set(implementations.OPS)):
    known = ", ".join(implementations.OPS)
    raise ValueError(f"--only={','.join(unknown)}: there is no such op; {known}.")
  files = (cases, attention_cases)
  known = [c for f in files for c in (f.toy_cases() if _TOY.value else f.real_cases())]
  asked = [c for c in known if not _ONLY.value or c.op in _ONLY.value]
  asked = [c for c in asked if _SHAPES.value in c.shape]
  if not asked:
    raise ValueError(f"--shapes={_SHAPES.value}: no case has this in its shape.")
  rows = []
  mesh = jax.make_mesh((1,) * len(MESH_AXES), MESH_AXES, devices=jax.devices()[:1])
  with jax.set_mesh(mesh):
    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    emit(versions | (rivals.versions() if _TORCH.value else {}))
    for case in asked:
      logging.info("%s %s", case.op, case.shape)
      how = {"with_torch": _TORCH.value, "with_xla": _XLA.value}
      for row in measure_case(case, check_only=_CHECK.value, **how):
        rows.append(row)
        emit(row)
  print(markdown(rows), flush=True)
  if _OUT.value:
    with open(f"{_OUT.value}.md", "w", encoding="utf-8") as f:
      f.write(markdown(rows) + "\n")
  return int(any("failed" in r or not r.get("ok", True) for r in rows))


def emit(row: Row) -> None:
  """Print a JSON line at once, so that a run cut short leaves what it had."""
  files: list[TextIO] = [sys.stdout]
  if _OUT.value:
    files.append(open(_OUT.value, "a", encoding="utf-8"))  # noqa: SIM115
  for f in files:
    print(json.dumps(row), file=f, flush=True)
  for f in files[1:]:
    f.close()


if __name__ == "__main__":
  cli.run(main)
