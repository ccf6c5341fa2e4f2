"""What all optimizers share: clip, decay by role, the move, and what they keep of a parameter."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ats_jax.config.schema import Config
from ats_jax.model.param import Param, Role, per_param
from ats_jax.step import tensors

DECAYS = frozenset({Role.MATRIX, Role.EXPERT, Role.ROUTER, Role.HEAD, Role.ADAPTER})


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


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """A transformation of gradients, and what the rest of the system may know about it.

  Its state for each parameter is in trees like the model, anywhere in `opt_state`. Code that edits
  the experts of a model edits these trees too (`per_parameter`); it needs to know only `squares`.

  Attributes:
    tx: gradients to directions of descent of unit learning rate; parameters move by -lr times them.
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
    squares: names of the fields of its state that hold averages of squares. They are never
      negative, and must not be 0 in a row that is reset late in a run. All other fields are
      averages of gradients, which are reset to 0.
  """

  tx: optax.GradientTransformationExtraArgs
  platform: str
  fused: Callable[[Any, Any, optax.OptState, jax.Array], Moved] | None = None
  recount: Callable[[optax.OptState, jax.Array], tuple[optax.OptState, jax.Array]] | None = None
  check: Callable[[optax.OptState, Any, optax.OptState, jax.Array], Checked] | None = None
  refit: Callable[[optax.OptState], optax.OptState] | None = None
  squares: frozenset[str] = frozenset()

  def update(self, params: Any, grads: Any, opt_state: optax.OptState, lr: jax.Array) -> Moved:
    """Move parameters by a learning rate, in one pass if there is one."""
    if self.fused is not None:
      return self.fused(params, grads, opt_state, lr)
    directions, opt_state = seam(self.tx.update(grads, opt_state, params), self.platform)
    params = seam(move(params, directions, lr), self.platform)
    return Moved(params, opt_state, lr * tensors.norm(directions))


def per_parameter(opt_state: optax.OptState) -> list[tuple[str, Any]]:
  """What an optimizer keeps of each parameter: names of fields and trees like the model.

  Under `optax.partition` a tree has `optax.MaskedNode` in place of arrays that another one keeps.
  """
  is_model = lambda x: isinstance(x, nnx.Module)
  found = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_model)
  return [(path[-1].name, tree) for path, tree in found if is_model(tree)]


def decays(param: Param, *, embeddings: bool) -> bool:
  """Whether a parameter decays: matrices; the embedding table if asked; no vector of any role."""
  asked = embeddings and param.role is Role.EMBEDDING
  return (param.role in DECAYS or asked) and len(param.axes) > 1


def decay_mask(params: Any, *, embeddings: bool) -> Any:
  """`decays` of each parameter, in a tree like `params`."""
  return per_param(lambda param: decays(param, embeddings=embeddings), params)


def clipping(cfg: Config, platform: str) -> tuple[optax.GradientTransformationExtraArgs, ...]:
  """The link of a chain that clips as `optimizer.grad_clip` says; none if it is 0."""
  max_norm = cfg.optimizer.grad_clip
  return (clip_by_norm(max_norm, platform),) if max_norm else ()


def decoupled_decay(cfg: Config) -> tuple[optax.GradientTransformationExtraArgs, ...]:
  """The link that adds decay to directions as `optimizer.weight_decay` says; none if it is 0."""
  o = cfg.optimizer
  if not o.weight_decay:
    return ()
  return (add_decayed_weights(o.weight_decay, embeddings=o.decay_embeddings),)


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
  weight_decay: float, *, embeddings: bool
) -> optax.GradientTransformationExtraArgs:
  """As `optax.add_decayed_weights`; `update` also takes a `decay_scale` that multiplies the decay.

  Args:
    weight_decay: of the parameters that `decays` says.
    embeddings: see there.
  """

  def update(updates, state, params=None, *, decay_scale: jax.Array | float = 1.0, **_):
    decay = jnp.asarray(weight_decay, jnp.float32) * decay_scale
    one = lambda u, p, decays: u + decay.astype(p.dtype) * p if decays else u
    mask = decay_mask(params, embeddings=embeddings)
    return jax.tree.map(one, updates, params, mask), state

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
