"""Mixture of depths does less work: by counted matmuls and by XLA's count of the compiled step."""

import pytest
from helpers import tiny_config

from ats_jax.config.schema import MoDConfig
from lab.mod_savings import Run, plan_with, saving


@pytest.mark.thorough
def test_the_compiled_step_is_as_much_smaller_and_runs(mesh):
  dims = {"model.vocab_size": 384, "model.d_model": 128, "model.d_ff": 384, "data.seq_len": 128}
  # No loops, of which XLA counts the body once.
  cfg = tiny_config(dims | {"step.scan_unroll": 2, "step.loss_chunk_tokens": 8 * 128})
  dense = plan_with(cfg, MoDConfig())
  mod = plan_with(cfg, MoDConfig(routing="learned", capacity=0.25))
  runs, found = [Run(dense), Run(mod)], saving(dense, mod)
  assert 0.9 <= found.counted / found.predicted <= 1.0
  by_xla = 1 - runs[1].compiled_flops / runs[0].compiled_flops
  assert by_xla == pytest.approx(found.counted, abs=0.02)
  tokens = cfg.data.batch_size * cfg.data.seq_len
  formula = tokens * (dense.counts.flops_full - 6 * dense.counts.parts["embedding"].total)
  assert 1.0 <= runs[0].compiled_flops / formula < 1.06
  assert runs[1].step() > 0
