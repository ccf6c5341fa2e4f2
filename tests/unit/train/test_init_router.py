"""Runs that begin with the routers of another run."""

import numpy as np
import pytest
from train_helpers import on_texts

from ats_jax.checkpoint.layout import named_arrays
from ats_jax.model.layout import stacks
from ats_jax.store.paths import parse
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.loop import train
from ats_jax.train.open import open_run

pytestmark = pytest.mark.thorough
EXPERTS = {
  "model.num_layers": 2, "moe.num_experts": 4, "moe.top_k": 2, "moe.d_ff": 16,
  "data.tokenizer": "bytes", "num_steps": 2, "orchestrator.mode": "off",
}  # fmt: skip


def arrays(cfg, model):
  """By name and layer."""
  return {
    name: np.asarray(part.leaf if part.layer is None else part.leaf[part.layer])
    for name, part in named_arrays(model, stacks=stacks(cfg)).items()
  }


def test_routers_are_those_of_one_run_and_all_else_of_the_other(tmp_path):
  config = on_texts(tmp_path, EXPERTS)
  base = arrays(config(), train(config(), tmp_path / "base").model)
  trained = train(config(seed=1), tmp_path / "other").model
  other = arrays(config(), trained)
  initial = InitialWeights.of(str(tmp_path / "base"), router=str(tmp_path / "other"))
  with open_run(config(), parse(tmp_path / "both"), initial=initial) as run:
    both = arrays(config(), run.state.model)
  assert both.keys() == base.keys() and any("router" in name for name in both)
  for name, array in both.items():
    np.testing.assert_array_equal(array, (other if "router" in name else base)[name], name)
  train(config(moe__num_experts=8), tmp_path / "wider")
  initial = InitialWeights.of(str(tmp_path / "base"), router=str(tmp_path / "wider"))
  with (
    pytest.raises(ValueError, match="its routers are not those of this model"),
    open_run(config(), parse(tmp_path / "neither"), initial=initial),
  ):
    pass
