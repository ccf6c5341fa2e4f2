"""Draw the next token of each row, each with settings of its own, on the device.

Letters: B rows, V vocab, N likeliest.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.inference.engine.request import MOST_LIKELIEST, Sampling
from ats_jax.inference.generator import narrowed, penalised

INTEGERS = ("seed", "top_k")
FLOATS = (
  "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


class Draw(NamedTuple):
  """What a program of sampling must be able to do; static, as each adds to its time.

  Attributes:
    random: some row has a temperature.
    narrow: of these some keep the likeliest tokens only.
    penalties: some row counts the tokens that came.
    likeliest: the likeliest tokens are reported.
  """

  random: bool = False
  narrow: bool = False
  penalties: bool = False
  likeliest: bool = False

  @classmethod
  def of(cls, asked: Sequence[Sampling]) -> "Draw":
    """What rows with these settings need."""
    drawn = [s for s in asked if s.temperature]
    return cls(
      random=bool(drawn),
      narrow=any(s.top_k or s.top_p < 1 or s.min_p for s in drawn),
      penalties=any(penalises(s) for s in asked),
      likeliest=any(s.logprobs for s in asked),
    )


def penalises(sampling: Sampling) -> bool:
  """Whether a request's draws depend on the tokens that came."""
  return bool(
    sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
  )


class Settings(NamedTuple):
  """The settings of rows as arrays.

  Attributes:
    integers_B2: `INTEGERS`; seeds are bits.
    floats_B6: `FLOATS`.
  """

  integers_B2: jax.Array
  floats_B6: jax.Array

  @classmethod
  def of(cls, asked: Sequence[Sampling]) -> "Settings":
    """Those of rows."""
    integers = [[np.uint32(s.seed).view(np.int32), s.top_k] for s in asked]
    floats = [[getattr(s, name) for name in FLOATS] for s in asked]
    return cls(np.array(integers, np.int32), np.array(floats, np.float32))  # type: ignore[arg-type]


class Drawn(NamedTuple):
  """What was drawn; all but the tokens is None if nobody asks for it.

  Attributes:
    id_B: int32 tokens.
    logprob_B: float32, their logarithms before temperature and what narrows a draw.
    likeliest_BN: int32 likeliest tokens, best first.
    likeliest_logprob_BN: float32, theirs.
  """

  id_B: jax.Array
  logprob_B: jax.Array | None = None
  likeliest_BN: jax.Array | None = None
  likeliest_logprob_BN: jax.Array | None = None

  @classmethod
  def zeros(cls, rows: int, vocab: int, which: Draw) -> "Drawn":
    """Arrays as `draw` returns them."""
    ids, wide = jnp.zeros(rows, jnp.int32), (rows, min(MOST_LIKELIEST, vocab))
    if not which.likeliest:
      return cls(ids)
    return cls(ids, jnp.zeros(rows), jnp.zeros(wide, jnp.int32), jnp.zeros(wide))


def draw(
  logits_BV: jax.Array,
  settings: Settings,
  position_B: jax.Array,
  counts_BV: jax.Array | None,
  which: Draw,
) -> Drawn:
  """Draw one token a row.

  Args:
    logits_BV: float32; -inf never comes out.
    settings: of the rows.
    position_B: int32 position of the token before, which makes the draws of a seed differ.
    counts_BV: int32, with `which.penalties`, as `penalised` takes them.
    which: what is needed.
  """
  get = dict(zip(FLOATS, settings.floats_B6.T[..., None], strict=True))
  if which.penalties:
    assert counts_BV is not None
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    logits_BV = penalised(logits_BV, counts_BV, *(get[name] for name in names))
  id_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  if which.random:
    drawn_B = _random(logits_BV, settings, get, position_B, which)
    id_B = jnp.where(get["temperature"][:, 0] == 0, id_B, drawn_B)
  if not which.likeliest:
    return Drawn(id_B)
  logprobs_BV = jax.nn.log_softmax(logits_BV)
  values_BN, ids_BN = jax.lax.top_k(logprobs_BV, min(MOST_LIKELIEST, logits_BV.shape[1]))
  own_B = jnp.take_along_axis(logprobs_BV, id_B[:, None], axis=1)[:, 0]
  return Drawn(id_B, own_B, ids_BN.astype(jnp.int32), values_BN)


def _random(logits_BV, settings, get, position_B, which) -> jax.Array:
  # Subtract the maximum first: a low temperature must not make two of them infinite.
  logits_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
  logits_BV /= jnp.where(get["temperature"] == 0, 1.0, get["temperature"])
  seed_B, top_k_B = settings.integers_B2.T
  if which.narrow:
    logits_BV = narrowed(logits_BV, top_k_B[:, None], get["top_p"], get["min_p"])

  def one(seed, position, logits_V):
    key = jax.random.key(jax.lax.bitcast_convert_type(seed, jnp.uint32))
    key = jax.random.fold_in(key, position)
    return jax.random.categorical(key, logits_V[None])[0].astype(jnp.int32)

  return jax.vmap(one)(seed_B, position_B, logits_BV)
