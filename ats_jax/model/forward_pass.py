"""The static rules of a forward pass: how sparse layers choose, and whether layers use 8 bits."""

import dataclasses

from ats_jax.config.schema import Config
from ats_jax.model.layout import mod_tokens

# Outside of training tokens choose for themselves, by a causal rule, and a row may choose more than
# its capacity. It has this factor times the capacity in places; tokens beyond them skip the layer
# and are counted as overflow.
CAUSAL_CAPACITY_FACTOR = 1.25


@dataclasses.dataclass(frozen=True)
class Pass:
  """The rules of a forward pass. Static: each value is a program of its own.

  Attributes:
    training: experts and tokens are chosen as in training, which looks at whole rows.
    capacity: share of a row's tokens that goes through a layer which skips tokens.
    horizon: outside of training, a shorter row has as many places as a row of this length, so that
      what a text may use does not depend on how far it has been generated.
    fp8: whether the layers of `fp8_layers` multiply in 8 bits.
  """

  training: bool
  capacity: float
  horizon: int = 0
  fp8: bool = True

  def places(self, seq_len: int) -> int:
    """The number of tokens of a row of `seq_len` that fit into a layer which skips tokens."""
    if self.training:
      return mod_tokens(self.capacity, seq_len)
    share = min(1.0, CAUSAL_CAPACITY_FACTOR * self.capacity)
    return min(seq_len, mod_tokens(share, max(seq_len, self.horizon)))


def rules_at(cfg: Config, step: int, *, training: bool) -> Pass:
  """The rules of update `step` (0-based), or for using the weights after that update.

  The capacity falls from `mod.start_capacity` to `mod.capacity` over the first
  `mod.anneal_fraction` of the run, in `mod.rungs` steps of equal ratio.
  """
  mod, length = cfg.mod, cfg.mod.anneal_fraction * cfg.num_steps
  horizon = 0 if training else cfg.data.seq_len
  if step >= length:
    return Pass(training, mod.capacity, horizon)
  rung = int(mod.rungs * step / length)
  ratio = mod.capacity / mod.start_capacity
  return Pass(training, mod.start_capacity * ratio ** (rung / mod.rungs), horizon)
