"""Speed on this machine; nothing is trained or kept.

`python -m ats_jax bench [step] --config=...` times the training step of a config on random rows.
`python -m ats_jax bench sweep --config=...` does so with settings changed, and picks the best.
`python -m ats_jax tune` finds the tiles with which kernels are fastest on this GPU.
"""

import sys

from absl import flags

from ats_jax import cli

if __name__ == "__main__":
  if "tune" in sys.argv[1:]:
    from ats_jax.bench import tune

    flags.adopt_module_key_flags(tune)
    cli.run(tune.main, commands=("tune",))
  elif "sweep" in sys.argv[1:]:
    from ats_jax.bench import step, sweep

    flags.adopt_module_key_flags(step)
    flags.adopt_module_key_flags(sweep)
    cli.run(sweep.main, commands=("sweep",))
  else:
    from ats_jax.bench import step

    flags.adopt_module_key_flags(step)
    cli.run(step.main, commands=("", "step"))
