"""Adapters: small matrices that train beside frozen ones.

Letters: E experts, R rank.
"""

import math
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.config.schema import Config
from ats_jax.config.schema import finetune as settings
from ats_jax.model.layers import (
  Embedding,
  ExpertLinear,
  Head,
  Linear,
  Weight,
  activation_axes,
)
from ats_jax.model.layout import place_of
from ats_jax.model.param import (
  EXPERTS,
  Frozen,
  Param,
  Role,
  is_variable,
  params_of,
  role_name,
)
from ats_jax.model.random import Purpose, fold
from ats_jax.model.router import Router
from ats_jax.ops.linear import linears
from ats_jax.sharding.apply import einsum, ensure_sharding
from ats_jax.sharding.rules import spec

GROUPS = ("attention", "mlp", "experts")


class LoRA(nnx.Module):
  """`x @ a @ b * factor`, which is added to the product with a layer's weight.

  `a` is [*inputs, rank] and `b` [rank, *outputs], both with the dimensions of layers and experts in
  front that the weight has. At first `b` is 0, or `a` where it is looked up.
  """

  def __init__(self, layer: Weight, factor: float, rank: int, key: jax.Array):
    """Draw as peft does: `a` uniform up to 1 / sqrt(inputs), or of a table `b` from N(0, 1).

    Args:
      layer: the layer that it is for, maybe a stack of them.
      factor: what the product is multiplied with.
      rank: the width between the two.
      key: of randomness.
    """
    weight, self.factor = layer.weight, factor
    self.outputs_first = layer.outputs_first
    first = int(weight.axes[0] == EXPERTS)
    end = first + weight.num_inputs
    stacked = weight.ndim - len(weight.axes)
    experts, lead = weight.axes[:first], weight.shape[: stacked + first]
    parts = [
      (weight.axes[part], weight.shape[stacked:][part])
      for part in (slice(first, end), slice(end, None))
    ]
    (inputs, ins), (outputs, outs) = reversed(parts) if self.outputs_first else parts
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    shapes = (*lead, *ins, rank), (*lead, rank, *outs)
    axes = (*experts, *inputs, "rank"), (*experts, "rank", *outputs)
    at_a, at_b = (spec(*(None,) * stacked, *of) for of in axes)
    if isinstance(layer, Embedding):
      a = jnp.zeros(shapes[0], wide, out_sharding=at_a)
      b = jax.random.normal(key, shapes[1], wide, out_sharding=at_b)
    else:
      bound = 1 / math.sqrt(math.prod(ins))
      a = jax.random.uniform(key, shapes[0], wide, -bound, bound, out_sharding=at_a)
      b = jnp.zeros(shapes[1], wide, out_sharding=at_b)
    self.a = Param(a, axes=axes[0], role=Role.ADAPTER, num_inputs=len(inputs))
    self.b = Param(b, axes=axes[1], role=Role.ADAPTER_OUT)

  def __call__(self, h_BTR: jax.Array, y: jax.Array, layer: Linear | Embedding) -> jax.Array:
    """Add to `y`, the product with the weight of `layer`, that of `h_BTR` with `b`."""
    (z,) = linears(
      h_BTR,
      [self.factors(y.dtype)[1]],
      inputs=("rank",),
      outputs=[layer.outputs],
      stored=[self.b.axes],
      kernels=layer.kernels,
    )
    return y + z

  def factors(self, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """The two matrices whose product is added to the weight."""
    return self.a[...].astype(dtype), (self.factor * self.b[...]).astype(dtype)

  @property
  def axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Logical axes in which `factors` are stored."""
    return self.a.axes, self.b.axes

  def merged(self, weight: jax.Array) -> jax.Array:
    """The weight that computes what the given one and the adapter do, in float32 at least."""
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    return weight.astype(wide) + self._product(wide)

  def _product(self, dtype: jnp.dtype) -> jax.Array:
    a, b = self.factors(dtype)
    experts, ins, outs = self._letters()
    inputs = self.a.axes[len(experts) : -1]
    outputs = activation_axes(self.b.axes[len(experts) + 1 :])
    axes = (*self.a.axes[: len(experts)], *self._in_order(inputs, outputs))
    formula = f"{experts}{ins}R,{experts}R{outs}->{experts}{''.join(self._in_order(ins, outs))}"
    return einsum(formula, a, b, axes=axes, precision=jax.lax.Precision.HIGHEST)

  def _in_order(self, inputs: Sequence[str], outputs: Sequence[str]) -> tuple[str, ...]:
    """What there is of inputs and of outputs, in the order in which the weight has them."""
    return (*outputs, *inputs) if self.outputs_first else (*inputs, *outputs)

  def _letters(self) -> tuple[str, str, str]:
    """Letters of the dimensions of experts, inputs and outputs, for formulas."""
    letters = iter(string.ascii_lowercase)
    take = lambda number: "".join(next(letters) for _ in range(number))
    experts = take(int(self.a.axes[0] == EXPERTS))
    return experts, take(self.a.num_inputs), take(len(self.b.axes) - len(experts) - 1)


class DoRA(LoRA):
  """The weight with the product added, each of its columns brought to a trained length.

  No gradient goes through the length that a column has before (arXiv:2402.09353, section 4.3).
  """

  def __init__(self, layer: Weight, factor: float, rank: int, key: jax.Array):
    """As of `LoRA`; the lengths are at first those of the weight."""
    super().__init__(layer, factor, rank, key)
    axes = activation_axes(self.b.axes[1:])  # whole along d_model, as what they multiply
    stacked = self.b.ndim - len(self.b.axes)
    lengths = self._lengths
    for _ in range(stacked):
      lengths = jax.vmap(lengths)
    first = lengths(layer.weight[...], *self.factors(self.a.dtype))
    self.lengths = Param(first, axes=axes, role=Role.SCALAR)

  def __call__(self, h_BTR: jax.Array, y: jax.Array, layer: Linear | Embedding) -> jax.Array:
    """As of `LoRA`, and bring the columns to their lengths."""
    stretch = self._stretch(layer.base())
    return super().__call__(h_BTR, y, layer) * stretch.astype(y.dtype)

  def merged(self, weight: jax.Array) -> jax.Array:
    """As of `LoRA`."""
    stretch = self._stretch(weight)
    if self.outputs_first:
      stretch = jnp.expand_dims(stretch, tuple(range(stretch.ndim, weight.ndim)))
    return super().merged(weight) * stretch

  def _stretch(self, weight: jax.Array) -> jax.Array:
    of_now = self._lengths(weight, *self.factors(self.a.dtype))
    return self.lengths[...] / jax.lax.stop_gradient(of_now)

  def _lengths(self, weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """The lengths of the columns of `weight + a b` of one layer, without making that matrix."""
    weight, a, b = map(jax.lax.stop_gradient, (weight, a, b))
    _, ins, outs = self._letters()
    weight, axes = weight.astype(a.dtype), self.b.axes[1:]
    whole = "".join(self._in_order(ins, outs))
    exact = jax.lax.Precision.HIGHEST
    total = lambda formula, *of, axes: einsum(formula, *of, axes=axes, precision=exact)
    weight_a = total(f"{whole},{ins}R->R{outs}", weight, a, axes=self.b.axes)
    a_a = total(f"{ins}R,{ins}S->RS", a, a, axes=("rank", None))
    a_a_b = total(f"RS,S{outs}->R{outs}", a_a, b, axes=self.b.axes)
    squares = total(f"{whole},{whole}->{outs}", weight, weight, axes=axes)
    result = jnp.sqrt(squares + jnp.sum(b * (2 * weight_a + a_a_b), axis=0))
    return ensure_sharding(result, *activation_axes(axes))


KINDS = {"lora": LoRA, "dora": DoRA}


def fine_tuned(cfg: Config, model: Any, key: jax.Array) -> Any:
  """The model of a run that fine-tunes, of its base: weights are frozen, and adapters beside them.

  Args:
    cfg: the resolved config.
    model: the base, whose arrays the result has too.
    key: the root key of the run.

  Raises:
    ValueError: if a role, target or rank of the settings does not fit the model.
  """
  adapter = cfg.finetune.adapter
  model = _frozen(cfg, model)
  if cfg.finetune.base_format:
    from ats_jax.model.quantised import quantised  # here: few runs have such a base

    model = quantised(cfg.finetune.base_format, model)
  if isinstance(adapter, settings.LoRA):
    targets = _targets(adapter, model)
    make = jax.jit(lambda key, layers: _adapters(adapter, layers, key))
    made = dict(zip(targets, make(key, list(targets.values())), strict=True))
  else:
    made = {}

  def with_adapter(path: Any, layer: Any) -> Any:
    if path not in made:
      return layer
    layer = jax.tree.map(lambda x: x, layer)  # a copy
    layer.adapter = made[path]
    return layer

  return jax.tree_util.tree_map_with_path(with_adapter, model, is_leaf=_is_layer)


def _adapters(adapter: settings.LoRA, layers: Iterable[Weight], key: jax.Array) -> list[LoRA]:
  make = KINDS[adapter.name]
  return [
    make(layer, adapter.factor, adapter.rank, fold(key, Purpose.ADAPTERS, n))
    for n, layer in enumerate(layers)
  ]


def _is_layer(x: Any) -> bool:
  return isinstance(x, Weight) or is_variable(x)


def _targets(adapter: settings.LoRA, model: Any) -> dict[Any, Weight]:
  """The layers that get an adapter, by path."""
  known = list(_candidates(model))
  names = sorted({name for _, of, _ in known for name in of})
  for target in adapter.targets:
    if target == "head" and model.head is None:
      raise ValueError(
        "finetune.adapter.targets: 'head' is the embedding of this model (model.tie_embeddings). "
        "Name embedding: its adapter serves both."
      )
    if target not in names:
      raise ValueError(
        f"finetune.adapter.targets: {target!r} matches nothing. This model has {', '.join(names)}."
      )
  wanted = {*adapter.targets} or {*GROUPS}
  found = {path: layer for path, of, layer in known if of & wanted and _tuned(model, path)}
  if not found:
    raise ValueError(
      f"finetune.layers has none of finetune.adapter.targets={','.join(sorted(wanted))}. Name "
      "other layers or targets."
    )
  for path, layer in found.items():
    name, is_expert = "/".join(_words(path)), isinstance(layer, ExpertLinear)
    if is_expert and adapter.name == "dora":
      raise ValueError(
        f"finetune.adapter.name=dora has no form for the experts of {name}. Use lora, or "
        "finetune.adapter.targets without experts."
      )
    if layer is model.embed and model.head is None and adapter.name == "dora":
      raise ValueError(
        "finetune.adapter.name=dora has no form for an embedding that is the head too "
        "(model.tie_embeddings): lengths of the columns of one are none of the other. Use lora, or "
        "finetune.adapter.targets without embedding."
      )
    if isinstance(layer, Router):
      continue  # as narrow as there are experts, beside matrices of the same rank
    weight = layer.weight
    shape = weight.shape[weight.ndim - len(weight.axes) + is_expert :]
    inputs = math.prod(shape[: weight.num_inputs])
    width = min(inputs, math.prod(shape) // inputs)
    if adapter.rank > width:
      raise ValueError(
        f"finetune.adapter.rank={adapter.rank} is above the width {width} of {name}. Use less."
      )
  return found


def merged(model: Any) -> Any:
  """The model without adapters that computes what this one does; nothing of it is frozen."""

  def one(layer: Any) -> Any:
    if isinstance(layer, Frozen):
      return layer.thawed()
    if not isinstance(layer, Weight):
      return layer
    value = Weight.value
    for _ in range(layer.weight.ndim - len(layer.weight.axes)):
      value = jax.vmap(value)
    is_plain = layer.adapter is None and is_variable(layer.weight)
    weight = layer.weight[...] if is_plain else value(layer)
    layer, old = jax.tree.map(lambda x: x, layer), layer.weight
    layer.adapter = None
    stacked = (None,) * (old.ndim - len(old.axes))
    weight = ensure_sharding(weight, *stacked, *old.axes)
    layer.weight = Param(weight, axes=old.axes, role=old.role, num_inputs=old.num_inputs)
    return jax.tree.map(one, layer, is_leaf=is_variable)

  return jax.tree.map(one, model, is_leaf=_is_layer)


def _candidates(model: Any) -> Iterator[tuple[Any, set[str], Weight]]:
  """All layers that an adapter has a form for: path, the targets that mean it, layer."""
  for path, layer in jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_layer):
    words = _words(path)
    if isinstance(layer, ExpertLinear):
      yield path, {"experts"}, layer
    elif isinstance(layer, Linear):
      group = "attention" if "attn" in words else "mlp"
      yield path, {group, words[-1]}, layer
    elif isinstance(layer, Embedding | Head):
      yield path, {role_name(layer.weight)}, layer
    elif isinstance(layer, Router) and type(layer).logits is Router.logits:  # that has a `value`
      yield path, {"router"}, layer


def _words(path: Any) -> list[str]:
  return jax.tree_util.keystr(path, simple=True, separator="/").split("/")


def _tuned(model: Any, path: Any) -> bool:
  """Whether something belongs to a layer that trains, or to none."""
  if (found := place_of(path)) is None:
    return True
  segment, place = found
  return model.layout[segment].kinds[place].tuned


def _frozen(cfg: Config, model: Any) -> Any:
  """The model with frozen weights, as the settings say."""
  finetune = cfg.finetune
  adapter = finetune.adapter if isinstance(finetune.adapter, settings.LoRA) else None
  setting, roles = ("adapter.train", adapter.train) if adapter else ("freeze", finetune.freeze)
  there = {role_name(param) for param in params_of(model)}
  for role in roles:
    if role not in there:
      raise ValueError(
        f"finetune.{setting}: this model has no parameters of the role {role!r}, only of "
        f"{', '.join(sorted(there))}."
      )

  def one(path: Any, v: Any) -> Any:
    if not isinstance(v, Param):
      return v
    trains = (role_name(v) in roles) == bool(adapter) and _tuned(model, path)
    return v if trains else Frozen.of(v)

  frozen = jax.tree_util.tree_map_with_path(one, model, is_leaf=is_variable)
  if not adapter and not params_of(frozen):
    raise ValueError(
      f"finetune.freeze={','.join(finetune.freeze)}, finetune.layers={finetune.layers}: nothing "
      "trains. Freeze less."
    )
  return frozen


def facts(model: Any) -> dict[str, str]:
  """What trains, what is frozen and what has an adapter, by role, for the log of a run."""
  variables = [v for v in jax.tree.leaves(model, is_leaf=is_variable) if is_variable(v)]
  everything = sum(v.num_values for v in variables if isinstance(v, Param | Frozen))

  def described(kind: type) -> str:
    of_kind = [v for v in variables if isinstance(v, kind)]
    parts = []
    for role in sorted({role_name(v) for v in of_kind}):
      of_role = [v for v in of_kind if role_name(v) == role]
      tensors = sum(math.prod(v.shape[: v.num_stacked]) for v in of_role)
      size = sum(v.num_values for v in of_role)
      parts.append(f"{role} {tensors} tensors, {size:,} parameters ({size / everything:.2%})")
    return "; ".join(parts) or "nothing"

  result = {"trains": described(Param), "frozen": described(Frozen)}
  layers = [layer for _, _, layer in _candidates(model)]
  narrow = [layer.weight for layer in layers if not is_variable(layer.weight)]
  if narrow:
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(narrow))
    size = sum(weight.size for weight in narrow)
    result["quantised"] = (
      f"{size:,} parameters as {narrow[0].name}, {8 * stored / size:.2f} bits each with scales"
    )
  adapted = [layer.weight for layer in layers if layer.adapter is not None]
  if adapted:
    size = sum(weight.size for weight in adapted)
    tensors = sum(math.prod(weight.shape[: weight.num_stacked]) for weight in adapted)
    result["adapted"] = (
      f"{tensors} matrices of {size:,} parameters ({size / everything:.2%} of all)"
    )
  return result
