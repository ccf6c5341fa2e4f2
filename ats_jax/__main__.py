"""The program: `ats-jax VERB [flags]`, or `python -m ats_jax VERB [flags]`."""

import sys

from ats_jax.verbs import main

if __name__ == "__main__":
  sys.exit(main())
