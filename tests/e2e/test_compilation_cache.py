"""A second start finds its programs compiled."""

import re
from pathlib import Path

import pytest
import runs

pytestmark = [pytest.mark.thorough, pytest.mark.slow]

# Unrolled layers and XLA's default level, so that compiling takes seconds while all else is small.
SETTINGS = (
  "num_steps=2",
  "optimizer.warmup_steps=1",
  "model.num_layers=12",
  "step.scan_unroll=12",
  "data.validation_fraction=0.0",
)
ATTEMPTS = 2  # other work on the machine may disturb one


def secs_to_first_step(output: str) -> float:
  return float(re.search(r"first step done (\S+) s after the run was ready", output)[1])


def entries(cache: Path) -> set[str]:
  """The compiled programs in a cache."""
  return {p.name for p in cache.glob("*-cache")}


def test_second_start_is_at_least_twice_as_fast(tiny, tmp_path):
  times = []
  for attempt in range(ATTEMPTS):
    cache = tmp_path / f"cache{attempt}"
    settings = (*tiny, *SETTINGS, f"compilation_cache={cache}")
    start = lambda folder, settings=settings: runs.start(folder, *settings, XLA_FLAGS="")
    cold = secs_to_first_step(runs.finish(start(tmp_path / f"cold{attempt}")))
    compiled = entries(cache)
    assert any(name.startswith("jit_train_step-") for name in compiled)
    warm = secs_to_first_step(runs.finish(start(tmp_path / f"warm{attempt}")))
    assert entries(cache) == compiled  # nothing was compiled again
    times.append((cold, warm))
    if warm <= cold / 2:
      return
  pytest.fail(f"seconds to the first step, with an empty and a full cache: {times}")
