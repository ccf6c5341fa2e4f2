"""A mixture of experts written from its formulas, token by token: what the tests compare with."""

import math
from typing import Any

import numpy as np

# Of a router; all but the first two come with spare slots.
BUFFERS = ("bias_E", "load_E", "active_S", "side_S", "direction_SD", "penalty_S")


def weights_of(moe: Any) -> dict[str, Any]:
  """The arrays of a module, or of its gradient."""
  found = {"router": moe.router.weight}
  for name in ("gate", "up", "down"):
    found[name] = getattr(moe, name).weight
    if (bias := getattr(moe, name).bias) is not None:
      found[f"{name}_bias"] = bias
  if moe.router.offset is not None:
    found["offset"] = moe.router.offset
  if moe.shared is not None:
    found |= {f"shared_{n}": getattr(moe.shared, n).weight for n in ("gate", "up", "down")}
  return {name: np.asarray(array[...]) for name, array in found.items()}


def buffers_of(moe: Any) -> dict[str, np.ndarray]:
  """The buffers that the router has."""
  router = moe.router
  return {n: np.asarray(getattr(router, n)[...]) for n in BUFFERS if hasattr(router, n)}


def silu(x):
  return x / (1 + np.exp(-x))


def feed_forward(model, x, weights):
  """Of one token, by the three matrices and their biases, if there are any."""
  plus = lambda name, y: y @ weights[name] + weights.get(f"{name}_bias", 0.0)
  gate, up = plus("gate", x), plus("up", x)
  if model.activation == "clamped":
    gate, up = (
      np.minimum(gate, model.gate_limit),
      np.clip(up, -model.gate_limit, model.gate_limit),
    )
    return plus("down", gate / (1 + np.exp(-model.gate_slope * gate)) * (1 + up))
  return plus("down", silu(gate) * up)


def slots(cfg) -> int:
  return cfg.num_experts + cfg.spare_experts


def is_open(cfg, buffers) -> np.ndarray:
  """Of each output of the router: can tokens go there? To null experts always."""
  return np.append(buffers.get("active_S", np.ones(slots(cfg))) > 0, np.ones(cfg.null_experts) > 0)


def logits_of(cfg, x_D, weights, buffers):
  """Of one token for each expert; minus infinity where it cannot go."""
  logits_E = (x_D @ weights["router"] + weights.get("offset", 0.0)) / cfg.temperature
  if cfg.spare_experts:
    side_S = buffers["side_S"]
    along_S = buffers["direction_SD"] @ x_D
    on_its_side_S = np.where(side_S > 0, along_S >= 0, along_S < 0) | (side_S == 0)
    loss_S = np.where(on_its_side_S, 0.0, buffers["penalty_S"])
    logits_E -= np.append(loss_S, np.zeros(cfg.null_experts))
  return np.where(is_open(cfg, buffers) & (logits_E > -1e29), logits_E, -np.inf)


def scores_of(cfg, logits_E):
  if cfg.score == "sigmoid":
    return 0.5 * (1 + np.tanh(logits_E / 2))
  return np.exp(logits_E) / np.sum(np.exp(logits_E))


def choose(cfg, bias_E, logits_E) -> list[int]:
  """The experts of one token, best first."""
  if cfg.bias_on == "scores":
    scores_E = scores_of(cfg, logits_E) + bias_E
    biased_E = np.where(np.isfinite(logits_E), scores_E, -np.inf)
  else:
    biased_E = logits_E + bias_E
    scores_E = scores_of(cfg, biased_E)
  biased = {e: biased_E[e] for e in np.flatnonzero(biased_E > -np.inf).tolist()}
  if cfg.num_groups > 1:
    size = slots(cfg) // cfg.num_groups
    members = [[e for e in biased if e // size == g] for g in range(cfg.num_groups)]
    counted = 1 if cfg.group_score == "max" else 2
    worth = [sum(sorted((scores_E[e] for e in m), reverse=True)[:counted]) for m in members]
    usable = [g for g in range(cfg.num_groups) if members[g]]
    best = sorted(usable, key=lambda g: -worth[g])[: cfg.top_groups]
    biased = {e: b for e, b in biased.items() if e // size in best}
  return sorted(biased, key=lambda e: -biased[e])[: cfg.top_k]


def capacity(cfg, seq: int) -> int:
  return min(seq, math.ceil(cfg.capacity_factor * cfg.top_k * seq / cfg.num_experts - 1e-9))


def keep(cfg, row: list[dict[int, Any]]) -> list[list[int]]:
  """The experts of each token of a row that have a place for it, from {expert: weight}."""
  kept = [[] for _ in row]
  for e in range(slots(cfg)):
    wants = [t for t, choices in enumerate(row) if e in choices]
    if cfg.drop_policy == "weight":
      wants.sort(key=lambda t: -float(row[t][e]))
    for t in wants[: capacity(cfg, len(row))]:
      kept[t].append(e)
  return kept


def route(cfg, x_D, weights, buffers, noise_E=None, choices=None) -> tuple[Any, Any, dict]:
  """Of one token: logits, probabilities, and {expert: weight} of its choices."""
  logits_E = logits_of(cfg, x_D, weights, buffers)
  scores_E = scores_of(cfg, logits_E)
  if choices is None:
    noisy_E = logits_E if noise_E is None else logits_E + cfg.noise * noise_E
    choices = choose(cfg, buffers["bias_E"], noisy_E)
  chosen = {e: scores_E[e] for e in choices}
  if cfg.renormalize and cfg.top_k > 1:
    total = sum(chosen.values())
    chosen = {e: s / total for e, s in chosen.items()}
  gates = {e: cfg.route_scale * s for e, s in chosen.items()}
  return logits_E, scores_E / np.sum(scores_E), gates


def plan(cfg, x, weights, buffers, valid, noise=None, *, dropping: bool):
  """What is decided, whatever the weights become: choices and kept choices [batch][seq]."""
  chosen, kept = [], []
  for b in range(len(x)):
    row = []
    for t in range(len(x[b])):
      noise_E = None if noise is None else noise[b, t]
      row.append(route(cfg, x[b, t], weights, buffers, noise_E)[2] if valid[b, t] else {})
    chosen.append([list(choices) for choices in row])
    kept.append(keep(cfg, row) if dropping else chosen[-1])
  return chosen, kept


def mixture(cfg, model, x, weights, buffers, valid, decided):
  """Output [batch, seq, d_model], and `MoEStats` as a dict."""
  chosen, kept = decided
  num_open = int(np.sum(is_open(cfg, buffers)))
  load_E, rows = np.zeros(slots(cfg) + cfg.null_experts), []
  stats = dict.fromkeys(("balance", "sequence_balance", "z", "entropy", "confidence"), 0.0)
  for b in range(x.shape[0]):
    tokens = [t for t in range(x.shape[1]) if valid[b, t]]
    share_E, mean_E, row = np.zeros_like(load_E), 0.0, np.zeros(x.shape[1:])
    for t in tokens:
      logits_E, probs_E, gates = route(cfg, x[b, t], weights, buffers, None, chosen[b][t])
      for e, gate in gates.items():
        load_E[e] += 1
        share_E[e] += 1 / (len(tokens) * cfg.top_k)
        if e < slots(cfg) and e in kept[b][t]:
          own = [n for n in weights if n.removesuffix("_bias") in ("gate", "up", "down")]
          row[t] += gate * feed_forward(model, x[b, t], {n: weights[n][e] for n in own})
      if cfg.num_shared:
        shared = {n: weights[f"shared_{n}"] for n in ("gate", "up", "down")}
        row[t] += feed_forward(model, x[b, t], shared)
      mean_E += probs_E / len(tokens)
      stats["balance"] += num_open * np.sum(buffers["load_E"] * probs_E)
      stats["z"] += np.log(np.sum(np.exp(logits_E))) ** 2
      stats["entropy"] -= np.sum(probs_E * np.log(np.maximum(probs_E, 1e-300)))
      stats["confidence"] += np.max(probs_E)
    stats["sequence_balance"] += num_open * np.sum(share_E * mean_E)
    rows.append(row)
  count = lambda a: sum(e < slots(cfg) for row in a for token in row for e in token)
  return np.stack(rows), stats | {
    "tokens": float(np.sum(valid)),
    "load_E": load_E,
    "dropped": float(count(chosen) - count(kept)),
    "overflow": 0.0,  # nothing is exchanged
  }
