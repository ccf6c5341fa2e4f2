"""What a pipeline refuses, and what is said of it."""

import jax
import pytest
from helpers import make_test_mesh, tiny_config

from ats_jax.planner.abstract import abstract_mesh, abstract_state
from ats_jax.planner.describe import describe, render
from ats_jax.sharding.mesh import on_mesh
from ats_jax.sharding.pipeline import bubble, most_micro_batches, row_axis
from ats_jax.sharding.rules import SHARDS
from ats_jax.step.program import make_program

STAGED = {"mesh.data": 1, "mesh.stage": 2, "step.accum_steps": 4, "model.num_layers": 4}
MOE = {"moe.num_experts": 4, "moe.d_ff": 32}
EIGHT_BITS = {"precision.fp8": True, "precision.fp8_keep_last": 0}


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"step.accum_steps": 1}, r"mesh.stage=2 does not divide step.accum_steps=1, .*multiple of 2"),
    ({"mesh.stage": 4, "step.accum_steps": 2}, "mesh.stage=4 does not divide step.accum_steps=2"),
    ({"model.num_layers": 3}, "does not cut model.num_layers=3 into equal.* as 3 x 1 .*num_layers"),
    (MOE | {"moe.dense_first": 1}, r"repeat as 1 x 1 \+ 3 x 1 .*moe.dense_first"),
    (MOE | {"moe.every": 4}, "repeat as .*moe.every"),
    (EIGHT_BITS | {"precision.fp8_keep_first": 1}, "fp8_keep_first=1 and .* different formats"),
  ],
)
def test_layers_and_micro_batches_that_stages_do_not_divide(changes, words):
  cfg = tiny_config(STAGED | changes)
  with pytest.raises(ValueError, match=words), jax.sharding.use_abstract_mesh(abstract_mesh(cfg)):
    abstract_state(cfg)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_stage_has_the_moments_of_its_layers_alone(zero):
  cfg = tiny_config(STAGED | {"model.vocab_size": 384, "mesh.fsdp": 2, "mesh.zero": zero})
  with on_mesh(cfg, abstract_mesh(cfg)):
    moments = abstract_state(cfg).opt_state[1].mu
  assert moments.segments[0].layers[0].mlp.gate.weight.sharding.spec[:2] == ("stage", SHARDS)


def test_the_bubble():
  assert bubble(4, 1) == 0.0
  assert bubble(4, 2) == 1 / 5 and bubble(8, 4) == 3 / 11


def test_the_planner_knows_a_stage():
  sizes = STAGED | {"model.vocab_size": 384}
  one, two = (describe(tiny_config(sizes | {"mesh.stage": n})) for n in (1, 2))
  text = "pipeline: 2 stages of 2 layers; 4 micro-batches take 5 ticks, of which a stage idles 1"
  assert f"{text} (20.0%)" in render(two) and "pipeline:" not in render(one)
  assert "at a time on each: 2 x 16 tokens" in render(two)
  exact = lambda plan: plan["device_bytes_exact"]
  tables = 4 * (2 * 384 * 32 + 32)  # embedding, head and final norm, on each stage
  for part in ("weights", "mu", "gradients"):
    assert exact(two)[part] - tables == (exact(one)[part] - tables) / 2
  estimated = lambda plan: plan["device_bytes_estimated"]
  assert estimated(two)["recomputed stage"] < estimated(one)["activations"]
  # Five ticks, of which a stage makes 2 x 16 x 32 activations and gets as many gradients.
  assert estimated(two)["handed on"] == 2 * 5 * 2 * 16 * 32 * 4
  assert not estimated(one)["handed on"] and not estimated(one)["recomputed stage"]


def test_the_log_says_it():
  with jax.set_mesh(make_test_mesh(1, 1, 1, stage=2)):
    facts = make_program(tiny_config(STAGED)).facts()
    assert "(20.0%)" in facts["pipeline"]
    assert (row_axis(4), row_axis(3), most_micro_batches(4)) == ("rows", "batch", 2)
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    assert "pipeline" not in make_program(tiny_config(STAGED)).facts()
    assert row_axis(4) == "batch"
