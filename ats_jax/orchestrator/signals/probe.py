"""The probe: held-out text that stays the same, scored now and then with the weights of the moment.

It is read as seldom as its cost asks for, and in between only where something is suspicious.
"""

import math

from ats_jax.data.batch import Batch
from ats_jax.metrics.transfer import start_copy
from ats_jax.model.decoder import Decoder
from ats_jax.model.mod import Pass
from ats_jax.orchestrator.signals.interval import Sums
from ats_jax.step.program import Program

FORWARD = 1 / 3  # of the FLOPs that a token costs in training


class Probe:
  """Held-out text on the mesh.

  Attributes:
    every: looks from one reading to the next, so that it costs no more than it may.
  """

  def __init__(self, program: Program, batch: Batch):
    """Take a batch [rows, seq], or [parts, rows, seq] of which one part at a time is scored."""
    cfg = program.cfg
    tokens = math.prod(batch["tokens"].shape)
    interval = cfg.orchestrator.check_interval * cfg.data.batch_size * cfg.data.seq_len
    self.every = math.ceil(FORWARD * tokens / interval / cfg.orchestrator.probe_share)
    self._parts = (batch,)
    if batch["tokens"].ndim == 3:
      parts = range(batch["tokens"].shape[0])
      self._parts = tuple({name: x[part] for name, x in batch.items()} for part in parts)

  def score(self, program: Program, model: Decoder, rules: Pass) -> Sums:
    """Begin to score `model`; what comes of it is on its way to the host."""
    sums = tuple(program.eval_step(model, part, rules) for part in self._parts)
    start_copy(sums)
    return sums
