"""Whether a mesh needs its expert axis: the same devices with `fsdp` in its place."""

import dataclasses
from typing import Any

from ats_jax.config.schema import Config
from ats_jax.metrics.memory import GIB
from ats_jax.planner.describe import describe, planned_bytes


def without_expert_axis(cfg: Config, devices: int, plan: dict[str, Any]) -> dict[str, Any] | None:
  """The plan of the mesh whose `fsdp` takes over from `expert`.

  It exchanges weights, which can be gathered ahead, and no tokens, which cannot.

  Args:
    cfg: the run, resolved or not.
    devices: how many share it; 0 = as few as its mesh needs.
    plan: what `describe` says of it.

  Returns:
    `mesh.fsdp`, `bytes` of a device, `bytes_with` the axis, and `prefer` (it takes no more memory,
    so that it fits wherever the other does); None if the mesh has no expert axis.
  """
  mesh = cfg.mesh
  if mesh.expert == 1:
    return None
  fsdp = mesh.fsdp * mesh.expert
  # It divides what this mesh divides.
  folded = dataclasses.replace(cfg, mesh=dataclasses.replace(mesh, fsdp=fsdp, expert=1))
  without, with_axis = planned_bytes(describe(folded, devices)), planned_bytes(plan)
  prefer = without <= with_axis
  return {"mesh.fsdp": fsdp, "bytes": without, "bytes_with": with_axis, "prefer": prefer}


def render_expert_axis(found: dict[str, Any]) -> list[str]:
  """Render the result of `without_expert_axis` as text."""
  sizes = f"mesh.fsdp={found['mesh.fsdp']}, mesh.expert=1"
  gap = (found["bytes"] - found["bytes_with"]) / GIB
  size = f"{found['bytes'] / GIB:,.3f} GiB a device"
  if found["prefer"]:
    return [
      f"experts fit without an expert axis: prefer {sizes}.",
      f"  {size}, {-gap:,.3f} less than this mesh, and no tokens are exchanged",
    ]
  return [
    f"without an expert axis: {sizes} takes {size}, {gap:,.3f} more than this mesh.",
    "  Prefer it if that fits: no tokens are exchanged",
  ]
