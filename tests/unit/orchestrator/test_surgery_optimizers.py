"""Surgery moves what any optimizer keeps of an expert, knowing its state's trees alone."""

import dataclasses

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import named_leaves, tiny_config

from ats_jax.model.param import Role, params_of, roles, trainable
from ats_jax.orchestrator.actions import AddExpert, PruneExpert, ReopenExpert, surgery
from ats_jax.orchestrator.actions.expert_view import find_layer, view_experts
from ats_jax.step.optimizers.base import per_parameter

CFG = tiny_config(
  {
    "model.num_layers": 1,
    "moe.num_experts": 3,
    "moe.spare_experts": 1,
    "moe.d_ff": 48,
    "moe.router_bias": True,
  }
)
LAYER, EXPERT = 0, 1


def masked_lion():
  labels = lambda params: jax.tree.map(
    lambda r: "lion" if r is Role.EXPERT else "sgd", roles(params)
  )
  return optax.partition({"lion": optax.scale_by_lion(), "sgd": optax.sgd(1.0)}, labels)


# Transformations, with the number of arrays that they keep with a row for each expert: Lion for
# experts alone, Adam of optax, and rows and columns of stacks; what is summed over experts has no
# row of one.
TX = optax.chain(
  masked_lion(), optax.scale_by_adam(), optax.scale_by_factored_rms(min_dim_size_to_factor=16)
)
KEEPS = {"mu": 3 + 5, "nu": 5, "v_row": 3, "v_col": 3}


@pytest.mark.thorough
def test_rows_go_with_their_experts(mesh):
  state = canonical.state(CFG)
  ones = lambda x: jnp.ones_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
  opt_state = TX.init(trainable(state.model))
  state = dataclasses.replace(state, opt_state=jax.tree.map(ones, opt_state))
  was = named_leaves(state.opt_state)
  rows = surgery._kept_rows(state, find_layer(CFG, LAYER).block, ())
  assert {name: sum(n == name for n, *_ in rows) for name in KEEPS} == KEEPS

  state = AddExpert(LAYER, EXPERT).apply(state, CFG)
  twin = int(view_experts(CFG, state, LAYER).twin[EXPERT])
  halved = {
    id(array): axis
    for _, array, axis in surgery._kept_rows(state, find_layer(CFG, LAYER).block, ())
  }
  for _, tree in per_parameter(state.opt_state):
    for param in params_of(tree):
      if not jax.tree.leaves(param):
        continue
      want = np.ones(param.shape, np.float32)
      if id(param) in halved:
        np.moveaxis(want, 1 + halved[id(param)], 0)[[EXPERT, twin]] = 0.5
      np.testing.assert_array_equal(param[...], want)
  assert named_leaves(state.opt_state).keys() == was.keys()

  state = ReopenExpert(LAYER, twin).apply(PruneExpert(LAYER, twin).apply(state, CFG), CFG)
  for name, array, axis in surgery._kept_rows(state, find_layer(CFG, LAYER).block, ()):
    row = np.moveaxis(np.asarray(array[...]), 1 + axis, 0)[twin]
    # Of Adam's squares the mean over the others, one of which was halved; else 0.
    np.testing.assert_allclose(row, (0.5 + 1 + 1) / 3 if name == "nu" else 0.0, rtol=1e-6)
