"""What layers keep of earlier tokens, in pages that rows share.

Letters: B rows, W pages of a row, G pages in all, P slots of a page, K key/value heads, H head_dim,
X keys and values of a head, C latent, R rotated part of a key, Y both, T new tokens, N query heads.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from ats_jax.config.schema import ModelConfig
from ats_jax.model.attention import Attention
from ats_jax.model.block import Block
from ats_jax.model.forward_pass import Pass
from ats_jax.ops.attention.causal import KV_AXES, Q_AXES, TOKEN_AXES, attention
from ats_jax.ops.attention.latent import attend_to_latents
from ats_jax.ops.attention.paged import paged_attention, read, write
from ats_jax.ops.registry import Kernels
from ats_jax.sharding.apply import island

PAGE_AXES = (None, None)


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
    array: [G, P, K, X], keys, and behind those of each head its values.
    view: which of them are of which row.
    slots: tokens that a row can hold here.
  """

  array: jax.Array
  view: View
  slots: int = dataclasses.field(metadata=dict(static=True))

  def attend(
    self, q_BTNH, k_BTKH, v_BTKH, index_BT, *, window, soft_cap, sinks_N
  ) -> tuple[jax.Array, Self]:
    """As of `Attended`."""
    view, of_pages = self.view, (*PAGE_AXES, "kv_heads", "head_dim")
    options = {"window": window, "soft_cap": soft_cap}

    def add(pages, k, v, table, index):
      return write(pages, jnp.concatenate([k, v], axis=-1), table, index)

    pages = island(
      add,
      in_axes=(of_pages, KV_AXES, KV_AXES, TOKEN_AXES, TOKEN_AXES),
      out_axes=of_pages,
    )(self.array, k_BTKH, v_BTKH, view.table_BW, index_BT)
    if view.whole:
      known_BT = ((index_BT >= 0) & (index_BT < self.slots)).astype(jnp.int32)
      y_BTNH = attention(
        q_BTNH, k_BTKH, v_BTKH, segment_ids_BT=known_BT, max_segments=2, kernels=view.kernels,
        sinks_N=sinks_N, **options,
      )  # fmt: skip
    else:
      local = lambda q, pages, table, index, sinks=None: paged_attention(
        q, pages, table, index, sinks_N=sinks, kernels=view.kernels, **options
      )
      sinks = () if sinks_N is None else (sinks_N,)
      axes = (Q_AXES, of_pages, TOKEN_AXES, TOKEN_AXES, *(("heads",) for _ in sinks))
      attend = island(local, in_axes=axes, out_axes=Q_AXES)
      y_BTNH = attend(q_BTNH, pages, view.table_BW, index_BT, *sinks)
    return y_BTNH, dataclasses.replace(self, array=pages)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentPages:
  """Latents of a layer (`model.latent_attention.LatentCache`).

  Attributes:
    array: [G, P, Y], latents, and behind each the rotated part of its key.
    view: which of them are of which row.
    slots: tokens that a row can hold here.
  """

  array: jax.Array
  view: View
  slots: int = dataclasses.field(metadata=dict(static=True))

  def attend(
    self, q_BTNC, turned_BTNR, latent_BTC, rotated_BTR, index_BT, *, scale
  ) -> tuple[jax.Array, Self]:
    """Attend to the latents of a row's slots, those of the new tokens among them."""

    def local(q, turned, latent, rotated, pages, table, index):
      pages = write(pages, jnp.concatenate([latent, rotated], axis=-1), table, index)
      latents, rotateds = jnp.split(read(pages, table), [latent.shape[-1]], axis=-1)
      return attend_to_latents(q, turned, latents, rotateds, index, scale), pages

    token, of_pages = ("batch", "seq", "latent"), (*PAGE_AXES, "latent")
    y, pages = island(
      local,
      in_axes=(Q_AXES, Q_AXES, token, token, of_pages, TOKEN_AXES, TOKEN_AXES),
      out_axes=(Q_AXES, of_pages),
    )(q_BTNC, turned_BTNR, latent_BTC, rotated_BTR, self.array, self.view.table_BW, index_BT)
    return y, dataclasses.replace(self, array=pages)


def slots_of(block: Block, context: int, rules: Pass) -> int:
  """Tokens of a row of `context` tokens that a layer can hold."""
  return rules.places(context) if block.depth is not None and block.scope == "block" else context


def width_of(cfg: ModelConfig) -> dict[str, int]:
  """The sizes of what a layer keeps of a token, by logical axis."""
  if cfg.kv_latent_dim:
    return {"latent": cfg.kv_latent_dim + cfg.latent_rope_dim}
  return {"kv_heads": cfg.num_kv_heads, "head_dim": 2 * cfg.head_dim}


def pages_of(block: Block, array: jax.Array, view: View, slots: int) -> Pages | LatentPages:
  """The pages of a layer, as it reads them."""
  kind = Pages if isinstance(block.attn, Attention) else LatentPages
  return kind(array, view, slots)
