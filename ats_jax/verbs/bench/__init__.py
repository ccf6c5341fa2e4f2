"""Speed on this machine; nothing is trained or kept."""

from ats_jax.verbs.bench import step, sweep

COMMANDS = {"": step.COMMAND, "step": step.COMMAND, "sweep": sweep.COMMAND}
