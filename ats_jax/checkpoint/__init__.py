"""State <-> disk: verified checkpoints, and stopping on a signal.

A name is imported when it is first used, so that the config of a run can be read without Orbax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from ats_jax.checkpoint.integrity import CheckpointError as CheckpointError
  from ats_jax.checkpoint.layout import abstract_like as abstract_like
  from ats_jax.checkpoint.manager import CheckpointManager as CheckpointManager
  from ats_jax.checkpoint.manager import keep_for as keep_for
  from ats_jax.checkpoint.preemption import StopSignal as StopSignal
  from ats_jax.checkpoint.reader import committed_steps as committed_steps
  from ats_jax.checkpoint.reader import load_extra as load_extra
  from ats_jax.checkpoint.reader import restore_tree as restore_tree

_MODULES = {
  "CheckpointError": "integrity",
  "abstract_like": "layout",
  "CheckpointManager": "manager",
  "keep_for": "manager",
  "StopSignal": "preemption",
  "committed_steps": "reader",
  "load_extra": "reader",
  "restore_tree": "reader",
}


def __getattr__(name: str) -> Any:
  if name in _MODULES:
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
