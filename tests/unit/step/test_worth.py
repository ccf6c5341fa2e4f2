"""FLOPs saved and the experts' efficiency, against counts of small models and by hand."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import make_test_mesh, tiny_config

from ats_jax.model.count import count
from ats_jax.model.forward_pass import Pass
from ats_jax.step.program import make_program
from ats_jax.step.sparse_value import expert_efficiency, sparse_value_metrics

RULES = Pass(training=True, capacity=0.25)
MOD = {"model.num_layers": 4, "mod.routing": "learned", "mod.capacity": 0.25}


@pytest.mark.parametrize("scope", ["block", "ffn"])
def test_flops_saved_are_those_of_the_model_without_skipping(scope):
  skipping = tiny_config(MOD | {"mod.scope": scope})
  whole = dataclasses.replace(skipping, mod=dataclasses.replace(skipping.mod, capacity=1.0))
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program = make_program(skipping)
    model = program.init(abstract=True).model
  dense = count(whole, model, 16).flops_causal
  counts = program.counts
  assert counts.flops_saved(0.25) == pytest.approx(1.0 - counts.flops_causal / dense)
  assert counts.flops_saved(1.0) == pytest.approx(0.0)
  assert 0.0 < counts.flops_saved(0.5) < counts.flops_saved(0.25) < counts.flops_saved(0.0) < 1.0
  assert sparse_value_metrics(skipping, counts, RULES, {"mod/routed": 0.25}, {}) == {
    "mod/flops_saved": counts.flops_saved(0.25)
  }


def moe(**changes):
  settings = {"moe.num_experts": 4, "moe.top_k": 2, "data.seq_len": 16, "data.batch_size": 8}
  return tiny_config(settings | changes)


def test_efficiency_of_places():
  """Two layers of 4 experts with 10 places in each of 8 rows; 256 choices, a quarter is dropped."""
  cfg = moe(**{"moe.dispatch": "capacity", "moe.capacity_factor": 1.25})
  layers = {
    "moe/load": np.full((2, 4), 0.25),
    "moe/layer_tokens": np.array([128.0, 64.0]),
    "moe/layer_dropped": np.array([0.25, 0.0]),
  }
  full, half = 256 * 0.75 / (8 * 4 * 10), 128 / (8 * 4 * 10)
  assert expert_efficiency(cfg, RULES, layers) == pytest.approx((full + half) / 2)


def test_efficiency_of_places_in_a_layer_that_skips_tokens():
  """Four of 16 tokens go through the second layer, so that its experts have 3 places in a row."""
  cfg = moe(**{"moe.dispatch": "capacity", "mod.routing": "learned", "mod.every": 2})
  layers = {
    "moe/load": np.full((2, 4), 0.25),
    "moe/layer_tokens": np.array([128.0, 32.0]),
    "moe/layer_dropped": np.zeros(2),
  }
  found = expert_efficiency(cfg, RULES, layers)
  assert found == pytest.approx((256 / (8 * 4 * 10) + 64 / (8 * 4 * 3)) / 2)


def test_efficiency_of_devices_that_wait_for_the_fullest():
  load = np.array([[0.4, 0.2, 0.3, 0.1], [0.25, 0.25, 0.25, 0.25]])
  one = expert_efficiency(moe(), RULES, {"moe/load": load})
  assert one == pytest.approx(1.0)
  two = expert_efficiency(moe(**{"mesh.expert": 2}), RULES, {"moe/load": load})
  assert two == pytest.approx((0.5 / 0.6 + 1.0) / 2)
