"""From a router that sends everything to two experts back to balance, with the default settings."""

import dataclasses

import canonical
import jax
import numpy as np
import pytest
from helpers import tiny_config
from xla_flags import FAST_STEPS

from ats_jax.step.program import init_state, make_program

SEEDS, MOST_STEPS, WINDOW = 2, 120, 10


@jax.jit
def collapse(state):
  for layer in state.model.segments[0].layers:
    offset = layer.mlp.router.offset
    offset[...] = offset[...].at[:, :2].add(6.0)
  return state


def steps_to_balance(program, seed) -> int:
  """Steps until max_violation, averaged over a window, is below 1."""
  cfg, rng = program.cfg, np.random.default_rng(seed)
  seeded = dataclasses.replace(cfg, seed=seed)
  state = collapse(init_state(seeded, program.num, program.optimizer))
  violations = []
  for step in range(1, MOST_STEPS + 1):
    batch = canonical.text_rows(cfg, rng)
    state, metrics = program.train_step(state, batch, program.training_rules(1))
    violations.append(float(metrics["moe/max_violation"]))
    if step == 1:
      assert violations[0] > 2.5  # two of eight experts have it all: 3
    if step >= WINDOW and np.mean(violations[-WINDOW:]) < 1.0:
      return step
  return MOST_STEPS + 1


@pytest.mark.thorough
def test_a_collapsed_router_recovers(mesh):
  cfg = tiny_config(
    {
      "num_steps": 300,
      "model.vocab_size": 256,
      "model.d_model": 64,
      "moe.num_experts": 8,
      "moe.d_ff": 32,
      "moe.router_bias": True,
      "data.seq_len": 64,
      "data.batch_size": 16,
      "optimizer.learning_rate": 3e-3,
      "optimizer.warmup_steps": 20,
      "step.loss_chunk_tokens": 1024,
      "step.compiler_options": dict([FAST_STEPS.removeprefix("--").split("=")]),
    }
  )
  program = make_program(cfg)
  found = [steps_to_balance(program, seed) for seed in range(SEEDS)]
  assert max(found) <= MOST_STEPS
