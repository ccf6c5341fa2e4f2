"""Parameters and FLOPs from shapes alone, and a table of the parameters."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import GetAttrKey

from ats_jax.config.schema import Config
from ats_jax.model.layer_kinds import LayerKind
from ats_jax.model.layout import mod_tokens
from ats_jax.model.param import Frozen, weights_of

COUNTED_PARTS: tuple[str, ...] = (
  "embedding",
  "attention",
  "dense feed-forward",
  "experts",
  "routers",
  "norms",
  "head",
)


class PartCount(NamedTuple):
  """The number of parameters in one part of a model.

  Attributes:
    total: all parameters of the part.
    active: the parameters that a token is multiplied with, on average.
  """

  total: int
  active: float


@dataclasses.dataclass(frozen=True)
class Counts:
  """The parameters and FLOPs of a model.

  Attributes:
    parameters: the number of all parameters.
    active: the parameters that a token is multiplied with, on average: top_k of the experts (fewer
      where null experts take choices), and the capacity's share of a layer that skips tokens.
    frozen: those of them that do not train, without the input embedding.
    flops_causal: training FLOPs per token: 6 x (active parameters without the input embedding), of
      which frozen ones count 4 as they get no gradient, plus causal attention (each query sees half
      of the keys, or those of its window). The convention of our MFU.
    flops_full: 6 x active parameters + 12 x layers x heads x head_dim x seq, as in PaLM
      (arXiv:2204.02311, appendix B); higher for the same speed. Also in layers with a window it
      counts twice the causal keys. Of latent attention head_dim is the mean of a key's and a
      value's width, as training computes it.
    by_routed: coefficients (c0, c1, c2) of `flops_causal` as c0 + c1 s + c2 s^2, where s is the
      share of tokens that goes through each layer which skips some.
    parts: the parameters by part, for each of `COUNTED_PARTS`. The table of a tied model counts as
      embedding; shared experts, which every token uses, as dense feed-forward.
  """

  parameters: int
  active: float
  frozen: float
  flops_causal: float
  flops_full: float
  by_routed: tuple[float, float, float]
  parts: dict[str, PartCount]

  def flops_saved(self, routed: float) -> float:
    """The share of a token's training FLOPs saved by layers that skip tokens.

    Args:
      routed: the share of tokens that goes through each such layer; 1 saves nothing.
    """
    c0, c1, c2 = self.by_routed
    return 1.0 - (c0 + c1 * routed + c2 * routed * routed) / (c0 + c1 + c2)


def count(cfg: Config, model: Any, seq_len: int) -> Counts:
  """Count a (possibly abstract) model's parameters and its training FLOPs per token.

  Recomputation is not counted: FLOPs are those the mathematics needs. Experts are taken as
  balanced, and layers that skip tokens at their final capacity.
  """
  mod_share = mod_tokens(cfg.mod.capacity, seq_len) / seq_len
  none, half, all_ = (_count(cfg, model, seq_len, share).flops_causal for share in (0.0, 0.5, 1.0))
  square = 2.0 * (none + all_ - 2.0 * half)
  by_routed = (none, all_ - none - square, square)
  return dataclasses.replace(_count(cfg, model, seq_len, mod_share), by_routed=by_routed)


def _count(cfg: Config, model: Any, seq_len: int, mod_share: float) -> Counts:
  """`count` for a given share of tokens through layers that skip some; without `by_routed`."""
  total, active = dict.fromkeys(COUNTED_PARTS, 0), dict.fromkeys(COUNTED_PARTS, 0.0)

  frozen = 0.0

  def add(part: str, tree: Any, share: float = 1.0) -> None:
    nonlocal frozen
    parameters = size(tree)
    total[part] += parameters
    active[part] += parameters * share
    if part != "embedding" or cfg.model.tie_embeddings:
      is_frozen = [v for v in weights_of(tree) if isinstance(v, Frozen)]
      frozen += share * sum(weight.num_values for weight in is_frozen)

  add("embedding", model.embed)
  add("head", model.head)
  add("norms", model.final_norm)
  attention_layers = 0.0
  for segment, blocks in zip(model.layout, model.segments, strict=True):
    for kind, layer in zip(segment.kinds, blocks.layers, strict=True):
      feed_share = mod_share if kind.mod else 1.0
      attend_share = feed_share if cfg.mod.scope == "block" else 1.0
      # Fewer queries, and fewer keys for each.
      keys_share = window_share(cfg.model.window, seq_len) if kind.window else 1.0
      attention_layers += segment.repeats * attend_share**2 * keys_share
      for part, tree in _attention_parts(layer):
        add(part, tree, attend_share)
      for part, tree, share in _feed_parts(cfg, kind, layer):
        add(part, tree, feed_share * share)
      add("routers", layer.depth)
  assert sum(total.values()) == size(model), "a parameter is in no part, or in two"

  parameters, all_active = sum(total.values()), sum(active.values())
  table = 0 if cfg.model.tie_embeddings else total["embedding"]
  model_cfg = cfg.model
  widths = model_cfg.head_dim + (model_cfg.v_head_dim or model_cfg.head_dim)
  attention = 6 * attention_layers * model_cfg.num_heads * widths * seq_len
  return Counts(
    parameters=parameters,
    active=all_active,
    frozen=frozen,
    flops_causal=6.0 * (all_active - table) - 2.0 * frozen + attention / 2,
    flops_full=6.0 * all_active - 2.0 * frozen + attention,
    by_routed=(0.0, 0.0, 0.0),
    parts={name: PartCount(total[name], active[name]) for name in COUNTED_PARTS},
  )


def window_share(window: int, seq_len: int) -> float:
  """The share of a row's query-key pairs that is left with a window, between 0 and 1.

  A query's own key counts half, as in the convention that causal attention is half of a square.
  """
  share = min(1.0, window / seq_len)
  return share * (2.0 - share)


def size(tree: Any) -> int:
  """Count the parameters in a (possibly abstract) part of a model, without buffers."""
  return sum(weight.num_values for weight in weights_of(tree))


def _attention_parts(layer: Any) -> Iterator[tuple[str, Any]]:
  yield from layer.attn.parts()
  yield "norms", (layer.attn_norm, layer.attn_post_norm)


def _feed_parts(cfg: Config, kind: LayerKind, layer: Any) -> Iterator[tuple[str, Any, float]]:
  """Yield each part, its parameters, and the share of them that a token is multiplied with."""
  moe, mlp = cfg.moe, layer.mlp
  yield "norms", (layer.mlp_norm, layer.mlp_post_norm), 1.0
  if not kind.moe:
    yield "dense feed-forward", mlp, 1.0
    return
  drawn = moe.top_k * moe.num_experts / (moe.num_experts + moe.null_experts)
  yield "experts", (mlp.gate, mlp.up, mlp.down), drawn / mlp.router.num_slots
  yield "routers", mlp.router, 1.0
  yield "dense feed-forward", mlp.shared, 1.0


def parameter_overview(model: Any) -> str:
  """Returns a table of the leaves: path, shape, dtype, number of elements, bytes, sharding.

  Args:
    model: any pytree of arrays or `jax.ShapeDtypeStruct`s, e.g. a Flax NNX module in tree mode or
      its `jax.eval_shape`. Sharding is the PartitionSpec, empty where the leaf has none.

  Raises:
    ValueError: a leaf has no shape and dtype.
  """
  rows = [("parameter", "shape", "dtype", "size", "bytes", "sharding")]
  total_size = total_bytes = device_bytes = 0
  for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
    name = _name(path)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
      raise ValueError(f"parameter {name!r} is a {type(leaf).__name__}, expected an array")
    sharding = getattr(leaf, "sharding", None)
    shard_shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
    size, itemsize = math.prod(leaf.shape), leaf.dtype.itemsize
    spec = str(sharding.spec) if isinstance(sharding, jax.sharding.NamedSharding) else ""
    shape, dtype = str(tuple(leaf.shape)), str(leaf.dtype)
    rows.append((name, shape, dtype, f"{size:,}", f"{size * itemsize:,}", spec))
    total_size += size
    total_bytes += size * itemsize
    device_bytes += math.prod(shard_shape) * itemsize
  total = f"total: {total_size:,} parameters, {total_bytes:,} bytes ({total_bytes / 2**30:.3f} GiB)"
  if device_bytes != total_bytes:
    total += f", {device_bytes:,} bytes ({device_bytes / 2**30:.3f} GiB) on each device"
  return "\n".join([*_align(rows), total])


def _name(path: tuple[Any, ...]) -> str:
  """`blocks.attn.q`; the attribute that holds an nnx.Variable's array is not part of the name."""
  if path and path[-1] == GetAttrKey("value"):
    path = path[:-1]
  return jax.tree_util.keystr(path, simple=True, separator=".")


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  sides = "<<<>><"  # numbers to the right
  return [
    "  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=True)).rstrip()
    for row in rows
  ]
