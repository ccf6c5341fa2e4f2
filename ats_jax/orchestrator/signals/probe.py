"""The probe: held-out text that stays the same, scored at each look with the weights of the moment.

It is as large as its cost allows.
"""

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np

from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.metrics.host_copy import start_copy
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.orchestrator.signals.interval import Finding, Sums, probe_loss, probe_sums
from ats_jax.sharding.apply import num_shards, reshape
from ats_jax.step.program import Program

FORWARD = 1 / 3  # of the FLOPs that a token costs in training
MOST_BLOCKS = 64
LEAST_TOKENS = 1024  # whatever they cost
# Two scores of the same weights may differ by the larger one of these.
MOST_SPREADS = 10.0  # times the spread at the start of the run
ROUNDING_SHARE = 1e-6  # of the loss
ADVICE = (
  "Test this machine's memory and devices, and start again on another from the last checkpoint but "
  "one."
)


def num_blocks(cfg: Config, block_len: int) -> int:
  """How many blocks of `block_len` tokens it has: at most MOST_BLOCKS.

  Of these as many as cost `orchestrator.probe_share` of an interval's training, or LEAST_TOKENS.
  """
  interval = cfg.orchestrator.check_interval * cfg.data.batch_size * cfg.data.seq_len
  tokens = max(cfg.orchestrator.probe_share * interval / FORWARD, LEAST_TOKENS)
  return min(math.ceil(tokens / block_len), MOST_BLOCKS)


def is_exact(program: Program) -> bool:
  """Whether the same computation gives the same bits."""
  return program.device.platform == "cpu" or program.cfg.precision.deterministic


class Probe:
  """Held-out text on the mesh.

  Attributes:
    spread: of its loss when the same weights were scored three times at the start, nats.
  """

  def __init__(self, batch: Batch, domains: Sequence[str] = ()):
    """Take the text.

    Args:
      batch: [rows, seq], or [parts, rows, seq] of which one part at a time is scored.
      domains: of each part the name of its kind of text; () = all is of one kind.
    """
    self.spread, self._disagreed = 0.0, 0
    self._domains = tuple(domains) if len(set(domains)) > 1 else ()
    self._parts = (batch,)
    if batch["tokens"].ndim == 3:
      parts = range(batch["tokens"].shape[0])
      self._parts = tuple({name: x[part] for name, x in batch.items()} for part in parts)

  def begin(self, program: Program, model: Decoder, rules: Pass) -> None:
    """Score `model` a few times; waits for it.

    Raises:
      ValueError: if there is no token to predict.
    """
    sums = [self.score(program, model, rules) for _ in range(3)]
    _, tokens = probe_sums(sums[0])
    if not tokens > 0.0:
      raise ValueError(
        "the probe batch of the orchestrator holds no token that counts in the loss. Give it rows "
        "of text that are not all padding."
      )
    self.spread = float(np.ptp([probe_loss(s) for s in sums]))

  def losses(self, sums: Sums) -> dict[str, float]:
    """Nats per token of what `score` returned, by domain; "" is all of it. Waits for it."""
    parts = {"": sums}
    for name in dict.fromkeys(self._domains):
      parts[name] = tuple(x for x, of in zip(sums, self._domains, strict=True) if of == name)
    return {name: probe_loss(some) for name, some in parts.items()}

  def disagreement(self, program: Program, first: Sums, second: Sums) -> tuple[Finding, ...]:
    """Whether two scores of the same weights differ by more than they may.

    They are equal to the bit on a CPU and with `precision.deterministic`, else within a few times
    what they differed by at the start. The second time in a row nothing but another machine helps.
    """
    one, two = probe_loss(first), probe_loss(second)
    bound = 0.0 if is_exact(program) else max(MOST_SPREADS * self.spread, ROUNDING_SHARE * abs(one))
    if abs(one - two) <= bound or not (math.isfinite(one) or math.isfinite(two)):
      self._disagreed = 0
      return ()
    self._disagreed += 1
    reason = (
      f"the same weights scored the same text at {one:.9g} and at {two:.9g} nats one after the "
      f"other, which may differ by {bound:.2g}: a device computes wrongly"
    )
    return (Finding("system", reason, ADVICE if self._disagreed > 1 else ""),)

  def logits(self, model: Decoder, rules: Pass) -> jax.Array:
    """Begin to find the largest attention logits of `model`, on one row of each shard."""
    found = _largest_logits(model, self._parts[0], rules)
    start_copy(found)
    return found

  def score(self, program: Program, model: Decoder, rules: Pass) -> Sums:
    """Begin to score `model`; what comes of it is on its way to the host."""
    sums = tuple(program.eval_step(model, part, rules) for part in self._parts)
    start_copy(sums)
    return sums


@functools.partial(jax.jit, static_argnames="rules")
def _largest_logits(model: Decoder, batch: Batch, rules: Pass) -> jax.Array:
  """Of each layer, on a few of the rows: their queries are enough, and all their keys count."""
  axes, shards = ("batch", None, "seq"), num_shards("batch")
  shape = lambda rows, seq: (shards, rows // shards, seq)
  first = lambda name: reshape(batch[name], shape(*batch[name].shape), axes=axes)[:, 0]
  return model.largest_logits(
    first("tokens"),
    positions_BT=first("positions"),
    segment_ids_BT=first("segment_ids"),
    rules=rules,
  )
