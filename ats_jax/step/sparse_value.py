"""Metrics of the value of sparse layers: saved FLOPs, and the used share of experts' time."""

from collections.abc import Mapping

import numpy as np

from ats_jax.config.schema import Config
from ats_jax.model.count import Counts
from ats_jax.model.forward_pass import Pass
from ats_jax.model.layer_kinds import layer_kinds
from ats_jax.model.layout import expert_capacity


def sparse_value_metrics(
  cfg: Config,
  counts: Counts,
  rules: Pass,
  metrics: Mapping[str, float],
  layers: Mapping[str, np.ndarray],
) -> dict[str, float]:
  """Compute metrics from those of a step, on the host, for a row of the log.

  Args:
    cfg: the resolved config.
    counts: parameters and FLOPs of the model.
    rules: the rules of the step.
    metrics: `StepMetrics.values` by name.
    layers: `StepMetrics.layers`.

  Returns:
    `mod/flops_saved` and `moe/efficiency`, for a model with such layers.
  """
  values = {}
  if "mod/routed" in metrics:
    values["mod/flops_saved"] = counts.flops_saved(metrics["mod/routed"])
  if "moe/load" in layers:
    values["moe/efficiency"] = expert_efficiency(cfg, rules, layers)
  return values


def expert_efficiency(cfg: Config, rules: Pass, layers: Mapping[str, np.ndarray]) -> float:
  """The share of the experts' computing time that is spent on tokens, averaged over layers.

  In capacity mode an expert computes all its places: the share of places that hold a token. In
  dropless mode the devices along the mesh axis `expert` wait for the one with the most rows: the
  mean load over the largest load, which is 1 on a single device.
  """
  load_LE = layers["moe/load"].astype(np.float64)
  slots = cfg.moe.num_experts + cfg.moe.spare_experts
  if cfg.moe.dispatch == "dropless":
    load_LW = load_LE[:, :slots].reshape(len(load_LE), cfg.mesh.expert, -1).sum(axis=-1)
    return float(np.mean(load_LW.mean(axis=1) / np.maximum(load_LW.max(axis=1), 1e-30)))
  seq, rows = cfg.data.seq_len, cfg.data.batch_size
  lengths = [rules.places(seq) if kind.mod else seq for kind in layer_kinds(cfg) if kind.moe]
  moe = cfg.moe
  places_L = [
    rows * slots * expert_capacity(length, moe.top_k, moe.capacity_factor, moe.num_experts)
    for length in lengths
  ]
  choices_L = moe.top_k * layers["moe/layer_tokens"].astype(np.float64)
  kept_L = choices_L * (1.0 - layers["moe/layer_dropped"].astype(np.float64))
  return float(np.mean(kept_L / places_L))
