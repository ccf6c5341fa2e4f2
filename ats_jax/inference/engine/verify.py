"""Guessed tokens: the program that reads them and draws behind each, for some rows at once.

Behind every token of a guess one is drawn as without it, with the random numbers of its place. A
guess is right up to the first token that is not the one drawn, which takes its place. So a token is
accepted with the probability that it has, and one in place of another comes from what is left of
the distribution, as in rejection sampling (arXiv:2211.17192) from a draft that is certain: texts
have the same distribution as without guesses, and but for rounding the same tokens.

Keys and values of wrong tokens stay in their slots: a slot is written again before a token sees it.

Letters: B rows, K tokens of a guess, T = 1 + K tokens, W pages of a row, N = B * T, V vocab.
"""

import jax
import jax.numpy as jnp

from ats_jax.inference.engine.caches import View
from ats_jax.inference.engine.programs import Programs, State
from ats_jax.inference.engine.sampling import Draw, Drawn, Settings, draw


def verify(
  of_model: Programs,
  most: int,
  weights: list[jax.Array],
  state: State,
  of_rows: jax.Array,
  settings: Settings,
  allowed_V: jax.Array,
  *,
  which: Draw,
) -> tuple[State, Drawn]:
  """Feed the last token of each row and a guess, and draw as many as are right and one more.

  Args:
    of_model: what is static in all programs.
    most: tokens of a guess at most, K.
    weights: as of `Programs.decode`, like all that is not said here.
    state: likewise.
    of_rows: int32 [B, K + 2 + W]: tokens that may follow, -1 = none, before what `Programs.decode`
      takes; not donated.
    settings: likewise.
    allowed_V: likewise.
    which: likewise.

  Returns:
    The state, and what was drawn, each array as [B, T, ...]; ids behind the last one are -1.
  """
  guess_BK, of_rows = of_rows[:, :most], of_rows[:, most:]
  row_B, start_B, table_BW = of_rows[:, 0], of_rows[:, 1], of_rows[:, 2:]
  rows, tokens = len(row_B), 1 + most
  model, view = of_model.model(weights), View(table_BW, of_model.kernels, whole=False)
  ids_BT = jnp.concatenate([state.token_R[row_B][:, None], jnp.maximum(guess_BK, 0)], axis=1)
  place_T, last_B = jnp.arange(tokens), jnp.sum(guess_BK >= 0, axis=1)
  is_real_BT = (start_B[:, None] >= 0) & (place_T <= last_B[:, None])
  index_BT = jnp.where(is_real_BT, start_B[:, None] + place_T, -1)
  x_BTD, state = of_model.extend(model, state, ids_BT, index_BT, row_B, view)

  logits_NV = model.logits(x_BTD.reshape(rows * tokens, -1))
  logits_NV = jnp.where(allowed_V, logits_NV, -jnp.inf)
  counts_NV = None
  if which.penalties:
    assert state.counts_RV is not None
    vocab = state.counts_RV.shape[1]
    came_BTV = jnp.cumsum(jax.nn.one_hot(ids_BT, vocab, dtype=jnp.int32).at[:, 0].set(0), axis=1)
    counts_NV = (state.counts_RV[row_B][:, None] + 2 * came_BTV).reshape(-1, vocab)
  each = Settings(*(jnp.repeat(of, tokens, axis=0) for of in settings))
  drawn = draw(logits_NV, each, index_BT.reshape(-1), counts_NV, which)
  drawn = jax.tree.map(lambda a: a.reshape(rows, tokens, *a.shape[1:]), drawn)

  id_BT = drawn.id_B
  right_B = jnp.sum(jnp.cumprod(id_BT[:, :-1] == guess_BK, axis=1), axis=1)
  token_B = jnp.take_along_axis(id_BT, right_B[:, None], axis=1)[:, 0]
  state = state._replace(token_R=state.token_R.at[row_B].set(token_B))
  is_drawn_BT = place_T <= right_B[:, None]
  if state.counts_RV is not None:
    state = state._replace(counts_RV=state.counts_RV.at[row_B[:, None], id_BT].add(2 * is_drawn_BT))
  return state, drawn._replace(id_B=jnp.where(is_drawn_BT, id_BT, -1))
