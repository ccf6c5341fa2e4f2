"""Rates of this machine's devices and of the links between them, for the planner."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ats_jax.cluster.preflight.results import CheckResult
from ats_jax.planner.hardware import COLLECTIVES, Hardware

ROUNDS = 3  # of which the median counts
CALLS_PER_ROUND = 5
DTYPES = ("bfloat16", "float16", "float32")


class Work(NamedTuple):
  """What is timed.

  Attributes:
    side: rows and columns of the square matrices.
    stream: bytes that are read and written.
    sizes: bytes of the arrays of collectives.
  """

  side: int
  stream: int
  sizes: tuple[int, ...]


CPU = Work(1024, 2**27, (2**20, 2**23, 2**25))
ACCELERATOR = Work(8192, 2**30, (2**20, 2**24, 2**26, 2**28))


def measure(work: Work | None = None) -> Hardware:
  """Measure the local devices; takes seconds, and up to 3 GiB of an accelerator.

  Args:
    work: what is timed; None = what suits them.
  """
  devices = jax.local_devices()
  if work is None:
    work = CPU if devices[0].platform == "cpu" else ACCELERATOR
  return Hardware(
    devices[0].device_kind,
    len(devices),
    {dtype: _matmul(dtype, work.side) for dtype in DTYPES},
    _stream(work.stream),
    {name: _collective(name, work.sizes) for name in COLLECTIVES} if len(devices) > 1 else {},
  )


def rows(hardware: Hardware) -> list[CheckResult]:
  """What was measured, for the table."""
  flops = ", ".join(f"{d} {f / 1e12:,.3g} TFLOP/s" for d, f in hardware.matmul_flops.items())
  results = [
    CheckResult("matmul", f"{flops} (one device)"),
    CheckResult(
      "memory", f"{hardware.memory_bytes_per_sec / 1e9:,.1f} GB/s read and written (one device)"
    ),
  ]
  for name, points in hardware.collectives.items():
    rates = ", ".join(f"{size / 2**20:g} MiB {size / s / 1e9:,.2f} GB/s" for size, s in points)
    results.append(CheckResult(name, f"{rates} ({hardware.devices} devices, size over time)"))
  return results


def _seconds(call: Callable[[], jax.Array]) -> float:
  """Of one call: the median of some rounds."""
  last = call().block_until_ready()  # compiled, and caches are warm
  times = []
  for _ in range(ROUNDS):
    start = time.perf_counter()
    for _ in range(CALLS_PER_ROUND):
      last = call()
    last.block_until_ready()
    times.append((time.perf_counter() - start) / CALLS_PER_ROUND)
  return statistics.median(times)


def _matmul(dtype: str, side: int) -> float:
  # As in a run: with equal numbers a GPU takes less power, and is faster.
  x = jax.random.normal(jax.random.key(0), (side, side)).astype(dtype)
  product = jax.jit(jnp.matmul)
  return 2 * side**3 / _seconds(lambda: product(x, x))


def _stream(size: int) -> float:
  x = jnp.zeros(size // 4, jnp.float32)
  add = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: no time for new pages

  def call() -> jax.Array:
    nonlocal x
    x = add(x)
    return x

  return 2 * size / _seconds(call)


def _collective(name: str, sizes: tuple[int, ...]) -> list[list[float]]:
  devices = jax.local_devices()
  mesh = jax.sharding.Mesh(np.array(devices), ("all",))
  along = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
  split, replicated = P("all"), P()
  # The array of a device, in the sense of `Hardware.collectives`, has `n` numbers.
  body, inputs, outputs = {
    "all_gather": (lambda x: jax.lax.all_gather(x, "all", tiled=True), split, replicated),
    "reduce_scatter": (lambda x: jax.lax.psum_scatter(x, "all", tiled=True), replicated, split),
    "all_reduce": (lambda x: jax.lax.psum(x, "all"), replicated, replicated),
    "all_to_all": (lambda x: jax.lax.all_to_all(x, "all", 0, 0, tiled=True), split, split),
  }[name]
  run = jax.jit(along(body, in_specs=inputs, out_specs=outputs))
  points = []
  for size in sizes:
    n = size // 4 // len(devices) ** 2 * len(devices) ** 2
    n_global = n * len(devices) if name == "all_to_all" else n
    x = jax.device_put(jnp.ones(n_global, jnp.float32), jax.NamedSharding(mesh, inputs))
    points.append([float(4 * n), _seconds(functools.partial(run, x))])
  return points
