"""What a step is made of: the plain step alone where a config asks for no more."""

from pathlib import Path

import jax
import pytest
from helpers import tiny_config

from ats_jax.config.schema import Config
from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.step.core import step_function
from ats_jax.step.objective import Pretraining
from ats_jax.step.parts import parts_of
from ats_jax.step.program import Program, abstract_batch, make_program

ROOT = Path(__file__).parents[3]
PLAIN = {"orchestrator.mode": "off", "num_steps": 1000}
MOE = {"moe.num_experts": 4, "moe.top_k": 2}
ACT = {"orchestrator.mode": "act"}
MOD = {"mod.routing": "learned", "mod.capacity": 0.5}
PHASES = {
  "data.sources": {"a": ("a.txt",), "b": ("b.txt",)},
  "data.phases": (Phase(Table(a=1), steps=4), Phase(Table(a=1, b=1))),
  "optimizer.schedule": "constant",
  "optimizer.phase_moments": "reset",
}


KEPT = {"optimizer.phase_moments": "keep"}


def abstract(cfg: Config, program: Program):
  """The arguments of a step, as shapes."""
  accum, data = cfg.step.accum_steps, cfg.data
  shape = (accum, data.batch_size // accum, data.seq_len)
  return program.init(abstract=True), abstract_batch(shape, None, program.objective)


def test_a_dense_step_is_the_plain_step_alone(mesh):
  cfg = tiny_config(PLAIN)
  program = make_program(cfg)
  state, batch = abstract(cfg, program)
  rules = program.training_rules(1)
  core = jax.jit(
    step_function(cfg, program.optimizer, Pretraining(cfg)),
    donate_argnums=0,
    static_argnames="rules",
  )
  assert str(program.train_step.trace(state, batch, rules).jaxpr) == str(
    core.trace(state, batch, rules).jaxpr
  )


@pytest.mark.parametrize(
  ("changes", "names"),
  [
    ({}, []),
    (MOE, ["Sparse"]),
    (MOD, ["Sparse"]),
    ({"optimizer.ema_decay": 0.9}, ["Ema"]),
    (ACT, ["Guard"]),
    (MOE | ACT | {"optimizer.ema_decay": 0.9}, ["ExpertDropout", "Sparse", "Ema", "Guard"]),
    (PHASES | ACT, ["Phases", "Guard"]),
    ({**PHASES, "data.phases": (Phase(Table(a=1), trains=("head",)),)} | KEPT, ["Freezing"]),
  ],
  ids=str,
)
def test_a_config_lists_its_parts_in_order(mesh, changes, names):
  cfg = tiny_config(PLAIN | changes)
  assert [type(part).__name__ for part in parts_of(cfg, make_program(cfg).optimizer)] == names


@pytest.mark.parametrize(
  ("changes", "devices", "names"),
  [
    ({"mesh.fsdp": 2, "mesh.zero": 1}, 4, ["Shards"]),
    ({"mesh.compress_gradients": "fp8"}, 8, ["Replicas"]),
    ({"mesh.compress_gradients": "fp8"}, 1, []),  # there is one replica
  ],
  ids=str,
)
def test_a_mesh_lists_its_parts_too(changes, devices, names):
  cfg = tiny_config(PLAIN | {"mesh.data": -1} | changes)
  with on_mesh(cfg, make_mesh(cfg, jax.devices()[:devices])):
    optimizer = make_program(cfg).optimizer
    assert [type(part).__name__ for part in parts_of(cfg, optimizer)] == names


def test_each_value_of_a_step_has_a_name_of_its_own(mesh):
  """Names come with the output of a step, here of one that nobody runs."""
  cfg = tiny_config(PLAIN | MOE | MOD | ACT)
  program = make_program(cfg)
  step = lambda state, batch: program.train_step(state, batch, program.training_rules(1))
  _, metrics = jax.eval_shape(step, *abstract(cfg, program))
  assert metrics.values.shape == (len(metrics.names),)
  assert len(set(metrics.names)) == len(metrics.names) and not set(metrics.names) & {
    *metrics.layers
  }
  assert {name.split("/")[0] for name in metrics.names} == {"train", "moe", "mod", "reflex"}
  page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
  assert not [name for name in (*metrics.names, *metrics.layers) if f"`{name}`" not in page]
