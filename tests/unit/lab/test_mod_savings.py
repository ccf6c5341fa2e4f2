"""Mixture of depths does less work, by the matmuls of the traced step."""

import pytest
from helpers import tiny_config

from ats_jax.config.schema import MoDConfig
from lab.mod_savings import plan_with, saving


@pytest.mark.thorough
def test_the_step_has_as_many_matmuls_less_as_predicted(mesh):
  dims = {"model.vocab_size": 384, "model.d_model": 128, "model.d_ff": 384, "data.seq_len": 128}
  cfg = tiny_config(dims | {"step.loss_chunk_tokens": 8 * 128})
  found = saving(
    plan_with(cfg, MoDConfig()), plan_with(cfg, MoDConfig(routing="learned", capacity=0.25))
  )
  assert found.predicted > 0.2 and 0.9 <= found.counted / found.predicted <= 1.0
