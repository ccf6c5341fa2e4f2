r"""Times of the kernels of `kernels_triton` by tile: what `kernels_triton.plan` prefers, and why.

Kernels are launched by Triton itself, on torch's arrays, and compiled by several processes before.
Writes a row for each kernel, shape and tile. Results are not compared: `lab.ops` does that.
Command: python -m lab.triton_tiles --out=FILE.csv [--shapes=B4,65536]
"""

import csv
import importlib
import itertools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent import futures
from typing import Any, NamedTuple

import torch  # pyright: ignore[reportMissingImports]
from absl import app, flags

from kernels_triton import plan
from kernels_triton.plan import Launch, Tile

_OUT = flags.DEFINE_string("out", None, "File of the rows.", required=True)
_SHAPES = flags.DEFINE_list("shapes", [""], "What names of shapes are to contain.")

# Batch, seq, heads, kv_heads, width, width of a value; rows, groups, d_in, d_out.
ATTENTION = [
  (4, 4096, 32, 8, 128, 128),
  (4, 4096, 32, 8, 64, 64),
  (2, 4096, 16, 4, 256, 256),
  (2, 4096, 16, 16, 192, 128),
]
GROUPED = [(65536, 8, 2048, 5632), (65536, 64, 2048, 1024)]
ROWS = {"1 document": (1, None), "8 documents": (8, None), "window 1024": (1, 1024)}
SIZES = (32, 64, 128)
TYPES = {"b": torch.bfloat16, "i": torch.int32, "f": torch.float32}


class Job(NamedTuple):
  """A kernel at a shape: its launch, how to spell the types of its arrays, and names for rows."""

  launch: Launch
  types: str
  shape: str
  kernel: str


def jobs(shapes: Sequence[str]) -> list[Job]:
  """Those whose shape has one of these texts in its name."""
  found = []
  for batch, seq, heads, kv_heads, width, value in ATTENTION:
    q_shape, k_shape = (batch, seq, heads, width), (batch, seq, kv_heads, width)
    launches = plan.attention(q_shape, k_shape, value, None, False, in_parts=False)
    shape = f"B{batch} S{seq} {heads}/{kv_heads} x {width}/{value}"
    for launch, types in zip(launches, ("bbbifbf", "bbbibffbb", "bbbibffb"), strict=True):
      found.append(Job(launch, types, shape, launch.kernel))
  for rows, groups, d_in, d_out in GROUPED:
    shape, sizes = f"{rows} x {d_in} x {d_out}, {groups} groups", (groups, d_in, d_out)
    for transposed, pairs in ((False, 1), (True, 1), (True, 2)):
      launch = plan.grouped_matmul(rows, sizes, transposed=transposed, pairs=pairs)
      name = f"{launch.kernel}{', transposed' * transposed}{', two pairs' * (pairs - 1)}"
      found.append(Job(launch, "bbbbib", shape, name))
    launch = plan.grouped_weight_gradient(*sizes)
    found.append(Job(launch, "bbib", shape, launch.kernel))
  return [job for job in found if any(part in job.shape for part in shapes)]


def tiles(job: Job) -> list[Tile]:
  """Those that are tried."""
  names = list(job.launch.tiles[0].blocks)
  if len(names) == 2:
    sizes, more = itertools.product(SIZES, SIZES), ((4, 2), (4, 3), (8, 2), (8, 3))
  else:
    rows = ((64, 256), (128, 128), (128, 256), (256, 128))
    sizes, more = ((*two, k) for two in rows for k in (32, 64)), ((8, 3), (8, 4))
  return [Tile(dict(zip(names, of, strict=True)), *how) for of in sizes for how in more]


def kernel_of(launch: Launch) -> Any:
  """The function of Triton."""
  return getattr(importlib.import_module(f"kernels_triton.{launch.module}"), launch.kernel)


def options(launch: Launch, tile: Tile) -> dict[str, Any]:
  """What a kernel is called with beside its arrays."""
  how = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
  return {**launch.constants, **tile.blocks, **how}


def compile_one(shapes: Sequence[str], number: int, tile: Tile) -> None:
  """Fill Triton's cache, in a process of its own."""
  job = jobs(shapes)[number]
  kernel_of(job.launch).warmup(
    *(TYPES[t] for t in job.types), grid=(1, 1), **options(job.launch, tile)
  )


def arrays(job: Job, rows: str) -> list[Any]:
  """Random inputs and empty outputs of a kernel."""
  normal = lambda *shape: torch.randn(*shape, device="cuda").bfloat16()
  if job.launch.module == "grouped_matmul":
    tokens, groups, d_in, d_out = next(g for g in GROUPED if f"{g[1]} groups" in job.shape)
    sizes = torch.full((groups,), tokens // groups)
    sizes[::2] += tokens // groups // 3  # uneven
    sizes[1::2] -= tokens // groups // 3
    ends = [torch.zeros(1), sizes.cumsum(0), torch.tensor([tokens])]
    starts = torch.cat(ends).int().cuda()
    if job.launch.kernel == "weight_gradient":
      return [normal(tokens, d_in), normal(tokens, d_out), starts, normal(groups, d_in, d_out)]
    d_in, d_out = (job.launch.constants[name] for name in ("d_in", "d_out"))
    x, w, y = normal(tokens, d_in), normal(groups, d_in, d_out), normal(tokens, d_out)
    return [x, w, x, w, starts, y]
  of = next(a for a in ATTENTION if f"{a[2]}/{a[3]} x {a[4]}/" in job.shape)
  batch, seq, heads, kv_heads, width, value = of
  documents, window = ROWS[rows]
  at, length = torch.arange(seq, device="cuda"), seq // documents
  first, last = at // length * length, at // length * length + length - 1
  if window:
    first, last = torch.maximum(first, at - window + 1), torch.minimum(last, at + window - 1)
  runs = (last if job.launch.kernel == "attention_key_gradient" else first).int()
  q, y = normal(batch, seq, heads, width), normal(batch, seq, heads, value)
  k, v = normal(batch, seq, kv_heads, width), normal(batch, seq, kv_heads, value)
  statistics = torch.full((batch, heads, seq), 8.0, device="cuda")
  inputs = [q, k, v, runs.repeat(batch, 1).contiguous()]
  if job.launch.kernel == "attention_forward":
    return [*inputs, torch.zeros(heads, device="cuda"), y, statistics]
  made = [k.clone(), v.clone()] if job.launch.kernel == "attention_key_gradient" else [q.clone()]
  return [*inputs, y, statistics, torch.zeros_like(statistics), *made]


def main(argv: list[str]) -> None:
  """Time all, a row as each is done."""
  del argv
  testing = importlib.import_module("triton.testing")
  errors = importlib.import_module("triton.runtime.errors")
  workers = max(1, (os.cpu_count() or 2) - 2)
  setup = multiprocessing.get_context("spawn")
  with (
    futures.ProcessPoolExecutor(workers, setup) as pool,
    open(_OUT.value, "w", newline="", encoding="utf-8") as file,
  ):
    table = csv.writer(file)
    table.writerow(["kernel", "shape", "rows", "tile", "warps", "stages", "ms"])
    made = [
      (job, tile, pool.submit(compile_one, _SHAPES.value, n, tile))
      for n, job in enumerate(jobs(_SHAPES.value))
      for tile in tiles(job)
    ]
    for job, tile, compiled in made:
      for rows in ROWS if job.launch.module == "attention" else ("",):
        blocks = " x ".join(map(str, tile.blocks.values()))
        row = [job.kernel, job.shape, rows, blocks, tile.num_warps, tile.num_stages]
        try:
          compiled.result()
          given, how = arrays(job, rows), options(job.launch, tile)
          launch = kernel_of(job.launch)[job.launch.grid(tile.blocks)]
          run = lambda launch=launch, given=given, how=how: launch(*given, **how)
          row.append(round(testing.do_bench(run, warmup=10, rep=50, return_mode="median"), 4))
        except errors.OutOfResources:
          row.append("no room")
        table.writerow(row)
        file.flush()


if __name__ == "__main__":
  app.run(main)
