"""Published model sizes as configs, each dense, with experts, with skipped layers, or with both.

`configs/<name>.py:<variant>` picks one; docs/reference/models.md has their exact sizes and where
the dimensions come from.
"""

import dataclasses

from ml_collections import ConfigDict

from ats_jax.config.build import to_dict
from ats_jax.config.schema import Config

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
  remat: str = "full"


def _b(layers: int, d_model: int, heads: int, kv_heads: int, d_ff: int, **other) -> Preset:
  """A size of the adaptive training system's own table."""
  common = {"vocab_size": 50_304, "tie_embeddings": True}
  return Preset(layers, d_model, heads, kv_heads, d_ff, **common | other)


def _llama(layers: int, d_model: int, heads: int, d_ff: int, **other) -> Preset:
  """A shape of Llama 3 (arXiv:2407.21783)."""
  return Preset(
    layers, d_model, heads, 8, d_ff, vocab_size=128_256, seq_len=4096, rope_theta=5e5, **other
  )


PRESETS = {
  "debug_200m": _b(
    12, 640, 8, 8, 2560, vocab_size=1024, seq_len=512, learning_rate=3e-5, batch_size=4,
    warmup_fraction=0.15, remat="none",
  ),
  # 1920 wide: 12 heads of 1908 would be 159 wide, which RoPE cannot pair. 5120 is 8/3 of it.
  "b1": _b(31, 1920, 12, 4, 5120, seq_len=2048, batch_size=8, warmup_fraction=0.15),
  "b7": _b(
    32, 4096, 32, 8, 10_944, seq_len=4096, learning_rate=1e-4, warmup_fraction=0.15
  ),
  "b14": _b(
    40, 5120, 40, 10, 13_696, seq_len=4096, learning_rate=8e-5, batch_size=32, warmup_fraction=0.05
  ),
  "b30": _b(
    48, 6656, 52, 13, 17_792, seq_len=8192, learning_rate=6e-5, batch_size=64, warmup_fraction=0.03
  ),
  "b50": _b(56, 8192, 64, 16, 21_888, seq_len=8192, learning_rate=4e-5, batch_size=128),
  "b75": _b(64, 10_240, 80, 20, 27_328, seq_len=8192, learning_rate=3e-5, batch_size=256),
  "b100": _b(
    72, 12_288, 96, 24, 32_768, seq_len=8192, learning_rate=2e-5, batch_size=512,
    warmup_fraction=0.01,
  ),
  "b200": _b(
    88, 16_384, 128, 32, 43_712, seq_len=8192, learning_rate=1.5e-5, batch_size=1024,
    warmup_fraction=0.01,
  ),
  "b300": _b(
    96, 20_480, 160, 40, 54_656, seq_len=8192, learning_rate=1e-5, batch_size=2048,
    warmup_fraction=0.01,
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
    raise ValueError(f"configs/{name}.py: unknown variant {variant!r}. Choose one of: {known}.")
  values = to_dict(Config())
  for section in ("model", "data", "optimizer", "step"):
    known = values[section].keys() & vars(dims).keys()
    values[section] |= {key: getattr(dims, key) for key in known}
  data, moe, mod = values["data"], values["moe"], values["mod"]
  data["bpe_vocab_size"] = min(data["bpe_vocab_size"], dims.vocab_size)
  if variant in ("moe", "hybrid"):
    moe |= {"num_experts": dims.num_experts, "num_shared": dims.num_shared}
  if variant in ("mod", "hybrid"):
    mod |= {"routing": "learned", "every": min(mod["every"], dims.num_layers)}
  return ConfigDict(values)
