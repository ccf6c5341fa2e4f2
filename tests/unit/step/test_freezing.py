"""Phases that train some roles alone: what moves in each, beside what it follows."""

import canonical
import jax
import numpy as np
import pytest
from helpers import micro_batches, random_rows, tiny_config

from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table
from ats_jax.model.layout import place_of
from ats_jax.model.param import Param, is_variable, params_of, role_name
from ats_jax.sharding.mesh import to_global
from ats_jax.step.program import make_program

TEXT = Table(a=1)
LORA = {"finetune.adapter.name": "lora", "finetune.adapter.rank": 2}
LORA |= {"finetune.adapter.train": ("head", "norm")}


def leaves(model):
  """The parameters of a model, with their paths."""
  found = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_variable)
  return [(path, v) for path, v in found if isinstance(v, Param)]


def moved(old, new, role):
  return {role for a, b in zip(old, new, strict=True) if np.any(np.asarray(a) != np.asarray(b))}


def phases(*trains):
  *before, last = trains
  of = (*(Phase(TEXT, steps=2, trains=roles) for roles in before), Phase(TEXT, trains=last))
  return {"data.sources": {"a": ("a.txt",)}, "data.phases": of, "optimizer.schedule": "constant"}


def course(cfg, steps=6):
  """The roles that move in each update, and the last state."""
  state, found = canonical.state(cfg), []
  for step in range(steps):
    before = canonical.copied(state)
    rows = micro_batches(random_rows(cfg, 8, seed=step), cfg.step.accum_steps)
    state, _ = canonical.step(cfg, state, to_global(rows, jax.sharding.get_mesh()))
    pairs = zip(params_of(before.model), params_of(state.model), strict=True)
    found.append({role_name(a) for a, b in pairs if np.any(a[...] != b[...])})
  return found, state


@pytest.mark.parametrize("supervised", [{}, canonical.SUPERVISED])
def test_each_phase_moves_its_roles_alone(supervised, mesh):
  changes = phases(("head",), ("adapter", "adapter_out", "head"), ())
  cfg = canonical.config("dense", LORA | changes | supervised)
  found, _ = course(cfg)
  some = {"adapter", "adapter_out", "head"}
  assert found == [{"head"}] * 2 + [some] * 2 + [some | {"norm"}] * 2


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_each_phase_moves_its_layers_alone(kind, mesh):
  two = Phase(TEXT, steps=2, trains=("matrix", "head"), layers="1")
  more = phases(()) | {"data.phases": (two, Phase(TEXT, layers="0"))}
  cfg = canonical.config(kind, more | {"model.num_layers": 2})
  state = canonical.state(cfg)
  for step in range(4):
    before = canonical.copied(state)
    rows = micro_batches(random_rows(cfg, 8, seed=step), cfg.step.accum_steps)
    state, _ = canonical.step(cfg, state, to_global(rows, jax.sharding.get_mesh()))
    found = {}
    models = zip(*(leaves(x.model) for x in (before, state)), strict=True)
    for (path, old), (_, new) in models:
      segment, place = place_of(path) or (None, None)
      if segment is None:
        found.setdefault("none", set()).update(moved([old[...]], [new[...]], role_name(old)))
        continue
      layers = state.model.layout[segment].layer_indices(place)
      for n, *pair in zip(layers, old[...], new[...], strict=True):
        found.setdefault(n, set()).update(moved(*[[x] for x in pair], role_name(old)))
    assert not found[0 if step < 2 else 1]
    if step < 2:
      assert found[1] == {"matrix"} and found["none"] == {"head"}
    else:
      assert {"matrix", "norm"} <= found[0] and "embedding" in found["none"]


def test_the_optimizer_goes_on_as_if_all_of_them_moved(mesh):
  constant = {"optimizer.schedule": "constant"}
  _, state = course(canonical.config("dense", phases(("head",), ())), steps=1)
  _, want = course(canonical.config("dense", constant), steps=1)
  for x, y in zip(*map(jax.tree.leaves, (state.opt_state, want.opt_state)), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      phases(("router",)),
      r"data.phases\[0\].trains: this run trains no .* 'router', only of embed",
    ),
    (phases(("head",)) | {"optimizer.name": "schedule_free"}, "trains with optimizer.name=sched"),
  ],
)
def test_what_cannot_be_is_refused(changes, message, mesh):
  with pytest.raises(ValueError, match=message):
    make_program(tiny_config(changes))
