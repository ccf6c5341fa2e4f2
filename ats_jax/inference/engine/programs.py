"""The engine's compiled programs for chunks of prompts, for single tokens and for scores.

Letters: B rows of a call, R rows of the engine, T tokens, W pages of a row, V vocab.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ats_jax.inference.engine.caches import View, pages_of
from ats_jax.inference.engine.layout import Served
from ats_jax.inference.engine.sampling import Draw, Drawn, Settings, draw
from ats_jax.model.block import LayerCache
from ats_jax.model.forward_pass import Pass
from ats_jax.ops.registry import Kernels
from ats_jax.sharding.apply import reshard

TOKENS_OF_SCORES = 128  # whose scores of the whole vocabulary are in memory at once


class State(NamedTuple):
  """What the device keeps from step to step, donated to each program.

  Attributes:
    layers: of each layer the arrays of its pages.
    taken: of each layer that skips tokens int32 [R + 1], places that a row has used; else None.
    token_R: int32 [R + 1], the token that each row drew last. The last row is nobody's.
    counts_RV: int32 [R + 1, V] as `draw` takes them, once a request wants them; None before.
  """

  layers: tuple[tuple[jax.Array, ...], ...]
  taken: tuple[jax.Array | None, ...]
  token_R: jax.Array
  counts_RV: jax.Array | None


class Programs(NamedTuple):
  """The functions that are compiled, with what is static in all of them.

  `verify.verify` is another one.

  Attributes:
    structure: of `Served`, whose arrays are in the first argument.
    stacked: which of them are in each array of it.
    kernels: the chosen implementations.
    slots: of each layer, the tokens that a row can hold.
    own: of each layer, the pages that each row has there for itself; 0 = it has those of its table.
    rules: how sparse layers choose.
  """

  structure: Any
  stacked: tuple[tuple[int, ...], ...]
  kernels: Kernels
  slots: tuple[int, ...]
  own: tuple[int, ...]
  rules: Pass

  def model(self, weights: list[jax.Array]) -> Served:
    """The model of an argument."""
    found = {}
    for array, numbers in zip(weights, self.stacked, strict=True):
      found.update(zip(numbers, array if len(numbers) > 1 else [array], strict=True))
    return self.structure.unflatten([found[number] for number in range(len(found))])

  def chunk(
    self,
    weights: list[jax.Array],
    state: State,
    ids_BT: jax.Array,
    index_BT: jax.Array,
    table_BW: jax.Array,
    of_chunk: jax.Array,
    settings: Settings,
    allowed_V: jax.Array,
    counts_V: jax.Array | None,
    *,
    which: Draw,
    whole: bool,
  ) -> tuple[State, Drawn]:
    """Read a chunk of one row, and draw the token behind it.

    Args:
      weights: of the model.
      state: donated.
      ids_BT: int32 [1, T] the tokens, filled up.
      index_BT: int32 [1, T] their positions; -1 = filled up.
      table_BW: int32 [1, W] pages of the row.
      of_chunk: int32: the row, the place of the last token, whether the row begins anew, and
        whether the draw counts.
      settings: of the row.
      allowed_V: bool, which tokens may come.
      counts_V: what the chunk adds to the counts.
      which: what is needed of the draw.
      whole: nothing of the row was read before.
    """
    row, at, first, last = of_chunk
    model, row_B = self.model(weights), row[None]
    taken = tuple(None if t is None else t.at[row].mul(1 - first) for t in state.taken)
    state = state._replace(taken=taken)
    if state.counts_RV is not None:
      assert counts_V is not None
      before_V = state.counts_RV[row] * (1 - first)
      counts_V = (before_V // 2 + counts_V // 2) * 2 + ((before_V | counts_V) & 1)
      state = state._replace(counts_RV=state.counts_RV.at[row].set(counts_V))
    view = View(table_BW, self.kernels, whole)
    x_BTD, state = self.extend(model, state, ids_BT, index_BT, row_B, view)
    x_BD = jax.lax.dynamic_index_in_dim(x_BTD, at, axis=1, keepdims=False)
    return _draw(model, state, x_BD, row_B, index_BT[:, at], settings, allowed_V, which, last)

  def decode(
    self,
    weights: list[jax.Array],
    state: State,
    of_rows: jax.Array,
    before: Drawn,
    settings: Settings,
    allowed_V: jax.Array,
    *,
    which: Draw,
  ) -> tuple[State, jax.Array, Drawn]:
    """Feed the last token of each row, and draw the next.

    All that changes is written to where it was: the kernels of a call are those of the call before
    with the same addresses, and a graph of them is launched as it is.

    Args:
      weights: of the model.
      state: donated.
      of_rows: donated, int32 [B, 2 + W]: rows, positions of the tokens to feed (-1 = nobody's),
        pages. One array, as each that the host sends takes its time.
      before: donated, what the last call drew. It is not read.
      settings: of the rows.
      allowed_V: bool, which tokens may come.
      which: what is needed of the draw.

    Returns:
      The state, `of_rows` of a step that goes on with the same pages, and what was drawn.
    """
    row_B, index_B, table_BW = of_rows[:, 0], of_rows[:, 1], of_rows[:, 2:]
    del before
    model, view = self.model(weights), View(table_BW, self.kernels, whole=False)
    ids_B1, index_B1 = state.token_R[row_B][:, None], index_B[:, None]
    x_BTD, state = self.extend(model, state, ids_B1, index_B1, row_B, view)
    state, drawn = _draw(model, state, x_BTD[:, 0], row_B, index_B, settings, allowed_V, which, 1)
    return state, of_rows.at[:, 1].add(index_B >= 0), drawn

  def score(
    self,
    weights: list[jax.Array],
    state: State,
    ids_BT: jax.Array,
    index_BT: jax.Array,
    target_BT: jax.Array,
    table_BW: jax.Array,
    of_rows: jax.Array,
    *,
    whole: bool,
  ) -> tuple[State, tuple[jax.Array, jax.Array]]:
    """Read parts of texts, and score the tokens behind theirs.

    Args:
      weights: of the model.
      state: donated.
      ids_BT: int32 [B, T] the tokens, filled up.
      index_BT: int32 [B, T] their positions; -1 = filled up.
      target_BT: int32 [B, T] the tokens behind them; -1 = not asked for.
      table_BW: int32 [B, W] pages of the rows.
      of_rows: int32 [B, 2]: rows, and whether each begins anew.
      whole: nothing of the rows was read before.

    Returns:
      The logarithms of the targets' probabilities among all tokens of the model, float32 [B, T],
      and whether each is the likeliest.
    """
    model, (row_B, first_B) = self.model(weights), of_rows.T
    taken = tuple(None if t is None else t.at[row_B].mul(1 - first_B) for t in state.taken)
    view = View(table_BW, self.kernels, whole)
    state = state._replace(taken=taken)
    x_BTD, state = self.extend(model, state, ids_BT, index_BT, row_B, view)

    def some(x_ND, target_N):
      logits_NV = model.logits(x_ND)
      of_target_N = jnp.take_along_axis(logits_NV, target_N[:, None], axis=1)[:, 0]
      logprob_N = of_target_N - jax.nn.logsumexp(logits_NV, axis=1)
      return logprob_N, jnp.argmax(logits_NV, axis=1) == target_N

    x_BTD = reshard(x_BTD, None, None, None)  # for the loop goes over its rows
    x_ND, target_N = x_BTD.reshape(-1, x_BTD.shape[2]), target_BT.reshape(-1)
    split = lambda a: a.reshape(-1, min(len(a), TOKENS_OF_SCORES), *a.shape[1:])
    scores = jax.lax.map(lambda of: some(*of), (split(x_ND), split(target_N)))
    return state, tuple(a.reshape(ids_BT.shape) for a in scores)

  def extend(
    self,
    model: Served,
    state: State,
    ids_BT: jax.Array,
    index_BT: jax.Array,
    row_B: jax.Array,
    view: View,
  ) -> tuple[jax.Array, State]:
    """Run tokens of some rows: their final activations [B, T, d_model], and the state with them."""
    caches, of_layers = [], (model.layers, state.layers, state.taken, self.slots, self.own)
    for layer, arrays, taken, slots, own in zip(*of_layers, strict=True):
      of_rows = None if taken is None else taken[row_B]
      table_BW = row_B[:, None] * own + jnp.arange(own) if own else view.table_BW
      seen = dataclasses.replace(view, table_BW=table_BW)
      caches.append(LayerCache(pages_of(layer, arrays, seen, slots), of_rows))
    x_BTD, caches = model.extend(ids_BT, index_BT, caches, self.rules)
    taken = tuple(
      None
      if before is None or cache.taken_B is None
      else before.at[row_B].set(reshard(cache.taken_B, None))
      for before, cache in zip(state.taken, caches, strict=True)
    )
    return x_BTD, state._replace(layers=tuple(c.kv.arrays for c in caches), taken=taken)


def _draw(model, state, x_BD, row_B, index_B, settings, allowed_V, which, counted):
  """Draw the token behind `x_BD` of some rows, and note it."""
  logits_BV = jnp.where(allowed_V, model.logits(x_BD), -jnp.inf)
  counts_BV = state.counts_RV[row_B] if which.penalties else None
  drawn = draw(logits_BV, settings, index_B, counts_BV, which)
  state = state._replace(token_R=state.token_R.at[row_B].set(drawn.id_B))
  if state.counts_RV is not None:
    state = state._replace(counts_RV=state.counts_RV.at[row_B, drawn.id_B].add(2 * counted))
  return state, drawn
