"""What is right for a grouped matmul: sizes of groups, float32 references by group, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

F32 = jnp.float32
EINSUM = dict(fwd="gmk,gkn->gmn", dgrad="gmn,gkn->gmk", wgrad="gmk,gmn->gkn")


def spread(kind: str, groups: int, rows: int) -> np.ndarray:
  """Rows of each group; the same in every run."""
  rng = np.random.RandomState(0)
  p = rng.dirichlet(np.full(groups, 5.0))
  if kind == "equal":
    p = np.full(groups, 1 / groups)
    return np.full(groups, rows // groups, np.int32)
  if kind == "one90":
    p = np.full(groups, 0.1 / (groups - 1))
    p[groups // 2] = 0.9
  if kind == "third":
    p[::3] = 0
  sizes = rng.multinomial(rows, p / p.sum()).astype(np.int32)
  if kind == "eights":  # as if dispatch started every group at a multiple of 8 rows
    sizes = sizes // 8 * 8
    sizes[groups // 2] += rows - sizes.sum()
  return sizes


def edges(groups: int, rows: int) -> np.ndarray:
  """Sizes around those of tiles, empty groups, and rows past the last group."""
  sizes = np.array([0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 0, 255, 256, 257, 0], np.int32)
  sizes = np.resize(sizes, groups)
  while sizes.sum() > rows - 20:
    sizes //= 2
  sizes[groups // 2] += (rows - sizes.sum()) // 2
  return sizes


@functools.partial(jax.jit, static_argnums=(0, 6))
def wanted(op, x, w, dy, starts, sizes, longest):
  """What a 16- or 8-bit kernel should give, in float32 from the same operands, and its groups."""
  i = starts[:, None] + jnp.arange(longest)
  inside = (jnp.arange(longest) < sizes[:, None])[:, :, None]
  take = lambda a: jnp.where(inside, a[jnp.minimum(i, a.shape[0] - 1)].astype(F32), 0)
  product = functools.partial(jnp.einsum, precision="highest")
  if op == "wgrad":
    return product(EINSUM[op], take(x), take(dy))
  return product(EINSUM[op], take(x if op == "fwd" else dy), w.astype(F32))


@functools.partial(jax.jit, static_argnums=(0, 5))
def errors(op, got, want, starts, sizes, longest):
  """Worst relative error of a group, whether all is finite, and the largest past the last group."""
  rows = jnp.arange(got.shape[0])
  if op == "wgrad":
    have, tail = got.astype(F32), jnp.float32(0)
  else:
    i = starts[:, None] + jnp.arange(longest)
    inside = (jnp.arange(longest) < sizes[:, None])[:, :, None]
    have = jnp.where(inside, got[jnp.minimum(i, got.shape[0] - 1)].astype(F32), 0)
    past = rows[:, None] >= starts[-1] + sizes[-1]
    tail = jnp.max(jnp.where(past, jnp.abs(got.astype(F32)), 0))
  norm = lambda a: jnp.sqrt(jnp.sum(jnp.square(a), (1, 2)))
  worst = jnp.max(norm(have - want) / jnp.maximum(norm(want), 1e-20))
  return worst, jnp.all(jnp.isfinite(got)), tail


def poison(a, used: int):
  """NaN in rows that belong to no group."""
  return jnp.where(jnp.arange(a.shape[0])[:, None] < used, a.astype(F32), jnp.nan).astype(a.dtype)


class Checker:
  """Remembers what is right for a case, so that many variants can be held against it."""

  def __init__(self, x, w, dy):
    self.operands, self.cache = (x, w, dy), {}

  def __call__(self, op, f, prepare, sizes, tolerance):
    """Runs `f(*prepare(x, w, dy), sizes)` twice; `(right, worst error, bitwise equal)`."""
    x, w, dy = self.operands
    starts = jnp.array(np.cumsum(sizes) - sizes, jnp.int32)
    device_sizes, longest = jnp.array(sizes), int(max(sizes.max(), 1))
    key = op, tuple(sizes), x.dtype, w.dtype
    if self.cache.get("key") != key:  # only the last one: they are large
      self.cache.clear()
      want = wanted(op, x, w, dy, starts, device_sizes, longest)
      args = prepare(poison(x, sizes.sum()), w, poison(dy, sizes.sum()), device_sizes)
      self.cache.update(key=key, want=want, args=args, prepare=prepare)
    args = self.cache["args"]
    if self.cache["prepare"] is not prepare:
      args = prepare(poison(x, sizes.sum()), w, poison(dy, sizes.sum()), device_sizes)
    got, again = f(*args, device_sizes), f(*args, device_sizes)
    worst, finite, tail = errors(op, got, self.cache["want"], starts, device_sizes, longest)
    equal = bool(jnp.array_equal(got, again))
    right = bool(finite) and float(worst) < tolerance and float(tail) == 0 and equal
    return right, float(worst), equal
