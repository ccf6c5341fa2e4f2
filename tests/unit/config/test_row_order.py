"""What an order of rows cannot go with is refused, with what to do."""

from helpers import tiny_config
from refusals import wrongly_refused

from ats_jax.config.schema.row_order import ROW_ORDERS
from ats_jax.extensions import orders

LONG = {"data.seq_len": 64, "eval.bigram_baseline": False}
STREAMED = {"data.reading": "streaming", "data.validation_fraction": 0.0}
SOURCES = {"data.sources": {"a": ("a.txt",), "b": ("b.txt",)}}


def test_what_several_lengths_cannot_go_with_is_refused():
  cases = [
    ({"data.order.lengths": 5}, "data.order.lengths=5 is too large: at most 4"),
    ({"data.order.lengths": 1}, "data.order.lengths=1 is too small: at least 2"),
    ({"data.seq_len": 48}, "Use a multiple of 32, better a power of two"),
    ({"mod.routing": "learned"}, "Set data.order=shuffled, or mod.routing=none"),
    ({"mesh.stage": 2}, "a pipeline has rows of one length"),
    ({"moe.num_experts": 4, "moe.dispatch": "capacity"}, "Set moe.dispatch=dropless"),
  ]
  whole = [
    (SOURCES, "data.order=.* Put all text into data.paths"),
    (STREAMED, "data.order=.* Set data.reading=whole"),
  ]
  for order in ("buckets", "length", "difficulty"):
    build = lambda changes, order=order: tiny_config({**LONG, "data.order": order, **changes})
    assert not wrongly_refused(build, whole + cases * (order != "difficulty"))


def test_a_setting_of_another_order_and_the_settings_that_were_are_refused():
  message = r"data.order.lengths is a setting of data.order.name=buckets and length, and .* is diff"
  cases = [({**LONG, "data.order": "difficulty", "data.order.lengths": 2}, message)]
  old = ("length_buckets", "curriculum", "streaming", "window_mb")
  cases += [({f"data.{name}": 2}, f"unknown key data.{name}") for name in old]
  assert not wrongly_refused(tiny_config, cases)


def test_what_goes_together_and_how_many_lengths_that_is():
  for changes, count in (
    ({"data.order": "shuffled", **SOURCES}, 1),
    ({"data.order": "buckets"}, 4),
    ({"data.order": {"name": "length", "lengths": 2}}, 2),
    ({"data.order": "buckets", "moe.num_experts": 4, "moe.dispatch": "dropless"}, 4),
    ({"data.order": "difficulty", "data.seq_len": 24, "mod.routing": "learned"}, 1),
  ):
    assert tiny_config({**LONG, **changes}).data.order.num_lengths == count
  assert set(ROW_ORDERS) == set(orders) == {"shuffled", "buckets", "length", "difficulty"}
