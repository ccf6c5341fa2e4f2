"""What the arms of a comparison are made with, in a run as it is at their end."""

import dataclasses

from ats_jax.orchestrator.constants import LEAST_MARGIN
from ats_jax.orchestrator.ports import Loop
from ats_jax.orchestrator.signals.watch import Watch
from ats_jax.orchestrator.trials.compare import Means
from ats_jax.orchestrator.trials.snapshots import Snapshots


def means_of(
  watch: Watch,
  loop: Loop | None,
  ring: Snapshots,
  *,
  since: int,
  step: int,
  changed: int,
  eight_bits: bool,
) -> Means | None:
  """The means; None if the model has changed its rules since the arms parted.

  Args:
    watch: scores, with the program of the run.
    loop: makes updates.
    ring: states to begin from.
    since: the step at which the arms part.
    step: at which they end.
    changed: the last step after which something else than a step changed the state.
    eight_bits: whether layers multiply in 8 bits.
  """
  assert loop is not None, "or nothing is compared"
  program = watch.program
  rules, trains = program.rules(step), program.training_rules(step)
  same = lambda at: program.training_rules(at + 1) == trains and program.rules(at) == rules
  if not same(since):
    return None
  usable = lambda kept: kept if kept is not None and same(kept.step) else None
  good, first = usable(ring.back(0)), usable(ring.first)
  means = Means(
    cfg=program.cfg,
    ahead=loop.ahead,
    **watch.scoring(rules),
    catch_up=program.catch_up,
    good=good,
    first=first,
    unchanged=good is not None and changed <= good.step,
    exact=program.device.platform == "cpu" or program.cfg.precision.deterministic,
    margin=LEAST_MARGIN,
  )
  if not eight_bits:
    return means
  wide = watch.scoring(dataclasses.replace(rules, fp8=False))
  return dataclasses.replace(means, wide=dataclasses.replace(means, **wide))
