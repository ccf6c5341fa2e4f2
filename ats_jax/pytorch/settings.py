"""What a model is made of: our settings, as a workdir or an export keeps them."""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

# `ats_jax.config.Config`, resolved, or what `settings_of` gives: sections with attributes.
Settings = Any

# Places for tokens under the causal rule, over those it is expected to choose.
SLACK = 1.25


class LayerKind(NamedTuple):
  """What one layer is made of.

  Attributes:
    moe: its feed-forward is a mixture of experts.
    mod: only some tokens go through it (mixture of depths).
    window: its queries see the last `model.window` tokens only.
  """

  moe: bool
  mod: bool
  window: bool


class RoutingRules(NamedTuple):
  """How sparse layers choose in a forward pass; `model.forward_pass.Pass` of JAX.

  Attributes:
    training: whether they choose as in training, which looks at whole rows.
    capacity: share of a row's tokens that a skipping layer lets through.
    horizon: outside of training, a shorter row lets as many tokens through as one of this length.
  """

  training: bool
  capacity: float
  horizon: int = 0

  def places(self, seq_len: int) -> int:
    """Places for tokens of a row of `seq_len` in a layer which skips tokens."""
    share, length = self.capacity, seq_len
    if not self.training:
      share, length = min(1.0, SLACK * share), max(seq_len, self.horizon)
    # Not ceil(share * length): 0.55 * 100 is a hair over 55 in binary.
    return min(seq_len, math.ceil(round(share * length, 6)))


def settings_of(values: Mapping[str, Any]) -> Settings:
  """Nested values, {section: {name: value}}, with attributes.

  Raises:
    ValueError: for a model that PyTorch does not compute here.
  """
  cfg = _with_attributes(values)
  check(cfg)
  return cfg


def _with_attributes(value: Any) -> Any:
  if not isinstance(value, Mapping):
    return value
  return SimpleNamespace(**{name: _with_attributes(inner) for name, inner in value.items()})


def check(cfg: Settings) -> None:
  """See that PyTorch computes what JAX does.

  Raises:
    ValueError: naming the setting.
  """
  if cfg.mod.routing == "random":
    raise ValueError(
      "mod.routing=random draws with jax's generator, which PyTorch has not: the two would let "
      "other tokens through. Use mod.routing=static or learned, or stay in JAX."
    )


def layer_kinds(cfg: Settings) -> tuple[LayerKind, ...]:
  """The kind of every layer, from the bottom up."""
  model, moe, mod, layers = cfg.model, cfg.moe, cfg.mod, cfg.model.num_layers
  with_experts = _every(moe.every, moe.dense_first, layers - moe.dense_last)
  skipping = _every(mod.every, mod.start_layer, mod.end_layer or layers)
  full = _every(model.full_every, 0, layers) if model.full_every else range(0)
  return tuple(
    LayerKind(
      moe=moe.num_experts > 0 and layer in with_experts,
      mod=mod.routing != "none" and layer in skipping,
      window=model.window > 0 and layer not in full,
    )
    for layer in range(layers)
  )


def _every(n: int, start: int, stop: int) -> range:
  return range(start + n - 1, stop, n)


def evaluation_rules(cfg: Settings) -> RoutingRules:
  """How evaluation and generation use the weights of an export."""
  return RoutingRules(False, cfg.mod.capacity, cfg.data.seq_len)
