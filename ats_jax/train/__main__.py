"""`python -m ats_jax.train`: the verb `train`."""

from ats_jax.verbs import cli
from ats_jax.verbs.train import COMMANDS

if __name__ == "__main__":
  cli.main("train", COMMANDS)
