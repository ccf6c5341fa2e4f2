"""State <-> disk: verified checkpoints, and stopping on a signal."""

from ats_jax.checkpoint.integrity import CheckpointError as CheckpointError
from ats_jax.checkpoint.layout import abstract_like as abstract_like
from ats_jax.checkpoint.manager import CheckpointManager as CheckpointManager
from ats_jax.checkpoint.manager import keep_for as keep_for
from ats_jax.checkpoint.preemption import StopSignal as StopSignal
from ats_jax.checkpoint.reader import committed_steps as committed_steps
from ats_jax.checkpoint.reader import load_extra as load_extra
from ats_jax.checkpoint.reader import restore_tree as restore_tree
