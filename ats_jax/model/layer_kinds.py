"""Which layers have experts, which skip tokens and which see a window."""

import dataclasses

from ats_jax.config.schema import Config


@dataclasses.dataclass(frozen=True)
class LayerKind:
  """What one layer is made of.

  Attributes:
    moe: its feed-forward is a mixture of experts.
    mod: only some tokens go through it (mixture of depths).
    window: its queries see the last `model.window` tokens only.
    tuned: it trains, or has adapters (`finetune.layers`).
  """

  moe: bool
  mod: bool
  window: bool = False
  tuned: bool = True


def layer_kinds(cfg: Config) -> tuple[LayerKind, ...]:
  """Return the kinds of all `model.num_layers` layers, from the bottom up."""
  model, moe, mod, num_layers = cfg.model, cfg.moe, cfg.mod, cfg.model.num_layers
  moe_layers = _every(moe.every, moe.dense_first, num_layers - moe.dense_last)
  mod_layers = _every(mod.every, mod.start_layer, mod.end_layer or num_layers)
  full_layers = _every(model.full_every, 0, num_layers) if model.full_every else ()
  kinds = []
  for layer in range(num_layers):
    kinds.append(
      LayerKind(
        moe=moe.num_experts > 0 and layer in moe_layers,
        mod=mod.routing != "none" and layer in mod_layers,
        window=model.window > 0 and layer not in full_layers,
        tuned=cfg.finetune.tunes(layer),
      )
    )
  return tuple(kinds)


def _every(n: int, start: int, stop: int) -> range:
  return range(start + n - 1, stop, n)
