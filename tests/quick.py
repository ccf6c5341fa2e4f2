"""Which test files `pytest --quick` runs: those that import nothing that compiles or forks."""

import re
from pathlib import Path

_SLOW = (
  r"jax|flax|optax|orbax|subprocess|multiprocessing|commands|runs|documents|"
  r"canonical|in_process|golden_run|checkpoint_helpers|lab\.mod_savings|processes import run_job|"
  r"ats_jax\.planner\.(?:describe|fit|memory)|"
  r"ats_jax\.(?:api|checkpoint|data\.chat\.jinja|step\.program|train|verbs\.bench)\b"
)
_IMPORT = re.compile(rf"^(?:import|from) (?:{_SLOW})\b", re.MULTILINE)


def is_quick(path: Path) -> bool:
  """Whether a test file imports none of these."""
  return not _IMPORT.search(path.read_text(encoding="utf-8"))
