"""Keys of randomness: every key is the run's root key, folded with a purpose and with numbers.

Nothing is split: a new purpose changes no number that another one draws.
"""

import enum

import jax


class Purpose(enum.IntEnum):
  """What a key is for. A number is never used for another purpose: runs would draw others."""

  INIT = 0  # weights of step 0
  PASS = 1  # a step's forward passes; those "of a pass" are folded into a layer's key of it
  SURGERY = 2
  EXPERT_DROPOUT = 3  # experts that are left out for a step
  DEPTH = 4  # of a pass: tokens that go through a layer, with random routing
  EXPERT_NOISE = 5  # of a pass: on the router's logits
  ATTENTION_DROPOUT = 6  # of a pass
  MLP_DROPOUT = 7  # of a pass
  ADAPTERS = 8  # their first values
  RATING = 9  # the head of a model that rates


def fold(key: jax.Array, purpose: Purpose, *numbers: jax.Array | int) -> jax.Array:
  """Fold a purpose and then numbers, such as a step or a layer, into a key, in this order."""
  for number in (purpose, *numbers):
    key = jax.random.fold_in(key, number)
  return key


def maybe_fold(key: jax.Array | None, purpose: Purpose) -> jax.Array | None:
  """`fold`, or None without a key: then nothing is drawn."""
  return None if key is None else fold(key, purpose)
