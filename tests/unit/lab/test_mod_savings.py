"""Mixture of depths does less work: by counted matmuls and by XLA's count of the compiled step."""

import pytest
from helpers import tiny_config

from ats_jax.config.schema import MoDConfig
from lab.mod_savings import CAPACITIES, EVERY, Run, default_config, plan_with, saving

pytestmark = pytest.mark.thorough

# 12.5, 25 and 50 % of a row through alternate layers of the default model save at least this.
LEAST = {0.125: 0.43, 0.25: 0.38, 0.5: 0.26}


def test_what_is_predicted_is_saved(mesh):
  cfg = default_config()
  dense = plan_with(cfg, MoDConfig())
  shares = {}
  for layers, every in EVERY.items():
    for capacity in CAPACITIES:
      mod = MoDConfig(routing="learned", capacity=capacity, every=every)
      found = shares[layers, capacity] = saving(dense, plan_with(cfg, mod))
      assert 0.9 <= found.counted / found.predicted <= 1.0, (layers, capacity)
  for capacity, least in LEAST.items():
    assert shares["alternate", capacity].counted > least
    assert shares["all", capacity].counted == pytest.approx(
      2 * shares["alternate", capacity].counted, rel=1e-3
    )


def test_the_compiled_step_is_as_much_smaller_and_runs(mesh):
  dims = {"model.vocab_size": 384, "model.d_model": 128, "model.d_ff": 384, "data.seq_len": 128}
  # No loops, of which XLA counts the body once.
  cfg = tiny_config(dims | {"step.scan_unroll": 2, "step.loss_chunk_tokens": 8 * 128})
  dense = plan_with(cfg, MoDConfig())
  mod = plan_with(cfg, MoDConfig(routing="learned", capacity=0.25))
  runs = [Run(dense), Run(mod)]
  by_xla = 1 - runs[1].compiled_flops / runs[0].compiled_flops
  assert by_xla == pytest.approx(saving(dense, mod).counted, abs=0.02)
  tokens = cfg.data.batch_size * cfg.data.seq_len
  formula = tokens * (dense.counts.flops_full - 6 * dense.counts.parts["embedding"].total)
  assert 1.0 <= runs[0].compiled_flops / formula < 1.06
  assert all(run.step() > 0 for run in runs)
