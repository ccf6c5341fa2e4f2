"""The tables of docs/reference/models.md: exact sizes of presets, and what their names promise."""

from collections.abc import Iterator, Mapping

import jax

from ats_jax.config.build import from_config_dict
from ats_jax.config.presets import PRESETS, VARIANTS, preset
from ats_jax.config.schema import Config
from ats_jax.model.count import Counts, count
from ats_jax.planner.abstract import abstract_mesh, abstract_state, resolve_without_data
from ats_jax.planner.memory import kv_cache_bytes

# What the names promise: active, total.
NOMINAL = {
  "debug_200m": ("200M", "6B"),
  "b1": ("1B", "8B"),
  "b7": ("7B", "56B"),
  "b14": ("14B", "112B"),
  "b30": ("30B", "240B"),
  "b50": ("50B", "400B"),
  "b100": ("100B", "800B"),
  "b200": ("200B", "1.6T"),
  "b300": ("300B", "2.4T"),
  "gpt_125m": ("125M",),
  "gpt_350m": ("350M",),
  "gpt_760m": ("760M",),
  "moe_200m": ("200M", "549M"),
  "p828_60m": ("60M",),
  "p828_800m": ("800M",),
  "llama_7b": ("8.03B", "8.03B"),
  "llama_13b": ("14.84B", "14.84B"),
  "llama_70b": ("70.55B", "70.55B"),
  "moe_small": ("2.9B", "9.23B"),
}


def sizes(cfg: Config) -> tuple[Config, Counts, int]:
  """A config as it is resolved, its counts, and bytes of keys and values of a row."""
  cfg = resolve_without_data(cfg)
  with jax.sharding.use_abstract_mesh(abstract_mesh(cfg)):
    model = abstract_state(cfg).model
    return cfg, count(cfg, model, cfg.data.seq_len), kv_cache_bytes(cfg, model)


def tables() -> Iterator[str]:
  """Lines of Markdown."""
  found = {
    (name, v): sizes(from_config_dict(preset(name, v))) for name in PRESETS for v in VARIANTS
  }
  yield from _dimensions(found)
  yield ""
  yield from _counts(found)


Found = Mapping[tuple[str, str], tuple[Config, Counts, int]]


def _dimensions(found: Found) -> Iterator[str]:
  yield from _row(
    "preset", "layers", "d_model", "heads / kv", "head_dim", "d_ff", "experts", "vocabulary",
    "head", "seq_len", "its name says: active / total", "dense", "moe: active / total",
    header=True,
  )  # fmt: skip
  for name, dims in PRESETS.items():
    cfg, dense, _ = found[name, "dense"]
    yield from _row(
      f"`{name}`",
      dims.num_layers,
      dims.d_model,
      f"{dims.num_heads} / {dims.num_kv_heads}",
      cfg.model.head_dim,
      dims.d_ff,
      f"{dims.num_experts} + {dims.num_shared}" if dims.num_shared else dims.num_experts,
      dims.vocab_size,
      "tied" if dims.tie_embeddings else "own",
      dims.seq_len,
      _nominal(name),
      _short(dense.parameters),
      _active_of_total(found[name, "moe"][1]),
    )


def _counts(found: Found) -> Iterator[str]:
  yield from _row(
    "config", "parameters", "active", "active share", "GFLOPs a token, training", "6N + 12LdS",
    "keys and values: bytes a token", "GiB a row",
    header=True,
  )  # fmt: skip
  for (name, variant), (cfg, counts, kv_row) in found.items():
    yield from _row(
      f"`{name}:{variant}`" + (" *" if PRESETS[name].variant == variant else ""),
      counts.parameters,
      round(counts.active),
      f"{counts.active / counts.parameters:.1%}",
      f"{counts.flops_causal / 1e9:,.3f}",
      f"{counts.flops_full / 1e9:,.3f}",
      round(kv_row / cfg.data.seq_len),
      f"{kv_row / 2**30:,.3f}",
    )


def _nominal(name: str) -> str:
  return " / ".join(NOMINAL.get(name, ("-",)))


def _active_of_total(counts: Counts) -> str:
  return f"{_short(counts.active)} / {_short(counts.parameters)}"


def _row(*cells: str | int, header: bool = False) -> Iterator[str]:
  yield f"| {' | '.join(f'{c:,}' if isinstance(c, int) else c for c in cells)} |"
  if header:
    yield "|---" + "|--:" * (len(cells) - 1) + "|"


def _short(number: float) -> str:
  for unit, size in (("T", 1e12), ("B", 1e9)):
    if number >= size:
      return f"{number / size:.2f}{unit}"
  return f"{number / 1e6:.1f}M"
