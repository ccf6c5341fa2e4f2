"""`python -m ats_jax.bench --config=...` times a step, `python -m ats_jax.bench ops` the ops."""

import sys

from ats_jax import runtime

if __name__ == "__main__":
  if "ops" in sys.argv[1:]:
    from ats_jax.bench import ops

    runtime.run(ops.main, commands=("ops",))
  else:
    from ats_jax.bench import step

    runtime.run(step.main)
