"""What families of models have beside the usual: windows, scaled positions, and their counts."""

import jax
import numpy as np
import pytest
from helpers import make_decoder, tiny_config

from ats_jax.config.build import with_settings
from ats_jax.config.schema import Config
from ats_jax.model.block import rope_scaling
from ats_jax.model.count import count, window_share
from ats_jax.model.layer_kinds import layer_kinds
from ats_jax.model.layout import segments
from ats_jax.ops.rope import Scaling, frequencies

WINDOWS = {"model.num_layers": 4, "model.window": 5, "model.full_every": 2}
SLOW = {
  "rope_scaling.name": "yarn",
  "rope_scaling.factor": 4.0,
  "rope_scaling.original_len": 8,
  "rope_scaling.fast_turns": 2.0,
  "rope_scaling.slow_turns": 0.25,
}
YARN = {f"model.{name}": value for name, value in SLOW.items()}


def test_which_layers_have_a_window():
  cfg = tiny_config({**WINDOWS, "model.num_layers": 8, "model.full_every": 3})
  kinds = layer_kinds(cfg)
  assert [kind.window for kind in kinds] == [True, True, False] * 2 + [True, True]
  assert [len(s.kinds) for s in segments(kinds)] == [3, 1]
  assert len(segments(layer_kinds(tiny_config({"model.window": 5})))) == 1


def test_scaled_frequencies_at_their_two_ends():
  """A fast pair stays, a slow one is slowed by the factor; between them it falls with the pair."""
  plain = frequencies(64, 1e4)
  for kind in ("llama3", "yarn"):
    scaled = frequencies(64, 1e4, Scaling(kind, 8.0, 256, 1.0, 16.0))
    turns = 256 * plain / (2 * np.pi)
    ratio = scaled / plain
    np.testing.assert_allclose(ratio[turns > 17], 1.0)
    np.testing.assert_allclose(ratio[turns < 0.7], 1 / 8)
    assert np.all(np.diff(ratio) <= 0) and 5 < np.sum((ratio < 0.99) & (ratio > 0.13)) < 20
  np.testing.assert_allclose(frequencies(64, 1e4, Scaling("linear", 8.0)), plain / 8)


def test_the_concentration_of_yarn():
  """0.1 ln(s) + 1 (arXiv:2309.00071, equation 22), or what is said."""
  cfg = with_settings(Config(), YARN)
  assert rope_scaling(cfg.model).concentration == pytest.approx(0.1 * np.log(4) + 1)
  cfg = with_settings(cfg, {"model.rope_scaling.concentration": 1.25})
  assert rope_scaling(cfg.model).concentration == 1.25
  assert rope_scaling(Config().model).concentration == 1.0


def counted(changes):
  cfg = tiny_config(changes)
  return count(cfg, jax.eval_shape(lambda: make_decoder(cfg)), 16)


def test_options_are_counted(mesh):
  changes = {"model.qkv_bias": True, "model.post_norms": True, "model.num_layers": 4}
  plain, counts = counted({"model.num_layers": 4}), counted(changes)
  more = 4 * (32 + 16 + 16) + 4 * 2 * 32
  assert counts.parameters - plain.parameters == more
  assert counts.flops_causal - plain.flops_causal == 6 * more
  sinks = counted({**changes, "model.attn_out_bias": True, "model.attn_sinks": True})
  added = sinks.parameters - counts.parameters
  assert added == 4 * (32 + 4)


def test_keys_of_a_window(mesh):
  """Query i sees min(i, w) keys and half of its own."""
  seen = lambda window, seq: sum(min(i, window) for i in range(1, seq + 1))
  for window, seq in ((64, 1024), (1000, 1024), (2000, 1024)):
    exact = seen(window, seq) / seen(seq, seq)
    assert window_share(window, seq) == pytest.approx(exact, rel=2e-2)
  plain, less = counted({"model.num_layers": 4}), counted(WINDOWS)
  attention = plain.flops_full - 6 * plain.active
  share = (1 + window_share(5, 16)) / 2
  assert less.flops_full - 6 * less.active == pytest.approx(share * attention)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"rope_scaling.name": "yarn"}, "rope_scaling=yarn needs model.rope_scaling.original_len"),
    ({"rope_scaling.factor": 2.0}, "factor is a setting of .*=linear and llama3 and yarn, and"),
    (SLOW | {"rope_scaling.slow_turns": 2.0}, "slow_turns=2.0 is not below"),
    (SLOW | {"rope_scaling.slow_turns": 0.0}, "slow_turns=0: YaRN takes its logarithm"),
    (
      {"rope_scaling.name": "linear", "rope_scaling.concentration": 1.5},
      "rope_scaling.concentration is a setting of .*=yarn, and .* is linear",
    ),
    ({"full_every": 2}, "full_every=2 does nothing with model.window=0"),
    ({"window_rope_theta": 1e4}, "window_rope_theta=10000.0 does nothing with model.window=0"),
    ({"window": 4, "full_every": 1}, "full_every=1 leaves no layer"),
    ({"window": 4, "window_rope_theta": 0.5}, "window_rope_theta=0.5 is below 1"),
    ({"qk_norm_scope": "all"}, "qk_norm_scope=all does nothing with model.qk_norm="),
    ({"gate_limit": 5.0}, "gate_limit=5.0 does nothing with model.activation=silu"),
    ({"activation": "clamped", "gate_limit": 0.0}, "gate_limit=0.0 is too small"),
  ],
)
def test_settings_that_do_not_go_together(changes, words):
  with pytest.raises(ValueError, match=words):
    with_settings(Config(), {f"model.{name}": value for name, value in changes.items()})


def test_settings_of_other_sections_that_do_not_go_together():
  with pytest.raises(ValueError, match=r"model\.window=4 with mod\.routing=static"):
    with_settings(Config(), {"model.window": 4, "mod.routing": "static"})
  whole = {"model.qk_norm": True, "model.qk_norm_scope": "all", "mesh.tensor": 2}
  with pytest.raises(ValueError, match="qk_norm_scope=all takes all heads together; mesh"):
    with_settings(Config(), whole)
