"""Statistics of sparse layers in a pass: sums, which add up over devices and micro-batches.

Letters: E expert slots (null experts behind the real ones), L layers that skip tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.model.layout import Segment


class MoEStats(NamedTuple):
  """Statistics of one mixture-of-experts layer: float32 sums over its tokens without padding.

  Attributes:
    tokens: the number of tokens.
    load_E: the number of choices of each expert.
    balance: E * sum_e load_share_e * probability_e, with the shares of the step before.
    sequence_balance: the balance loss with each row's own shares, averaged over the row and summed
      over rows.
    z: the squared logsumexp of the router's logits.
    entropy: the entropy of each token's probabilities, in nats.
    confidence: the highest probability of each token.
    dropped: the number of choices without a place (capacity mode).
    overflow: the number of choices that did not fit into the first pass of the token exchange.
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
  """Statistics of one layer that skips tokens: float32 sums over tokens without padding.

  Attributes:
    tokens: the number of tokens.
    routed: the number of tokens that went through the layer.
    overflow: the number of tokens that were chosen but had no place.
    gate: the gate weights of the tokens that went through.
    agree: the number of tokens for which training's choice and the causal rule agree.
    threshold: the score between the last token in and the first one out, summed over rows.
    rows: the number of rows that have such a score.
    predictor_loss: the binary cross-entropy of the predictor.
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
  """Statistics of one layer; None where the layer is not sparse in that way."""

  moe: MoEStats | None
  mod: MoDStats | None


class StackStats(NamedTuple):
  """Statistics of all layers.

  Attributes:
    segments: for each segment, for each place of its super-block, `LayerStats` with a leading
      [repeats].
    depth_L: the number of tokens by how many skipping layers they went through, [L + 1]; None if no
      layer skips tokens.
  """

  segments: tuple[tuple[LayerStats, ...], ...]
  depth_L: jax.Array | None


def stack_layers(layout: tuple[Segment, ...], part: str, get: Callable[[int, int], Any]) -> Any:
  """Stack arrays of the layers that have `part` ("moe" or "mod"), from the bottom up.

  Args:
    layout: the segments.
    part: the attribute of `LayerKind` that selects layers.
    get: segment and place in its super-block -> a tree of arrays [repeats, ...].

  Returns:
    The same tree with [layers with `part`, ...].
  """
  trees, indices = [], []
  for number, segment in enumerate(layout):
    for place, kind in enumerate(segment.kinds):
      if getattr(kind, part):
        trees.append(get(number, place))
        indices += segment.layer_indices(place)
  order = jnp.array(sorted(range(len(indices)), key=indices.__getitem__))
  return jax.tree.map(lambda *arrays: jnp.concatenate(arrays)[order], *trees)


def by_layer(stats: StackStats, layout: tuple[Segment, ...], part: str) -> Any:
  """Stack the statistics `part` ("moe" or "mod") of the layers that have them, [layers, ...]."""
  return stack_layers(
    layout, part, lambda number, place: getattr(stats.segments[number][place], part)
  )
