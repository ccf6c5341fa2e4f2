"""`data.sources`, `data.mixture` and `data.phases`: what they mean, and errors that name them."""

import json

import pytest
from refusals import wrongly_refused

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.names import differences, flatten, to_dict
from ats_jax.config.schema.mixture import Phase, parts, phases_of, steps_of
from ats_jax.config.schema.setting import Table
from ats_jax.config.text import parse

SOURCES = {"web": ("a.txt", "b.txt"), "code": ("src",)}
CHAT = {"data.format": "chat"}
WEB, CODE = Table(web=1.0), Table(code=1.0)


def build(**changes):
  config = base_config()
  config.update_from_flattened_dict({"data.sources": SOURCES, **changes})
  return from_config_dict(config)


def phases(*of):
  return {"data.phases": of}


def test_sources_keep_their_order_and_come_back_from_json():
  cfg = build(**phases(Phase(WEB, steps=3), Phase(CODE)))
  assert list(cfg.data.sources) == ["web", "code"]
  stored = json.loads(json.dumps(to_dict(cfg)))
  again = from_config_dict(stored)
  assert again == cfg and list(again.data.sources) == ["web", "code"]
  assert hash(again) == hash(cfg)
  assert not differences(flatten(stored), flatten(cfg))


def test_text_of_flags():
  assert parse("data.sources", "web=a.txt,code=src,web=b.txt", {}) == SOURCES
  assert parse("data.mixture", "web=0.7,code=0.3", {}) == Table(web=0.7, code=0.3)
  assert parse("data.filters", "exact,near", {}) == ("exact", "near")
  with pytest.raises(ValueError, match=r"data.mixture=web=1,web=2 names web twice"):
    parse("data.mixture", "web=1,web=2", {})
  with pytest.raises(ValueError, match=r"no text for a Phase. Set data.phases in a config file"):
    parse("data.phases", "3", {})


def test_phases_of_a_file_may_be_mappings():
  config = base_config()
  config.data.sources = SOURCES
  config.data.phases = ({"weights": {"web": 9, "code": 1}, "steps": 3}, Phase(Table(code=1.0)))
  found = from_config_dict(config).data.phases
  assert found == (Phase(Table(web=9.0, code=1.0), steps=3), Phase(Table(code=1.0)))


def test_weights_are_whole_numbers_of_rows():
  for weights, expected in (
    ({"web": 0.7, "code": 0.3}, {"web": 7, "code": 3}),
    ({"code": 3.0, "web": 1.0}, {"web": 1, "code": 3}),
    ({"web": 0.0, "code": 2.0}, {"code": 1}),
    ({"web": 50, "code": 100}, {"web": 1, "code": 2}),
    ({"web": 1e-2, "code": 0.99}, {"web": 1, "code": 99}),
    ({"web": 1e-05, "code": 0.1}, {"web": 1, "code": 10_000}),
  ):
    found = parts(weights, ["web", "code"])
    assert found == expected and list(found) == list(expected)


def test_lengths_in_steps():
  how = dict(batch_size=4, seq_len=16, rows=13)
  assert steps_of(Phase(WEB, steps=7), **how) == 7
  assert steps_of(Phase(WEB, tokens=40), **how) == 1  # 2.5 rows
  assert steps_of(Phase(WEB, epochs=1.5), **how) == 5  # 19.5 rows
  assert steps_of(Phase(WEB, epochs=0.1), **{**how, "rows": 40}) == 1  # 4 rows, not a little more
  assert steps_of(Phase(WEB), **how) == 0
  assert Phase(WEB).is_endless and not Phase(WEB, tokens=1).is_endless
  # A mixture is one phase.
  assert phases_of(build(**{"data.mixture": WEB}).data) == (Phase(WEB),)
  assert phases_of(build().data) == ()


def test_errors_name_the_setting():
  cases = [
    ({"data.mixture": {"wbe": 1.0}}, "data.mixture: there is no source 'wbe'. .* are web, code"),
    ({"data.mixture": {"web": -1.0}}, r"data.mixture\['web'\]=-1.0 is too small"),
    ({"data.mixture": {"web": float("nan")}}, r"data.mixture\['web'\]=nan is not a finite number"),
    ({"data.mixture": {"web": 0.0, "code": 0.0}}, "data.mixture: the weights sum to 0"),
    (phases(Phase(steps=10), Phase(WEB)), r"data.phases\[0\]: the weights sum to 0"),
    ({"data.mixture": {"web": 0.123457, "code": 0.9}}, "data.mixture: .* Round .* e.g. web=121"),
    (phases(Phase(WEB, steps=-3), Phase(CODE)), r"data.phases\[0\].steps=-3 is too small"),
    (phases({"weights": {"web": 1}, "steps": 1.5}), r"data.phases\[0\].steps must be int, got 1.5"),
    (phases({"weights": {"web": 1}, "rows": 5}), r"unknown key data.phases\[0\].rows"),
    (phases(Phase(WEB, steps=1, tokens=1)), r"data.phases\[0\] has several lengths"),
    (phases(Phase(WEB), Phase(CODE)), r"data.phases\[0\] has no length, but another"),
    (phases(Phase(WEB, steps=5)), "the last one has a length, .* length=phases"),
    ({"length": "phases", "data.mixture": WEB}, "length=phases, but there is no last phase"),
    ({"length": "phases", **phases(Phase(WEB, epochs=1.0)), "num_epochs": 1.0}, "both say when"),
    ({"data.mixture": WEB, **phases(Phase(WEB))}, "data.mixture and data.phases both give weights"),
    ({"data.sources": {}, "data.mixture": WEB}, "data.mixture=.* needs data.sources"),
    ({"data.sources": {}, "data.temperature": 2.0}, "data.temperature=2.0 .* needs data.sources"),
    ({"data.temperature": 0.0}, "data.temperature=0 is not positive"),
    ({"data.temperature": 2.0, "data.mixture": WEB}, "data.temperature=2 does nothing with"),
    ({"data.paths": ("b.txt",)}, "data.paths and data.sources are both set"),
    ({"data.sources": {"Web": ("a.txt",)}}, "data.sources: 'Web' is no name"),
    ({"data.sources": {"web": ()}}, "data.sources: web has no path"),
    ({"data.sources": {"web": "a.txt"}}, r"data.sources\['web'\] must be a list of str"),
    ({"data.validation_sets": {"a b": ("a.txt",)}}, "data.validation_sets: 'a b' is no name"),
    ({**CHAT, "data.format.sources": ("talk",)}, "data.format.sources: 'talk' is no name of data"),
    (
      {**CHAT, "data.format.sources": ("held",), "data.validation_sets": {"held": ("a.jsonl",)}},
      r"data.format.sources=\['held'\] names no source of data.sources",
    ),
    ({"data.format.sources": ("web",)}, "data.format.sources is a setting of .*name=chat"),
    (
      phases(Phase(WEB, steps=5, learning_rate=1.0), Phase(CODE)),
      r"data.phases\[1\] has no learning_rate, and others have",
    ),
    (
      phases(Phase(WEB, steps=5, warmup_steps=1), Phase(CODE)),
      r"data.phases\[0\].warmup_steps=1 does nothing without learning_rate",
    ),
    (
      phases(
        Phase(WEB, steps=5, learning_rate=1.0, warmup_steps=6), Phase(CODE, learning_rate=1.0)
      ),
      r"data.phases\[0\]: 6 steps of warm-up exceed a phase of 5 steps",
    ),
    (phases(Phase(WEB, trains=("heads",))), r"data.phases\[0\].trains: .* Did you mean 'head'"),
    (phases(Phase(WEB, layers="1-9")), r"data.phases\[0\].layers=1-9 is no range of the layers 0-"),
    ({"optimizer.phase_moments": "reset"}, "phase_moments=reset does nothing with data.phases="),
  ]
  assert not wrongly_refused(lambda changes: build(**changes), cases)
  assert build(**{"data.temperature": 3.0}).data.temperature == 3.0
  both = phases(Phase(WEB, steps=3), Phase(CODE, epochs=2.0))
  assert build(**{"length": "phases", **both}).counts_epochs
