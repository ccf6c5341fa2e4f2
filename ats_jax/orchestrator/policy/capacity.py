"""Too few places for experts: what is dropped teaches nothing, and no balance mends that."""

from ats_jax.config.schema import Config
from ats_jax.orchestrator.actions.settings import ChangeSettings
from ats_jax.orchestrator.policy.state import Memory

# Of moe.capacity_factor: 1 to 1.25 in Switch (arXiv:2101.03961), 2 in GShard (arXiv:2006.16668).
LADDER = (1.0, 1.25, 1.5, 2.0)
LOOKS = 10  # in a row, in which too much is dropped


def more_room(cfg: Config, memory: Memory) -> ChangeSettings | None:
  """The next rung, if too much has been dropped for long.

  Args:
    cfg: the run as it is now.
    memory: of the policy, after a look.
  """
  higher = [factor for factor in LADDER if factor > cfg.moe.capacity_factor]
  is_long = memory.crowded > 0 and memory.crowded % LOOKS == 0
  if cfg.moe.dispatch != "capacity" or not higher or not is_long or memory.latched:
    return None
  return ChangeSettings((("moe.capacity_factor", higher[0]),))
