"""What all optimizers share: clip, decay by role, the move, and what they keep of a parameter."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ats_jax.config.schema import Config
from ats_jax.config.schema.optimizer import ROLES
from ats_jax.model.param import Param, Role, per_param, role_name
from ats_jax.step import tensors

# See `Optimizer.check`.
type Check = Callable[[optax.OptState, Any, optax.OptState, jax.Array], Checked]
# A hyperparameter: one number, or one of each parameter.
type PerParam = float | Callable[[Param], float]

DECAYS = frozenset(
  {Role.MATRIX, Role.EXPERT, Role.ROUTER, Role.HEAD, Role.ADAPTER, Role.ADAPTER_OUT}
)


class Moved(NamedTuple):
  """What an update leaves behind.

  Attributes:
    params: new parameters.
    opt_state: new state.
    update_norm: float32, of what was added to the parameters.
  """

  params: Any
  opt_state: optax.OptState
  update_norm: jax.Array


class Checked(NamedTuple):
  """An update whose corrupted elements are removed.

  An element is corrupted if no gradients can have led to the optimizer's moments of it.

  Attributes:
    directions: 0 at corrupted elements.
    opt_state: after the update; the moments of corrupted elements are 0.
    marked: the directions, NaN at corrupted elements: their norm, which is taken anyway, shows it.
  """

  directions: Any
  opt_state: optax.OptState
  marked: Any


class Codec(Protocol):
  """How a field of a state holds numbers as codes, beside their scales in another field.

  Codes have the shape of the parameter, scales another last dimension. `optax.MaskedNode` among the
  scales stands for an array that is not coded. A codec is hashable: it is static in programs.
  """

  @property
  def field(self) -> str:
    """The field of the state with the codes."""
    ...

  @property
  def scales(self) -> str:
    """The field with the scales."""
    ...

  def decode(self, codes: jax.Array, scale: jax.Array, /) -> jax.Array:
    """The numbers, float32, of codes [..., n] and their scales."""
    ...

  def encode(self, x: jax.Array, /) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of numbers [..., n], row by row along the last dimension."""
    ...


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """A transformation of gradients, and what the rest of the system may know about it.

  Its state for each parameter is in trees like the model, anywhere in `opt_state`. Code that edits
  the experts of a model edits these trees too (`per_parameter`); it needs to know only
  `codecs`.

  Attributes:
    tx: gradients to directions of descent of unit learning rate; parameters move by -lr times them.
      Its `update` gets lr as `learning_rate`, for what is not proportional to it.
    platform: where it runs, "cpu", "gpu" or "tpu".
    fused: `(params, grads, opt_state, lr) -> Moved`: the same in one pass over each parameter, on
      the same state; None = there is no kernel for it.
    recount: `(opt_state, updates) -> (opt_state, off)`: the state with its count of updates set to
      `updates`, and by how much the count was off; None = it does not count.
    check: `(before, directions, after, armed) -> Checked`: finds elements that no gradients can
      have led to. Takes the state before the update, and the directions and the state after it.
      Removes the elements if `armed`, and marks them in any case; None = nothing can be checked.
    refit: `(opt_state) -> opt_state`: a state that was made with other settings as these could have
      left it, so that `check` finds nothing; None = as it is.
    average: `(params, opt_state) -> params`: the weights for evaluation, generation and exports, if
      `OptimizerConfig.has_average`; None = those that are trained.
    codecs: of the fields of its state whose numbers are coded.
  """

  tx: optax.GradientTransformationExtraArgs
  platform: str
  fused: Callable[[Any, Any, optax.OptState, jax.Array], Moved] | None = None
  recount: Callable[[optax.OptState, jax.Array], tuple[optax.OptState, jax.Array]] | None = None
  check: Check | None = None
  refit: Callable[[optax.OptState], optax.OptState] | None = None
  average: Callable[[Any, optax.OptState], Any] | None = None
  codecs: tuple[Codec, ...] = ()

  def update(self, params: Any, grads: Any, opt_state: optax.OptState, lr: jax.Array) -> Moved:
    """Move parameters by a learning rate, in one pass if there is one."""
    if self.fused is not None:
      return self.fused(params, grads, opt_state, lr)
    tx = optax.with_extra_args_support(self.tx)
    directions, opt_state = seam(
      tx.update(grads, opt_state, params, learning_rate=lr), self.platform
    )
    params = seam(move(params, directions, lr), self.platform)
    return Moved(params, opt_state, lr * tensors.norm(directions))


def per_parameter(opt_state: optax.OptState) -> list[tuple[str, Any]]:
  """What an optimizer keeps of each parameter: names of fields and trees like the model.

  Under `optax.partition` a tree has `optax.MaskedNode` in place of arrays that another one keeps.
  """
  is_model = lambda x: isinstance(x, nnx.Module)
  found = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_model)
  return [(path[-1].name, tree) for path, tree in found if is_model(tree)]


def by_role(table: Mapping[str, float], usual: float) -> PerParam:
  """A hyperparameter that a setting such as `optimizer.b1_by_role` gives, or else `usual`."""
  return (lambda param: table.get(role_name(param), usual)) if table else usual


def per_group(
  make: Callable[..., optax.GradientTransformation], *values: tuple[Mapping[str, float], float]
) -> optax.GradientTransformation:
  """A transformation with hyperparameters by role, of one that has the same for all parameters.

  Args:
    make: hyperparameters to a transformation.
    values: of each, a setting such as `optimizer.b1_by_role`, and what it is otherwise.
  """
  if not any(table for table, _ in values):
    return make(*(usual for _, usual in values))
  of_role = lambda role: tuple(table.get(role, usual) for table, usual in values)
  links: dict[Hashable, optax.GradientTransformation] = {
    str(group): make(*group) for group in map(of_role, ROLES)
  }
  return optax.partition(links, functools.partial(per_param, lambda p: str(of_role(role_name(p)))))


def per_tensor(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """A transformation that treats each tensor by itself, for each layer and expert of a stack.

  The state has the fields of that of `tx`. A field of integers (a count of updates) is the same for
  all tensors and kept once; any other is a tree like the parameters.
  """

  def is_shared(field: Any) -> bool:
    return hasattr(field, "dtype") and jnp.issubdtype(field.dtype, jnp.integer)

  def axes_of(state: Any) -> Any:
    return jax.tree.map(lambda x: None if is_shared(x) else 0, state)

  def stacked(params: Any) -> list[int]:
    return jax.tree.leaves(per_param(lambda param: param.num_stacked, params))

  def join(states: Sequence[Any], outer: Any) -> Any:
    fields = zip(*map(jax.tree.leaves, states), strict=True)
    joined = [field[0] if is_shared(field[0]) else outer.unflatten(field) for field in fields]
    return jax.tree.structure(states[0]).unflatten(joined)

  def split(state: Any, outer: Any, inner: Any) -> list[Any]:
    fields = [
      [field] * outer.num_leaves if is_shared(field) else outer.flatten_up_to(field)
      for field in inner.flatten_up_to(state)
    ]
    return [inner.unflatten(of_one) for of_one in zip(*fields, strict=True)]

  def init_one(param: jax.Array, num_stacked: int) -> Any:
    make, tensor = tx.init, jax.ShapeDtypeStruct(param.shape[num_stacked:], param.dtype)
    axes = axes_of(jax.eval_shape(tx.init, tensor))
    for _ in range(num_stacked):
      make = jax.vmap(make, out_axes=axes)
    return make(param)

  def init(params):
    leaves, outer = jax.tree.flatten(params)
    return join([init_one(*each) for each in zip(leaves, stacked(params), strict=True)], outer)

  def update_one(grad: jax.Array, state: Any, param: jax.Array, num_stacked: int) -> Any:
    make, axes = tx.update, axes_of(state)
    for _ in range(num_stacked):
      make = jax.vmap(make, in_axes=(0, axes, 0), out_axes=(0, axes))
    return make(grad, state, param)

  def update(updates, state, params=None):
    assert params is not None
    grads, outer = jax.tree.flatten(updates)
    states = split(state, outer, jax.tree.structure(jax.eval_shape(tx.init, grads[0])))
    each_one = zip(grads, states, jax.tree.leaves(params), stacked(updates), strict=True)
    directions, states = zip(*[update_one(*each) for each in each_one], strict=True)
    return outer.unflatten(directions), join(states, outer)

  return optax.GradientTransformation(init, update)


def each(value: PerParam, tree: Any) -> Any:
  """A hyperparameter of each parameter, floats in a tree like `tree`."""
  if callable(value):
    return per_param(value, tree)
  return jax.tree.map(lambda _: value, tree)


def decays(param: Param, *, embeddings: bool) -> bool:
  """Whether a parameter decays: matrices; the embedding table if asked; no vector of any role."""
  asked = embeddings and param.role is Role.EMBEDDING
  return (param.role in DECAYS or asked) and len(param.axes) > 1


def decay_rates(cfg: Config, params: Any) -> Any:
  """The weight decay of each parameter, floats in a tree like `params`."""
  o = cfg.optimizer
  usual = lambda param: o.weight_decay * decays(param, embeddings=o.decay_embeddings)
  return per_param(lambda param: o.decay_by_role.get(role_name(param), usual(param)), params)


def relative_rates(cfg: Config, params: Any) -> Any:
  """What the learning rate of each parameter is multiplied with, floats in a tree like `params`."""
  return each(by_role(cfg.optimizer.rate_by_role, 1.0), params)


def recount(opt_state: optax.OptState, updates: jax.Array) -> tuple[optax.OptState, jax.Array]:
  """See `Optimizer.recount`: of states with a field `steps` or `count`, as ours and optax's have.

  A wrong count would turn bias corrections over.
  """
  off = [jnp.zeros((), jnp.float32)]

  def mended(state: Any) -> Any:
    name = _counter(state)
    if name is None:
      return state
    counts = getattr(state, name)
    off.extend(jnp.abs(count - updates).astype(jnp.float32) for count in jax.tree.leaves(counts))
    right = jax.tree.map(lambda count: updates.astype(count.dtype), counts)
    return state._replace(**{name: right})

  opt_state = jax.tree.map(mended, opt_state, is_leaf=lambda s: _counter(s) is not None)
  return opt_state, jnp.max(jnp.stack(off))


def _counter(state: Any) -> str | None:
  """The field of a state that counts updates; None if it has none."""
  fields = getattr(state, "_fields", ())
  return next((name for name in ("steps", "count") if name in fields), None)


def state_of(kind: type, opt_state: optax.OptState) -> Any:
  """The one state of a kind in the state of an optimizer."""
  is_it = lambda state: isinstance(state, kind)
  (found,) = filter(is_it, jax.tree.leaves(opt_state, is_leaf=is_it))
  return found


def with_state(new: Any, opt_state: optax.OptState) -> optax.OptState:
  """The state of an optimizer with `new` in place of the one of its kind."""
  is_it = lambda state: isinstance(state, type(new))
  return jax.tree.map(lambda s: new if is_it(s) else s, opt_state, is_leaf=is_it)


def check_elements(
  kind: type,
  fields: tuple[str, ...],
  is_wrong: Callable[[Any, jax.Array], Any],
  before: optax.OptState,
  directions: Any,
  after: optax.OptState,
  armed: jax.Array,
  spread: Callable[[Param], jax.Array] | None = None,
) -> Checked:
  """An `Optimizer.check` of the state of one link.

  The state is asked as it was before the update, which XLA has at hand in the pass that makes it:
  asked of the one after it, the answers to bfloat16 moments are written out first (seen on an H200,
  jax 0.11.2).

  Args:
    kind: of the state.
    fields: its trees like the parameters; `optax.MaskedNode` stands for those of other links.
    is_wrong: `(state, zero) -> wrong`: which elements no gradients can have led to, of each
      parameter. `zero` is a 0 behind a barrier: XLA would read zeros that something else has in
      memory, and tie both together.
    before: see `Optimizer.check`, as all that follow.
    directions: of all parameters.
    after: the state after the update.
    armed: whether to act.
    spread: which elements of a direction are wrong where some of the state are; None = those.
  """
  zero = jax.lax.optimization_barrier(jnp.zeros((), jnp.float32))
  wrong = is_wrong(state_of(kind, before), zero)
  is_of_other = lambda x: isinstance(x, optax.MaskedNode)
  anew = lambda x, w: x if is_of_other(w) else jnp.where(w & armed, zero.astype(x.dtype), x)
  mark = lambda d, w: d if is_of_other(w) else jnp.where(w, jnp.nan, d)
  of_directions = per_param(spread, wrong) if spread else wrong
  new = state_of(kind, after)
  mended = {name: jax.tree.map(anew, getattr(new, name), wrong) for name in fields}
  return Checked(
    jax.tree.map(anew, directions, of_directions),
    with_state(new._replace(**mended), after),
    jax.tree.map(mark, directions, of_directions),
  )


def clipping(cfg: Config, platform: str) -> tuple[optax.GradientTransformationExtraArgs, ...]:
  """The link of a chain that clips as `optimizer.grad_clip` says; none if it is 0."""
  max_norm = cfg.optimizer.grad_clip
  return (clip_by_norm(max_norm, platform),) if max_norm else ()


def decoupled_decay(
  cfg: Config, applies: Callable[[Param], bool] = lambda param: True
) -> tuple[optax.GradientTransformationExtraArgs, ...]:
  """The last links of a chain: decay and learning rates by role, as the settings say.

  Decay is added to directions, and then these are multiplied by the rates of `rate_by_role`, so a
  parameter that moves more slowly decays more slowly.

  Args:
    cfg: the resolved config.
    applies: which parameters may decay at all.
  """
  o = cfg.optimizer
  decay = (add_decayed_weights(cfg, applies),) if o.weight_decay or o.decay_by_role else ()
  rates = (scale_by_role(cfg),) if o.rate_by_role else ()
  return (*decay, *rates)


def clip_by_norm(max_norm: float, platform: str) -> optax.GradientTransformationExtraArgs:
  """Scale gradients whose norm is above `max_norm` to it (Pascanu et al. 2013, algorithm 1).

  As `optax.clip_by_global_norm`, but in float32 whatever the gradients are: that one rounds the
  norm of bfloat16 gradients to bfloat16, and reads them once more than the step's own norm.
  A caller that knows the norm may pass it to `update` as `grad_norm`.
  """

  def update(updates, state, params=None, *, grad_norm: jax.Array | None = None, **_):
    del params
    known = tensors.norm(updates) if grad_norm is None else grad_norm
    # Without the seam XLA divides or takes an rsqrt, depending on who else reads the norm.
    scale = jnp.minimum(1.0, max_norm / seam(known, platform))
    return jax.tree.map(lambda g: g.astype(jnp.float32) * scale, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def add_decayed_weights(
  cfg: Config, applies: Callable[[Param], bool]
) -> optax.GradientTransformationExtraArgs:
  """As `optax.add_decayed_weights` with the `decay_rates` of the parameters that it applies to.

  `update` also takes a `decay_scale` that multiplies the decay.
  """

  def update(updates, state, params=None, *, decay_scale: jax.Array | float = 1.0, **_):
    def one(u: jax.Array, p: jax.Array, rate: float) -> jax.Array:
      decay = jnp.asarray(rate, jnp.float32) * decay_scale
      return u + decay.astype(p.dtype) * p if rate else u

    rates = jax.tree.map(operator.mul, decay_rates(cfg, params), per_param(applies, params))
    return jax.tree.map(one, updates, params, rates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def scale_by_role(cfg: Config) -> optax.GradientTransformationExtraArgs:
  """Multiply directions by `relative_rates`."""

  def update(updates, state, params=None, **_):
    one = lambda u, rate: u if rate == 1.0 else rate * u
    return jax.tree.map(one, updates, relative_rates(cfg, params)), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def move(params: Any, directions: Any, lr: jax.Array) -> Any:
  """`params - lr * directions`, in float32, rounded once."""
  one = lambda p, d: (p.astype(jnp.float32) - lr * d).astype(p.dtype)
  return jax.tree.map(one, params, directions)


def seam(tree: Any, platform: str) -> Any:
  """Fusion barrier (CPU only), so that the guarded and the plain step round identically.

  Without it XLA fuses the two steps differently, and on a CPU that changes the rounding. On a GPU a
  barrier would write arrays to memory that otherwise never exist there.
  """
  return jax.lax.optimization_barrier(tree) if platform == "cpu" else tree
