"""Training with some layers in 8 bits."""

import dataclasses

import canonical
import jax
import numpy as np
import pytest
from helpers import make_decoder, tiny_config

from ats_jax.config.schema import SampleConfig
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.inference.generator import generate
from ats_jax.ops import fp8_matmul

SHAPE = {"model.d_model": 64, "model.d_ff": 128, "model.head_dim": 16}
STEPS, BAND = 40, 0.05  # nats between the losses of the last ten steps


def rows(cfg, step):
  return canonical.text_rows(cfg, np.random.default_rng(step))


ALL_LAYERS = {"fp8": True, "fp8_keep_first": 0, "fp8_keep_last": 0}


def config(**precision):
  changes = {"optimizer.learning_rate": 3e-3, "num_steps": STEPS, "model.vocab_size": 320}
  return tiny_config(SHAPE | changes | {f"precision.{k}": v for k, v in precision.items()})


def losses(cfg):
  state, found = canonical.state(cfg), []
  for step in range(STEPS):
    state, metrics = canonical.step(cfg, state, rows(cfg, step))
    found.append(float(metrics["train/loss"]))
  return np.array(found), state


@pytest.mark.thorough
def test_the_loss_stays_within_a_band_and_text_is_made_without_them(mesh, monkeypatch):
  wide, eight = config(), config(**ALL_LAYERS)
  (want, _), (found, state) = losses(wide), losses(eight)
  assert found[0] == pytest.approx(want[0], abs=0.01) and (found != want).all()
  assert want[-10:].mean() < want[0] - 1.5
  assert found[-10:].mean() == pytest.approx(want[-10:].mean(), abs=BAND)
  # A prompt is 16 rows and more, which 8 bits could take; a token is not.
  monkeypatch.setattr(fp8_matmul, "fp8_matmuls", None)
  greedy = SampleConfig(temperature=0.0, max_tokens=4)
  rules = canonical.program(eight).rules(STEPS)
  text = generate(state.weights, ByteTokenizer(), greedy, rules=rules, prompt="import ", seed=0)
  assert len("".join(text)) > 0


def test_the_parameters_do_not_know_of_them(mesh):
  shape = SHAPE | {"model.num_layers": 4, "moe.num_experts": 4, "moe.every": 2}
  init = lambda fp8: jax.make_jaxpr(
    lambda: jax.tree.leaves(make_decoder(tiny_config(shape | {"precision.fp8": fp8})))
  )()
  assert str(init(True)) == str(init(False))


@pytest.mark.thorough
def test_a_scan_in_runs_is_what_unrolled_layers_are(mesh):
  """The first and the last layer are wide: three scans over slices of one stack."""
  found = []
  for unroll in (1, 4):
    settings = {"model.num_layers": 4, "step.scan_unroll": unroll, "precision.fp8": True}
    cfg = tiny_config(SHAPE | settings | {"step.remat": "full"})
    batch = {name: x[0] for name, x in rows(cfg, 0).items()}
    found.append(canonical.gradients(cfg, canonical.model(cfg), batch))
  for got, want in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_allclose(
      np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=2e-3, atol=1e-4
    )


@pytest.mark.thorough
def test_the_rules_switch_them_off(mesh):
  program, wide = (canonical.program(config(**more)) for more in (ALL_LAYERS, {}))
  batch = {name: x[0] for name, x in rows(program.cfg, 0).items()}
  model, same = (canonical.state(one.cfg).model for one in (program, wide))
  want = wide.eval_step(same, batch, wide.rules(1))
  off = dataclasses.replace(program, fp8=False)
  np.testing.assert_array_equal(off.eval_step(model, batch, off.rules(0)), want)
  assert program.eval_step(model, batch, program.rules(0))[0] != want[0]
  assert program.rules(0) != off.rules(0) and program.training_rules(1) != off.training_rules(1)
  norms = [
    one.train_step(canonical.state(one.cfg), rows(one.cfg, 0), one.training_rules(1))[1]
    for one in (off, wide, program)
  ]
  without, never, eight = (float(metrics["train/grad_norm"]) for metrics in norms)
  assert without == never != eight
