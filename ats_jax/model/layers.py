"""Layers with weights: linear ones, RMSNorm, gated feed-forward.

`Weight.value` is where number formats and adapters enter. Letters: B batch, T seq, D d_model,
F d_ff.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ats_jax.config.schema import ModelConfig
from ats_jax.model.numerics import Numerics
from ats_jax.model.param import Role, is_variable, normal, ones, residual_std, zeros
from ats_jax.ops.embedding import embedding_lookup
from ats_jax.ops.linear import linears
from ats_jax.ops.remat import ADAPTER_HIDDEN, MLP_HIDDEN
from ats_jax.ops.rms_norm import rms_norm
from ats_jax.ops.swiglu import Gating, gated
from ats_jax.sharding.rules import current_plan

# Where an activation's dimension has another logical axis than the weight's that meets it.
_ACTIVATION_AXIS = {
  "embed": "act_embed",
  "latent_rows": "latent",
  "stored_experts": "experts",
  "expert_embed": "act_embed",
}


class Adapter(Protocol):
  """What trains beside a frozen weight (`model.adapters` has the kinds)."""

  def __call__(self, h_BTR: jax.Array, y: jax.Array, layer: "Linear | Embedding", /) -> jax.Array:
    """The output of a layer whose weight alone makes `y`.

    Args:
      h_BTR: the layer's input times the first of `factors`.
      y: the layer's input times its weight.
      layer: whose adapter it is.
    """
    ...

  def factors(self, dtype: jnp.dtype, /) -> tuple[jax.Array, ...]:
    """Of a layer of experts: matrices that its rows are multiplied with in turn, and then added."""
    ...

  @property
  def axes(self) -> tuple[tuple[str, ...], ...]:
    """Logical axes in which `factors` are stored."""
    ...

  def merged(self, weight: jax.Array, /) -> jax.Array:
    """The weight that alone computes what the given one and the adapter do."""
    ...


class Weight(nnx.Module):
  """One drawn weight.

  Attributes:
    weight: a parameter, or what stands for its array (`model.quantised`).
    adapter: trains beside the weight, which is frozen then; None = there is none.
    outputs_first: the dimensions of its outputs stand in front of those of its inputs.
  """

  weight: Any
  adapter: Adapter | None = None
  outputs_first: ClassVar[bool] = False

  def __init__(
    self,
    sizes: Mapping[str, int],
    *,
    role: Role,
    std: float,
    num: Numerics,
    rngs: nnx.Rngs,
    num_inputs: int = 1,
  ):
    """Draw the weight from N(0, std^2).

    Args:
      sizes: the length of each dimension, by logical axis.
      role: what the parameter does.
      std: standard deviation.
      num: gives the dtype.
      rngs: the source of one key.
      num_inputs: see `Param`.
    """
    axes, shape = tuple(sizes), tuple(sizes.values())
    self.weight = normal(rngs.params(), shape, axes, std, num.stored(role), role, num_inputs)

  def base(self, dtype: jnp.dtype | None = None) -> jax.Array:
    """The weight without its adapter, cast to `dtype` (None = as stored)."""
    weight = self.weight[...]
    return weight if dtype is None else weight.astype(dtype)

  def value(self, dtype: jnp.dtype | None = None) -> jax.Array:
    """The weight to multiply with, merged with its adapter, cast to `dtype` (None = as stored).

    Training multiplies by the two one after the other (`project`): the gradient of a merged weight
    would be that of a whole matrix.
    """
    weight = self.base(dtype)
    return weight if self.adapter is None else self.adapter.merged(self.base()).astype(weight.dtype)

  @property
  def outputs(self) -> tuple[str, ...]:
    """Logical axes of the result's new dimensions, as activations have them."""
    return activation_axes(self.weight.axes[self.weight.num_inputs :])


class Embedding(Weight):
  """The table [vocab, d_model] of the rows of tokens, which may be the head's too."""

  def __init__(self, sizes: Mapping[str, int], *, std: float, num: Numerics, rngs: nnx.Rngs):
    """Draw the table, as `Weight` does."""
    super().__init__(sizes, role=Role.EMBEDDING, std=std, num=num, rngs=rngs)
    self.num, self.kernels = num, num.kernels

  def rows(self, tokens_BT: jax.Array) -> jax.Array:
    """The rows [batch, seq, d_model] of int32 tokens [batch, seq], in the compute dtype."""
    dtype = self.num.compute_dtype
    lookup = functools.partial(embedding_lookup, deterministic=self.num.deterministic)
    x_BTD = lookup(self.base(), tokens_BT, dtype)  # which casts single rows
    if self.adapter is None:
      return x_BTD
    a_VR = self.adapter.factors(dtype)[0]
    return self.adapter(lookup(a_VR, tokens_BT, dtype, width="rank"), x_BTD, self)


class Head(Weight):
  """The matrix [vocab, d_model] that scores tokens, or [1, d_model], which rates texts."""

  outputs_first = True


class Linear(Weight):
  """Multiplies the last dimensions of its input by a weight [*inputs, *outputs]."""

  def __init__(
    self,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    *,
    std: float,
    num: Numerics,
    rngs: nnx.Rngs,
    bias: bool = False,
  ):
    """Draw the weight.

    Args:
      inputs: sizes of the contracted dimensions, by logical axis.
      outputs: sizes of the result's new dimensions, by logical axis.
      std: standard deviation of the weight.
      num: dtypes and implementations.
      rngs: the source of one key.
      bias: add a trained vector to the result, which starts at 0.
    """
    sizes = {**inputs, **outputs}
    super().__init__(sizes, role=Role.MATRIX, std=std, num=num, rngs=rngs, num_inputs=len(inputs))
    self.kernels, self.keep_gathered = num.kernels, num.keep_gathered
    # Whole along d_model, as what it is added to.
    shape = tuple(outputs.values())
    self.bias = zeros(shape, self.outputs, num.stored(Role.BIAS), Role.BIAS) if bias else None

  @property
  def inputs(self) -> tuple[str, ...]:
    """Logical axes of the contracted dimensions, as activations have them."""
    return activation_axes(self.weight.axes[: self.weight.num_inputs])

  def __call__(self, x: jax.Array, *, fp8: bool = False) -> jax.Array:
    """Map [batch, seq, *inputs] to [batch, seq, *outputs]; `fp8` multiplies in 8 bits."""
    return project(x, (self,), fp8=fp8)[0]


class ExpertLinear(Weight):
  """The weights of all experts' layers of one kind: a stack [experts, in, out].

  The caller sorts tokens by expert first, so it passes `matrices` to an island and calls
  `ops.grouped_matmul` there.
  """

  def __init__(
    self,
    experts: int,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    *,
    std: float,
    num: Numerics,
    rngs: nnx.Rngs,
    bias: bool = False,
  ):
    """Draw the weights of `experts` slots, as `Linear` draws one. The caller adds the bias."""
    sizes = {"stored_experts": experts, **inputs, **outputs}
    super().__init__(sizes, role=Role.EXPERT, std=std, num=num, rngs=rngs)
    axes, shape = activation_axes((self.weight.axes[0], *outputs)), (experts, *outputs.values())
    self.bias = zeros(shape, axes, num.stored(Role.BIAS), Role.BIAS) if bias else None

  def matrices(self, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
    """The weights, cast to `dtype`, and behind them the two factors that an adapter adds.

    Of quantised weights there are several arrays, of which `of_device` makes one.
    """
    factors = () if self.adapter is None else self.adapter.factors(dtype)
    weights = (self.base(dtype),) if is_variable(self.weight) else self.weight.arrays
    return *weights, *factors

  def of_device(self, matrices: tuple[jax.Array, ...], dtype: jnp.dtype) -> tuple[Any, ...]:
    """Inside an island: the weights to multiply with in `dtype`, and an adapter's factors."""
    return matrices if is_variable(self.weight) else self.weight.of_device(matrices, dtype)

  @property
  def axes(self) -> tuple[tuple[str, ...], ...]:
    """Logical axes of `matrices` when they are gathered along d_model."""
    return tuple(map(activation_axes, self._kept))

  @property
  def stored_axes(self) -> tuple[tuple[str, ...], ...]:
    """Logical axes of `matrices` where they enter an island, which gathers them to `axes`."""
    return self._kept if current_plan().copy_engines else self.axes

  @property
  def _kept(self) -> tuple[tuple[str, ...], ...]:
    weights = (self.weight.axes,) if is_variable(self.weight) else self.weight.arrays_axes
    return *weights, *(() if self.adapter is None else self.adapter.axes)


def project(x: jax.Array, layers: Sequence[Linear], *, fp8: bool = False) -> tuple[jax.Array, ...]:
  """Apply several linear layers to one input, which is read (and in 8 bits quantised) once.

  Args:
    x: activations [batch, seq, *inputs].
    layers: layers with the same inputs.
    fp8: multiply in 8 bits.

  Returns:
    [batch, seq, *outputs] for each layer, in the dtype of `x`.
  """
  adapters = [layer.adapter for layer in layers if layer.adapter is not None]
  in_turn = adapters and is_variable(layers[0].weight)  # codes keep what is multiplied with them
  # In 8 bits the products share what is made of `x`.
  groups = [[layer] for layer in layers] if in_turn and not fp8 else [layers]
  results = []
  for group in groups:
    results += _wide_products(x, group, fp8)
    x = _behind(x) if in_turn else x
  narrow = iter(_narrow_products(x, adapters, layers[0]) if adapters else ())
  adapted = lambda y, of: y if of.adapter is None else of.adapter(next(narrow), y, of)
  with_bias = lambda y, bias: y if bias is None else y + bias[...].astype(y.dtype)
  pairs = zip(results, layers, strict=True)
  return tuple(with_bias(adapted(y, layer), layer.bias) for y, layer in pairs)


def _behind(x: jax.Array) -> jax.Array:
  """Hide from XLA that several products have the same input.

  Otherwise it makes one of them, for which it writes the weights side by side and cuts the result
  apart, as matmuls that add an adapter's product read whole arrays; and of the gradients of `x` it
  adds some in passes of their own. Of a chain, each matmul adds its own to that of the next.
  """
  return jax.lax.optimization_barrier(x)


def _wide_products(x: jax.Array, layers: Sequence[Linear], fp8: bool) -> tuple[jax.Array, ...]:
  """`x` times the weight of each layer, without adapters and biases."""
  first = layers[0]

  def multiply(
    x: jax.Array, weights: Sequence[jax.Array], stored: Sequence[tuple[str, ...]]
  ) -> tuple[jax.Array, ...]:
    return linears(
      x,
      weights,
      inputs=first.inputs,
      outputs=[layer.outputs for layer in layers],
      stored=stored,
      fp8=fp8,
      keep_gathered=first.keep_gathered,
      kernels=first.kernels,
    )

  if not is_variable(first.weight):  # quantised, as all of them are
    return first.weight.products(multiply, x, layers)
  weights = [layer.base(x.dtype) for layer in layers]
  return multiply(x, weights, [layer.weight.axes for layer in layers])


def _narrow_products(x: jax.Array, adapters: Sequence[Adapter], layer: Linear) -> list[jax.Array]:
  """`x` times the first factor of each adapter, by one matmul, which reads `x` only once."""
  factors = [adapter.factors(x.dtype)[0] for adapter in adapters]
  ends = itertools.accumulate(a.shape[-1] for a in factors)
  (h_BTR,) = linears(
    x,
    [jnp.concatenate(factors, axis=-1)],
    inputs=layer.inputs,
    outputs=[("rank",)],
    stored=[adapters[0].axes[0]],
    kernels=layer.kernels,
  )
  h_BTR = checkpoint_name(h_BTR, ADAPTER_HIDDEN)
  return jnp.split(h_BTR, list(ends)[:-1], axis=-1)


def activation_axes(axes: Sequence[Any]) -> tuple[Any, ...]:
  """Logical axes of a weight in a matmul: the axes that shard its storage only are replaced."""
  return tuple(_ACTIVATION_AXIS.get(axis, axis) for axis in axes)


class RMSNorm(nnx.Module):
  """`x / rms(x) * scale` over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4).

  With `norm_plus_one` the weight is `scale - 1`, so that decay pulls the scale to 1.
  """

  def __init__(self, dim: int, cfg: ModelConfig, num: Numerics, *, eps: float | None = None):
    self.eps = cfg.norm_eps if eps is None else eps
    self.plus_one, self.kernels = cfg.norm_plus_one, num.kernels
    first = zeros if cfg.norm_plus_one else ones
    self.scale = first((dim,), ("norm",), num.stored(Role.NORM), Role.NORM)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalise `x [..., dim]`; statistics in float32, result in the dtype of `x`."""
    scale = self.scale[...]
    if self.plus_one:
      scale = 1 + scale.astype(jnp.promote_types(scale.dtype, jnp.float32))
    return rms_norm(x, scale, eps=self.eps, kernels=self.kernels)


def gating(cfg: ModelConfig) -> Gating:
  """Translate the settings of the feed-forward's gate to the arguments of `ops.swiglu`."""
  return Gating(cfg.activation, cfg.gate_limit, cfg.gate_slope)


class MLP(nnx.Module):
  """`down(act(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202, eq. 6)."""

  def __init__(self, cfg: ModelConfig, num: Numerics, rngs: nnx.Rngs, d_ff: int):
    self.gating, self.kernels = gating(cfg), num.kernels
    stream, wide = {"embed": cfg.d_model}, {"ff": d_ff}
    self.gate = Linear(stream, wide, std=cfg.init_std, num=num, rngs=rngs)
    self.up = Linear(stream, wide, std=cfg.init_std, num=num, rngs=rngs)
    self.down = Linear(wide, stream, std=residual_std(cfg), num=num, rngs=rngs)

  def __call__(self, x_BTD: jax.Array, *, fp8: bool = False) -> jax.Array:
    """Map [batch, seq, d_model] to the same shape; `fp8` multiplies in 8 bits."""
    gate_BTF, up_BTF = project(x_BTD, (self.gate, self.up), fp8=fp8)
    pair = zip((gate_BTF, up_BTF), MLP_HIDDEN, strict=True)
    gate_BTF, up_BTF = (checkpoint_name(x, name) for x, name in pair)
    return self.down(gated(gate_BTF, up_BTF, self.gating, self.kernels), fp8=fp8)
