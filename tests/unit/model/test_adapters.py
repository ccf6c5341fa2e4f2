"""Adapters and frozen weights: what is computed, what trains, what a step holds, and errors."""

import re

import canonical
import jax
import numpy as np
import pytest
from helpers import tiny_config

from ats_jax.model.adapters import facts, merged
from ats_jax.model.layers import project
from ats_jax.model.param import Frozen, is_variable, params_of, role_name
from ats_jax.model.quantised import Codes
from ats_jax.planner.memory import state_memory
from ats_jax.step.program import make_program

LORA = {"finetune.adapter.name": "lora", "finetune.adapter.rank": 3}
DORA = LORA | {"finetune.adapter.name": "dora"}


def trained(cfg, steps=2):
  """States before and after some updates."""
  first = state = canonical.state(cfg)
  first = canonical.copied(first)
  for seed in range(steps):
    state, _ = canonical.step(cfg, state, canonical.rows(cfg, seed))
  return first, state


def variables(model):
  leaves = jax.tree.leaves(model, is_leaf=is_variable)
  return [v for v in leaves if isinstance(v, Frozen)], params_of(model)


TABLES = {"finetune.adapter.targets": ("embedding", "head")}
TIED = LORA | {"model.tie_embeddings": True, "finetune.adapter.targets": ("embedding", "down")}
ROUTER = {"finetune.adapter.rank": 6, "finetune.adapter.targets": ("router",)}


@pytest.mark.parametrize(
  ("kind", "settings"),
  [
    ("dense", DORA),
    ("experts", LORA),
    ("dense", LORA | TABLES),
    ("dense", DORA | TABLES | {"model.scale_embeddings": True}),
    ("dense", TIED),
    ("experts", LORA | ROUTER),
    ("experts", DORA | ROUTER),
  ],
)
def test_a_merged_model_computes_the_same(kind, settings):
  cfg = canonical.config(kind, settings)
  _, state = trained(cfg)
  rows = {k: v[0] for k, v in canonical.rows(cfg).items()}
  program = canonical.program(cfg)
  with jax.set_mesh(canonical.mesh()):
    score = lambda model: np.asarray(program.eval_step(model, rows, program.rules(1)))
    plain = merged(state.model)
    np.testing.assert_allclose(score(plain), score(state.model), rtol=1e-5)
    assert not variables(plain)[0]
    assert not np.allclose(score(plain), score(canonical.state(cfg).model), rtol=2e-5)
    whole = plain.embed if plain.head is None else plain.head
    np.testing.assert_allclose(state.model.head_weights(), whole.weight[...], rtol=1e-6)


@pytest.mark.parametrize("settings", [LORA, {"finetune.freeze": ("matrix", "norm")}])
def test_what_is_frozen_stays_and_has_no_moments(settings):
  cfg = canonical.config("dense", settings)
  before, after = trained(cfg)
  frozen, params = variables(after.model)
  for old, new in zip(variables(before.model)[0], frozen, strict=True):
    np.testing.assert_array_equal(old[...], new[...])
  for old, new in zip(variables(before.model)[1], params, strict=True):
    assert not np.array_equal(old[...], new[...])
  size = sum(param.size for param in params)
  moments = sum(x.size for x in jax.tree.leaves(after.opt_state) if x.ndim)
  assert moments == 2 * size


def test_a_step_of_adapters_leaves_out_the_gradients_of_weights():
  def compiled(settings):
    cfg = canonical.config("dense", settings | {"model.vocab_size": 500})
    program = canonical.program(cfg)
    with jax.set_mesh(canonical.mesh()):
      state = canonical.state(cfg)
      lowered = program.train_step.lower(state, canonical.rows(cfg), program.training_rules(1))
      return lowered.compile()

  # What has the shape of the tables, which no activation has, beside the tables themselves.
  made = re.compile(r"= f32\[500,32\]\S* (dot|scatter|fusion|add|custom-call)\(")
  adapters, whole = compiled(LORA | {"finetune.adapter.rank": 1}), compiled({})
  assert adapters.cost_analysis()["flops"] < 0.75 * whole.cost_analysis()["flops"]
  assert made.search(whole.as_text()) and not made.search(adapters.as_text())


def test_gradients_of_an_adapted_layers_input_are_added_by_matmuls(mesh):
  cfg = canonical.config("dense", LORA)
  layer = jax.tree.map(lambda x: x[0], canonical.state(cfg).model.segments[0].layers[0])
  loss = lambda x: sum(y.sum() for y in project(x, (layer.attn.q, layer.attn.k, layer.attn.v)))
  x = jax.numpy.ones((2, 8, cfg.model.d_model))
  eqns = jax.make_jaxpr(jax.grad(loss))(x).jaxpr.eqns
  made = {var: eqn.primitive.name for eqn in eqns for var in eqn.outvars}
  sums = [eqn for eqn in eqns if eqn.primitive.name == "add_any" and eqn.outvars[0].aval.ndim > 1]
  of_input = [eqn for eqn in sums if eqn.outvars[0].aval.shape == x.shape]
  assert len(of_input) == 3  # of q, k, v and the adapters
  for eqn in of_input:  # XLA takes a sum with one matmul as its operand into that matmul
    assert "optimization_barrier" in [made[var] for var in eqn.invars]


def test_only_the_layers_asked_for_train():
  cfg = canonical.config("dense", {"model.num_layers": 3, "finetune.layers": "1-2"})
  frozen, params = variables(canonical.state(cfg).model)
  assert {v.shape[0] for v in frozen} == {1}
  assert {role_name(v) for v in params} == {"embedding", "head", "matrix", "norm"}
  cfg = canonical.config("dense", LORA | {"model.num_layers": 3, "finetune.layers": "2"})
  _, params = variables(canonical.state(cfg).model)
  assert len(params) == 14 and {v.shape[0] for v in params} == {1}


NF4 = LORA | {"finetune.adapter.base": "nf4"}


@pytest.mark.parametrize(("kind", "settings"), [("dense", NF4 | DORA), ("experts", NF4)])
def test_a_quantised_base_stays_and_is_merged_as_it_is_used(kind, settings):
  cfg = canonical.config(kind, settings)
  before, after = trained(cfg)
  codes = [v for v in variables(after.model)[0] if isinstance(v, Codes)]
  assert {v.dtype for v in codes} == {np.dtype("uint8")}
  for old, new in zip(variables(before.model)[0], variables(after.model)[0], strict=True):
    np.testing.assert_array_equal(old[...], new[...])
  rows = {k: v[0] for k, v in canonical.rows(cfg).items()}
  program = canonical.program(cfg)
  with jax.set_mesh(canonical.mesh()):
    score = lambda model: np.asarray(program.eval_step(model, rows, program.rules(1)))
    np.testing.assert_allclose(score(merged(after.model)), score(after.model), rtol=1e-5)
  plain = canonical.config(kind, settings | {"finetune.adapter.base": "plain"})
  plain = canonical.program(plain).counts
  assert (program.counts.parameters, program.counts.frozen) == (plain.parameters, plain.frozen)
  assert " parameters as nf4, " in facts(after.model)["quantised"]


@pytest.mark.parametrize(("remat", "unroll"), [("none", 1), ("names", 1), ("names", 3)])
def test_no_wide_copy_of_a_quantised_stack_is_kept(remat, unroll):
  changes = {"model.d_ff": 96, "model.num_layers": 3, "step.scan_unroll": unroll}
  changes |= {"step.remat": remat}
  cfg = canonical.config("dense", NF4 | changes)
  program = canonical.program(cfg)
  with jax.set_mesh(canonical.mesh()):
    state = program.init(abstract=True)
    lowered = program.train_step.lower(state, canonical.rows(cfg), program.training_rules(1))
  # Of gate, up and down alone: a layer is wide, the stack is not.
  text = lowered.compile().as_text()
  assert re.search(r"f32\[(32,96|96,32)\]", text) and not re.search(r"f32\[3,(32,96|96,32)\]", text)
  # A layer's codes are read once the layer before has run: forward, and to compute it again.
  waits = re.findall(
    r"optimization_barrier .* : tensor<i32>, tensor<8x16x32xf32>\n", lowered.as_text()
  )
  assert len(waits) == (2 * 3 if unroll == 3 else 0)


@pytest.mark.parametrize(
  ("settings", "dtype"),
  [
    (LORA, "bfloat16"),
    (LORA | {"finetune.adapter.train": ("embedding",)}, "float32"),
    ({"finetune.freeze": ("embedding",)}, "float32"),  # which another run may train
  ],
)
def test_an_embedding_beside_adapters_is_as_narrow_as_matrices(settings, dtype):
  cfg = canonical.config("dense", settings | {"precision.param_dtype": "bfloat16"})
  with jax.set_mesh(canonical.mesh()):
    model = canonical.program(cfg).init(abstract=True).model
  assert model.embed.weight.dtype == dtype and model.final_norm.scale.dtype == "float32"


def test_facts_tell_what_is_adapted():
  cfg = canonical.config("experts", LORA | {"finetune.adapter.targets": ("experts", "q")})
  found = facts(canonical.state(cfg).model)
  assert found["adapted"].startswith("26 matrices of 14,336 ")
  assert found["trains"].startswith("adapter 26 tensors, ")
  assert "expert 24 tensors" in found["frozen"]


WRONG = [
  ("dense", {"finetune.adapter.targets": ("experts",)}, "'experts' matches nothing"),
  ("dense", {"finetune.adapter.rank": 17}, "rank=17 is above the width 16 of segments/0/"),
  ("experts", {"finetune.adapter.name": "dora"}, "dora has no form for the experts"),
  ("dense", {"finetune.adapter.targets": ("router",)}, "'router' matches nothing"),
  (
    "dense",
    {"finetune.adapter.targets": ("head",), "model.tie_embeddings": True},
    "'head' is the embedding of this model .*Name embedding",
  ),
  ("dense", TIED | {"finetune.adapter.name": "dora"}, "dora has no form for an embedding"),
  ("dense", {"finetune.adapter.train": ("router",)}, "no parameters of the role 'router'"),
  (
    "dense",
    {"finetune.adapter.train": ("matrix",), "finetune.adapter.base": "int8"},
    "base=int8: no matrix is frozen",
  ),
  ("dense", {"finetune.adapter.name": "none", "finetune.freeze": ("bias",)}, "the role 'bias'"),
  (
    "dense",
    {
      "finetune.adapter.name": "none",
      "finetune.freeze": ("embedding", "matrix", "norm", "head"),
    },
    "nothing trains",
  ),
]


@pytest.mark.parametrize(("kind", "changes", "message"), WRONG)
def test_settings_that_fit_no_model_are_refused(kind, changes, message):
  changes = dict(changes)
  base = {"finetune.adapter.name": "lora", "finetune.adapter.rank": 3}
  if changes.get("finetune.adapter.name") == "none":
    base = {}
  cfg = canonical.config(kind, base | changes)
  with jax.set_mesh(canonical.mesh()), pytest.raises(ValueError, match=message):
    make_program(cfg)


def test_what_frozen_weights_do_not_go_with_is_refused():
  stages = {"mesh.stage": 2, "step.accum_steps": 2}
  with pytest.raises(ValueError, match=r"finetune with mesh\.stage=2"):
    tiny_config(LORA | stages)
  with pytest.raises(ValueError, match=r"finetune with moe\.spare_experts=2"):
    tiny_config(LORA | canonical.EXPERTS | {"moe.spare_experts": 2})
  with pytest.raises(ValueError, match=r"finetune\.freeze: there is no role 'normm'.*'norm'"):
    tiny_config({"finetune.freeze": ("normm",)})


@pytest.mark.parametrize("layers", ["2", "1-0", "a", "0-2"])
def test_layers_that_there_are_not_are_refused(layers):
  with pytest.raises(ValueError, match=r"is no range of the layers 0-1 .*Write FIRST-LAST"):
    tiny_config({"finetune.layers": layers})


def test_the_planner_counts_no_gradients_of_frozen_weights():
  def planned(settings):
    cfg = canonical.config("dense", settings | {"optimizer.name": "adamw"})
    with jax.set_mesh(canonical.mesh()):
      state = canonical.program(cfg).init(abstract=True)
      return canonical.program(cfg).counts, state_memory(cfg, state), state

  counts, parts, state = planned(LORA)
  all_trained, of_all, _ = planned({})
  trained = 4 * sum(param.size for param in params_of(state.model))
  assert parts["gradients"] == parts["mu"] == parts["nu"] == trained
  assert parts["weights"] == of_all["weights"] + trained
  table = counts.parts["embedding"].total
  frozen = all_trained.parameters - table
  assert counts.frozen == frozen and all_trained.frozen == 0
  assert all_trained.flops_causal - counts.flops_causal == 2 * frozen - 6 * trained / 4
