"""Settings that do nothing without another one: refused, or reset where a flag turns that off."""

import re

import pytest
from absl.flags import FlagValues
from commands import called
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
from ats_jax.config.validate import check_given
from ats_jax.verbs.cli import ConfigFlag

KNOWN = {name: known[0] for name, known in all_settings().items()}
PAIRS = [
  (name, needs)
  for name, known in KNOWN.items()
  for needs in conditions(name, known.field)
  if needs.setting != name and len(tuple(known.field.metadata["choices"] or "ab")) > 1
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


# With these further conditions do not hold.
FAILING = {
  "data.phases": ({"weights": {"a": 1.0}, "learning_rate": 1e-3},),
  "data.tokenizer": "bytes",
  "data.validation_paths": ("a.txt",),
}


def failing(needs):
  """Settings with which a condition does not hold."""
  field, name = KNOWN[needs.setting].field, needs.setting
  cast = field.type if field.type in (int, float) else lambda value: value
  own = [FAILING[name]] if name in FAILING else []
  words = (default_of(name, field), *field.metadata["choices"], *own)
  value = next(v for v in (*words, cast(1), cast(2), cast(False), "", ()) if not needs.holds(v))
  found = {needs.setting: value}
  if name == "data.phases" and value:
    found["data.sources"] = Table(a=("a.txt",))
  return found


def kind_of(name):
  known = KNOWN[name]
  return {f"{known.section.path}.name": known.kinds[0]} if known.kinds else {}


def changed(name, settings):
  """A config with the setting `name` at another value than its default, beside other settings."""
  config = base_config()
  config.update_from_flattened_dict(kind_of(name) | settings | {name: another(name)})
  return config


@given(st.sampled_from(PAIRS))
def test_a_setting_is_refused_where_a_condition_of_it_does_not_hold(pair):
  name, needs = pair
  config = changed(name, enabling(name) | failing(needs))
  with pytest.raises(ValueError, match=r"^\S+=.* does nothing with \S+=.*: it needs .* Set that"):
    check_given(from_config_dict(config), [name])


def test_what_a_file_says_may_lose_its_effect_by_what_another_says():
  """A preset goes with every tokenizer and length; only a flag that is ignored is a mistake."""
  for name, needs in PAIRS:
    if needs.of_flags:
      assert from_config_dict(changed(name, enabling(name) | failing(needs))), name


def test_a_flag_that_asks_for_nothing_is_not_ignored():
  cfg = from_config_dict({"optimizer": {"warmup_steps": 5}})
  check_given(cfg, ["optimizer.warmup_steps", "optimizer.warmup_fraction", "num_steps"])
  with pytest.raises(ValueError, match=r"^num_steps=9 does nothing with num_epochs=2.0: .* leave"):
    check_given(from_config_dict({"num_steps": 9, "num_epochs": 2.0}), ["num_steps"])


def test_the_flags_that_a_run_was_begun_with_go_on_with_it():
  cfg = from_config_dict({"data": {"tokenizer": "bytes", "bpe_vocab_size": 500}})
  check_given(cfg, ["data.bpe_vocab_size"], lambda: {"data.bpe_vocab_size": 500})
  with pytest.raises(ValueError, match=r"^data.bpe_vocab_size=500 does nothing with"):
    check_given(cfg, ["data.bpe_vocab_size"], lambda: {"data.bpe_vocab_size": 2048})


def test_a_file_and_a_run_that_goes_on_may_have_what_a_new_flag_may_not(tmp_path):
  file, run = tmp_path / "own.py", tmp_path / "run"
  file.write_text(
    "from ats_jax.config import base_config\n\ndef get_config():\n  config = base_config()\n"
    "  config.data.tokenizer, config.data.bpe_vocab_size = 'bytes', 500\n  return config\n"
  )
  flags = [f"--config={file}", f"--workdir={run}", f"--config.data.paths={tmp_path}/none.txt"]
  no_text = "none.txt' does not exist"
  vain = r"data.bpe_vocab_size=\d+ does nothing with data.tokenizer=bytes"
  for sizes, message in ((), no_text), ((600,), vain), ((500,), no_text), ((), no_text):
    own = [f"--config.data.bpe_vocab_size={size}" for size in sizes]
    assert re.search(message, called("train", *flags, *own).error()), sizes


@pytest.mark.parametrize(
  ("flags", "needs"),
  [
    ("moe.bias_rate=0.1", "moe.num_experts"),
    ("mod.capacity=0.5", "mod.routing other than none"),
    ("moe.num_experts=4 moe.capacity_factor=2.0", "moe.dispatch=capacity"),
    ("precision.fp8_band=2.0", "precision.fp8"),
    ("data.tokenizer=bytes data.bpe_vocab_size=500", "data.tokenizer=bpe"),
    ("num_epochs=2.0 num_steps=9", "num_epochs=0.0"),
    ("length=budget num_steps=9", "length=given"),
    ("sample.temperature=0.0 sample.top_k=5", "sample.temperature"),
    ("mesh.zero=1", "mesh.fsdp, mesh.expert or mesh.context above 1"),
    ("eval.every_steps=0 checkpoint.keep_best=true", "eval.every_steps"),
    (
      "data.validation_fraction=0.0 eval.num_batches=3",
      "data.validation_fraction, data.validation_paths or data.validation_sets",
    ),
    ("data.validation_fraction=0.1 data.validation_paths=a.txt", "no data.validation_paths"),
    ("optimizer.warmup_steps=5 optimizer.warmup_fraction=0.1", "optimizer.warmup_steps=0"),
    ("optimizer.weight_decay=0.0 optimizer.decay_embeddings=true", "optimizer.weight_decay"),
    (
      "orchestrator.mode=act orchestrator.snapshot_gb=0 orchestrator.snapshot_interval=5",
      "orchestrator.snapshot_gb",
    ),
  ],
)
def test_flags_in_vain_are_refused(flags, needs):
  values = FlagValues()
  config = ConfigFlag(values)
  values(["train", *(f"--config.{flag}" for flag in flags.split())])
  with pytest.raises(ValueError, match=rf" does nothing with \S+: it needs {needs}\. Set that"):
    assert config.value


def test_each_can_have_an_effect_and_the_default_is_always_legal():
  for name in dict.fromkeys(name for name, _ in PAIRS):
    config = base_config()
    config.update_from_flattened_dict(kind_of(name) | enabling(name))
    flat = flatten(config.to_dict())
    assert unmet(name, settings(flat), flat, by_flag=True) is None, name
    assert all(needs.setting in KNOWN for needs in conditions(name, KNOWN[name].field)), name


def test_what_a_condition_needs_is_needed_too():
  message = r"^moe.bias_rate=0.1 does nothing with moe.num_experts=0: it needs moe.num_experts. "
  with pytest.raises(ValueError, match=message):
    from_config_dict({"moe": {"bias_rate": 0.1}})
  with pytest.raises(
    ValueError, match=r"^moe.exchange.name=hierarchical does nothing with moe.num_exp"
  ):
    from_config_dict({"moe": {"exchange": "hierarchical"}})


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
