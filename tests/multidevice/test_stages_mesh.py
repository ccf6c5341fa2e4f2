"""A pipeline of stages: losses, gradients and scores of one device with the same accumulation."""

import functools
import re
from typing import Any, NamedTuple

import equality
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import RTOL
from helpers import make_test_mesh, micro_batches, named_leaves, random_rows, tiny_config
from processes import run_job

from ats_jax.checkpoint import CheckpointManager, abstract_like
from ats_jax.config.schema import CheckpointConfig
from ats_jax.model.layout import stacks
from ats_jax.sharding.mesh import to_global
from ats_jax.sharding.pipeline import join_micro_batches, pipeline, split_micro_batches
from ats_jax.step.program import make_program

ACCUM, ROWS, STEPS = 4, 16, 2
ONE = {}
CFG = equality.CFG | {"data.batch_size": ROWS, "step.accum_steps": ACCUM, "model.dropout": 0.1}
MOE = equality.MOE | {"moe.noise": 0.3}
MOD = {"mod.routing": "learned", "mod.capacity": 0.5, "mod.every": 1}
KINDS = {
  "dense": {},
  "deep": {"model.num_layers": 4},
  "deeper": {"model.num_layers": 8},
  "moe": MOE,
  "capacity": MOE | {"moe.dispatch": "capacity", "moe.capacity_factor": 0.8},
  "alternating": MOE | {"moe.every": 2, "model.num_layers": 4},
  "alternating_8": MOE | {"moe.every": 2, "model.num_layers": 8},
  "mod": MOD,
  "deep_mod": MOD | {"model.num_layers": 4},
}


class Run(NamedTuple):
  losses: np.ndarray
  grads: dict[str, np.ndarray]
  layers: dict[str, np.ndarray]  # metrics of sparse layers
  buffers: dict[str, np.ndarray]
  scores: list[np.ndarray]
  shardings: list[dict[str, Any]]
  compilations: int
  text: str


def mesh_of(sizes):
  return make_test_mesh(**({"data": 1, "fsdp": 1, "tensor": 1} | sizes))


def of_all_layers(leaves: dict[str, Any]) -> dict[str, np.ndarray]:
  """Arrays by name; those of the rounds of a pipeline as those of one stack."""
  found: dict[str, list[np.ndarray]] = {}
  for name, value in leaves.items():
    found.setdefault(re.sub(r"segments\[\d+\]", "segments[0]", name), []).append(np.asarray(value))
  return {name: np.concatenate(v) if len(v) > 1 else v[0] for name, v in found.items()}


@functools.cache
def run(kind: str, *sizes: tuple[str, int], rounds: int = 1, **step: Any) -> Run:
  pipelined = {"mesh.stage": dict(sizes).get("stage", 1), "mesh.stage_rounds": rounds}
  pipelined |= {f"step.{name}": value for name, value in step.items()}
  cfg, mesh = tiny_config(CFG | KINDS[kind] | pipelined), mesh_of(dict(sizes))
  with jax.set_mesh(mesh):
    program = make_program(cfg)
    state, rules = program.init(), program.training_rules(1)
    shardings = [{k: v.sharding for k, v in named_leaves(state).items()}]
    rows = [random_rows(cfg, ROWS, seed=s) for s in range(STEPS)]
    batches = [to_global(micro_batches(r, ACCUM), mesh) for r in rows]
    text = program.train_step.lower(state, batches[0], rules).compile().as_text()
    losses, grads = [], {}
    for batch in batches:
      state, metrics = program.train_step(state, batch, rules)
      losses.append(float(metrics["train/loss"]))
      if not grads:  # after one update the first moment is (1 - b1) times the gradient
        mu = named_leaves(state.opt_state[0].mu)
        grads = {k: v / (1 - cfg.optimizer.b1) for k, v in of_all_layers(mu).items()}
    shardings.append({k: v.sharding for k, v in named_leaves(state).items()})
    # Of rows that the stages can share, and of fewer.
    score = lambda n: program.eval_step(
      state.weights, to_global({k: v[:n] for k, v in rows[0].items()}, mesh), program.rules(1)
    )
    return Run(
      np.array(losses),
      grads,
      {k: np.asarray(v) for k, v in named_leaves(metrics.layers).items()},
      of_all_layers({k: v for k, v in named_leaves(state.model).items() if "_E" in k}),
      [np.asarray(score(n)) for n in (ROWS, ROWS // ACCUM)],
      shardings,
      program.train_step._cache_size(),
      text,
    )


def assert_equal(many: Run, one: Run):
  def close(got, want, name):
    np.testing.assert_allclose(got, want, RTOL, RTOL / 10 * np.abs(want).max(), err_msg=name)

  close(many.losses, one.losses, "losses")
  assert len(set(one.losses.tolist())) == STEPS  # there is something to compare
  for got, want in zip(many.scores, one.scores, strict=True):
    close(got, want, "scores")
  for part in ("grads", "layers", "buffers"):
    got, want = getattr(many, part), getattr(one, part)
    assert got.keys() == want.keys()
    for name, value in want.items():
      close(got[name], value, name)
  assert all(np.abs(g).max() > 1e-5 for name, g in one.grads.items())


def collectives(text: str, name: str) -> list[tuple[int, ...]]:
  """The shape of each result, on a device."""
  found = re.findall(rf"= \(?\w+\[([\d,]*)\][^=]*? {name}(?:-start)?\(", text)
  return [tuple(int(n) for n in dims.split(",") if n) for dims in found]


def assert_no_stack_is_gathered(many: Run, rows: int):
  """What is gathered is what enters the pipeline, and no more than the weights of a layer."""
  entering = lambda shape: shape[:3] == (ACCUM, rows, 16)
  gathered = collectives(many.text, "all-gather")
  assert sum(map(entering, gathered)) >= 3  # activations, positions, segments
  layer = max(np.prod(v.shape[1:]) for k, v in many.grads.items() if ".segments[" in k)
  assert max(np.prod(shape) for shape in gathered if not entering(shape)) <= layer


@pytest.mark.mesh
def test_two_stages_equal_one_device():
  many = run("dense", ("stage", 2))
  assert_equal(many, run("dense"))
  assert many.compilations == 1
  assert many.shardings[0] == many.shardings[1]
  of_layers = {k: s.spec[0] for k, s in many.shardings[0].items() if ".segments[" in k}
  assert len(of_layers) > 20 and set(of_layers.values()) == {"stage"}
  # One to the next stage and one back, each in a loop over the ticks; no gather of a stack.
  assert len(collectives(many.text, "collective-permute")) == 2
  assert_no_stack_is_gathered(many, ROWS // ACCUM)


@pytest.mark.mesh
@pytest.mark.parametrize(
  ("kind", "sizes"),
  [
    pytest.param("deep", {"stage": 4}, marks=pytest.mark.slow),
    pytest.param("deep", {"stage": 2, "data": 2}, marks=pytest.mark.slow),
    pytest.param("deep", {"stage": 2, "fsdp": 2}, marks=pytest.mark.slow),
    pytest.param("dense", {"stage": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param("moe", {"stage": 2, "expert": 2}, marks=pytest.mark.slow),
    ("moe", {"stage": 2, "fsdp": 2, "tensor": 2}),
    ("capacity", {"stage": 2, "expert": 2}),
    pytest.param("alternating", {"stage": 2}, marks=pytest.mark.slow),
    ("mod", {"stage": 2, "data": 2}),
  ],
  ids=str,
)
def test_stages_compose(kind, sizes):
  many = run(kind, *sizes.items())
  assert_equal(many, run(kind))
  assert many.compilations == 1
  shards = np.prod([sizes.get(axis, 1) for axis in ("data", "fsdp", "expert")])
  assert_no_stack_is_gathered(many, ROWS // ACCUM // shards)
  if set(sizes) <= {"stage", "data"}:
    # Activations, and in a model that skips layers how many each token went through.
    assert len(collectives(many.text, "collective-permute")) == (3 if kind == "mod" else 2)


@pytest.mark.compat
def test_two_rounds_equal_one_device():
  many = run("deep", ("stage", 2), rounds=2)
  assert_equal(many, run("deep"))
  assert many.compilations == 1 and many.shardings[0] == many.shardings[1]
  # Each stage has a half of each round, and hands on and back as with one round.
  of_layers = {k: s.spec[0] for k, s in many.shardings[0].items() if ".segments[" in k}
  assert set(of_layers.values()) == {"stage"} and any(".segments[1]" in k for k in of_layers)
  assert len(collectives(many.text, "collective-permute")) == 2
  assert_no_stack_is_gathered(many, ROWS // ACCUM)


@pytest.mark.mesh
@pytest.mark.parametrize(
  ("kind", "sizes", "rounds"),
  [
    ("deeper", {"stage": 2, "fsdp": 2}, 4),
    ("deeper", {"stage": 4, "tensor": 2}, 2),
    ("alternating_8", {"stage": 2, "expert": 2}, 2),
    ("deep_mod", {"stage": 2, "data": 2}, 2),
  ],
  ids=str,
)
def test_rounds_compose(kind, sizes, rounds):
  many = run(kind, *sizes.items(), rounds=rounds)
  assert_equal(many, run(kind))
  assert many.compilations == 1
  shards = np.prod([sizes.get(axis, 1) for axis in ("data", "fsdp", "expert")])
  assert_no_stack_is_gathered(many, ROWS // ACCUM // shards)


@pytest.mark.mesh
@pytest.mark.parametrize(
  ("kept", "unroll"), [("dots", 1), ("names", 2), ("qkv", 2), ("attention", 1)]
)
def test_a_stage_keeps_what_a_policy_says(kept, unroll):
  """And computes less again in its backward pass; the values are the same."""
  products = lambda many: many.text.count(" dot(")
  inputs_alone = run("deep", ("stage", 2), scan_unroll=unroll)
  many = run("deep", ("stage", 2), scan_unroll=unroll, remat_stages=kept)
  assert_equal(many, run("deep"))
  assert products(many) < products(inputs_alone)


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
  values = lambda state: of_all_layers(named_leaves(state.model))

  def through(sizes, step, rounds=1):
    pipelined = {"mesh.stage": sizes.get("stage", 1), "mesh.stage_rounds": rounds}
    cfg, mesh = tiny_config(CFG | KINDS["deep"] | pipelined), mesh_of(sizes)
    with (
      jax.set_mesh(mesh),
      CheckpointManager(tmp_path, CheckpointConfig(), None, stacks(cfg)) as manager,
    ):
      program = make_program(cfg)
      if step:
        abstract = abstract_like(program.init(abstract=True), mesh)
        found, state, _ = manager.restore_latest(abstract)
        assert found == step
        for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
          assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
      else:
        state = program.init()
      manager.save(step + 1, state, {})
      manager.wait()
      return values(state)

  first = through({"stage": 2, "fsdp": 2}, 0)
  two_rounds = {"stage": 2, "data": 2}, 2
  for step, (sizes, rounds) in enumerate((({}, 1), ({"stage": 4}, 1), two_rounds, ({}, 1)), 1):
    now = through(sizes, step, rounds)
    for name, value in first.items():
      np.testing.assert_array_equal(now[name], value, err_msg=name)


@pytest.mark.mesh
def test_generation_takes_the_weights_from_their_stages():
  tokens = np.arange(1, 9, dtype=np.int32)[None]

  def scores(sizes, rounds=1):
    pipelined = {"mesh.stage": sizes.get("stage", 1), "mesh.stage_rounds": rounds}
    cfg = tiny_config(CFG | KINDS["deep"] | pipelined)
    with jax.set_mesh(mesh_of(sizes)):
      program = make_program(cfg)
      model, rules = program.init().model, program.rules(1)

      @jax.jit
      def extend(model, tokens_BT):
        cache = model.empty_cache(1, 16, rules, jnp.float32)
        index_BT = jnp.arange(8)[None]
        return model.extend(tokens_BT, index_BT, index_BT >= 0, cache, rules)[0]

      return np.asarray(extend(model, tokens))

  np.testing.assert_allclose(scores({"stage": 4}), scores({}), 1e-5, 1e-6)
  np.testing.assert_allclose(scores({"stage": 2}, rounds=2), scores({}), 1e-5, 1e-6)


PROCESS = """
from pathlib import Path
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from ats_jax.checkpoint import CheckpointManager
from ats_jax.config.schema import CheckpointConfig

directory, stacks = Path(argv[0]), {"s": (0, 1, 2, 3)}
mesh = jax.make_mesh((2, 2), ("stage", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
with jax.set_mesh(mesh), CheckpointManager(directory, CheckpointConfig(), None, stacks) as manager:
  def state(step):
    return jax.jit(
      lambda: {
        "w": jax.random.normal(jax.random.key(step), (8, 4), out_sharding=P("fsdp")),
        "s": {"q": jax.random.normal(jax.random.key(step), (4, 8), out_sharding=P("stage", "fsdp")),
              "k": jax.random.normal(jax.random.key(step), (4, 6), out_sharding=P("stage", None))},
      })()

  manager.save(1, state(1), {})
  manager.wait()
  jax.experimental.multihost_utils.sync_global_devices("saved")
  _, restored, _ = manager.restore_latest(state(0))
  for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(state(1)), strict=True):
    for a, b in zip(got.addressable_shards, want.addressable_shards, strict=True):
      np.testing.assert_array_equal(a.data, b.data)
  say("restored")
"""


@pytest.mark.mesh
def test_each_stage_in_a_process_of_its_own_saves_its_layers(tmp_path):
  assert run_job(PROCESS, tmp_path, tmp_path, devices=2) == [["restored"], ["restored"]]
