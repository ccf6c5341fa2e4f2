"""Do all processes decide alike? If not, none of them may go on."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ats_jax.orchestrator.actions.base import to_json
from ats_jax.orchestrator.policy.decide import Decision
from ats_jax.orchestrator.policy.state import Memory
from ats_jax.orchestrator.signals.interval import Reading


def check_agreement(
  memory: Memory,
  reading: Reading,
  decisions: tuple[Decision, ...],
  waiting: Sequence[Mapping[str, Any]] = (),
) -> None:
  """Do all processes see, remember and decide the same? Called before anything is done.

  Args:
    memory: of the policy.
    reading: what it looked at.
    decisions: what it wants done.
    waiting: requests, as JSON values.

  Raises:
    RuntimeError: on every process, if two differ.
  """
  if jax.process_count() == 1:
    return
  acts = [to_json(decision.action) for decision in decisions]
  known = json.dumps([memory.to_json(), reading._asdict(), acts, waiting], sort_keys=True)
  digest = np.frombuffer(hashlib.sha256(known.encode()).digest()[:8], np.uint32)
  if len(np.unique(multihost_utils.process_allgather(digest), axis=0)) > 1:
    raise RuntimeError(
      f"processes see or decide differently at look {memory.checks}, of steps {reading.first} to "
      f"{reading.step}; nothing was done. A device computes wrongly, programs or library versions "
      "differ, or a hook asks for something in one process only. Restart the job from the last "
      "checkpoint on machines with one environment."
    )
