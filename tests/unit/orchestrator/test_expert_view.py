"""Which experts a layer has, where it is in the model, and what its settings forbid."""

import numpy as np
import pytest
from flax import nnx
from helpers import tiny_config

from ats_jax.model.layer_kinds import layer_kinds
from ats_jax.model.numerics import numerics
from ats_jax.model.router import Router
from ats_jax.orchestrator.actions import AddExpert
from ats_jax.orchestrator.actions.expert_view import ExpertView, SurgeryError, find_layer
from ats_jax.step.program import make_program

BASE = {"moe.num_experts": 4, "moe.spare_experts": 4, "moe.d_ff": 32, "model.d_ff": 32}


def test_without_spare_slots_surgery_is_off(mesh):
  cfg = tiny_config({"moe.num_experts": 4})
  with pytest.raises(SurgeryError, match=r"surgery is off: .*moe.spare_experts >= 1"):
    AddExpert(0, 0).apply(make_program(cfg).init(abstract=True), cfg)


def test_layers_are_found_in_any_layout():
  cfg = tiny_config(
    BASE
    | {"model.num_layers": 11, "moe.every": 2, "moe.dense_first": 1, "moe.dense_last": 1}
    | {"mod.routing": "learned", "mod.every": 3}
  )
  layers = [i for i, kind in enumerate(layer_kinds(cfg)) if kind.moe]
  places = [find_layer(cfg, layer) for layer in layers]
  assert layers == [2, 4, 6, 8] and len(set(places)) == 4
  for layer in set(range(-1, 12)) - set(layers):
    with pytest.raises(SurgeryError, match=f"layer {layer} has no experts"):
      find_layer(cfg, layer)


@pytest.mark.parametrize(("experts", "spare", "groups"), [(8, 4, 1), (8, 8, 4), (6, 3, 3)])
def test_idle_slots_are_spread_over_groups_and_devices(mesh, experts, spare, groups):
  settings = {"num_experts": experts, "spare_experts": spare, "num_groups": groups}
  cfg = tiny_config({f"moe.{k}": v for k, v in settings.items()} | {"moe.top_k": 1})
  router = Router(cfg, numerics(cfg), nnx.Rngs(params=0))
  is_open = np.array(router.active_S[...])
  assert is_open.sum() == experts
  for ways in range(1, spare + 1):
    if spare % ways == 0 and experts % ways == 0:  # as many on each device
      assert len(set(is_open.reshape(ways, -1).sum(1))) == 1
  assert len(set(is_open.reshape(groups, -1).sum(1))) == 1


def layer(load, closed=(), twins=()):
  """A layer of one group with this load."""
  slots = np.arange(len(load))
  twin = np.full(len(load), -1)
  for one, two in twins:
    twin[[one, two]] = two, one
  return ExpertView(0, ~np.isin(slots, closed), twin, 0.0 * slots, np.array(load), 0 * slots)


def test_the_most_loaded_expert_is_whole_and_open():
  view = layer([0.1, 0.4, 0.2, 0.0, 0.3], closed=[3], twins=[(1, 4)])
  assert view.most_loaded() == 2
  assert view._replace(group=np.array([0, 0, 1, 1, 1])).most_loaded(group=0) == 0
  with pytest.raises(SurgeryError, match="layer 0: all experts are halves"):
    layer([0.5, 0.5], twins=[(0, 1)]).most_loaded()


def test_a_group_keeps_its_own():
  cfg = tiny_config(BASE | {"moe.num_groups": 2, "moe.top_groups": 1, "moe.spare_experts": 2})
  view = layer([0.2, 0.3, 0.0, 0.2, 0.3, 0.0], closed=[2, 5])
  view = view._replace(group=np.array([0, 0, 0, 1, 1, 1]))
  assert view.check_split(0, None) == 2
  assert view.check_split(4, None) == 5
  with pytest.raises(SurgeryError, match="slots 0 and 5 are in groups 0 and 1"):
    view.check_split(0, 5)
  full = view._replace(is_open=np.array([True, True, True, True, True, False]))
  with pytest.raises(SurgeryError, match="no idle slot for a half of expert 1"):
    full.check_split(1, None)
  # A token needs two experts of the one group that it uses.
  assert not full.without(cfg, 2).is_open[2]
  with pytest.raises(SurgeryError, match="can choose among 1 experts"):
    view.without(cfg, 3)
