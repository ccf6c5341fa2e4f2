"""What the forward pass of the training says of a text, to compare an engine with."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass


def logprobs_of(
  model: Decoder, rules: Pass, context: Sequence[int], continuation: Sequence[int]
) -> np.ndarray:
  """The logarithms [tokens] of the probabilities of a continuation, on one device.

  Args:
    model: the decoder.
    rules: those of an evaluation pass.
    context: ids before it, at least one.
    continuation: its ids.
  """
  ids = np.array([*context, *continuation], np.int32)
  padded = np.zeros((1, max(16, 1 << (len(ids) - 1).bit_length())), np.int32)
  padded[0, : len(ids)] = ids
  logprobs_TV = _logprobs(model, padded, len(ids), rules)
  return np.asarray(logprobs_TV)[np.arange(len(context) - 1, len(ids) - 1), ids[len(context) :]]


@functools.partial(jax.jit, static_argnames="rules")
def _logprobs(model, ids_1T, length, rules):
  at_1T = jnp.arange(ids_1T.shape[1])[None]
  known_1T = (at_1T < length).astype(jnp.int32)
  x_1TD, _ = model(ids_1T, positions_BT=at_1T, segment_ids_BT=known_1T, rules=rules)
  return jax.nn.log_softmax(model.logits(x_1TD)[0])
