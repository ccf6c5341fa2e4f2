"""What the forward pass of the training says of a text, to compare an engine with."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.sharding.apply import num_shards, replicate


def logprobs_of(
  model: Decoder, rules: Pass, context: Sequence[int], continuation: Sequence[int]
) -> np.ndarray:
  """The logarithms [tokens] of the probabilities of a continuation.

  Args:
    model: the decoder.
    rules: those of an evaluation pass.
    context: ids before it, at least one.
    continuation: its ids.
  """
  ids = np.array([*context, *continuation], np.int32)
  rows = num_shards("batch")  # every device needs a row; all rows are alike
  padded = np.zeros((rows, max(16, 1 << (len(ids) - 1).bit_length())), np.int32)
  padded[:, : len(ids)] = ids
  logprobs_TV = _logprobs(model, padded, len(ids), rules)
  return np.asarray(logprobs_TV)[np.arange(len(context) - 1, len(ids) - 1), ids[len(context) :]]


@functools.partial(jax.jit, static_argnames="rules")
def _logprobs(model, ids_BT, length, rules):
  at_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
  known_BT = (at_BT < length).astype(jnp.int32)
  x_BTD, _ = model(ids_BT, positions_BT=at_BT, segment_ids_BT=known_BT, rules=rules)
  return jax.nn.log_softmax(replicate(model.logits(x_BTD))[0])
