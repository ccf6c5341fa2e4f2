"""The rules that join several settings of sparse layers."""

from ats_jax.config.schema import Config


def check_moe(cfg: Config) -> None:
  """Check a mixture of experts.

  Raises:
    ValueError: naming the settings, their values and what to change.
  """
  moe, layers = cfg.moe, cfg.model.num_layers
  if moe.top_k > moe.num_experts:
    raise ValueError(
      f"moe.top_k={moe.top_k} exceeds moe.num_experts={moe.num_experts}. A token goes to each "
      "expert at most once; lower top_k or add experts."
    )
  if moe.dense_first + moe.dense_last + moe.every > layers:
    raise ValueError(
      f"no layer has experts: moe.dense_first={moe.dense_first}, moe.dense_last={moe.dense_last} "
      f"and moe.every={moe.every} leave none of model.num_layers={layers}. Lower one of them, or "
      "set moe.num_experts=0."
    )
  slots = moe.num_experts + moe.spare_experts
  if slots % cfg.mesh.expert:
    spare = f" + moe.spare_experts={moe.spare_experts}" if moe.spare_experts else ""
    raise ValueError(
      f"mesh.expert={cfg.mesh.expert} does not divide moe.num_experts={moe.num_experts}{spare}. "
      "Each device holds the same number of experts; change one of them."
    )
  _check_groups(cfg)
  if moe.null_experts and moe.dispatch == "capacity":
    raise ValueError(
      f"moe.null_experts={moe.null_experts} needs moe.dispatch=dropless: in capacity mode every "
      "expert computes all its places, so that nothing is saved. Set moe.null_experts=0, or "
      "moe.dispatch=dropless."
    )


def _check_groups(cfg: Config) -> None:
  moe = cfg.moe
  if moe.num_groups == 1:
    if moe.top_groups > 1:
      raise ValueError(
        f"moe.top_groups={moe.top_groups} of moe.num_groups=1. Set moe.num_groups too."
      )
    return
  for name in ("num_experts", "spare_experts"):
    if getattr(moe, name) % moe.num_groups:
      raise ValueError(
        f"moe.num_groups={moe.num_groups} does not divide moe.{name}={getattr(moe, name)}. "
        "Groups are of one size; change one of them."
      )
  if moe.top_groups > moe.num_groups:
    raise ValueError(
      f"moe.top_groups={moe.top_groups} exceeds moe.num_groups={moe.num_groups}. Lower top_groups."
    )
  if moe.top_k > (reach := moe.top_groups * moe.num_experts // moe.num_groups):
    raise ValueError(
      f"moe.top_k={moe.top_k} exceeds the {reach} experts of moe.top_groups={moe.top_groups} "
      "groups. Raise top_groups or lower top_k."
    )
  if moe.null_experts:
    raise ValueError(
      f"moe.null_experts={moe.null_experts} belong to no group: use them with moe.num_groups=1."
    )


def check_mod(cfg: Config) -> None:
  """Check a mixture of depths.

  Raises:
    ValueError: naming the settings, their values and what to change.
  """
  mod, layers = cfg.mod, cfg.model.num_layers
  end = mod.end_layer or layers
  if not mod.start_layer < end <= layers:
    raise ValueError(
      f"mod.start_layer={mod.start_layer} and mod.end_layer={end} are no range within "
      f"model.num_layers={layers}: 0 <= start < end <= {layers} (end_layer=0 means {layers})."
    )
  if mod.start_layer + mod.every > end:
    raise ValueError(
      f"mod.every={mod.every} finds no layer between mod.start_layer={mod.start_layer} and "
      f"mod.end_layer={end}. Lower it, widen the range, or set mod.routing=none."
    )
  if mod.anneal_fraction and mod.start_capacity < mod.capacity:
    raise ValueError(
      f"mod.start_capacity={mod.start_capacity} is below mod.capacity={mod.capacity}: capacity "
      "falls over the annealing. Swap them, or set mod.anneal_fraction=0."
    )
  if mod.decision == "predictor" and mod.routing != "learned":
    raise ValueError(
      f"mod.decision=predictor learns what a trained router does; mod.routing={mod.routing} has "
      "none. Set mod.routing=learned or mod.decision=threshold."
    )
