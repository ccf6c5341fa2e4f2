"""What sparse layers are worth: FLOPs that they save, and how much of the experts' work is used."""

from collections.abc import Mapping

import numpy as np

from ats_jax.config.schema import Config
from ats_jax.model.count import Counts
from ats_jax.model.layer_kinds import layer_kinds
from ats_jax.model.layout import expert_capacity
from ats_jax.model.mod import Pass


def worth(
  cfg: Config,
  counts: Counts,
  rules: Pass,
  metrics: Mapping[str, float],
  layers: Mapping[str, np.ndarray],
) -> dict[str, float]:
  """Metrics that follow from a step's others; for the host, when a row is written.

  Args:
    cfg: the run, resolved.
    counts: of its model.
    rules: that the step followed.
    metrics: `StepMetrics.values` by name.
    layers: `StepMetrics.layers`.

  Returns:
    `mod/flops_saved` and `moe/efficiency`, of a model that has such layers.
  """
  found = {}
  if "mod/routed" in metrics:
    found["mod/flops_saved"] = counts.flops_saved(metrics["mod/routed"])
  if "moe/load" in layers:
    found["moe/efficiency"] = expert_efficiency(cfg, rules, layers)
  return found


def expert_efficiency(cfg: Config, rules: Pass, layers: Mapping[str, np.ndarray]) -> float:
  """Share of the experts' time that goes into tokens; the mean over layers.

  In capacity mode an expert computes all its places: the share of them that hold a token. Dropless,
  it computes what it gets, but the devices along the mesh axis `expert` wait for the fullest of
  them: its load in the mean over its load on that device, which is 1 on a single device.
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
