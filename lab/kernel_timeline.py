r"""Inside the grouped matmul kernels on one Hopper GPU: where a multiplying warpgroup's cycles go.

Mosaic's profiler notes the clock of each warpgroup where a tile's products begin and end. Printed
for each kernel: medians over all tiles of all thread blocks, of the products, of the time until the
next tile's, and of the time when neither warpgroup is at its products. At the rate of the tensor
cores, a step of 64 takes 1,024 cycles for a tile of 128 x 256. The clock counts cycles, whatever
their frequency is.
Command: PYTHONPATH=. python -m lab.kernel_timeline [--groups=64] [--n=1024]
  [--trace=FOLDER: keeps what Perfetto shows]
"""

import collections
import functools
import json
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul import machine
from kernels_pallas.grouped_matmul.forward import grouped_matmul
from kernels_pallas.grouped_matmul.wgrad import grouped_matmul_dw
from lab.grouped_matmul_checks import spread

_GROUPS = flags.DEFINE_integer("groups", 64, "Groups, of uneven sizes.", lower_bound=1)
_ROWS = flags.DEFINE_integer("m", 65536, "Rows of all groups.", lower_bound=1)
_K = flags.DEFINE_integer("k", 2048, "Columns of x.", lower_bound=64)
_N = flags.DEFINE_integer("n", 1024, "Columns of y.", lower_bound=64)
_TRACE = flags.DEFINE_string("trace", "", "Where to keep the traces; none without it.")

TILES = 40  # that there is room for in shared memory, for each warpgroup
SCOPE = "products"


class Cycles(NamedTuple):
  """Medians over the tiles of all thread blocks; of `neither`, over the thread blocks' means.

  Attributes:
    tiles: how many were seen, by both multiplying warpgroups together.
    products: from the begin of a warpgroup's tile to the end of its products.
    until_next: from there to the begin of its next tile.
    neither: of a tile, when no warpgroup of the thread block was at its products.
  """

  tiles: int
  products: float
  until_next: float
  neither: float


def cycles(events: list[dict]) -> Cycles:
  """What a trace says of the scope."""
  blocks = collections.defaultdict(lambda: collections.defaultdict(list))
  for event in events:
    if event["name"] == SCOPE:  # a "begin" or an "end", in turn; one process is one SM
      blocks[event["pid"]][event["tid"]].append(1e3 * event["ts"])
  inside, between, neither = [], [], []
  for warpgroups in blocks.values():
    spans = [np.array(t)[: len(t) // 2 * 2].reshape(-1, 2) for _, t in sorted(warpgroups.items())]
    for span in spans:
      inside.extend(span[:, 1] - span[:, 0])
      between.extend(span[1:, 0] - span[:-1, 1])
    both = min(map(len, spans))
    begins, ends = np.sort(np.concatenate([span[:both] for span in spans]), axis=0).T
    # No span is open where as many have ended as began.
    neither.append(np.maximum(begins[1:] - ends[:-1], 0).sum() / both)
  return Cycles(len(inside), *map(np.median, (inside, between, neither)))


def timeline(folder: Path, f, *args) -> Cycles:
  """`cycles` of a call of the kernel in `f`, which is compiled with the profiler."""
  settings = plgpu.CompilerParams(
    profile_space=TILES, profile_dir=str(folder), profile_bounds_check=True
  )
  multiply = machine.Reader.multiply

  def named(*args):
    with jax.named_scope(SCOPE):
      return multiply(*args)

  with (
    mock.patch.object(machine.Reader, "multiply", named),
    mock.patch.object(plgpu, "kernel", functools.partial(plgpu.kernel, compiler_params=settings)),
  ):
    compiled = jax.jit(f).lower(*args).compile()
  for _ in range(3):  # the newest trace is of a warm GPU
    jax.block_until_ready(compiled(*args))
  jax.effects_barrier()
  newest = max(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
  return cycles(json.loads(newest.read_text(encoding="utf-8"))["traceEvents"])


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  if jax.default_backend() != "gpu":
    raise SystemExit(
      f"kernel_timeline: Mosaic's profiler needs a Hopper GPU, jax has a {jax.default_backend()}."
      " Without one, lab/grouped_matmul.py --tiny runs the kernels in the simulator."
    )
  m, k, n, groups = _ROWS.value, _K.value, _N.value, _GROUPS.value
  keys = jax.random.split(jax.random.key(0), 3)
  normal = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
  x, w, dy = normal(keys[0], m, k), normal(keys[1], groups, k, n), normal(keys[2], m, n)
  sizes = jnp.array(spread("uneven", groups, m))
  jobs = {
    "forward": (grouped_matmul, x, w, sizes),
    "input_gradient": (functools.partial(grouped_matmul, transpose_w=True), dy, w, sizes),
    "weight_gradient": (grouped_matmul_dw, x, dy, sizes),
  }
  print(
    f"jax {jax.__version__}, {jax.devices()[0].device_kind}: {m} rows, {groups} groups, {k=}, {n=}"
  )
  print("| | tiles seen | products | until the next tile's | in neither warpgroup |")
  print("|---|--:|--:|--:|--:|")
  with tempfile.TemporaryDirectory() as scratch:
    for name, job in jobs.items():
      folder = Path(_TRACE.value or scratch) / name
      folder.mkdir(parents=True, exist_ok=True)
      print(f"| {name} |", *(f"{value:,.0f} |" for value in timeline(folder, *job)))


if __name__ == "__main__":
  app.run(main)
