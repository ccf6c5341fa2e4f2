"""Which experts a token goes to, with what weight, and into which slot, without a sort.

Letters: N tokens, E outputs of the router, S experts (outputs from S on are null experts), K
choices, M = N * K slots.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_cuda.checks import call, expect, like
from kernels_cuda.rows import MAX_CHOICES, Places

MAX_EXPERTS = 256
TOKENS_PER_BLOCK = 64  # kRouteTokens
CHOICES_PER_BLOCK = 512  # kRouteThreads
CLOSED = -5e29  # an expert with this logit or a lower one is chosen last


class Route(NamedTuple):
  """Where tokens go.

  Attributes:
    weight_NK: float32; the only differentiable part.
    chosen_NK: int32 outputs in descending order, null experts and padding's choices too.
    places: slots grouped by expert, in the order of tokens within one; choices of null experts and
      of invalid tokens have none.
    sizes_S: int32, slots of each expert.
  """

  weight_NK: jax.Array
  chosen_NK: jax.Array
  places: Places
  sizes_S: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6, 7))
def route(
  logits_NE: jax.Array,
  bias_E: jax.Array,
  valid_N: jax.Array,
  top_k: int,
  num_experts: int,
  score: str,
  renormalize: bool,
  route_scale: float,
) -> Route:
  """Choose the K outputs with the highest `logit + bias` (of equals the first) and place them.

  Weights are the softmax or sigmoid of the logits alone, in float32. The logits are read once. The
  gradient of the weights is left to XLA. Floor in bytes: 4 N E + N + 24 N K.

  Args:
    logits_NE: float32 [tokens, outputs], at most 256 outputs.
    bias_E: float32, added for the choice only.
    valid_N: bool; the others get no slot.
    top_k: K, 1 to 8.
    num_experts: S.
    score: "softmax" or "sigmoid".
    renormalize: divide a token's weights by their sum (if K > 1).
    route_scale: multiplies the weights.

  Raises:
    ValueError: another dtype, shape or setting.
  """
  op = "route"
  tokens, outputs = expect(op, "logits", logits_NE, (None, None), jnp.float32)
  expect(op, "bias", bias_E, (outputs,), jnp.float32)
  expect(op, "valid", valid_N, (tokens,), jnp.bool_)
  _check_settings(op, outputs, top_k, score)
  if not 1 <= num_experts <= outputs:
    raise ValueError(f"{op}: {num_experts} experts of {outputs} outputs")
  chosen = jax.ShapeDtypeStruct((tokens, top_k), jnp.int32)
  weight = jax.ShapeDtypeStruct((tokens, top_k), jnp.float32)
  out = (weight, chosen, *_places_of(chosen, num_experts, -(-tokens // TOKENS_PER_BLOCK)))
  weight_NK, chosen_NK, slot_NK, source_M, choice_M, sizes_S, _ = call(
    "ats_route",
    out,
    logits_NE,
    bias_E,
    valid_N,
    sigmoid=score == "sigmoid",
    renormalize=renormalize and top_k > 1,
    route_scale=float(route_scale),
    closed=CLOSED,
  )
  return Route(weight_NK, chosen_NK, Places(source_M, choice_M, slot_NK), sizes_S)


def _forward(logits_NE, bias_E, valid_N, *settings):
  result = route(logits_NE, bias_E, valid_N, *settings)
  return result, (logits_NE, result.chosen_NK)


def _backward(top_k, num_experts, score, renormalize, route_scale, residuals, cotangent):
  del top_k, num_experts
  logits_NE, chosen_NK = residuals
  weigh = functools.partial(weights_of, score=score, renormalize=renormalize, scale=route_scale)
  _, pullback = jax.vjp(lambda logits: weigh(logits, chosen_NK), logits_NE)
  return *pullback(cotangent.weight_NK), None, None


route.defvjp(_forward, _backward)


def weights_of(
  logits_NE: jax.Array, chosen_NK: jax.Array, *, score: str, renormalize: bool, scale: float
) -> jax.Array:
  """The weights of given choices, in plain XLA: [tokens, choices]."""
  scores_NE = jax.nn.softmax(logits_NE) if score == "softmax" else jax.nn.sigmoid(logits_NE)
  is_chosen_NKE = chosen_NK[..., None] == jnp.arange(logits_NE.shape[-1])
  weight_NK = jnp.sum(jnp.where(is_chosen_NKE, scores_NE[:, None, :], 0), axis=-1)
  if renormalize and chosen_NK.shape[1] > 1:
    weight_NK /= jnp.sum(weight_NK, axis=-1, keepdims=True) + 1e-20
  return scale * weight_NK


def choose(
  logits_BTE: jax.Array,
  selection_BTE: jax.Array,
  valid_BT: jax.Array,
  *,
  top_k: int,
  score: str,
  renormalize: bool,
  scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The choice of `route` alone, of the K outputs with the highest `selection`.

  Not differentiable. Floor in bytes: 8 B T E + B T (1 + 8 K).

  Args:
    logits_BTE: float32 [batch, seq, outputs], at most 256 outputs.
    selection_BTE: like the logits.
    valid_BT: bool; the others are not counted.
    top_k: K, 1 to 8.
    score: "softmax" or "sigmoid".
    renormalize: divide a token's weights by their sum.
    scale: multiplies the weights.

  Returns:
    Outputs [batch, seq, K] int32, their weights, and the choices of valid tokens that fell on each
    output of each row, float32 [batch, outputs].

  Raises:
    ValueError: another dtype, shape or setting.
  """
  shape = expect("routing", "logits", logits_BTE, (None, None, None), jnp.float32)
  expect("routing", "selection", selection_BTE, shape, jnp.float32)
  expect("routing", "valid", valid_BT, shape[:2], jnp.bool_)
  _check_settings("routing", shape[2], top_k, score)
  chosen = jax.ShapeDtypeStruct((*shape[:2], top_k), jnp.int32)
  weight = jax.ShapeDtypeStruct(chosen.shape, jnp.float32)
  load = jax.ShapeDtypeStruct((shape[0], shape[2]), jnp.float32)
  settings = {"sigmoid": score == "sigmoid", "renormalize": renormalize}
  settings["route_scale"] = float(scale)
  out = (chosen, weight, load)
  return tuple(call("ats_choose", out, logits_BTE, selection_BTE, valid_BT, **settings))


def _check_settings(op, outputs, top_k, score):
  if outputs > MAX_EXPERTS:
    raise ValueError(f"{op}: {outputs} outputs of the router, expected at most {MAX_EXPERTS}")
  if not 1 <= top_k <= min(MAX_CHOICES, outputs):
    raise ValueError(f"{op}: top_k is {top_k}, expected 1 to {min(MAX_CHOICES, outputs)}")
  if score not in ("softmax", "sigmoid"):
    raise ValueError(f"{op}: score is {score!r}, expected softmax or sigmoid")


def sort_by_expert(chosen_NK: jax.Array, num_experts: int) -> tuple[Places, jax.Array]:
  """Give every choice a slot, grouped by expert, in the order of tokens within a group.

  Floor in bytes: 16 N K.

  Args:
    chosen_NK: int32 [tokens, choices]; outside 0 ... num_experts - 1 means nowhere.
    num_experts: S, at most 256.

  Returns:
    Places with M = N * K, of which those past the last group are empty; int32 [S] group sizes.

  Raises:
    ValueError: another dtype, shape or number.
  """
  *places, sizes_S = sort_choices(chosen_NK, num_experts=num_experts)
  return Places(*places), sizes_S


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))  # integers, but jax asks for a rule
def sort_choices(
  chosen_NK: jax.Array, num_experts: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """As `sort_by_expert`: source, choice, slot, sizes."""
  expect("sort_by_expert", "chosen", chosen_NK, (None, None), jnp.int32)
  if not 1 <= num_experts <= MAX_EXPERTS:
    raise ValueError(f"sort_by_expert: {num_experts} experts, expected 1 to {MAX_EXPERTS}")
  out = _places_of(like(chosen_NK), num_experts, -(-chosen_NK.size // CHOICES_PER_BLOCK))
  slot_NK, source_M, choice_M, sizes_S, _ = call("ats_sort_by_expert", out, chosen_NK)
  return source_M, choice_M, slot_NK, sizes_S


sort_choices.defvjp(
  lambda chosen_NK, num_experts: (sort_choices(chosen_NK, num_experts), None),
  lambda num_experts, residuals, cotangents: (None,),
)


def _places_of(chosen, num_experts, blocks):
  """Slots, sources, choices, sizes, and the scratch of the counts of each block."""
  flat = jax.ShapeDtypeStruct((chosen.shape[0] * chosen.shape[1],), jnp.int32)
  sizes = jax.ShapeDtypeStruct((num_experts,), jnp.int32)
  return chosen, flat, flat, sizes, jax.ShapeDtypeStruct((num_experts, blocks), jnp.int32)
