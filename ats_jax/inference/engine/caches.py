"""What layers keep of earlier tokens, in pages that rows share.

Letters: B rows, W pages of a row, G pages in all, P slots of a page, K key/value heads, H head_dim,
X keys and values of a head, C latent, R rotated part of a key, Y both, T new tokens, N query heads.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from ats_jax.config.schema import ModelConfig
from ats_jax.inference.engine.options import PAGES
from ats_jax.model.attention import Attention
from ats_jax.model.block import Block
from ats_jax.model.forward_pass import Pass
from ats_jax.ops.attention.causal import KV_AXES, Q_AXES, TOKEN_AXES, attention
from ats_jax.ops.attention.latent import attend_to_latents
from ats_jax.ops.attention.paged import (
  SCALE_DTYPE,
  narrowed,
  paged_attention,
  read,
  widened,
  write,
)
from ats_jax.ops.registry import Kernels
from ats_jax.sharding.apply import island, num_shards

PAGE_AXES = (None, None)
NARROW = {name: jnp.dtype(dtype) for name, dtype in PAGES.items()}
_OF_HEADS = ((*PAGE_AXES, "kv_heads", "head_dim"), (*PAGE_AXES, "kv_heads", None))
_OF_LATENTS = ((*PAGE_AXES, "latent"), (*PAGE_AXES, None))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
  """How a program looks at the pages of its rows; the same in all layers.

  Attributes:
    table_BW: int32 pages of each row, in order; G = none.
    kernels: the chosen implementations.
    whole: the tokens at hand are the first ones of their rows: they see nothing but each other.
  """

  table_BW: jax.Array
  kernels: Kernels = dataclasses.field(metadata=dict(static=True))
  whole: bool = dataclasses.field(metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """Keys and values of a layer (`model.attention.Attended`).

  Attributes:
    arrays: [G, P, K, X], keys, and behind those of each head its values; in 8 bits also the scales
      of both, [G, P, K, 2].
    view: which of them are of which row.
    slots: tokens that a row can hold here.
  """

  arrays: tuple[jax.Array, ...]
  view: View
  slots: int = dataclasses.field(metadata=dict(static=True))

  def attend(
    self, q_BTNH, k_BTKH, v_BTKH, index_BT, *, window, soft_cap, sinks_N
  ) -> tuple[jax.Array, Self]:
    """As of `Attended`."""
    view, of_pages = self.view, _OF_HEADS[: len(self.arrays)]
    options = {"window": window, "soft_cap": soft_cap}
    new = (q_BTNH, k_BTKH, v_BTKH)
    if view.whole:
      pages = island(
        lambda k, v, table, index, *pages: write(pages, (k, v), table, index),
        in_axes=(KV_AXES, KV_AXES, TOKEN_AXES, TOKEN_AXES, *of_pages),
        out_axes=of_pages,
      )(k_BTKH, v_BTKH, view.table_BW, index_BT, *self.arrays)
      if len(pages) > 1:  # or a text would read on differently behind pages that it shares
        rounded = lambda x: widened(*narrowed(x, pages[0].dtype), x.dtype)
        new = (q_BTNH, rounded(k_BTKH), rounded(v_BTKH))
      known_BT = ((index_BT >= 0) & (index_BT < self.slots)).astype(jnp.int32)
      y_BTNH = attention(
        *new, segment_ids_BT=known_BT, max_segments=2, kernels=view.kernels, sinks_N=sinks_N,
        **options,
      )  # fmt: skip
    else:
      number = len(self.arrays)
      local = lambda q, k, v, table, index, *rest: paged_attention(
        q, k, v, rest[:number], table, index, sinks_N=next(iter(rest[number:]), None),
        kernels=view.kernels, **options,
      )  # fmt: skip
      sinks = () if sinks_N is None else (sinks_N,)
      of_new = (Q_AXES, KV_AXES, KV_AXES, TOKEN_AXES, TOKEN_AXES)
      axes = (*of_new, *of_pages, *(("heads",) for _ in sinks))
      attend = island(local, in_axes=axes, out_axes=(Q_AXES, of_pages))
      y_BTNH, pages = attend(*new, view.table_BW, index_BT, *self.arrays, *sinks)
    return y_BTNH, dataclasses.replace(self, arrays=pages)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentPages:
  """Latents of a layer (`model.latent_attention.LatentCache`).

  Attributes:
    arrays: [G, P, Y], latents, and behind each the rotated part of its key; in 8 bits also the
      scales of both, [G, P, 2].
    view: which of them are of which row.
    slots: tokens that a row can hold here.
  """

  arrays: tuple[jax.Array, ...]
  view: View
  slots: int = dataclasses.field(metadata=dict(static=True))

  def attend(
    self, q_BTNC, turned_BTNR, latent_BTC, rotated_BTR, index_BT, *, scale
  ) -> tuple[jax.Array, Self]:
    """Attend to the latents of a row's slots, those of the new tokens among them."""

    def local(q, turned, latent, rotated, table, index, *pages):
      pages = write(pages, (latent, rotated), table, index)
      widths = latent.shape[-1], rotated.shape[-1]
      latents, rotateds = read(pages, table, widths, latent.dtype)
      return attend_to_latents(q, turned, latents, rotateds, index, scale), pages

    token, of_pages = ("batch", "seq", "latent"), _OF_LATENTS[: len(self.arrays)]
    y, pages = island(
      local,
      in_axes=(Q_AXES, Q_AXES, token, token, TOKEN_AXES, TOKEN_AXES, *of_pages),
      out_axes=(Q_AXES, of_pages),
    )(q_BTNC, turned_BTNR, latent_BTC, rotated_BTR, self.view.table_BW, index_BT, *self.arrays)
    return y, dataclasses.replace(self, arrays=pages)


def slots_of(block: Block, context: int, rules: Pass) -> int:
  """Tokens of a row of `context` tokens that a layer can hold."""
  return rules.places(context) if block.depth is not None and block.scope == "block" else context


class SlotArray(NamedTuple):
  """An array of the pages of a layer.

  Attributes:
    axes: logical, of all its dimensions.
    shape: of what it holds of a token.
    dtype: of its numbers.
  """

  axes: Sequence[str | None]
  shape: tuple[int, ...]
  dtype: jnp.dtype

  @property
  def num_bytes(self) -> int:
    """Of a token, on each device."""
    size = math.prod(self.shape) * self.dtype.itemsize
    return size // math.prod(map(num_shards, self.axes))


def slot_arrays(cfg: ModelConfig, dtype: jnp.dtype) -> list[SlotArray]:
  """What a layer keeps of a token.

  Args:
    cfg: of the model.
    dtype: the compute dtype, or one of `NARROW`, which has scales.
  """
  heads, axes = (cfg.num_kv_heads,), _OF_HEADS
  width = 2 * cfg.head_dim
  if cfg.kv_latent_dim:
    heads, axes, width = (), _OF_LATENTS, cfg.kv_latent_dim + cfg.latent_rope_dim
  values = SlotArray(axes[0], (*heads, width), dtype)
  scales = SlotArray(axes[1], (*heads, 2), jnp.dtype(SCALE_DTYPE))
  return [values, scales] if dtype in NARROW.values() else [values]


def pages_of(
  block: Block, arrays: tuple[jax.Array, ...], view: View, slots: int
) -> Pages | LatentPages:
  """The pages of a layer, as it reads them."""
  kind = Pages if isinstance(block.attn, Attention) else LatentPages
  return kind(arrays, view, slots)
