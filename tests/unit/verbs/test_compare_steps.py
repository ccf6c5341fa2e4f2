"""How many steps cost as much as those of the first variant."""

import pytest
from helpers import tiny_config

from ats_jax.planner.describe import describe
from ats_jax.verbs.compare import num_steps


def test_equal_tokens_flops_and_time():
  base = {"num_steps": 100, "model.vocab_size": 0}
  first = tiny_config(base)
  rows = tiny_config(base | {"data.batch_size": 2 * first.data.batch_size})
  wide = tiny_config(base | {"model.d_ff": 8 * first.model.d_ff})
  assert num_steps([first, rows, wide], "tokens") == [100, 50, 100]
  cost = [describe(cfg)["flops_per_token"]["training"] for cfg in (first, wide)]
  assert num_steps([first, rows, wide], "flops") == [100, 50, round(100 * cost[0] / cost[1])]
  assert num_steps([first, rows, wide], "time", [0.25, 0.5, 0.2]) == [100, 50, 125]


def test_a_length_that_the_text_decides_is_refused():
  with pytest.raises(ValueError, match="num_epochs=2 decide how long a variant trains"):
    num_steps([tiny_config({"num_epochs": 2.0})], "tokens")
