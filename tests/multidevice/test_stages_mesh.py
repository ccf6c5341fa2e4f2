"""A pipeline of stages: what goes between them, checkpoints, generation; values on a toy."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import compiled_step, every_equation, traced_step
from equality import ACCUM, ROWS, config_of, mesh_of, of_all_layers
from helpers import named_leaves

from ats_jax.checkpoint import CheckpointManager, abstract_like
from ats_jax.config.schema import CheckpointConfig
from ats_jax.model.layout import stacks
from ats_jax.sharding.mesh import on_mesh
from ats_jax.sharding.pipeline import join_micro_batches, pipeline, split_micro_batches
from ats_jax.step.program import make_program

DEEP = {"model.num_layers": 4}
TWO_ROUNDS = {"stage": 2, "stage_rounds": 2}


def filled(x: jax.Array) -> jax.Array:
  """Random numbers where there were zeros."""
  values = np.random.default_rng(0).random(x.shape).astype(x.dtype)
  return jax.device_put(values, x.sharding)


def made(text: str, name: str) -> list[tuple[int, ...]]:
  """The shape of each result of a collective, on a device."""
  found = re.findall(rf"= \(?\w+\[([\d,]*)\][^=]*? {name}(?:-start)?\(", text)
  return [tuple(int(n) for n in dims.split(",") if n) for dims in found]


@pytest.mark.mesh
def test_two_rounds_send_activations_alone():
  """Values are those of one device in test_train_mesh.py."""
  cfg, mesh = config_of("dense", TWO_ROUNDS, DEEP), mesh_of(TWO_ROUNDS)
  with on_mesh(cfg, mesh):
    text = compiled_step(cfg, mesh).as_text()
    weights = named_leaves(make_program(cfg).init(abstract=True).model)
  # Each stage has a half of each round.
  of_layers = {k: x for k, x in weights.items() if ".segments[" in k}
  assert {x.sharding.spec[0] for x in of_layers.values()} == {"stage"}
  assert any(".segments[1]" in name for name in of_layers)
  # One to the next stage and one back, each in a loop over the ticks.
  assert len(made(text, "collective-permute")) == 2
  # What is gathered is what enters the pipeline, and no more than the weights of a layer.
  entering = lambda shape: shape[:3] == (ACCUM, ROWS // ACCUM, 16)
  gathered = made(text, "all-gather")
  assert sum(map(entering, gathered)) >= 3  # activations, positions, segments
  layer = max(np.prod(x.shape[1:]) for x in of_layers.values())
  assert max(np.prod(shape) for shape in gathered if not entering(shape)) <= layer


@pytest.mark.mesh
def test_a_stage_keeps_what_a_policy_says():
  """And computes less again in its backward pass."""
  products = {}
  for kept in ("none", "names"):
    sizes = {"stage": 2, "step.scan_unroll": 2}
    changes = {} if kept == "none" else {"step.remat_stages": kept}
    cfg, mesh = config_of("dense", sizes, DEEP | changes), mesh_of(sizes)
    with on_mesh(cfg, mesh):
      every = every_equation(traced_step(cfg, mesh).jaxpr.jaxpr)
      products[kept] = sum(e.primitive.name == "dot_general" for e in every)
  assert products["names"] < products["none"]


@pytest.mark.compat
def test_ticks_of_the_bubble_count_nothing():
  """Statistics are sums over real micro-batches, and no gradient comes of the others."""

  def stage(layers, x, beside, key):
    del beside, key
    return x * jnp.prod(layers), jnp.broadcast_to(jnp.sum(x), layers.shape)

  def f(layers, x):
    y, (stats,) = pipeline(stage, [layers], x, (), None, micro=4)
    return jnp.sum(y * jnp.arange(8.0)[:, None]) + 0.1 * jnp.sum(stats), stats

  layers, x = np.array([2.0, 3.0, 0.5, 1.5], np.float32), np.arange(16.0, dtype=np.float32)
  x = x.reshape(8, 2)
  with jax.set_mesh(mesh_of({"stage": 4})):
    cut = jax.device_put(layers, jax.NamedSharding(jax.sharding.get_mesh(), jax.P("stage")))
    (_, stats), grads = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(cut, x)
  before = np.array([1.0, 2.0, 6.0, 3.0], np.float32)  # product of the layers before
  np.testing.assert_allclose(stats, before * x.sum(), 1e-6)
  weight = np.arange(8.0)[:, None] * layers.prod() + 0.1 * before.sum()
  np.testing.assert_allclose(grads[1], np.broadcast_to(weight, x.shape), 1e-6)
  of_y = (np.arange(8.0)[:, None] * x).sum() * layers.prod() / layers
  of_stats = [0.1 * x.sum() * before[i + 1 :].sum() / layers[i] for i in range(4)]
  np.testing.assert_allclose(grads[0], of_y + of_stats, 1e-5)


@pytest.mark.compat
def test_gradients_of_bfloat16_weights_are_added_up_in_float32():
  # Too little for bfloat16 beside the one that comes first in the backward pass.
  x = np.full((64, 2), 2.0**-10, np.float32)
  x[-1] = 0.5
  stage = lambda layers, x, beside, key: (x * layers.astype(jnp.float32)[0], ())
  f = lambda layers: jnp.sum(pipeline(stage, [layers], jnp.array(x), (), None, micro=64)[0])
  with jax.set_mesh(mesh_of({"stage": 2})):
    ones = jnp.ones(2, jnp.bfloat16, out_sharding=jax.P("stage"))
    grad = jax.jit(jax.grad(f))(ones)
  assert grad.dtype == jnp.bfloat16
  np.testing.assert_array_equal(np.asarray(grad, np.float32), [1.125, 1.125])


@pytest.mark.compat
def test_rows_change_hands_for_nothing():
  mesh = mesh_of({"stage": 2, "data": 2})
  x = np.arange(8 * 4 * 3).reshape(8, 4, 3)
  with jax.set_mesh(mesh):
    cut = jax.device_put(x, jax.NamedSharding(mesh, jax.P("stage", "data")))
    rows = jax.jit(join_micro_batches).lower(cut).compile()
    back = jax.jit(lambda r: split_micro_batches(r, 8)).lower(rows(cut)).compile()
    np.testing.assert_array_equal(back(rows(cut)), x)
  for text in (rows.as_text(), back.as_text()):
    assert not re.search("all-|permute|reduce-scatter", text)


@pytest.mark.mesh
def test_a_checkpoint_goes_from_stages_to_one_device_and_back(tmp_path):
  """With other moments sharded in each; the weights serve to generate, wherever they are."""
  tokens = np.arange(1, 17, dtype=np.int32).reshape(2, 8)

  def scores(program, model):
    rules = program.rules(1)

    @jax.jit
    def extend(model, tokens_BT):
      cache = model.empty_cache(2, 16, rules, jnp.float32)
      index_BT = jnp.broadcast_to(jnp.arange(8), (2, 8))
      return model.extend(tokens_BT, index_BT, index_BT >= 0, cache, rules)[0]

    return np.asarray(extend(model, tokens))

  def through(sizes, step):
    cfg, mesh = config_of("dense", sizes, DEEP | {"model.dropout": 0.0}), mesh_of(sizes)
    with (
      on_mesh(cfg, mesh),
      CheckpointManager(tmp_path, CheckpointConfig(), None, stacks(cfg)) as manager,
    ):
      program = make_program(cfg)
      if step:
        abstract = abstract_like(program.init(abstract=True), mesh)
        number, state, _ = manager.restore_latest(abstract)
        assert number == step
        for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
          assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
        drawn.append(scores(program, state.model))
      else:
        state = program.init()
        state = dataclasses.replace(state, opt_state=jax.tree.map(filled, state.opt_state))
      manager.save(step + 1, state, {})
      manager.wait()
      found.append(of_all_layers(named_leaves((state.model, state.opt_state))))

  found, drawn = [], []
  meshes = {"stage": 2, "fsdp": 2, "zero": 1}, {}, TWO_ROUNDS | {"fsdp": 2, "zero": 2}
  for step, sizes in enumerate(meshes):
    through(sizes, step)
    for name, value in found[0].items():
      np.testing.assert_array_equal(found[-1][name], value, err_msg=name)
  np.testing.assert_allclose(*drawn, 1e-5, 1e-6)
