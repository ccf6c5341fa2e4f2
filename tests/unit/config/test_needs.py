"""Settings that do nothing without another one: refused, or reset where a flag turns that off."""

import pytest
from helpers import enabling
from hypothesis import given
from hypothesis import strategies as st

from ats_jax.config import Config, base_config, from_config_dict
from ats_jax.config.file import load_file
from ats_jax.config.names import (
  all_settings,
  conditions,
  default_of,
  flatten,
  settings,
  unmet,
)
from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table
from ats_jax.config.tree import updated

KNOWN = {name: known[0] for name, known in all_settings().items()}
PAIRS = [
  (name, needs)
  for name, known in KNOWN.items()
  for needs in conditions(name, known.field)
  if needs.setting != name
]


# Of settings that are no number and no word.
OTHERS = {
  "data.phases": (Phase(Table(a=1.0)),),
  "data.mixture": Table(a=1.0),
}


def another(name):
  """A legal value of a setting that is not its default."""
  field = KNOWN[name].field
  default, meta = default_of(name, field), field.metadata
  if name in OTHERS:
    return OTHERS[name]
  if meta["choices"]:
    return next(choice for choice in meta["choices"] if choice != default)
  if field.type is bool:
    return not default
  if field.type in (int, float):
    tries = (default + 1, default / 2, default - 1)
    inside = lambda v: (
      (meta["low"] is None or v >= meta["low"]) and (meta["high"] is None or v <= meta["high"])
    )
    return next(field.type(v) for v in tries if field.type(v) != default and inside(v))
  return "some" if field.type is str else ("some",)


def failing(needs):
  """A value with which a condition does not hold."""
  field = KNOWN[needs.setting].field
  values = (default_of(needs.setting, field), *field.metadata["choices"], 1, 2, False, "", ())
  return next(v for v in values if not needs.holds(v))


def kind_of(name):
  known = KNOWN[name]
  return {f"{known.section.path}.name": known.kinds[0]} if known.kinds else {}


@given(st.sampled_from(PAIRS))
def test_a_setting_is_refused_where_a_condition_of_it_does_not_hold(pair):
  name, needs = pair
  config = base_config()
  config.update_from_flattened_dict(
    kind_of(name) | enabling(name) | {needs.setting: failing(needs), name: another(name)}
  )
  with pytest.raises(ValueError, match=r"^\S+=.* does nothing with \S+=.*: it needs .* Set that"):
    from_config_dict(config)


def test_each_can_have_an_effect_and_the_default_is_always_legal():
  for name in dict.fromkeys(name for name, _ in PAIRS):
    config = base_config()
    config.update_from_flattened_dict(kind_of(name) | enabling(name))
    flat = flatten(config.to_dict())
    assert unmet(name, settings(flat), flat) is None, name
    assert all(needs.setting in KNOWN for needs in conditions(name, KNOWN[name].field)), name


def test_what_a_condition_needs_is_needed_too():
  message = r"^moe.bias_rate=0.1 does nothing with moe.num_experts=0: it needs moe.num_experts. "
  with pytest.raises(ValueError, match=message):
    from_config_dict({"moe": {"bias_rate": 0.1}})
  with pytest.raises(ValueError, match=r"^moe.exchange.name=bins does nothing with moe.num_exp"):
    from_config_dict({"moe": {"exchange": "bins"}})


def test_a_mesh_of_one_device_refuses_no_exchange():
  moe = {"num_experts": 8, "exchange": {"name": "hierarchical", "hosts": 2}}
  for axis in ("data", "expert", "fsdp"):
    assert from_config_dict({"moe": moe, "mesh": {axis: 1}}).moe.exchange.hosts == 2


def test_what_a_file_sets_of_a_section_that_a_flag_turns_off_is_reset():
  base = load_file("b7:hybrid")
  base.mod.anneal_fraction, base.mod.start_capacity, base.mod.every = 0.5, 0.5, 4
  base.moe.exchange = {"name": "hierarchical", "hosts": 2}
  from_config_dict(base)
  for off in ({"mod.routing": "none"}, {"mod.routing": "none", "moe.num_experts": 0}):
    cfg = from_config_dict(updated(base.to_dict(), off))
    for section in {name.split(".")[0] for name in off}:
      assert getattr(cfg, section) == getattr(Config(), section)
  # What the same flags set is refused and not reset.
  changed = updated(base.to_dict(), {"mod.routing": "none", "mod.capacity": 0.5})
  with pytest.raises(ValueError, match=r"^mod.capacity=0.5 does nothing with mod.routing=none"):
    from_config_dict(changed)
