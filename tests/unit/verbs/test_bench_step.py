"""What `bench step` refuses to run."""

import pytest
from helpers import tiny_config

from ats_jax.metrics.memory import GIB
from ats_jax.verbs.bench.step import measure


@pytest.mark.thorough
def test_what_does_not_fit_is_left_out_before_and_after_it_is_compiled():
  cfg = tiny_config({"model.vocab_size": 320})
  found = measure(cfg, steps=1, segments=1)
  planned, needed = found["memory/planned_gib"], found["memory/predicted_gib"]
  assert 0.5 * needed < planned < 2 * needed
  with pytest.raises(ValueError, match=r"does not fit: the planner estimates 0\.0 GiB a device"):
    measure(cfg, steps=1, segments=1, memory_gib=planned / 2)
  assert (
    needed > planned / 1.1 + 100 / GIB
  )  # so there is a limit that only the compiler's plan exceeds
  with pytest.raises(ValueError, match="does not fit: the compiled step needs"):
    measure(cfg, steps=1, segments=1, memory_gib=(needed + planned / 1.1) / 2)
