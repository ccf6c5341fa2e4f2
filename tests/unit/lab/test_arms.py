"""Arms: what an ablation takes away is gone, rules act on the production step, an oracle knows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh, random_rows, tiny_config

from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.step.reflex import WARMUP_SAMPLES
from lab.faults.arms import ARMS, OTHER_ARMS, build_arm
from lab.faults.bench import Bench, Suite
from lab.faults.inject import Fault
from lab.faults.single import run

pytestmark = [pytest.mark.thorough, pytest.mark.slow]  # of the laboratory

CFG = tiny_config({"optimizer.warmup_steps": 5})
ROWS = {k: v[None] for k, v in random_rows(CFG, CFG.data.batch_size).items()}
OTHER = ROWS | {"targets": (ROWS["targets"] + 7) % CFG.model.vocab_size}


@pytest.fixture(scope="module", autouse=True)
def mesh():
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    yield


CALM = Fault(jnp.float32(1.0), jnp.float32(1.0))


@functools.cache
def warm(name):
  """An arm after a while of calm steps."""
  arm = build_arm(name, CFG)
  state, memory = arm.program.init(), arm.memory
  for _ in range(2 * WARMUP_SAMPLES):
    state, memory, _ = arm.step(state, memory, ROWS, CALM)
  return arm, state, memory


def reaction(name, *, rows=ROWS, **fault):
  """What a warm arm reports of a step, and whether weights moved."""
  arm, state, memory = warm(name)
  copy = jax.tree.map(lambda x: jnp.array(x, copy=True), state)
  given = CALM._replace(**{what: jnp.float32(by) for what, by in fault.items()})
  new, _, metrics = arm.step(copy, memory, rows, given)
  pairs = zip(jax.tree.leaves(new.model), jax.tree.leaves(state.model), strict=True)
  moved = any(not np.array_equal(a, b) for a, b in pairs)
  assert int(new.step) == 2 * WARMUP_SAMPLES + 1
  return metrics.on_host(), moved


@pytest.mark.parametrize(
  ("name", "bounds", "holds"),
  [("reflex", True, True), ("reflex-gradient", False, True), ("reflex-governor", True, False)],
)
@pytest.mark.thorough
def test_ablations(name, bounds, holds):
  row, moved = reaction(name, gradient=1e6)
  assert (row["reflex/grad_scale"] < 1e-2) == bounds and moved
  row, moved = reaction(name, schedule=30.0)
  assert (row["reflex/rate_scale"] < 0.5) == holds and moved


@pytest.mark.parametrize("name", ["reflex", "reflex-gradient", "reflex-governor"])
def test_no_ablation_leaves_out_what_is_finite(name):
  row, moved = reaction(name, rows=OTHER)
  assert row["reflex/z_loss"] > 6.0 and row["reflex/skipped"] == 0.0 and moved


def test_a_rule_leaves_a_step_of_the_production_step_out():
  row, moved = reaction("skip_step", rows=OTHER)
  assert row["rule/skipped"] == 1.0 and not moved
  row, moved = reaction("skip_step")
  assert row["rule/skipped"] == 0.0 and moved


@pytest.mark.parametrize("name", ARMS | OTHER_ARMS)
def test_each_can_be_built(name):
  arm = build_arm(name, CFG)
  kind = (ARMS | OTHER_ARMS)[name]
  assert arm.program.cfg.orchestrator.raise_learning_rate == (name == "ours+rate")
  assert (arm.program.cfg.moe.bias_update == "none") == (name in ("unbalanced", "switch"))
  assert arm.program.cfg.orchestrator.mode == kind.mode
  assert (arm.program.cfg.optimizer.grad_clip == 1.0) == kind.clip
  assert (arm.memory is not None) == (kind.rule is not None)
  assert isinstance(arm.supervise(None, None), Supervisor) == kind.watched


@pytest.mark.thorough
def test_an_oracle_is_told():
  small = {"num_steps": 30, "optimizer.warmup_steps": 5, "data.batch_size": 4, "model.d_model": 16}
  bench = Bench(Suite((), (), (), tuple(small.items())))
  after = {}
  for name in ("clip", "oracle"):
    arm = build_arm(name, bench.cfg)
    for scenario in ("clean", "rate_forever", "nan_weight", "noise_burst"):
      after[name, scenario] = run(bench, arm, scenario, 0, arm.program.init())["loss"]
  clean = after["clip", "clean"]
  for fault in ("clean", "rate_forever", "nan_weight"):
    assert after["oracle", fault] == clean
    assert fault == "clean" or after["clip", fault] != clean
  # The steps with noise are gone: neither trained on, nor made up for.
  assert clean < after["oracle", "noise_burst"] != after["clip", "noise_burst"]
