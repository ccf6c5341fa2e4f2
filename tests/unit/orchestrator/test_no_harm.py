"""The guard does no harm: what an audit found, through the doors that production has.

Short runs of a small model on bytes, with the production step and supervisor: a legitimate second
domain, one flipped bit, a count that is off, a schedule that is wrong, and nothing at all.
"""

import dataclasses
import functools

import canonical
import jax
import pytest
from helpers import make_test_mesh

from ats_jax.orchestrator import hooks
from lab.faults import arms
from lab.faults import bench as bench_module
from lab.faults.bench import Bench
from lab.faults.single import run
from lab.faults.suite import AUDIT

STEPS = 100
AS_WELL = 0.02  # nats: less is no difference
FAR = 0.25  # nats: more than the margin ever is at first, though the rate rose


@pytest.fixture(scope="module")
def result():
  """(arm, scenario) -> its record, and the looks of its supervisor; each run is made once."""
  with jax.set_mesh(make_test_mesh(1, 1, 1)), pytest.MonkeyPatch.context() as patch:
    patch.setitem(arms.OTHER_ARMS, "observe", arms.Kind(mode="observe", watched=True))
    patch.setattr(bench_module, "SCORED_ROWS", 256)
    bench = Bench(dataclasses.replace(AUDIT, settings=(("num_steps", STEPS),)))
    build = functools.cache(lambda name: arms.build_arm(name, bench.cfg))
    first = functools.cache(lambda name: build(name).program.init())

    @functools.cache
    def of(name, scenario):
      arm, looks = build(name), []
      hook = hooks.register(looks.append)
      try:
        return run(bench, arm, scenario, 0, canonical.copied(first(name))), looks
      finally:
        hooks.unregister(hook)

    yield of


@pytest.mark.thorough
def test_a_second_domain_is_trained_on(result):
  """In a tenth of the batches: none is left out, nothing is done about it, both are learned."""
  guarded, _ = result("ours", "minority_batch_10")
  clipped, _ = result("clip", "minority_batch_10")
  assert guarded["tokens"]["script"][0] > 0.05 * STEPS * 16 * 32
  assert all(left_out == 0 for _, left_out in guarded["tokens"].values())
  assert guarded["rollbacks"] == guarded["cuts"] == 0 and not guarded["stops"]
  for domain in ("main", "script"):
    assert guarded["domains"][domain] < clipped["domains"][domain] + AS_WELL


@pytest.mark.thorough
@pytest.mark.parametrize("flipped", [("weight", 30), ("nu", 31)])
def test_a_flipped_bit_is_named_and_costs_nothing(result, flipped):
  """Weights go back, which costs some steps; of moments the element begins anew."""
  place, bit = flipped
  guarded, _ = result("ours", f"flip_{place}_b{bit}")
  clipped, _ = result("clip", f"flip_weight_b{bit}" if place == "weight" else "clean")
  (hit,) = guarded["hit"]
  tensor = hit.removeprefix("model/").rpartition(f"{place}/")[-1]
  assert any(f"{tensor}/weight or its moments" in said for said in guarded["said"])
  assert guarded["loss"] < clipped["loss"] + AS_WELL
  assert guarded["rollbacks"] == (place == "weight") and not guarded["stops"]


@pytest.mark.thorough
def test_a_count_that_is_off_is_mended(result):
  """That of steps, which the rate goes by, at the next look that reads it."""
  guarded, _ = result("ours", "flip_step_b6")
  # The rate was that of another step until then, and one seed is noise of a few hundredths.
  assert guarded["loss"] < result("clip", "clean")[0]["loss"] + 5 * AS_WELL
  assert guarded["rollbacks"] == guarded["cuts"] == 0
  corrected = [action["action"] for *_, action in guarded["decisions"]]
  assert corrected == ["CorrectStep"]


@pytest.mark.thorough
def test_a_run_that_diverges_is_never_called_healthy(result):
  """Where nobody may hold the rate: neither when the loss jumps, nor when that has lasted."""
  record, looks = result("observe", "schedule_x30_forever")
  assert record["loss"] > result("clip", "clean")[0]["loss"] + FAR
  best, far = float("inf"), []
  for look in looks:
    far += [look] if look.reading.probe > best + FAR else []
    best = min(best, look.reading.probe)
  assert len(far) >= 2
  for look in far:
    assert look.judgement.finding is not None and look.health.level != "healthy"


@pytest.mark.thorough
def test_nothing_is_done_to_a_clean_run(result):
  """Its weights are bit for bit those of one that nobody watches."""
  guarded, looks = result("ours", "clean")
  assert len(looks) == STEPS // 10 and not guarded["decisions"] and guarded["acted"] == 0
  assert guarded["weights"] == result("clip", "clean")[0]["weights"]
