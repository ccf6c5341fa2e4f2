"""Rotary position embedding."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.ops import registry
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import map_shards


class Scaling(NamedTuple):
  """The scaling of frequencies for contexts longer than in the original training. Static.

  Attributes:
    kind: "none", "linear", "llama3" or "yarn".
    factor: the factor by which low frequencies are divided.
    original_len: the context length of the original training, in tokens.
    slow_turns: pairs with fewer turns within `original_len` are slowed by `factor`.
    fast_turns: pairs with more turns within `original_len` are unchanged; between the two is a
      ramp, along the frequency (llama3) or the index of the pair (yarn).
    whole_pairs: round the ends of YaRN's ramp outwards to whole pairs.
    concentration: the factor of cosines and sines.
  """

  kind: str = "none"
  factor: float = 1.0
  original_len: int = 0
  slow_turns: float = 1.0
  fast_turns: float = 32.0
  whole_pairs: bool = True
  concentration: float = 1.0


NO_SCALING = Scaling()


def frequencies(head_dim: int, theta: float, scaling: Scaling = NO_SCALING) -> np.ndarray:
  """Angles per position of each pair, float64 [head_dim / 2].

  Rounded to float32 where published models round them: an angle is a multiple of its frequency, so
  the error of another rounding grows with the position.
  """
  exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  powers = (theta ** exponents.astype(np.float64)).astype(np.float32)
  plain = (np.float32(1.0) / powers).astype(np.float64)
  if scaling.kind == "none":
    return plain
  if scaling.kind == "linear":
    kept = np.zeros_like(plain)
  elif scaling.kind == "llama3":  # Llama 3.1's published code
    turns = scaling.original_len * plain / (2 * np.pi)
    kept = (turns - scaling.slow_turns) / (scaling.fast_turns - scaling.slow_turns)
  else:  # Peng et al. 2023, arXiv:2309.00071, section 3.2
    length = scaling.original_len
    pair = lambda turns: head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
    first, last = pair(scaling.fast_turns), pair(scaling.slow_turns)
    if scaling.whole_pairs:
      first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    kept = 1 - (np.arange(head_dim // 2) - first) / max(last - first, 0.001)
  kept = np.clip(kept, 0.0, 1.0)
  return plain * (kept + (1 - kept) / scaling.factor)


def rope_table(
  positions_BT: jax.Array, head_dim: int, theta: float, scaling: Scaling = NO_SCALING
) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines of the rotary angles (Su et al. 2021, arXiv:2104.09864, eq. 15).

  Args:
    positions_BT: int32 [batch, seq].
    head_dim: even width of one head.
    theta: base of the frequencies.
    scaling: how the frequencies are scaled for long contexts.

  Returns:
    Two float32 arrays [batch, seq, 1, head_dim / 2].
  """
  per_position = jnp.asarray(frequencies(head_dim, theta, scaling), jnp.float32)
  angles = positions_BT[..., None, None] * per_position
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  if scaling.concentration == 1.0:
    return cos, sin
  return scaling.concentration * cos, scaling.concentration * sin


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rope(
  x_BTNH: jax.Array, table: tuple[jax.Array, jax.Array], kernels: Kernels = XLA
) -> jax.Array:
  """Rotate each pair (i, i + head_dim/2) by its angle, in float32 or wider.

  A table with a concentration also stretches it.

  Args:
    x_BTNH: queries or keys [batch, seq, heads, head_dim].
    table: from `rope_table`; it gets no gradient.
    kernels: the chosen implementations.

  Returns:
    Array like `x_BTNH`.
  """
  cos, sin = table
  return _rotate("forward", x_BTNH, cos, sin, kernels)


def _forward(x_BTNH, table, kernels):
  return rope(x_BTNH, table, kernels), table


def _backward(kernels, table, dy_BTNH):
  cos, sin = table
  return _rotate("backward", dy_BTNH, cos, -sin, kernels), None  # a rotation's transpose turns back


rope.defvjp(_forward, _backward)


def _rotate(slot, x_BTNH, cos, sin, kernels):
  dims = dict(rows=x_BTNH.shape[0] * x_BTNH.shape[1], head_dim=x_BTNH.shape[-1])
  kernel = registry.kernel("rope", slot, kernels, heads=x_BTNH.shape[2], **dims)
  if kernel is not None:
    return map_shards(lambda *a: (kernel(*a),), x_BTNH, cos, sin, out_like=(0,))[0]
  first, second = jnp.split(x_BTNH.astype(jnp.promote_types(x_BTNH.dtype, jnp.float32)), 2, axis=-1)
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x_BTNH.dtype)
