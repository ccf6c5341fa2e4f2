"""On a GPU, `precision.deterministic` makes a resumed run bit-equal to an uninterrupted one."""

import signal

import pytest
import runs

from ats_jax.exits import STOPPED

STEPS = 40
SETTINGS = (
  f"num_steps={STEPS}",
  "optimizer.warmup_steps=5",
  "model.d_model=512",
  "model.num_heads=8",
  "model.num_kv_heads=4",
  "model.dropout=0.1",
  "data.seq_len=1024",
  "data.batch_size=8",
  "data.num_workers=2",
  "data.max_segments=16",
  "step.accum_steps=2",
  "step.remat=names",
  "precision.compute_dtype=bfloat16",
  "precision.deterministic=True",
  "ops.kernels=attention=cudnn",
  "checkpoint.every_steps=10",
  "eval.every_steps=0",
  "eval.num_batches=4",
  "eval.bigram_baseline=False",
  "log.every_steps=1",
  "sample.max_tokens=0",
)


@pytest.mark.gpu
def test_resume_is_bit_equal_on_a_gpu(tmp_path):
  uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
  start = lambda workdir: runs.start(workdir, *SETTINGS, JAX_PLATFORMS="cuda")
  runs.finish(start(uninterrupted))
  runs.stop_at(start(killed), 17, signal.SIGKILL)
  process = start(killed)
  output = runs.stop_at(process, 27, signal.SIGTERM)
  assert process.returncode == STOPPED, output
  assert "resuming" in runs.finish(start(killed))
  runs.assert_same_run(uninterrupted, killed, STEPS)
