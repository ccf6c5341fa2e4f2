"""What needs the whole text is refused with `data.reading=streaming`, with what to do."""

from helpers import tiny_config
from refusals import wrongly_refused

from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table

STREAMED = {"data.reading": "streaming", "data.validation_fraction": 0.0}
MIXED = {
  "data.sources": {"a": ("a.txt",), "b": ("b.txt",)},
  "data.mixture": {"a": 1.0, "b": 1.0},
}
PHASES = (Phase(Table(a=1), epochs=2), Phase(Table(b=1)))


def test_refused():
  cases = [
    (
      {"data.reading": "whole", "data.reading.window_mb": 3.0},
      "window_mb is a setting of data.reading.name=streaming, and data.reading.name is whole",
    ),
    ({"data.filters": ("exact",)}, r"filters=exact .*ats-jax data prepare"),
    ({"data.validation_fraction": 0.1}, r"validation_fraction=0\.1 .* data\.validation_paths"),
    ({"data.format": "chat"}, "Conversations are not streamed"),
    ({"num_epochs": 2.0}, r"num_epochs=2 .* num_steps"),
    ({"eval.bigram_baseline": True}, "bigram_baseline=true"),
    (MIXED | {"data.mixture": {}}, r"a mixture by size .* data\.mixture=web"),
    (MIXED | {"data.mixture": {}, "data.phases": PHASES}, "a phase in epochs .* steps or tokens"),
  ]
  assert not wrongly_refused(lambda changes: tiny_config(STREAMED | changes), cases)


def test_accepted():
  for changes in (
    {},
    {"data.validation_fraction": 0.1, "data.validation_paths": ("c.txt",)},
    MIXED,
    MIXED | {"data.format": "chat", "data.format.sources": ("a",)},
  ):
    assert tiny_config(STREAMED | changes).data.reading.is_streamed
