"""Speed on this machine; nothing is trained or kept."""

from ats_jax import cli
from ats_jax.bench import step, sweep

COMMANDS = {"": step.COMMAND, "step": step.COMMAND, "sweep": sweep.COMMAND}
if __name__ == "__main__":
  cli.main("bench", COMMANDS)
