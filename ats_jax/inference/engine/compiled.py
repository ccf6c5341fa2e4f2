"""The engine's functions with what jax compiles of them, which equal engines share."""

import functools
from typing import NamedTuple

import jax

from ats_jax.inference.engine.ahead import Jitted
from ats_jax.inference.engine.programs import Programs, State
from ats_jax.inference.engine.sampling import Drawn

KEPT = 4  # engines whose programs stay when these are gone


class Compiled(NamedTuple):
  """Functions of `Programs`, each with its compiled programs; `verify` if tokens are guessed."""

  chunk: Jitted[..., tuple[State, Drawn]]
  decode: Jitted[..., tuple[State, jax.Array, Drawn]]
  score: Jitted[..., tuple[State, tuple[jax.Array, jax.Array]]]
  verify: Jitted[..., tuple[State, Drawn]] | None


@functools.lru_cache(KEPT)
def compiled(of_model: Programs, guess: int) -> Compiled:
  """The compiled functions, the same for engines of which all that is static is equal.

  Args:
    of_model: the functions.
    guess: guessed tokens of a row that are read in a step; 0 = there are none.
  """
  donating = functools.partial(Jitted, donate_argnames="state")
  of_guesses = None
  if guess:
    from ats_jax.inference.engine.verify import verify  # here: few engines guess

    of_guesses = donating(functools.partial(verify, of_model, guess), static_argnames="which")
  return Compiled(
    donating(of_model.chunk, static_argnames=("which", "whole")),
    Jitted(
      of_model.decode,
      donate_argnames=("state", "of_rows", "before"),
      static_argnames="which",
      keep_unused=True,
    ),
    donating(of_model.score, static_argnames="whole"),
    of_guesses,
  )
