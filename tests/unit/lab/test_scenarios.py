"""What the scenarios of the suite of faults do to a step, and that chance is the seed's alone."""

import jax
import numpy as np
import pytest
from helpers import make_test_mesh, named_leaves, random_rows, tiny_config

from ats_jax.step.program import make_program
from lab.faults.scenarios import EARLIEST, LATEST, SCENARIOS

STEPS = 400
EXPERTS = {"moe.num_experts": 4, "moe.spare_experts": 1, "moe.router_bias": True}
CFG = tiny_config(EXPERTS)
ROWS = {k: v[None] for k, v in random_rows(CFG, CFG.data.batch_size).items()}
FOREIGN = {k: v[None] for k, v in random_rows(CFG, CFG.data.batch_size, seed=1).items()}
EARLY = ("length_jump", "low_rate")  # what there is from the start
OF_STATE = {
  "nan_weight", "scaled_matrix", "flipped_bits", "collapsed_router", "biased_router", "dead_experts"
}  # fmt: skip


def injections(name, seed=0):
  draw = SCENARIOS[name].draw(name, seed, STEPS, CFG.model.vocab_size, lambda domain, step: FOREIGN)
  return draw, [SCENARIOS[name].inject(draw, step, ROWS) for step in range(STEPS)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario(name):
  """It begins at an onset of its seed, leaves the data's rows alone, and then changes something."""
  before = {k: v.copy() for k, v in ROWS.items()}
  draw, injected = injections(name)
  assert injections(name)[0].onset == draw.onset
  assert EARLIEST * STEPS - 1 <= draw.onset < LATEST * STEPS
  assert draw.severity in SCENARIOS[name].severities
  for now in injected[: 0 if name in EARLY else draw.onset]:
    assert now.rows is ROWS and now.rate == now.gradient == 1.0 and now.state is None
  for key, value in ROWS.items():
    np.testing.assert_array_equal(value, before[key])
    assert all(now.rows[key].shape == value.shape for now in injected)
  differs = lambda now: (
    any((now.rows[k] != ROWS[k]).any() for k in ROWS)
    or ((now.rate, now.gradient) != (1.0, 1.0) or now.state is not None)
  )
  hit = [step for step, now in enumerate(injected) if differs(now)]
  assert bool(hit) == (name != "clean")
  assert {step for step, now in enumerate(injected) if now.state} == (
    {draw.onset} if name in OF_STATE else set()
  )


@pytest.mark.thorough
def test_one_array_of_the_weights_is_hit():
  array = lambda x: np.asarray(jax.random.key_data(x) if "key" in str(x.dtype) else x)
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    state = make_program(CFG).init()
    for name in OF_STATE:
      draw, injected = injections(name)
      old = {k: array(v) for k, v in named_leaves(state.model).items()}
      edited = injected[draw.onset].state(jax.tree.map(lambda x: x.copy(), state))
      new = {k: array(v) for k, v in named_leaves(edited.model).items()}
      assert sum(not np.array_equal(old[k], new[k]) for k in old) == 1, name
