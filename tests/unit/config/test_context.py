"""What `mesh.context` and other settings of the mesh are refused with, and how."""

import pytest
from helpers import tiny_config
from refusals import wrongly_refused

from ats_jax.planner.describe import describe

WIDE = {"model.num_heads": 6, "model.num_kv_heads": 3, "model.d_model": 48}
STAGED = {"mesh.stage": 2, "model.num_layers": 4, "step.accum_steps": 2}
BUCKETS = {"data.seq_len": 96, "data.order": "buckets"}


def test_what_does_not_go_together_is_refused_with_advice():
  cases = [
    ({"mesh.context": 3}, r"mesh.context=3 does not divide data.seq_len=16.*multiple of 3"),
    (
      {"mesh.context": 8},
      r"mesh.context=8 x mesh.tensor=1 does not divide model.num_heads=4.*mesh.fsdp",
    ),
    (
      {"mesh.context": 2, "moe.num_experts": 4, "moe.dispatch": "capacity"},
      "Set moe.dispatch=dropless, or mesh.context=1",
    ),
    (
      WIDE
      | {"mesh.context": 3, "data.seq_len": 768}
      | {"orchestrator.mode": "observe", "orchestrator.check_interval": 5},
      "its probe has rows of 256 positions",
    ),
    (
      WIDE | BUCKETS | {"mesh.context": 3},
      "multiples of 16, which it does not divide. Use data.order=shuffled",
    ),
    (
      {"mesh.context": 2, "precision.fp8": True, "model.num_layers": 4},
      r"data.seq_len is 8 on a device",
    ),
    ({"mesh.keep_gathered": True}, "mesh.fsdp=1: .* Set mesh.keep_gathered=false"),
    ({"mesh.copy_engines": True}, "mesh.copy_engines=true .* Set mesh.copy_engines=false"),
    ({"mesh.keep_gathered": True, "mesh.fsdp": 2, "mesh.zero": 2}, "nothing with mesh.zero=2"),
    (STAGED | {"mesh.keep_gathered": True, "mesh.fsdp": 2}, "nothing with mesh.stage=2"),
    (
      {"mesh.compress_gradients": "fp8", "mesh.data": 1},
      r"fp8 does nothing with mesh.data=1: it needs mesh.data other than 1",
    ),
    (
      STAGED | {"mesh.compress_gradients": "fp8"},
      r"fp8 with mesh.stage=2.* Set mesh.compress_gradients=none, or mesh.stage=1",
    ),
  ]
  assert not wrongly_refused(tiny_config, cases)


def test_heads_that_need_not_divide():
  assert tiny_config({"mesh.context": 4}).model.num_kv_heads == 2


def test_devices_and_batch_are_checked_as_for_other_axes():
  with pytest.raises(ValueError, match=r"mesh.context=4 .* does not divide the 6 devices"):
    describe(tiny_config({"mesh.context": 4, "model.vocab_size": 384}), 6)
