"""A decoder as it is served: layers apart, and matrices packed once for few rows at a time.

Letters: B rows, T tokens, V vocab, D d_model, F outputs.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.inference.engine import ahead
from ats_jax.model.attention import Attention
from ats_jax.model.block import Block, LayerCache, tokens_at
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.model.layers import MLP, Embedding, Linear, Weight
from ats_jax.model.numerics import NARROW
from ats_jax.model.param import is_variable
from ats_jax.ops.row_matmul import row_matmul
from ats_jax.sharding.apply import (
  all_sum,
  has_several_devices,
  island,
  num_shards,
  replicate,
  reshard,
)

_HEAD_AXES = ("vocab", None)


class Packed(nnx.Module):
  """Stands for the weights of linear layers that read one input: their matrices as one.

  The first of the layers has it, the others have None.

  Attributes:
    matrix: [all outputs, inputs] in the compute dtype; each device has its share of each layer.
  """

  def __init__(self, layers: Sequence[Linear], dtype: jnp.dtype):
    """Copy the weights of layers."""
    self.inputs = layers[0].inputs
    self.outputs = tuple(layer.outputs for layer in layers)
    self.axes = tuple(map(_sharded_axis, (itertools.chain(*self.outputs), self.inputs)))
    num_inputs = len(self.inputs)
    weights = [layer.value(dtype) for layer in layers]
    of_device = lambda size, axis: size // num_shards(axis)
    self.shapes = tuple(
      tuple(map(of_device, w.shape[num_inputs:], axes))
      for w, axes in zip(weights, self.outputs, strict=True)
    )

    def local(*weights):
      matrices = [w.reshape(math.prod(w.shape[:num_inputs]), -1).T for w in weights]
      return jnp.concatenate(matrices)

    in_axes = tuple((*self.inputs, *axes) for axes in self.outputs)
    self.matrix = nnx.Param(island(local, in_axes=in_axes, out_axes=self.axes)(*weights))

  def products(self, multiply: Any, x: jax.Array, layers: Sequence[Linear]) -> tuple[Any, ...]:
    """`x` times the matrix of each layer (`model.layers.project`)."""
    del multiply, layers

    def local(x, matrix_FD):
      y_MF = row_matmul(x.reshape(-1, matrix_FD.shape[1]), matrix_FD)
      y_MF = all_sum(y_MF, self.axes[1])
      ends = [sum(map(math.prod, self.shapes[: n + 1])) for n in range(len(self.shapes) - 1)]
      parts = jnp.split(y_MF, ends, axis=1)
      return tuple(
        y.reshape(*x.shape[:2], *shape) for y, shape in zip(parts, self.shapes, strict=True)
      )

    return island(
      local,
      in_axes=(("batch", "seq", *self.inputs), self.axes),
      out_axes=tuple(("batch", "seq", *axes) for axes in self.outputs),
    )(x, self.matrix[...])


def _sharded_axis(axes: Iterable[str]) -> str | None:
  return next((axis for axis in axes if num_shards(axis) > 1), None)


class Served(nnx.Module):
  """A decoder for generation, under the plan `for_serving`.

  Attributes:
    layers: its blocks, from the bottom up.
    decoder: the rest of it.
    head: [vocab, d_model] in the compute dtype.
  """

  def __init__(self, decoder: Decoder, *, keep: bool = False):
    """Pack a decoder, whose layers are taken out of it: their memory is free afterwards.

    Args:
      decoder: the decoder.
      keep: its arrays stay, since they are those of other decoders too.
    """
    if keep:
      decoder = jax.tree.map(lambda x: x, decoder)  # a copy
    dtype, layers = decoder.num.compute_dtype, list[Block]()
    for segment in decoder.segments:
      for places in _apart(list(segment.layers), keep=keep):
        layers += _pack(places, dtype)
    self.layers = nnx.List(layers)
    head = decoder.embed if decoder.head is None else decoder.head
    self.head = nnx.Param(_head(head, dtype))
    decoder.segments = nnx.List([])
    decoder.head = None
    decoder.embed = _joined(decoder.embed)
    self.decoder = decoder

  def extend(
    self,
    tokens_BT: jax.Array,
    index_BT: jax.Array,
    pages: Sequence[LayerCache],
    rules: Pass,
  ) -> tuple[jax.Array, list[LayerCache]]:
    """Run tokens as the continuation of what pages hold.

    Args:
      tokens_BT: int32 [rows, tokens].
      index_BT: position of each token in its row; -1 = padding.
      pages: of each layer, for these rows.
      rules: the rules of an evaluation pass.

    Returns:
      Final activations [rows, tokens, d_model], and the pages with the tokens in them.
    """
    tokens = tokens_at(self.decoder.cfg, jnp.maximum(index_BT, 0), index_BT + 1, index_BT)
    x_BTD, extended = self.decoder.lookup(tokens_BT), []
    for number, (layer, cache) in enumerate(zip(self.layers, pages, strict=True)):
      x_BTD, new = _run(layer, x_BTD, tokens, cache, jnp.int32(number), rules=rules)
      extended.append(new)
    return self.decoder.final_norm(x_BTD), extended

  def logits(self, x_BD: jax.Array) -> jax.Array:
    """Scores [rows, vocab] in float32."""
    local = lambda x, head: row_matmul(x, head, jnp.dtype(jnp.float32))
    score = island(local, in_axes=((None, None), _HEAD_AXES), out_axes=(None, "vocab"))
    logits_BV = replicate(score(x_BD, self.head[...]))
    cap = self.decoder.cfg.logit_soft_cap
    return cap * jnp.tanh(logits_BV / cap) if cap else logits_BV


# Traced once for all layers of a kind, which takes a large part of the start; XLA inlines it.
@functools.partial(jax.jit, static_argnames="rules")
def _run(layer, x_BTD, tokens, cache, number, *, rules):
  x_BTD, _, _, extended = layer(x_BTD, tokens, rules, layer=number, cache=cache)
  assert isinstance(extended, LayerCache)
  return x_BTD, extended


def _apart(places: Sequence[Block], *, keep: bool) -> Iterator[list[Block]]:
  """The layers of each turn of a segment.

  Weights are taken apart one by one, and nothing here holds a turn that was taken: beside a model
  there are the largest of its weights or two turns, never a second model.
  """
  leaves, structure = jax.tree.flatten(places)
  apart = []
  for leaf in leaves:
    apart.append(list(reversed(_unstacked(leaf))))
    if not keep:
      leaf.delete()
  while apart[0]:
    yield structure.unflatten([of_leaf.pop() for of_leaf in apart])


@ahead.Jitted
def _unstacked(leaf: jax.Array) -> list[jax.Array]:
  return list(leaf)


@functools.partial(ahead.Jitted, static_argnames="dtype")
def _head(layer: Weight, dtype: jnp.dtype) -> jax.Array:
  return reshard(layer.value(dtype), *_HEAD_AXES)


@ahead.Jitted
def _joined(table: Embedding) -> Embedding:
  return jax.tree.map(_whole, table, is_leaf=is_variable)


@functools.partial(ahead.Jitted, static_argnames="dtype")
def _pack(places: Sequence[Block], dtype: jnp.dtype) -> list[Block]:
  """Packed layers: one program, where each operation would be one."""
  return [_packed(block, dtype) for block in places]


def _packed(block: Block, dtype: jnp.dtype) -> Block:
  """A layer with its matrices packed, and everything else that is multiplied in `dtype`."""
  together = []
  if isinstance(block.attn, Attention):
    together.append((block.attn.q, block.attn.k, block.attn.v))
  mlp = block.mlp if isinstance(block.mlp, MLP) else block.mlp.shared
  if mlp is not None:
    together.append((mlp.gate, mlp.up))
  taken = {id(layer) for group in together for layer in group}
  # Latent attention multiplies by parts of this one, which it asks for as it is stored.
  taken.add(id(getattr(block.attn, "kv", None)))
  for _, module in nnx.iter_modules(block):
    if type(module) is Linear and id(module) not in taken:
      together.append((module,))
  for layers in together:
    packed = Packed(layers, dtype)
    for number, layer in enumerate(layers):
      layer.weight = packed if number == 0 else None
  is_matrix = lambda v: is_variable(v) and getattr(v, "role", None) in NARROW
  cast = lambda v: v.replace(v.get_value().astype(dtype)) if is_matrix(v) else v
  return jax.tree.map(lambda v: _whole(cast(v)), block, is_leaf=is_variable)


def _whole(v: Any) -> Any:
  """A parameter as the plan has it: a training has it in more parts, which each step would join."""
  if not is_variable(v) or not hasattr(v, "axes") or not has_several_devices():
    return v
  return v.replace(reshard(v.get_value(), *v.axes))
