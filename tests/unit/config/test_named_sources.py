"""`data.paths` with names and `data.mixture`: what they say, and errors that name the setting."""

from fractions import Fraction

import pytest

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.mixture import Phase, in_words, named_paths, phases, sources

PATHS = "web=a.txt,web=b.txt,code=src"
CHAT = {"data.chat_template": "chatml", "data.packing": "best_fit"}


def build(**changes):
  config = base_config()
  config.update_from_flattened_dict({"data.paths": PATHS, **changes})
  return from_config_dict(config)


def test_sources_in_their_order():
  assert sources(PATHS) == {"web": "a.txt,b.txt", "code": "src"}
  assert sources("a.txt, b.txt") == {} == sources("")
  assert sources("./a=b.txt,https://x/?q=1") == {}
  assert named_paths("a.txt,code=b.py", "x") == {"": "a.txt", "code": "b.py"}


@pytest.mark.parametrize(
  ("text", "parts"),
  [
    ("web=0.7,code=0.3", {"web": 7, "code": 3}),
    ("code=3 , web=1", {"web": 1, "code": 3}),
    ("web=1/3,code=2/3", {"web": 1, "code": 2}),
    ("web=0,code=2", {"code": 1}),
    ("web=50,code=100", {"web": 1, "code": 2}),
    ("web=1e-2,code=0.99", {"web": 1, "code": 99}),
  ],
)
def test_weights_are_whole_numbers_of_rows(text, parts):
  assert phases(text, ["web", "code"]) == (Phase(parts),)


def test_phases():
  text = "1000 steps: web=0.9,code=0.1; 2.5e9tokens:web=1;1.5 epochs: code=1 ; web=1,code=3;"
  found = phases(text, ["web", "code"])
  assert [(p.amount, p.unit) for p in found] == [
    (1000, "steps"), (2_500_000_000, "tokens"), (Fraction(3, 2), "epochs"), (0, "steps")
  ]  # fmt: skip
  assert phases(in_words(found), ["web", "code"]) == found
  assert phases("", ["web"]) == ()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"data.mixture": "wbe=1"}, "data.mixture: there is no source 'wbe'. .* are web, code"),
    ({"data.mixture": "web=-1,code=2"}, "data.mixture: 'web=-1' has no weight"),
    ({"data.mixture": "web=nan"}, "data.mixture: 'web=nan' has no weight"),
    ({"data.mixture": "web=1/0"}, "data.mixture: 'web=1/0' has no weight"),
    ({"data.mixture": "web"}, "data.mixture: 'web' is not source=weight"),
    ({"data.mixture": "web=0,code=0"}, "data.mixture: the weights of 'web=0,code=0' sum to 0"),
    ({"data.mixture": "10 steps:; web=1"}, "data.mixture: the weights of '' sum to 0"),
    ({"data.mixture": "web=1,web=2"}, "data.mixture: .* names web twice"),
    ({"data.mixture": "web=0.123457,code=0.9"}, "data.mixture: .* Round the weights, e.g. web=121"),
    ({"data.mixture": "0 steps: web=1; code=1"}, "data.mixture: .* has a length of 0 steps"),
    ({"data.mixture": "-3 epochs: web=1; code=1"}, "has a length of -3 epochs"),
    ({"data.mixture": "1.5 steps: web=1; code=1"}, "data.mixture: .* ends inside a step"),
    ({"data.mixture": "5 rows: web=1; code=1"}, "'5 rows' is no length. .* steps, tokens, epochs"),
    ({"data.mixture": "few steps: web=1; code=1"}, "'few steps' is no length"),
    ({"data.mixture": "web=1; code=1"}, "data.mixture: the phase 'web=1' has no length"),
    ({"data.mixture": "5 steps: web=1"}, "its last phase has a length, .* length=phases"),
    ({"length": "phases", "data.mixture": "web=1"}, "length=phases, but data.mixture='web=1'"),
    ({"length": "phases"}, "length=phases, but data.mixture=''"),
    ({"length": "phases", "data.mixture": "1 epochs: web=1", "num_epochs": 1.0}, "both say when"),
    ({"data.paths": "a.txt", "data.mixture": "a=1"}, "data.mixture=a=1 needs sources with names"),
    ({"data.paths": "a.txt", "data.temperature": 2.0}, "data.temperature=2.0 needs sources"),
    ({"data.temperature": 0.0}, "data.temperature=0 is not positive"),
    ({"data.temperature": -1.0}, "data.temperature=-1 is not positive"),
    ({"data.temperature": 2.0, "data.mixture": "web=1"}, "data.temperature=2 does nothing with"),
    ({"data.paths": "web=a.txt,b.txt"}, "data.paths: 'b.txt' has no name, but others have"),
    ({"data.paths": "Web=a.txt"}, "data.paths: 'Web=a.txt' is not name=path"),
    ({**CHAT, "data.chat_sources": "talk"}, "data.chat_sources: 'talk' is no name of data.paths"),
    (
      {**CHAT, "data.chat_sources": "held", "data.validation_paths": "held=a.jsonl"},
      "data.chat_sources='held' names no source of data.paths",
    ),
    ({"data.chat_sources": "web"}, "data.chat_sources=web does nothing with text"),
    ({"optimizer.phases": "3e-4"}, "optimizer.phases: '3e-4' is not rate/steps"),
    ({"optimizer.phases": "-1/0"}, "optimizer.phases: '-1/0' is not rate/steps"),
    ({"optimizer.phases": "3e-4/0"}, "has 1 rates, data.mixture 0 phases"),
    (
      {"data.mixture": "5 steps: web=1; code=1", "optimizer.phases": "1/6;1/0"},
      "optimizer.phases: 6 steps of warm-up exceed a phase of 5 steps",
    ),
    (
      {"data.mixture": "5 epochs: web=1; code=1", "optimizer.phases": "1/0;1/0"},
      "optimizer.phases needs to know when each phase",
    ),
    (
      {"optimizer.phase_moments": "reset"},
      "optimizer.phase_moments=reset does nothing with data.mixture=''",
    ),
    (
      {"data.mixture": "5 epochs: web=1; code=1", "optimizer.phase_moments": "reset"},
      "optimizer.phase_moments=reset needs to know when each phase",
    ),
    ({"data.paths": "web="}, "data.paths: 'web=' is not name=path"),
  ],
)
def test_errors_name_the_setting(changes, message):
  with pytest.raises(ValueError, match=message):
    build(**changes)


def test_valid():
  assert build(**{"data.temperature": 3.0}).data.temperature == 3.0
  cfg = build(**{"length": "phases", "data.mixture": "3 steps: web=1; 2 epochs: code=1"})
  assert cfg.counts_epochs
