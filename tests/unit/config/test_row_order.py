"""What an order of rows cannot go with is refused, with what to do."""

import pytest
from helpers import tiny_config

from ats_jax.config.schema.row_order import ROW_ORDERS

LONG = {"data.seq_len": 64, "eval.bigram_baseline": False}
STREAMED = {"data.reading": "streaming", "data.validation_fraction": 0.0}
SOURCES = {"data.sources": {"a": ("a.txt",), "b": ("b.txt",)}}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"data.order.lengths": 5}, "data.order.lengths=5 is too large: at most 4"),
    ({"data.order.lengths": 1}, "data.order.lengths=1 is too small: at least 2"),
    ({"data.seq_len": 48}, "Use a multiple of 32, better a power of two"),
    ({"mod.routing": "learned"}, "Set data.order=shuffled, or mod.routing=none"),
    ({"mesh.stage": 2}, "a pipeline has rows of one length"),
    ({"moe.num_experts": 4, "moe.dispatch": "capacity"}, "Set moe.dispatch=dropless"),
  ],
)
@pytest.mark.parametrize("order", ["buckets", "length"])
def test_what_several_lengths_cannot_go_with_is_refused(order, changes, message):
  with pytest.raises(ValueError, match=message):
    tiny_config({**LONG, "data.order": order, **changes})


@pytest.mark.parametrize("order", ["buckets", "length", "difficulty"])
def test_an_order_of_documents_is_one_of_a_whole_text(order):
  with pytest.raises(ValueError, match=f"data.order={order} .* Put all text into data.paths"):
    tiny_config({**LONG, "data.order": order, **SOURCES})
  with pytest.raises(ValueError, match=f"data.order={order} .* Set data.reading=whole"):
    tiny_config({**LONG, "data.order": order, **STREAMED})


def test_a_setting_of_another_order_and_the_settings_that_were_are_refused():
  message = r"data.order.lengths is a setting of data.order.name=buckets and length, and .* is diff"
  with pytest.raises(ValueError, match=message):
    tiny_config({**LONG, "data.order": "difficulty", "data.order.lengths": 2})
  for name in ("length_buckets", "curriculum", "streaming", "window_mb"):
    with pytest.raises(ValueError, match=f"unknown key data.{name}"):
      tiny_config({f"data.{name}": 2})


@pytest.mark.parametrize(
  ("changes", "count"),
  [
    ({"data.order": "shuffled", **SOURCES}, 1),
    ({"data.order": "buckets"}, 4),
    ({"data.order": {"name": "length", "lengths": 2}}, 2),
    ({"data.order": "buckets", "moe.num_experts": 4, "moe.dispatch": "dropless"}, 4),
    ({"data.order": "difficulty", "data.seq_len": 24, "mod.routing": "learned"}, 1),
  ],
)
def test_what_goes_together_and_how_many_lengths_that_is(changes, count):
  assert tiny_config({**LONG, **changes}).data.order.num_lengths == count


def test_each_kind_is_registered_with_what_makes_its_rows():
  from ats_jax.extensions import orders

  assert set(ROW_ORDERS) == set(orders) == {"shuffled", "buckets", "length", "difficulty"}
