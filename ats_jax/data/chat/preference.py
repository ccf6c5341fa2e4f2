"""Pairs of answers as a format of text: both in one row, each a segment of its own."""

import numpy as np

from ats_jax.data.chat.format import ChatFormat
from ats_jax.data.chat.pairs import PAIRS
from ats_jax.data.chat.segments import REJECTED


class PreferenceFormat(ChatFormat):
  """Pairs of conversations.

  A pair is one document: the preferred conversation, eos, the other one. So both are in one row
  whatever the order of rows is. Codes say where the second one begins.
  """

  second_code = REJECTED
  schema = PAIRS

  @property
  def key(self) -> list[str]:
    """See the base class."""
    return ["pairs", "whole"]

  @property
  def weights(self) -> np.ndarray:
    """[4 * NUM_CODES] float32: those of both conversations are the same."""
    return np.tile(super().weights, 4)

  def _counts(self, codes: np.ndarray) -> bool:
    weights, is_second = self.weights[codes], codes >= REJECTED
    return bool(weights[is_second].any() and weights[~is_second].any())
