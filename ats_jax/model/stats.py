"""What sparse layers report of a pass. Sums, so that devices and micro-batches add up.

Letters: E expert slots (null experts behind the real ones), L layers that skip tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.model.layout import Segment


class MoEStats(NamedTuple):
  """Of one mixture-of-experts layer; float32 sums over its tokens, padding left out.

  Attributes:
    tokens: how many there were.
    load_E: choices that fell on each expert.
    balance: E * sum_e load_share_e * probability_e, with the shares of the step before.
    sequence_balance: the same with each row's own shares, its mean over the row, summed over rows.
    z: squared logsumexp of the router's logits.
    entropy: of each token's probabilities, in nats.
    confidence: the highest probability of each token.
    dropped: choices without a place (capacity mode).
    overflow: choices for which an exchange of tokens had no room in its first pass.
  """

  tokens: jax.Array
  load_E: jax.Array
  balance: jax.Array
  sequence_balance: jax.Array
  z: jax.Array
  entropy: jax.Array
  confidence: jax.Array
  dropped: jax.Array
  overflow: jax.Array


class MoDStats(NamedTuple):
  """Of one layer that skips tokens; float32 sums over tokens, padding left out.

  Attributes:
    tokens: how many there were.
    routed: how many went through.
    overflow: how many the rule chose but had no place.
    gate: weights of those that went through.
    agree: tokens for which training's choice and the causal rule agree.
    threshold: the score between the last token in and the first one out, summed over rows.
    rows: rows that had such a score.
    predictor_loss: binary cross-entropy of the predictor.
  """

  tokens: jax.Array
  routed: jax.Array
  overflow: jax.Array
  gate: jax.Array
  agree: jax.Array
  threshold: jax.Array
  rows: jax.Array
  predictor_loss: jax.Array


class LayerStats(NamedTuple):
  """Of one layer; None for what it has not."""

  moe: MoEStats | None
  mod: MoDStats | None


class StackStats(NamedTuple):
  """Of the whole stack.

  Attributes:
    segments: for each segment, for each place of its super-block, `LayerStats` with a leading
      [repeats].
    depth_L: tokens by the number of skipping layers they went through, [L + 1]; None without any.
  """

  segments: tuple[tuple[LayerStats, ...], ...]
  depth_L: jax.Array | None


def stack_layers(layout: tuple[Segment, ...], part: str, get: Callable[[int, int], Any]) -> Any:
  """Stack what is known of the layers that have `part` ("moe" or "mod"), from the bottom up.

  Args:
    layout: the segments.
    part: which layers.
    get: segment and place in its super-block -> a tree of arrays [repeats, ...].

  Returns:
    The same tree with [layers with `part`, ...].
  """
  found, indices = [], []
  for number, segment in enumerate(layout):
    for place, kind in enumerate(segment.kinds):
      if getattr(kind, part):
        found.append(get(number, place))
        indices += segment.layer_indices(place)
  order = jnp.array(sorted(range(len(indices)), key=indices.__getitem__))
  return jax.tree.map(lambda *arrays: jnp.concatenate(arrays)[order], *found)


def by_layer(stats: StackStats, layout: tuple[Segment, ...], part: str) -> Any:
  """`MoEStats` ("moe") or `MoDStats` ("mod") of all layers that have them, [layers, ...]."""
  return stack_layers(
    layout, part, lambda number, place: getattr(stats.segments[number][place], part)
  )
