"""SOAP and SOAP-Muon: Adam or Muon in the eigenbases of Shampoo's preconditioners."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ats_jax.config.schema import Config
from ats_jax.config.schema.optimizer import InEigenbasis, Soap, SoapMuon
from ats_jax.model.param import Param, params_of, per_param, reshard_params
from ats_jax.ops.gram_schmidt import orthonormal, times
from ats_jax.ops.newton_schulz import of_unit_norm, orthogonalise
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.apply import map_tensors, replicate, zeros_of_tensors
from ats_jax.step.optimizers.adamw import betas_of
from ats_jax.step.optimizers.base import (
  Checked,
  Optimizer,
  PerParam,
  by_role,
  each,
  state_of,
  with_state,
)
from ats_jax.step.optimizers.matrices import for_matrices, matrix_shape
from ats_jax.step.optimizers.muon import TINY, scale_updates

AT_A_TIME = 2**28  # elements of the largest array of matrices that are worked on together
OFF_UNIT = 1e-3  # of the squared length of a basis vector
EPS = float(jnp.finfo(jnp.float32).eps)


class SoapState(NamedTuple):
  """State of `scale_by_soap`, all float32; of one matrix, all but `steps` are matrices.

  A matrix of I inputs and O outputs has sides of these lengths. Trees like the parameters have
  `optax.MaskedNode` for a side without a basis.

  Attributes:
    steps: int32 scalar, updates so far.
    mu: averages of gradients.
    nu: averages of squares in the eigenbasis, of gradients or of what is orthogonalised.
    left: averages of G G^T, [*stack, I, I].
    right: averages of G^T G, [*stack, O, O].
    left_basis: columns are roughly the eigenvectors of `left`, the largest first.
    right_basis: the same of `right`.
  """

  steps: jax.Array
  mu: Any
  nu: Any
  left: Any
  right: Any
  left_basis: Any
  right_basis: Any


# (turn, gradient, mu, nu, steps, b1, b2) -> (direction, mu, nu), of one matrix in update `steps`.
# The direction is in the eigenbasis, into which `turn` takes a matrix.
type Rule = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def soap(cfg: Config, platform: str, kernels: Kernels = XLA) -> Optimizer:
  """SOAP for matrices, Adam for the rest, with decoupled weight decay.

  Vyas et al. 2024 (arXiv:2409.11321), algorithm 3, with the bias corrections of Adam and what
  github.com/nikhilvyas/SOAP has besides: the first update makes the bases by `eigh` and moves no
  matrix, basis vectors are sorted by eigenvalue, and sides longer than `max_side` have none.
  """
  del kernels
  o = cfg.optimizer
  assert isinstance(o, Soap)

  def rule(turn, grad, mu, nu, steps, b1, b2):
    # In its own bases the first gradient is diagonal: Adam would move all else by rounding errors.
    average = lambda old, new, b: jnp.where(steps == 1, old, b * old + (1.0 - b) * new)
    mu, nu = average(mu, grad, b1), average(nu, jnp.square(turn(grad)), b2)
    count = jnp.maximum(steps - 1, 1)
    bias1, bias2 = 1.0 - b1**count, 1.0 - b2**count
    return turn(mu) / (bias1 / jnp.sqrt(bias2) * jnp.sqrt(nu) + bias1 * o.eps), mu, nu

  tx = scale_by_soap(o, rule, *betas_of(o))
  return for_matrices(cfg, platform, tx, functools.partial(check_matrices, o.grad_clip))


def soap_muon(cfg: Config, platform: str, kernels: Kernels = XLA) -> Optimizer:
  """Muon of a momentum that is divided by the root of its mean squares in SOAP's eigenbasis.

  github.com/KellerJordan/modded-nanogpt, pull request 278, without what that adds to Muon itself.
  The first update, before there are bases, is that of Muon.
  """
  del kernels
  o = cfg.optimizer
  assert isinstance(o, SoapMuon)

  def rule(turn, grad, mu, nu, steps, b1, b2):
    average = lambda old, new, b: b * old + (1.0 - b) * new
    mu = average(mu, grad, b1)
    turned = turn(average(mu, grad, b1) if o.nesterov else mu)
    nu = jnp.where(steps == 1, nu, average(nu, jnp.square(turned), b2))
    return jnp.where(steps == 1, turned, turned / (jnp.sqrt(nu) + o.eps)), mu, nu

  def finish(x_BMN: jax.Array) -> jax.Array:
    unit_BMN = of_unit_norm(x_BMN, 1, eps=o.norm_eps, dtype=jnp.dtype(o.iteration_dtype))
    return orthogonalise(unit_BMN, steps=o.iterations)

  beta = by_role(o.momentum_by_role, o.momentum)
  tx = optax.chain(scale_by_soap(o, rule, beta, o.basis_decay, finish), scale_updates(o))
  return for_matrices(cfg, platform, tx, functools.partial(check_matrices, o.grad_clip))


def scale_by_soap(
  settings: InEigenbasis,
  rule: Rule,
  b1: PerParam,
  b2: PerParam,
  finish: Callable[[jax.Array], jax.Array] = lambda x_BMN: x_BMN,
) -> optax.GradientTransformation:
  """Directions of matrices by a rule in their eigenbases, each matrix of a stack by itself.

  Where the mesh divides the stack, devices exchange gradients and directions alone.

  Args:
    settings: of the optimizer.
    rule: makes directions.
    b1: decay of `mu`.
    b2: decay of `nu` and of the preconditioners.
    finish: directions of some matrices, turned back, to those of the optimizer.
  """

  def init(params):
    def side(number: int, param: Param) -> Any:
      length = matrix_shape(param)[number]
      return _zeros(param, (length, length)) if length <= settings.max_side else optax.MaskedNode()

    moments = lambda: per_param(lambda p: _zeros(p, p.shape[p.num_stacked :]), params)
    sides = lambda: [per_param(functools.partial(side, number), params) for number in (0, 1)]
    bases = [jax.tree.map(lambda q: q + jnp.eye(q.shape[-1]), tree) for tree in sides()]
    return SoapState(jnp.zeros((), jnp.int32), moments(), moments(), *sides(), *bases)

  def update(updates, state, params=None):
    del params
    steps, outer = state.steps + 1, jax.tree.structure(updates)
    updates = reshard_params("moments", updates)  # as the state is
    kept = (outer.flatten_up_to(tree) for tree in state[1:])
    betas = (jax.tree.leaves(each(b, updates)) for b in (b1, b2))
    stacks = [param for param in params_of(updates) if jax.tree.leaves(param)]

    def one(param: Param, b1: float, b2: float, *kept: Any) -> tuple[Any, ...]:
      shape = matrix_shape(param)

      def of_block(*args: Any) -> tuple[Any, ...]:
        (*block, steps), alone = args, lambda x: x.reshape(-1, *x.shape[-2:])
        of_matrix = functools.partial(_update, rule, settings.refresh_every, steps, b1, b2)
        matrices = [x.reshape(-1, *shape) for x in block[:3]] + jax.tree.map(alone, block[3:])
        largest = max(x[0].size for x in jax.tree.leaves(matrices))
        at_a_time = max(1, min(len(matrices[0]), AT_A_TIME // largest))
        direction, *new = jax.lax.map(lambda m: of_matrix(*m), matrices, batch_size=at_a_time)
        like = lambda x, old: x.reshape(old.shape)
        return jax.tree.map(like, (finish(direction), *new), tuple(block))

      direction, *new = map_tensors(of_block, param.num_stacked, param[...], *kept, whole=(steps,))
      return direction.astype(jnp.float32), *new

    done = [one(*of_param) for of_param in zip(stacks, *betas, *kept, strict=True)]
    directions, *fields = map(outer.unflatten, zip(*done, strict=True))
    return directions, SoapState(steps, *fields)

  return optax.GradientTransformation(init, update)


def _zeros(param: Param, tensor: tuple[int, ...]) -> jax.Array:
  return zeros_of_tensors(param[...], param.num_stacked, tensor, jnp.float32)


def _update(
  rule: Rule, refresh_every: int, steps: jax.Array, b1: float, b2: float, grad: Any, *kept: Any
) -> tuple[Any, ...]:
  """One matrix: its direction, and what is kept of it. Only the next update uses new bases."""
  grad, (mu, nu, left, right, *bases) = grad.astype(jnp.float32), kept
  direction, mu, nu = rule(functools.partial(_turn, bases), grad, mu, nu, steps, b1, b2)
  direction = _turn([jax.tree.map(jnp.matrix_transpose, q) for q in bases], direction)
  average = lambda old, new: b2 * old + (1.0 - b2) * new
  left = jax.tree.map(lambda p: average(p, times(grad, grad.T)), left)
  right = jax.tree.map(lambda p: average(p, times(grad.T, grad)), right)

  def first(nu: jax.Array, *bases: Any) -> tuple[Any, ...]:
    del bases
    return nu, *jax.tree.map(lambda p: jnp.linalg.eigh(_unit(p))[1][:, ::-1], (left, right))

  def refreshed(nu: jax.Array, *bases: Any) -> tuple[Any, ...]:
    """One power iteration. Columns, and with them the squares, are sorted first."""
    new = []
    for axis, (side, basis) in enumerate(zip((left, right), bases, strict=True)):
      if not isinstance(basis, optax.MaskedNode):
        # What is far below the largest eigenvalue stays as it is, and no column is zero.
        product = times(_unit(side), basis) + EPS * basis
        order = jnp.argsort(-jnp.sum(basis * product, axis=0))
        nu = jnp.take(nu, order, axis=axis)
        basis = orthonormal(product[:, order])
      new.append(basis)
    return nu, *new

  is_due = (steps - 1) % refresh_every == 0
  which = jnp.where(steps == 1, 1, jnp.where(is_due, 2, 0))
  nu, *new = jax.lax.switch(which, [lambda *same: same, first, refreshed], nu, *bases)
  return direction, mu, nu, left, right, *new


def _turn(bases: Any, x: jax.Array) -> jax.Array:
  """`left^T x right`, where there are bases; with transposed ones the inverse of it."""
  left, right = bases
  x = x if isinstance(left, optax.MaskedNode) else times(left.T, x)
  return x if isinstance(right, optax.MaskedNode) else times(x, right)


def _unit(side: jax.Array) -> jax.Array:
  """A preconditioner whose eigenvalues add up to 1, so that no square of an element underflows."""
  return side / jnp.maximum(jnp.trace(side), TINY)


def check_matrices(
  most: float,
  before: optax.OptState,
  directions: Any,
  after: optax.OptState,
  armed: jax.Array,
) -> Checked:
  """What holds of the state for gradients that were clipped to the norm `most` (0 = any).

  No average of gradients is larger than it, and none of squares or products than its square;
  squares are not negative, and basis vectors have length 1. (A corrupted element that changes a
  length by less than a thousandth is not found; the next refresh makes the basis orthogonal
  again.) A matrix of which anything is wrong does not move, and begins anew: zeros, and bases that
  are the identity. See `Optimizer.check`.
  """
  old, new = state_of(SoapState, before), state_of(SoapState, after)
  limit = most * (1.0 + 1e-3) if most else math.sqrt(float(jnp.finfo(jnp.float32).max))
  outer = jax.tree.structure(old.mu)

  def is_wrong(num_stacked: int, mu: Any, nu: Any, *sides: Any) -> jax.Array:
    preconditioners, bases = (jax.tree.leaves(of) for of in (sides[:2], sides[2:]))
    off = lambda q: jnp.abs(jnp.sum(jnp.square(q), axis=-2) - 1.0)
    right = [jnp.abs(mu) <= limit, (nu >= 0.0) & (nu <= limit * limit)]
    right += [jnp.abs(p) <= limit * limit for p in preconditioners]
    right += [off(q) <= OFF_UNIT for q in bases]  # false of NaN, as all of these
    return ~functools.reduce(
      jnp.logical_and, (jnp.all(x, axis=range(num_stacked, x.ndim)) for x in right)
    )

  stacked = jax.tree.leaves(per_param(lambda param: param.num_stacked, old.mu))
  kept = [outer.flatten_up_to(tree) for tree in old[1:]]
  wrong = outer.unflatten([is_wrong(*of_param) for of_param in zip(stacked, *kept, strict=True)])
  act = jax.tree.map(lambda w: w & armed, wrong)
  is_none = lambda x: isinstance(x, optax.MaskedNode)

  def put(value: Any, tree: Any, where: Any) -> Any:
    def one(x: Any, w: Any) -> Any:
      if is_none(x) or is_none(w):
        return x
      fresh = jnp.eye(x.shape[-1]) if value == "basis" else value
      return jnp.where(jnp.expand_dims(w, range(w.ndim, x.ndim)), fresh, x)

    return jax.tree.map(one, tree, where, is_leaf=is_none)

  values = dict.fromkeys(new._fields[1:5], 0.0) | dict.fromkeys(new._fields[5:], "basis")
  anew = new._replace(**{name: put(v, getattr(new, name), act) for name, v in values.items()})
  act, wrong = jax.tree.map(replicate, (act, wrong))
  return Checked(
    put(0.0, directions, act), with_state(anew, after), put(jnp.nan, directions, wrong)
  )
