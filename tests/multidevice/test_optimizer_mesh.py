"""Updates of every optimizer on a mesh: those of one device, and what devices exchange for them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import CFG, KINDS, mesh_of
from helpers import named_leaves, tiny_config

from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table
from ats_jax.model.param import trainable
from ats_jax.sharding.mesh import on_mesh
from ats_jax.step.optimizers import soap
from ats_jax.step.parts.phases import renew_moments
from ats_jax.step.program import make_program

OPTIMIZERS = {
  "adamw": {},
  "lion": {},
  "adafactor": {"optimizer.least_factored": 8},
  "schedule_free": {"optimizer.schedule": "constant"},
  "muon": {},
  "muonh": {},
  "soap": {"optimizer.refresh_every": 1},
  "soap_muon": {"optimizer.refresh_every": 1},
}
UPDATES, LR = 3, 1e-2


def config(kind, name, sizes, layers):
  of_muon = {"optimizer.iteration_dtype": "float32", "optimizer.iterations": 2}
  more = OPTIMIZERS[name] | (of_muon if "muon" in name else {})
  common = {key: value for key, value in CFG.items() if key != "optimizer.eps"}
  of_mesh = {f"mesh.{axis}": size for axis, size in sizes.items()}
  of_optimizer = {"optimizer.name": name, "model.num_layers": layers, **more}
  return tiny_config(common | KINDS[kind] | of_mesh | of_optimizer)


def updates(kind, name, axes, layers=3):  # 2 devices do not divide 3 layers
  """Parameters after some updates by the same gradients, and the compiled update."""
  sizes = dict.fromkeys(axes, 2)
  cfg, mesh = config(kind, name, sizes, layers), mesh_of(sizes)
  with on_mesh(cfg, mesh):
    program = make_program(cfg)
    state = program.init()
    params = trainable(state.model)

    def gradients(seed):
      rng, (leaves, tree) = np.random.default_rng(seed), jax.tree.flatten(params)
      draw = lambda p: jax.device_put(rng.normal(size=p.shape).astype(np.float32), p.sharding)
      return tree.unflatten([draw(p) for p in leaves])

    update = jax.jit(lambda p, g, s: program.optimizer.update(p, g, s, jnp.float32(LR))[:2])
    compiled = update.lower(params, gradients(0), state.opt_state).compile()
    opt_state = state.opt_state
    for seed in range(UPDATES):
      params, opt_state = compiled(params, gradients(seed), opt_state)
    return {n: np.asarray(v) for n, v in named_leaves(params).items()}, compiled


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=() if n == "muon" else pytest.mark.mesh) for n in OPTIMIZERS]
)
def test_a_mesh_updates_as_one_device_does(name, monkeypatch):
  # Rounding decides the basis of what a first gradient does not reach; so it is the same.
  monkeypatch.setattr(soap, "AT_A_TIME", 1)
  many, _ = updates("hybrid", name, ("fsdp", "expert", "tensor"))
  one, _ = updates("hybrid", name, ())
  assert many.keys() == one.keys()
  for key, value in one.items():
    np.testing.assert_allclose(many[key], value, rtol=1e-4, atol=2e-6, err_msg=key)


@pytest.mark.parametrize(
  ("name", "layers"), [("muon", 3), pytest.param("soap", 4, marks=pytest.mark.mesh)]
)
def test_matrices_are_exchanged_once_there_and_once_back(name, layers):
  """The state of SOAP stays where its matrices are worked on, if devices divide the layers."""
  _, compiled = updates("dense", name, ("fsdp", "data"), layers)
  text = compiled.as_text()
  stacks = 7  # q, k, v, out, gate, up, down
  assert len(re.findall(r" all-to-all(?:-start)?\(", text)) == 2 * stacks


def test_a_new_phase_finds_the_state_of_soap_where_it_was():
  """With ZeRO-1 the weights are not distributed as the state is."""
  of_phases = {
    "data.sources": {"a": ("a.txt",)},
    "data.phases": (Phase(Table(a=1), steps=3), Phase(Table(a=1))),
    "optimizer.phase_moments": "reset",
  }
  sizes = {"fsdp": 2, "data": 2}
  of_mesh = {f"mesh.{axis}": size for axis, size in sizes.items()}
  cfg = tiny_config(of_phases | of_mesh | {"optimizer.name": "soap", "mesh.zero": 1})
  with on_mesh(cfg, mesh_of(sizes)):
    program = make_program(cfg)
    state = program.init(abstract=True)
    reset = functools.partial(renew_moments, cfg, program.optimizer, since=0)
    cut = lambda tree: {n: jax.typeof(x).sharding.spec for n, x in named_leaves(tree).items()}
    assert cut(jax.eval_shape(reset, state).opt_state) == cut(state.opt_state)
