"""Published model sizes as configs, each dense, with experts, with skipped layers, or with both.

`--config=NAME:VARIANT` picks one; docs/reference/models.md has their exact sizes and where the
dimensions come from.
"""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from ats_jax.config.names import to_dict
from ats_jax.config.schema import Config
from ats_jax.config.tree import edited

VARIANTS = {
  "dense": "every token goes through every layer",
  "moe": "experts in every layer",
  "mod": "every second layer takes one token in eight",
  "hybrid": "both: what goes through a layer goes to experts",
}


@dataclasses.dataclass(frozen=True)
class Preset:
  """Dimensions and a recipe to start from; names as in the settings.

  Attributes:
    variant: what the name alone stands for.
    batch_size: rows of an update.
    num_experts: of the variants that have them, each as wide as the dense feed-forward.
    num_shared: beside them.
  """

  num_layers: int
  d_model: int
  num_heads: int
  num_kv_heads: int
  d_ff: int
  vocab_size: int
  seq_len: int
  tie_embeddings: bool = False
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  variant: str = "dense"
  num_experts: int = 8
  num_shared: int = 0
  learning_rate: float = 3e-4
  warmup_fraction: float = 0.02
  batch_size: int = 16
  accum_steps: int = 1
  remat: str = "full"


def _b(layers: int, d_model: int, heads: int, kv_heads: int, **other) -> Preset:
  """A size named by its parameters; `d_ff` is 8/3 of the width in multiples of 256."""
  d_ff = -(-8 * d_model // (3 * 256)) * 256  # as `model.d_ff=0` resolves
  common = {"d_ff": d_ff, "vocab_size": 50_304, "tie_embeddings": True}
  return Preset(layers, d_model, heads, kv_heads, **common | other)


def _gpt(layers: int, d_model: int, heads: int, d_ff: int, learning_rate: float) -> Preset:
  """A shape and a recipe of GPT-3, table 2.1 (arXiv:2005.14165): updates of half a million tokens.

  Blocks are this decoder's: SwiGLU of 8/3 the width takes the place of an MLP of 4 times the width,
  so parameters come out as there but for the learned positions.
  """
  return Preset(
    layers, d_model, heads, heads, d_ff, vocab_size=50_304, seq_len=2048, tie_embeddings=True,
    learning_rate=learning_rate, batch_size=256, accum_steps=16,
  )  # fmt: skip


def _llama(layers: int, d_model: int, heads: int, d_ff: int, **other) -> Preset:
  """A shape of Llama 3 (arXiv:2407.21783)."""
  return Preset(
    layers, d_model, heads, 8, d_ff, vocab_size=128_256, seq_len=4096, rope_theta=5e5, **other
  )


PRESETS = {
  # 14M parameters, of which a token uses 2M beside the embedding; for one small GPU.
  "demo_14m": _b(
    2, 128, 2, 2, d_ff=1216, seq_len=512, variant="moe", learning_rate=1e-4, batch_size=240,
    accum_steps=8, remat="none",
  ),
  # The shape of gpt_125m. Of 32 experts as wide as its feed-forward a token uses 0.2B parameters.
  "debug_200m": _b(
    12, 768, 12, 12, seq_len=512, num_experts=32, learning_rate=6e-4, batch_size=4,
    warmup_fraction=0.15, remat="none",
  ),
  "gpt_125m": _gpt(12, 768, 12, 2048, learning_rate=6e-4),
  "gpt_350m": _gpt(24, 1024, 16, 2816, learning_rate=3e-4),
  "gpt_760m": _gpt(24, 1536, 16, 4096, learning_rate=2.5e-4),
  "b1": _b(24, 1024, 16, 4, seq_len=2048, batch_size=8, warmup_fraction=0.15),
  "b7": _b(32, 4096, 32, 8, seq_len=4096, learning_rate=1e-4, warmup_fraction=0.15),
  "b14": _b(
    40, 5120, 40, 10, seq_len=4096, learning_rate=8e-5, batch_size=32, warmup_fraction=0.05
  ),
  "b30": _b(
    48, 8192, 64, 16, seq_len=8192, learning_rate=6e-5, batch_size=64, warmup_fraction=0.03
  ),
  "b50": _b(56, 10_240, 80, 20, seq_len=8192, learning_rate=4e-5, batch_size=128),
  "b75": _b(64, 10_240, 80, 20, seq_len=8192, learning_rate=3e-5, batch_size=256),
  "b100": _b(
    80, 12_288, 96, 24, seq_len=8192, learning_rate=2e-5, batch_size=512, warmup_fraction=0.01
  ),
  "b200": _b(
    100, 16_384, 128, 32, seq_len=8192, learning_rate=1.5e-5, batch_size=1024, warmup_fraction=0.01
  ),
  "b300": _b(
    120, 20_480, 160, 40, seq_len=8192, learning_rate=1e-5, batch_size=2048, warmup_fraction=0.01
  ),
  "moe_200m": Preset(
    12, 768, 12, 4, 2048, vocab_size=50_304, seq_len=2048, variant="moe", remat="none"
  ),
  "p828_60m": Preset(
    1, 512, 8, 2, 768, vocab_size=49_152, seq_len=2048, norm_eps=1e-5, variant="moe",
    num_experts=4, num_shared=1, remat="none",
  ),
  "p828_800m": Preset(
    24, 1536, 24, 8, 4096, vocab_size=49_152, seq_len=2048, norm_eps=1e-5, variant="moe",
    num_shared=1,
  ),
  "llama_7b": _llama(32, 4096, 32, 14_336),
  "llama_13b": _llama(40, 5120, 40, 17_920),
  "llama_70b": _llama(80, 8192, 64, 28_672),
  "moe_small": Preset(
    24, 2048, 16, 4, 7168, vocab_size=128_256, seq_len=4096, rope_theta=5e5, variant="moe"
  ),
}  # fmt: skip


def preset(name: str, variant: str = "") -> ConfigDict:
  """The config of a preset.

  Args:
    name: of `PRESETS`.
    variant: of `VARIANTS`; empty = the preset's own.

  Raises:
    ValueError: for an unknown variant.
  """
  dims = PRESETS[name]
  variant = variant or dims.variant
  if variant not in VARIANTS:
    known = "; ".join(f"{v!r} ({meaning})" for v, meaning in VARIANTS.items())
    raise ValueError(f"unknown variant {variant!r} of {name}. Choose one of: {known}.")
  defaults = to_dict(Config())
  values: dict[str, dict[str, Any]] = {}
  for section in ("model", "data", "optimizer", "step"):
    known = defaults[section].keys() & vars(dims).keys()
    values[section] = {key: getattr(dims, key) for key in known}
  values["data"]["bpe_vocab_size"] = dims.vocab_size  # a tokenizer that fills the table
  if variant in ("moe", "hybrid"):
    values["moe"] = {"num_experts": dims.num_experts, "num_shared": dims.num_shared}
  if variant in ("mod", "hybrid"):
    values["mod"] = {"routing": "learned", "every": min(defaults["mod"]["every"], dims.num_layers)}
  return edited(values)
