import pytest
from helpers import tiny_config

LONG = {"data.seq_len": 64}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"data.length_buckets": 5}, "data.length_buckets=5 is too large: at most 4"),
    ({"data.curriculum": "length"}, "data.length_buckets to 2, 3 or 4"),
    (
      {"data.curriculum": "difficulty", "data.length_buckets": 2},
      "both part the documents. Set data.length_buckets=1",
    ),
    (
      {"data.length_buckets": 2, "data.sources": {"a": ("a.txt",), "b": ("b.txt",)}},
      "Put all text into data.paths",
    ),
    (
      {"data.curriculum": "difficulty", "data.sources": {"a": ("a.txt",), "b": ("b.txt",)}},
      "Put all text into data.paths",
    ),
    (
      {"data.length_buckets": 2, "data.streaming": True, "data.validation_fraction": 0.0},
      "Set data.streaming=false",
    ),
    ({"data.length_buckets": 2, "data.seq_len": 48}, "Use a multiple of 32, better a power of two"),
    ({"data.length_buckets": 2, "mod.routing": "learned"}, "Set one of them to none"),
    ({"data.length_buckets": 2, "mesh.stage": 2}, "a pipeline has rows of one length"),
    (
      {"data.length_buckets": 2, "moe.num_experts": 4, "moe.dispatch": "capacity"},
      "Set moe.dispatch=dropless",
    ),
  ],
)
def test_what_cannot_go_together_is_refused_with_advice(changes, message):
  with pytest.raises(ValueError, match=message):
    tiny_config({**LONG, "eval.bigram_baseline": False, **changes})


@pytest.mark.parametrize(
  "changes",
  [
    {"data.length_buckets": 4},
    {"data.length_buckets": 2, "data.curriculum": "length"},
    {"data.length_buckets": 2, "moe.num_experts": 4, "moe.dispatch": "dropless"},
    {"data.curriculum": "difficulty", "data.seq_len": 24, "mod.routing": "learned"},
  ],
)
def test_what_goes_together(changes):
  tiny_config({**LONG, **changes})
