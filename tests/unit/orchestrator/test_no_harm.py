"""The guard does no harm: what an audit found, through the doors that production has.

Short runs of a small model on bytes, with the production step and supervisor: a legitimate second
domain, one flipped bit, a count that is off, a schedule that is wrong, and nothing at all.
"""

import functools

import jax
import pytest
from helpers import make_test_mesh

from ats_jax.orchestrator import hooks
from lab.faults import bench as bench_module
from lab.faults.bench import Bench, Suite
from lab.faults.course import run
from lab.faults.scenarios import SCENARIOS

STEPS = 100
AS_WELL = 0.02  # nats: less is no difference
FAR = 0.5  # nats: more than the bends of a steep descent make the margin


@pytest.fixture(scope="module")
def result():
  """(arm, scenario) -> its record, and the looks of its supervisor; each run is made once."""
  with jax.set_mesh(make_test_mesh(1, 1, 1)), pytest.MonkeyPatch.context() as patch:
    patch.setattr(bench_module, "SCORED_ROWS", 256)
    share = ("orchestrator.compare_share", 0.5)  # of so few steps, as many as are made again
    bench = Bench(Suite((), tuple(SCENARIOS), (), (("num_steps", STEPS), share)))

    @functools.cache
    def of(name, scenario, seed=0):
      looks = []
      hook = hooks.register(looks.append)
      try:
        return run(bench, name, scenario, seed), looks
      finally:
        hooks.unregister(hook)

    yield of


def kinds(record):
  """What was done, in its order."""
  return [what for _, what, _ in record["actions"]]


@pytest.mark.thorough
def test_a_second_domain_is_trained_on(result):
  """In a tenth of the batches: none is left out, nothing is done about it, both are learned."""
  guarded, _ = result("ours", "script_batch_10")
  clipped, _ = result("clip", "script_batch_10")
  assert not guarded["left_out"] and not guarded["actions"] and not guarded["stops"]
  for domain in ("main", "script"):
    assert guarded["domains"][domain] < clipped["domains"][domain] + AS_WELL


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["flip_weight_30", "flip_nu_31"])
def test_a_flipped_bit_is_named_and_costs_nothing(result, name):
  """Steps with a broken weight are made again; of moments the element begins anew."""
  (guarded, looks), of_weight = result("ours", name), name == "flip_weight_30"
  clipped, _ = result("clip", "clean")
  causes = [cause for look in looks for cause in look.health.causes]
  assert any("/weight or its moments" in cause for cause in causes)
  assert guarded["loss"] < clipped["loss"] + AS_WELL
  assert kinds(guarded) == ["Repeat"] * of_weight and not guarded["stops"]


@pytest.mark.thorough
def test_a_count_that_is_off_is_mended(result):
  """That of steps, which the rate goes by, at the next look that reads it."""
  guarded, _ = result("ours", "flip_step_6")
  # The rate was that of another step until then, and one seed is noise.
  assert guarded["loss"] < result("clip", "clean")[0]["loss"] + FAR
  assert kinds(guarded) == ["CorrectStep"]


@pytest.mark.thorough
def test_a_run_that_diverges_is_never_called_healthy(result):
  """Where nobody may hold the rate."""
  record, looks = result("ours-observe", "computed_x30_forever", seed=5)  # late enough
  assert record["loss"] > result("clip", "clean", seed=5)[0]["loss"] + FAR / 4
  best, far = float("inf"), []
  for look in looks:
    far += [look] if look.reading.probe > best + FAR else []
    best = min(best, look.reading.probe)
  assert far
  for look in far:
    assert look.health.level != "healthy"


@pytest.mark.thorough
def test_nothing_is_done_to_a_clean_run(result):
  """Its weights are bit for bit those of one that nobody watches."""
  guarded, looks = result("ours", "clean")
  assert len(looks) == STEPS // 10 and not guarded["fired"]
  assert guarded["weights"] == result("clip", "clean")[0]["weights"]
