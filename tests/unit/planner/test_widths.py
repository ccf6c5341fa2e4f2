"""Settings of a width (muP), and the check of how updates change what models compute."""

import math

import pytest
from helpers import tiny_config

from ats_jax.config.build import with_settings
from ats_jax.config.width import settings_of_width, widened
from ats_jax.planner.widths import ALL, Slope, check_widths, render_slopes

SMALL = {
  "model.d_model": 32,
  "model.d_ff": 64,
  "model.num_layers": 2,
  "model.num_heads": 2,
  "model.num_kv_heads": 2,
  "model.vocab_size": 320,
  "data.seq_len": 32,
  "data.batch_size": 8,
  "optimizer.learning_rate": 3e-3,
}
MOE = {"moe.num_experts": 4, "moe.d_ff": 32}


def test_the_settings_of_a_width():
  cfg = widened(tiny_config(SMALL | MOE), 128)
  assert (cfg.model.num_heads, cfg.model.d_ff, cfg.moe.d_ff) == (8, 256, 128)
  found = settings_of_width(cfg, 32)
  assert found["model.init_std"] == pytest.approx(cfg.model.init_std / 2)
  assert found["model.embed_std"] == cfg.model.init_std
  assert found["model.head_std"] == pytest.approx(0.02 / 4)
  of_width = dict.fromkeys(("matrix", "expert", "router", "head"), 0.25)
  assert found["optimizer.rate_by_role"] == of_width
  decay = cfg.optimizer.weight_decay  # times the rate it is the same
  assert found["optimizer.decay_by_role"] == dict.fromkeys(of_width, 4 * decay)
  assert with_settings(cfg, found).optimizer.rate_by_role == of_width


def test_at_its_own_width_a_model_is_as_it_was():
  cfg = tiny_config(SMALL)
  same = settings_of_width(cfg, 32)
  assert same["model.init_std"] == cfg.model.init_std
  assert set(same["optimizer.rate_by_role"].values()) == {1.0}
  assert same["model.head_std"] == min(cfg.model.init_std, 0.25 / math.sqrt(32))


def test_rates_by_role_that_are_set_are_kept_as_factors():
  cfg = tiny_config(SMALL | {"optimizer.rate_by_role": {"head": 0.5, "norm": 2.0}})
  rates = settings_of_width(widened(cfg, 64), 32)["optimizer.rate_by_role"]
  assert rates == {"head": 0.25, "norm": 2.0, "matrix": 0.5, "expert": 0.5, "router": 0.5}


@pytest.mark.parametrize(
  ("size", "of_matrices"), [("spectral", 1.0), ("rms", 1.0 / math.sqrt(2.0))]
)
def test_matrices_of_muon(size, of_matrices):
  cfg = tiny_config(SMALL | {"optimizer.name": "muon", "optimizer.update_size": size})
  rates = settings_of_width(widened(cfg, 64), 32)["optimizer.rate_by_role"]
  assert rates["matrix"] == rates["expert"] == pytest.approx(of_matrices)
  assert rates["head"] == rates["router"] == 0.5  # those go by Adam


@pytest.mark.thorough
def test_updates_change_as_much_at_any_width():
  cfg = tiny_config(SMALL)
  plain, scaled = (
    {row.role: row for row in check_widths(cfg, (32, 128), base, updates=3, seeds=1)}
    for base in (0, 32)
  )
  for role in (ALL, "head"):
    assert plain[role].verdict == "grows" and scaled[role].verdict == "steady", role
    assert plain[role].changes[0] == pytest.approx(scaled[role].changes[0], rel=0.05)
  assert abs(scaled["matrix"].slope) < abs(plain["matrix"].slope)


def test_verdicts():
  rows = [Slope("head", (1.0, 2.0), 1.0), Slope("norm", (1.0, 1.1), 0.1), Slope("x", (2, 1), -1.0)]
  assert [row.verdict for row in rows] == ["grows", "steady", "shrinks"]
  text = render_slopes((32, 64), rows)
  assert "not steady: head, x" in text and "grows" in text


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda cfg: widened(cfg, 40), "--widths=40: model.num_heads=2 .* no whole number"),
    (lambda cfg: check_widths(cfg, (32,), 0), "two widths at least"),
    (
      lambda cfg: settings_of_width(with_settings(cfg, {"model.tie_embeddings": True}), 32),
      "tie_embeddings=true.*Set it to false",
    ),
    (
      lambda cfg: settings_of_width(with_settings(cfg, {"optimizer.name": "lion"}), 32),
      "there is a rule for adamw, muon",
    ),
  ],
)
def test_what_cannot_be_is_refused(call, words):
  with pytest.raises(ValueError, match=words):
    call(tiny_config(SMALL))
