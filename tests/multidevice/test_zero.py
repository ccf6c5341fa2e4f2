"""What `mesh.fsdp` shards (`mesh.zero`): moments, gradients, weights; the numbers stay the same."""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from collectives import compiled_step
from helpers import make_test_mesh, micro_batches, named_leaves, random_rows, tiny_config, when

from ats_jax.checkpoint import CheckpointManager, abstract_like
from ats_jax.config import Config
from ats_jax.config.schema import CheckpointConfig
from ats_jax.model.layout import stacks
from ats_jax.orchestrator.actions import AddExpert
from ats_jax.planner.abstract import abstract_mesh, abstract_state
from ats_jax.planner.memory import state_memory
from ats_jax.sharding.mesh import on_mesh, to_global
from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import batch_totals
from ats_jax.step.program import Program, make_program

STEPS = 3
RTOL = 1e-5
# Adam amplifies the difference of the smallest gradients: relative to the largest of a tensor.
ATOL = 1e-5
BASE = {
  "data.batch_size": 16,
  "optimizer.grad_clip": 0.0,
  "optimizer.eps": 1e-4,
  "model.num_layers": 3,
}
GATE = "segments[0].layers[0].mlp.gate.weight.value"
ONE = (1, 1, 1, 1)
KINDS = {
  "dense": {"step.accum_steps": 2, "model.qk_norm": True, "optimizer.ema_decay": 0.9},
  "experts": {"moe.num_experts": 4, "moe.d_ff": 32, "step.remat": "full"},
  "unrolled": {"step.scan_unroll": 3, "step.remat": "dots", "model.tie_embeddings": True},
  "staged": {"step.accum_steps": 4, "model.num_layers": 4},
  "skipping": {"mod.routing": "learned", "mod.capacity": 0.5, "precision.deterministic": True},
}


class Run(NamedTuple):
  losses: np.ndarray
  grads: dict[str, np.ndarray]
  after: dict[str, np.ndarray]
  shards: dict[str, tuple[int, ...]]  # of the state, after the steps
  grad_shards: dict[str, tuple[int, ...]]
  compilations: int


def config(kind: str, zero: int = 3) -> Config:
  return tiny_config(BASE | KINDS[kind] | {"mesh.zero": zero})


def batches(cfg: Config, mesh: jax.sharding.Mesh, steps: range) -> list[Any]:
  rows = [random_rows(cfg, cfg.data.batch_size, seed=s) for s in steps]
  return [to_global(micro_batches(r, cfg.step.accum_steps), mesh) for r in rows]


def shard_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  return {k: v.addressable_shards[0].data.shape for k, v in named_leaves(tree).items()}


def gradients(program: Program, state: Any, batch: Any) -> Any:
  rules = program.training_rules(1)
  of = lambda model, batch, key: sums_and_grads(
    program.objective, model, batch, batch_totals(batch, rules), key, rules
  )[2]
  return jax.jit(of)(state.model, batch, state.key)


@functools.cache
def made(kind: str, zero: int, shape: tuple[int, ...]) -> tuple[Program, Any]:
  """The program of a case and its mesh: tests share what is compiled."""
  cfg, mesh = config(kind, zero), make_test_mesh(*shape)
  with on_mesh(cfg, mesh):
    return make_program(cfg), mesh


@functools.cache
def run(kind: str, zero: int, shape: tuple[int, ...]) -> Run:
  program, mesh = made(kind, zero, shape)
  cfg = program.cfg
  with on_mesh(cfg, mesh):
    state, losses = program.init(), []
    given = batches(cfg, mesh, range(STEPS))
    grads = gradients(program, state, given[0])
    grad_shards = shard_shapes(grads)
    for batch in given:
      state, metrics = program.train_step(state, batch, program.training_rules(1))
      losses.append(float(metrics["train/loss"]))
    return Run(
      np.array(losses),
      {k: np.asarray(v) for k, v in named_leaves(grads).items()},
      {k: np.asarray(v) for k, v in named_leaves(state.model).items()},
      shard_shapes(state),
      grad_shards,
      program.train_step._cache_size(),
    )


def equal(many: dict[str, np.ndarray], one: dict[str, np.ndarray], atol: float = ATOL) -> None:
  assert many.keys() == one.keys()
  for name, wanted in one.items():
    largest = float(np.abs(wanted).max())
    np.testing.assert_allclose(many[name], wanted, RTOL, atol * largest, err_msg=name)


CASES = [("dense", 2, (1, 4, 1, 1)), ("dense", 1, (1, 2, 2, 1))]
GRID = [
  (kind, zero, shape)
  for kind in ("dense", "experts", "unrolled", "skipping")
  for zero, shape in ((1, (2, 2, 2, 1)), (2, (2, 4, 1, 1)), (3, (1, 2, 2, 1)))
] + [("experts", 2, (1, 2, 1, 2)), ("experts", 1, (2, 2, 1, 2))]
# With CASES and STAGED: stages 1 and 2, a loop and none, experts and their axis; stage 3 has tests
# of its own.
CHOSEN = [("unrolled", 2, (2, 4, 1, 1)), ("experts", 1, (2, 2, 1, 2))]
FURTHER = [
  pytest.param(*case, marks=pytest.mark.mesh if case in CHOSEN else pytest.mark.slow)
  for case in GRID
]
STAGED = [
  pytest.param("staged", zero, (1, 2, 1, 1, 2), marks=when(zero, ci=(2,))) for zero in (1, 2)
]
ALL = [*CASES, *FURTHER, *STAGED]


@pytest.mark.parametrize(("kind", "zero", "shape"), ALL)
def test_losses_gradients_and_weights_are_those_of_one_device(kind, zero, shape):
  one, many = run(kind, 3, ONE), run(kind, zero, shape)
  np.testing.assert_allclose(many.losses, one.losses, RTOL)
  equal(many.grads, one.grads)
  # Adam divides by the root of small squares: rounding weighs more after steps than in gradients.
  equal(many.after, one.after, atol=10 * ATOL)
  assert many.compilations == 1 and len({*one.losses.tolist()}) == STEPS


def test_what_each_stage_shards():
  first, second = run(*CASES[1]), run(*CASES[0])
  whole, half = (3, 32, 32), (3, 16, 32)  # the width is halved by tensor
  assert first.shards[f".model.{GATE}"] == first.shards[f".ema.{GATE}"] == whole
  assert first.grad_shards[f".{GATE}"] == whole
  assert {s for k, s in first.shards.items() if k.startswith(".opt") and k.endswith(GATE)} == {half}
  whole, quarter = (3, 32, 64), (3, 8, 64)
  assert second.shards[f".model.{GATE}"] == whole
  assert second.grad_shards[f".{GATE}"] == quarter
  of_optimizer = {s for k, s in second.shards.items() if k.startswith(".opt") and k.endswith(GATE)}
  assert of_optimizer == {quarter}


@pytest.mark.parametrize("case", CASES)
def test_the_plan_knows_the_bytes_of_a_stage(case):
  found, (_, zero, (_, fsdp, tensor, _)) = run(*case), case
  mesh = {"mesh.data": 1, "mesh.fsdp": fsdp, "mesh.tensor": tensor, "mesh.zero": zero}
  cfg = tiny_config(BASE | KINDS["dense"] | mesh)
  with on_mesh(cfg, abstract_mesh(cfg)):
    planned = state_memory(cfg, abstract_state(cfg))
  held = lambda shards, part: sum(
    4 * math.prod(shape) for name, shape in shards.items() if part in name
  )
  grads = held(found.grad_shards, "")
  assert planned["weights"] == held(found.shards, ".model.")
  assert planned["ema"] == held(found.shards, ".ema.") == planned["weights"]
  assert planned["mu"] == planned["nu"] == held(found.shards, ".mu.")
  assert planned["gradients"] == planned["gradient sums"] == grads
  assert planned["mu"] < 1.2 * planned["weights"] / fsdp  # vectors are whole
  assert grads == (planned["mu"] if zero == 2 else planned["weights"])


def test_a_checkpoint_of_one_stage_goes_on_in_another(tmp_path):
  """Stage 1 on a mesh, then 2 on another, then one device: the losses of a run in one go."""
  losses, kept = [], None
  for at, (zero, shape) in enumerate([CASES[1][1:], CASES[0][1:], (3, ONE)]):
    program, mesh = made("dense", zero, shape)
    cfg = program.cfg
    with (
      on_mesh(cfg, mesh),
      CheckpointManager(tmp_path, CheckpointConfig(), None, stacks(cfg)) as manager,
    ):
      if kept is None:
        state = program.init()
      else:
        abstract = abstract_like(program.init(abstract=True), mesh)
        step, state, _ = manager.restore_latest(abstract)
        assert step == at
        for new, old in zip(jax.tree.leaves(state), kept, strict=True):
          if not jax.dtypes.issubdtype(new.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(np.asarray(new), old)
      (batch,) = batches(cfg, mesh, range(at, at + 1))
      state, metrics = program.train_step(state, batch, program.training_rules(1))
      losses.append(float(metrics["train/loss"]))
      typed = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
      kept = [None if typed(x) else np.asarray(x) for x in jax.tree.leaves(state)]
      manager.save(at + 1, state, {})
  np.testing.assert_allclose(losses, run("dense", 3, ONE).losses, RTOL)


@pytest.mark.mesh
@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_edited_state_is_sharded_as_before(zero):
  cfg = tiny_config(
    {"moe.num_experts": 4, "moe.spare_experts": 4, "moe.d_ff": 32, "mesh.zero": zero}
  )
  mesh = make_test_mesh(1, 2, 1, 2)
  with on_mesh(cfg, mesh):
    program = make_program(cfg)
    (batch,) = batches(cfg, mesh, range(1))
    state, _ = program.train_step(program.init(), batch, program.training_rules(1))
    before = {k: v.sharding for k, v in named_leaves(state).items()}
    state = AddExpert(0, 0, 7).apply(state, cfg)
    assert {k: v.sharding for k, v in named_leaves(state).items()} == before
    program.train_step(state, batch, program.training_rules(1))
    assert program.train_step._cache_size() == 1


@pytest.mark.mesh
def test_gradients_of_all_layers_are_never_whole_at_once_in_stage_2():
  """The loop of the backward pass writes a stack of shards; in stage 1 a stack of whole ones."""

  def written(zero: int) -> tuple[int, int]:
    cfg = tiny_config(BASE | {"mesh.zero": zero, "orchestrator.mode": "off"})
    mesh = make_test_mesh(1, 4, 1)
    with on_mesh(cfg, mesh):
      text = compiled_step(cfg, mesh).as_text()
    loops = [line.split(" while(")[0] for line in text.splitlines() if " while(" in line]
    count = lambda shape: max(line.count(shape) for line in loops)
    return count("f32[3,32,64]"), count("f32[3,8,64]")

  weights = 2  # gate and up, which both loops read
  assert written(1) == (weights + 2, 0)
  assert written(2) == (weights, 2)
