"""`python -m ats_jax plan`, and what its text is made of."""

import json

import pytest
from commands import started
from helpers import tiny_config
from in_process import printed_by

from ats_jax.config import base_config, from_config_dict
from ats_jax.planner import describe as describe_module
from ats_jax.planner.abstract import abstract_mesh, abstract_state, resolve_without_data
from ats_jax.planner.describe import describe, flops_per_token, render_plan
from ats_jax.sharding.mesh import on_mesh


@pytest.mark.thorough
def test_a_plan_for_1024_devices_without_one():
  """An unknown platform: whatever touched a device would fail."""
  result = started(
    "ats_jax", "plan", "--config=b300:hybrid", "--devices=1024", "--json",
    "--config.mesh.fsdp=16", "--config.mesh.expert=8", "--config.mesh.tensor=8",
    "--config.step.remat=full", JAX_PLATFORMS="none-at-all",
  )  # fmt: skip
  assert result.code == 0, result.err
  found = json.loads(result.out)
  sizes = {"stage": 1, "data": 1, "fsdp": 16, "expert": 8, "context": 1, "tensor": 8}
  assert found["run"]["mesh"] == sizes
  assert found["parameters"]["total"] > 3.3e12
  # Experts and attention are cut along all three axes.
  parts = found["parameters"]["parts"]
  weights = 4 * (parts["experts"]["total"] + parts["attention"]["total"]) / 1024
  assert found["device_bytes_exact"]["weights"] == pytest.approx(weights, rel=0.01)


def test_what_is_wrong_is_said():
  for flags, message in (
    (("--config=b7:sparse",), r"unknown variant 'sparse'.*'dense'.*'hybrid'"),
    (("--config=b7", "--devices=6"), r"16 rows a micro-batch do not divide over .* = 6 shards"),
    (("--config=b7", "--config.mesh.tensor=3"), r"mesh.tensor=3 does not divide"),
    (("--config=b7", "--devices=-1"), r"--devices"),
    (
      ("--config=configs/debug.py", "--config.data.tokenizer=README.md"),
      r"model.vocab_size=0 stands for the size of data.tokenizer=README.md",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      printed_by("plan", *flags)


def test_a_config_without_a_vocabulary_uses_the_tokenizers():
  config = base_config()
  assert resolve_without_data(from_config_dict(config)).model.vocab_size == 2048
  config.data.tokenizer = "bytes"
  assert resolve_without_data(from_config_dict(config)).model.vocab_size == 384


def test_what_sparse_layers_spare():
  layers = {"model.vocab_size": 384, "model.num_layers": 4, "moe.num_experts": 8}
  cfg = tiny_config(layers | {"mod.routing": "learned", "mod.capacity": 0.25})
  with on_mesh(cfg, abstract_mesh(cfg)):
    flops = flops_per_token(cfg, abstract_state(cfg).model)
  experts, seq = 3 * 32 * 64, 16
  attention = 6 * 4 * 8 * seq  # of a layer, causal
  spared = 2 * (1 - 0.25**2) * attention  # the scores of two layers
  spared += 6 * 2 * 0.75 * (32 * 12 * 8 + 2 * 32 + 32 * 8 + 2 * experts)
  assert flops["training_without_mod"] - flops["training"] == pytest.approx(spared)
  spared = 6 * (2 + 2 * 0.25) * 6 * experts
  assert flops["training_without_top_k"] - flops["training"] == pytest.approx(spared)
  assert flops["training_without_both"] > flops["training_without_mod"]
  assert (flops["forward"], flops["forward_6n"]) == (
    flops["training"] / 3,
    flops["training_6n"] / 3,
  )
  text = describe_module._savings(flops)
  assert len(text) == 3 and all("are saved" in line for line in text) and "both" in text[-1]


def test_text_of_a_dense_run_mentions_nothing_that_it_lacks():
  text = render_plan(describe(tiny_config({"model.vocab_size": 384}), devices=2))
  assert text.startswith("devices: 2 (stage=1, data=2, fsdp=1, expert=1, context=1, tensor=1)\n")
  assert "4 x 16 tokens" in text
  assert not any(word in text for word in ("experts", "routers", "saved", "ema,", "sums", "rates"))
