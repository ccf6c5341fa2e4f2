"""Device time and errors of functions of arrays.

A launch from the host takes longer than a small kernel. Functions are therefore timed inside one
compiled loop, and a single call is subtracted. A barrier ties each round's inputs to the results of
the round before, so that the compiler can neither hoist the work nor drop it.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

REPEATS = 5  # timings of which the median counts
TARGET_SECS = 0.05  # of the long loop
MAX_ROUNDS = 1000


def loop(f: Callable, rounds: int, feed: Callable | None = None) -> jax.stages.Wrapped:
  """A compiled loop that runs `f` `rounds` times.

  `feed(args, out)` gives the next round's arguments. An op that updates its arguments in place
  needs it: otherwise XLA would copy the arguments in each round, and the copies would be timed.

  Returns:
    A function that gives the last arguments (None without `feed`), and the results.
  """

  def run(args, out):
    def body(_, carry):
      args, out = jax.lax.optimization_barrier(carry)
      return (feed(args, f(*args)), out) if feed else (args, f(*args))

    # Static bounds: with a known trip count the host need not ask the device when to stop.
    args, out = jax.lax.fori_loop(0, rounds, body, (args, out))
    return (args if feed else None), out

  return jax.jit(run, donate_argnums=1)


def device_secs(
  f: Callable,
  args: tuple,
  once: jax.stages.Compiled | None = None,
  feed: Callable | None = None,
) -> float:
  """Median device time of one `f(*args)` in seconds.

  Args:
    f: function of arrays.
    args: arrays.
    once: `f` compiled for `args`, if that was done before.
    feed: see `loop`.
  """
  once = once or jax.jit(f).lower(*args).compile()
  out = jax.block_until_ready(once(*args))
  single = min(_wall(once, *args)[0] for _ in range(3))
  rounds = min(MAX_ROUNDS, max(5, round(TARGET_SECS / single)))
  long = loop(f, 1 + rounds, feed).lower(args, out).compile()
  _, (_, out) = _wall(long, args, out)
  times = []
  for _ in range(REPEATS):
    base, _ = _wall(once, *args)
    all_rounds, (_, out) = _wall(long, args, out)
    times.append((all_rounds - base) / rounds)
  return statistics.median(times)


def _wall(compiled: Callable, *args: Any) -> tuple[float, Any]:
  began = time.perf_counter()
  out = jax.block_until_ready(compiled(*args))
  return time.perf_counter() - began, out


def relative_errors(got: Any, want: Any) -> list[float]:
  """||got - want|| / ||want|| of each floating-point array; NaN where anything is NaN.

  Of integers, the share that differs.
  """

  @jax.jit
  def one(a, b):
    if not jnp.issubdtype(a.dtype, jnp.inexact):
      return jnp.mean(a != b, dtype=jnp.float32)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x)))
    return norm(a - b) / jnp.maximum(norm(b), 1e-30)

  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return [float(one(a, b)) for a, b in pairs]
