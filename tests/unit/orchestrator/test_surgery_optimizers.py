"""Surgery moves what any optimizer keeps of an expert, knowing its state's trees alone."""

import dataclasses

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import named_leaves, thorough_but, tiny_config

from ats_jax.model.param import Role, params_of, roles, trainable
from ats_jax.orchestrator.actions import AddExpert, MergeExperts, surgery
from ats_jax.orchestrator.actions.expert_view import find_layer, view_experts
from ats_jax.step.optimizers import build_optimizer
from ats_jax.step.optimizers.adamw8bit import to_float32
from ats_jax.step.optimizers.base import per_parameter

SETTINGS = {
  "model.num_layers": 1,
  "moe.num_experts": 3,
  "moe.spare_experts": 1,
  "moe.d_ff": 48,
  "moe.router_bias": True,
}
CFG = tiny_config(SETTINGS)
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
KEPT = (3 + 5) + 5 + 3 + 3 + 2  # rows of mu, nu, v_row, v_col, and v of what is not factored


@pytest.mark.thorough
def test_rows_go_with_their_experts(mesh):
  state = canonical.state(CFG)
  ones = lambda x: jnp.ones_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
  opt_state = TX.init(trainable(state.model))
  state = dataclasses.replace(state, opt_state=jax.tree.map(ones, opt_state))
  was = named_leaves(state.opt_state)
  assert len(surgery._kept_rows(state, find_layer(CFG, LAYER).block, ())) == KEPT

  state = AddExpert(LAYER, EXPERT).apply(state, CFG)
  twin = int(view_experts(CFG, state, LAYER).twin[EXPERT])
  halved = {
    id(array): axis for array, axis in surgery._kept_rows(state, find_layer(CFG, LAYER).block, ())
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


@pytest.mark.parametrize("edit", thorough_but(["split", "merge"], 0))
def test_numbers_are_edited_and_not_their_codes(mesh, edit):
  """Of moments in 8 bits: what other experts have stays bit for bit."""
  coded = {"optimizer.name": "adamw8bit", "optimizer.min_size": 256, "optimizer.block_size": 32}
  cfg = tiny_config(SETTINGS | coded)
  optimizer, rng = build_optimizer(cfg, "cpu"), np.random.default_rng(0)
  state = canonical.state(cfg)
  draw = lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32)
  update = jax.jit(lambda g, s: optimizer.tx.update(g, s, trainable(state.model))[1])
  opt_state = update(jax.tree.map(draw, trainable(state.model)), state.opt_state)
  state = dataclasses.replace(state, opt_state=opt_state)
  (of_experts,) = {len(p.axes) for p in params_of(state.model) if p.role is Role.EXPERT}
  assert of_experts == 3

  def arrays(opt_state):
    """Codes, scales, and numbers of the experts' moments: [slots, ...] of the layer."""
    raw = [opt_state[1]._asdict(), to_float32(cfg.optimizer, opt_state)[1]._asdict()]
    experts = lambda tree: [p for p in params_of(tree) if p.role is Role.EXPERT]
    return [
      {n: [np.array(p[...][0]) for p in experts(kept[n])] for n in kept if n != "steps"}
      for kept in raw
    ]

  codes, numbers = arrays(opt_state)
  assert all(x.dtype == np.uint8 for x in codes["mu"] + codes["nu"])
  other, slot = 2, 3
  if edit == "split":
    state = AddExpert(LAYER, EXPERT, slot).apply(state, cfg)
    edited = {n: {EXPERT: 0.5 * x[EXPERT], slot: 0.5 * x[EXPERT]} for n, x in flat(numbers)}
  else:
    state = MergeExperts(LAYER, EXPERT, other).apply(state, cfg)
    edited = {n: {EXPERT: x[EXPERT] + x[other]} for n, x in flat(numbers)}
  new_codes, new_numbers = map(dict, map(flat, arrays(state.opt_state)))
  for key, old in flat(codes):
    kept = [e for e in range(4) if e not in edited[key[0].removesuffix("_scale"), key[1]]]
    np.testing.assert_array_equal(new_codes[key][kept], old[kept])
  for key, rows in edited.items():
    for expert, want in rows.items():
      got = new_numbers[key][expert]
      root = np.sqrt if key[0] == "nu" else np.asarray
      # A half of all numbers of a block has the same codes; others are within half a cell.
      rounding = 1e-6 if edit == "split" else 0.0071
      largest = np.abs(root(want)).max(-1, keepdims=True)
      assert (np.abs(root(got) - root(want)) <= rounding * largest).all(), key


def flat(of_fields):
  """((field, which parameter), array) of each."""
  return [((name, i), x) for name, found in of_fields.items() for i, x in enumerate(found)]
