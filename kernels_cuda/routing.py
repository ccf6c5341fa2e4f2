"""Which experts a token goes to, with what weight, and into which slot, without a sort.

Letters: B batch, T seq, N tokens, E outputs of the router, S experts, K choices, M = N * K slots.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_cuda.checks import call, expect, like
from kernels_cuda.rows import MAX_CHOICES

MAX_EXPERTS = 256
CHOICES_PER_BLOCK = 512  # kRouteThreads


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
  """Choose the K outputs with the highest `selection`, of equals the first; weigh by the logits.

  Floor in bytes: 8 B T E + B T (1 + 8 K).

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
  outputs = shape[2]
  if outputs > MAX_EXPERTS:
    raise ValueError(f"routing: {outputs} outputs of the router, expected at most {MAX_EXPERTS}")
  if not 1 <= top_k <= min(MAX_CHOICES, outputs):
    raise ValueError(f"routing: top_k is {top_k}, expected 1 to {min(MAX_CHOICES, outputs)}")
  if score not in ("softmax", "sigmoid"):
    raise ValueError(f"routing: score is {score!r}, expected softmax or sigmoid")
  chosen = jax.ShapeDtypeStruct((*shape[:2], top_k), jnp.int32)
  weight = jax.ShapeDtypeStruct(chosen.shape, jnp.float32)
  load = jax.ShapeDtypeStruct((shape[0], outputs), jnp.float32)
  settings: dict[str, Any] = {"sigmoid": score == "sigmoid", "renormalize": renormalize}
  settings["route_scale"] = float(scale)
  out = (chosen, weight, load)
  return tuple(call("ats_choose", out, logits_BTE, selection_BTE, valid_BT, **settings))


def sort_by_expert(
  chosen_NK: jax.Array, num_experts: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Give every choice a slot, grouped by expert, in the order of tokens within a group.

  Floor in bytes: 16 N K.

  Args:
    chosen_NK: int32 [tokens, choices]; outside 0 ... num_experts - 1 means nowhere.
    num_experts: S, at most 256.

  Returns:
    int32 source [M], choice [M] and slot [N, K] as in `kernels_cuda.rows`, of which slots past the
    last group are empty; group sizes [S].

  Raises:
    ValueError: another dtype, shape or number.
  """
  expect("sort_by_expert", "chosen", chosen_NK, (None, None), jnp.int32)
  if not 1 <= num_experts <= MAX_EXPERTS:
    raise ValueError(f"sort_by_expert: {num_experts} experts, expected 1 to {MAX_EXPERTS}")
  flat = jax.ShapeDtypeStruct((chosen_NK.size,), jnp.int32)
  sizes = jax.ShapeDtypeStruct((num_experts,), jnp.int32)
  counts = jax.ShapeDtypeStruct((num_experts, -(-chosen_NK.size // CHOICES_PER_BLOCK)), jnp.int32)
  out = (like(chosen_NK), flat, flat, sizes, counts)
  slot_NK, source_M, choice_M, sizes_S, _ = call("ats_sort_by_expert", out, chosen_NK)
  return source_M, choice_M, slot_NK, sizes_S
