"""What a pipeline refuses, and what is said of it."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from helpers import make_test_mesh, tiny_config

from ats_jax.planner.abstract import abstract_mesh, abstract_state
from ats_jax.planner.describe import describe, render_plan
from ats_jax.sharding.apply import row_axis
from ats_jax.sharding.mesh import on_mesh
from ats_jax.sharding.pipeline import _slot, bubble, most_micro_batches, num_ticks
from ats_jax.sharding.rules import ZERO_AXES
from ats_jax.step.program import make_program

STAGED = {"mesh.data": 1, "mesh.stage": 2, "step.accum_steps": 4, "model.num_layers": 4}
MOE = {"moe.num_experts": 4, "moe.d_ff": 32}
TICKS = np.arange(64)  # one shape for all examples
EIGHT_BITS = {"precision.fp8": True, "precision.fp8_keep_last": 0}


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"step.accum_steps": 1}, r"mesh.stage=2 does not divide step.accum_steps=1, .*multiple of 2"),
    ({"mesh.stage": 4, "step.accum_steps": 2}, "mesh.stage=4 does not divide step.accum_steps=2"),
    ({"model.num_layers": 3}, "does not cut model.num_layers=3 into equal.* as 3 x 1 .*num_layers"),
    (MOE | {"moe.dense_first": 1}, r"repeat as 1 x 1 \+ 3 x 1 .*moe.dense_first"),
    (MOE | {"moe.every": 4}, "repeat as .*moe.every"),
    (
      {"mesh.stage_rounds": 4},
      "stage=2 x mesh.stage_rounds=4 does not cut .* mesh.stage_rounds, model",
    ),
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
  assert moments.segments[0].layers[0].mlp.gate.weight.sharding.spec[:2] == ("stage", ZERO_AXES)


def test_the_bubble():
  assert bubble(4, 1) == 0.0
  assert bubble(4, 2) == 1 / 5 and bubble(8, 4) == 3 / 11
  assert bubble(4, 2, 2) == 1 / 9 and bubble(8, 4, 3) == 3 / 27
  assert bubble(3, 2, 2) == 2 / 8  # a group of one goes round as slowly as one of two


@hypothesis.settings(max_examples=10)
@hypothesis.given(st.integers(1, 9), st.sampled_from([1, 2, 3, 4]), st.integers(1, 4))
def test_every_micro_batch_goes_through_every_round_of_every_stage_in_order(micro, stages, rounds):
  """What a stage made in a tick is what the next one works on in the next tick."""
  ticks = num_ticks(micro, stages, rounds)
  assert ticks <= len(TICKS)
  slots_of = lambda s: _slot(TICKS - s, micro, stages, rounds)
  at = [jax.tree.map(lambda x: np.asarray(x)[:ticks], slots_of(s)) for s in range(stages)]
  every = {(m, r) for m in range(micro) for r in range(rounds)}
  for here, slots in enumerate(at):
    real = [(m, r) for m, r, is_real in zip(*slots, strict=True) if is_real]
    assert len(real) == len(every) and set(real) == every
    for tick in np.flatnonzero(slots.is_real):
      now = int(slots.micro[tick]), int(slots.round[tick])
      if here == 0 and now[1] == 0:
        continue  # enters
      before = at[here - 1]
      came = int(before.micro[tick - 1]), int(before.round[tick - 1])
      assert before.is_real[tick - 1] and came == (now[0], now[1] - (here == 0))
  # The last thing that the last stage makes of a micro-batch is that of its last round.
  last = {int(m): int(r) for m, r in zip(at[-1].micro, at[-1].round, strict=True)}
  assert last == dict.fromkeys(range(micro), rounds - 1)


@pytest.mark.thorough
def test_the_planner_knows_a_stage():
  sizes = STAGED | {"model.vocab_size": 384}
  one, two = (describe(tiny_config(sizes | {"mesh.stage": n})) for n in (1, 2))
  text = "pipeline: 2 stages of 2 layers; 4 micro-batches take 5 ticks, of which a stage idles 1"
  assert f"{text} (20.0%)" in render_plan(two) and "pipeline:" not in render_plan(one)
  assert "at a time on each: 2 x 16 tokens" in render_plan(two)
  exact = lambda plan: plan["device_bytes_exact"]
  tables = 4 * (2 * 384 * 32 + 32)  # embedding, head and final norm, on each stage
  for part in ("weights", "mu", "gradients"):
    assert exact(two)[part] - tables == (exact(one)[part] - tables) / 2
  estimated = lambda plan: plan["device_bytes_estimated"]
  assert estimated(two)["recomputed stage"] < estimated(one)["activations"]
  # Of four micro-batches 2 x 16 x 32 activations come out and as many gradients go in.
  assert estimated(two)["handed on"] == 2 * 4 * 2 * 16 * 32 * 4
  assert not estimated(one)["handed on"] and not estimated(one)["recomputed stage"]
  rounds = describe(tiny_config(sizes | {"mesh.stage": 2, "mesh.stage_rounds": 2}))
  text = "pipeline: 2 stages of 2 x 1 layers; 2 rounds of 4 micro-batches take 9 ticks, of which a "
  assert f"{text}stage idles 1 (11.1%)" in render_plan(rounds)
  assert exact(rounds) == exact(two)
  half = estimated(two)["recomputed stage"] / 2
  assert estimated(rounds)["recomputed stage"] == pytest.approx(half, rel=0.01)
  kept = describe(tiny_config(sizes | {"mesh.stage": 2, "step.remat_stages": "dots"}))
  assert estimated(kept)["activations"] > 2 * estimated(two)["activations"]


def test_the_log_says_it():
  with jax.set_mesh(make_test_mesh(1, 1, 1, stage=2)):
    facts = make_program(tiny_config(STAGED)).facts()
    assert "(20.0%)" in facts["pipeline"]
    assert (row_axis(4), row_axis(3), most_micro_batches(4)) == ("rows", "batch", 2)
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    assert "pipeline" not in make_program(tiny_config(STAGED)).facts()
    assert row_axis(4) == "batch"
