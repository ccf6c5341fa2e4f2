"""What a step takes at least, from measured rates of devices and links."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.model.param import trainable
from ats_jax.planner.abstract import device_bytes
from ats_jax.planner.hardware import Hardware
from ats_jax.sharding.apply import mesh_axes
from ats_jax.sharding.pipeline import bubble, num_stages
from ats_jax.step.state import TrainState


def step_seconds(
  cfg: Config, state: TrainState, flops_per_token: float, hardware: Hardware
) -> dict[str, Any]:
  """Seconds of the parts of a step that the rates tell, on each device.

  Weights that are sharded along fsdp are gathered in the compute dtype, for the forward and the
  backward pass of each micro-batch, and their gradients scattered. Other gradients are summed over
  the axes of the batch. Matmuls take as long as the stages of a pipeline need with its bubble. What
  `stage`, `tensor` and `expert` exchange of activations is left out, and so is what `step.remat`
  and the stages compute twice.

  Args:
    cfg: the resolved run.
    state: its (abstract) state on the current (abstract) mesh.
    flops_per_token: of training.
    hardware: the rates.

  Returns:
    `parts`, seconds by name, None where nothing was measured; `least`, if all communication were
    hidden, and `most`, if none were (of these parts); `left_out`, mesh axes whose exchange is not
    counted.

  Raises:
    ValueError: if the rate of a matmul in the compute dtype was not measured.
  """
  mesh = jax.sharding.get_abstract_mesh()
  dtype = cfg.precision.compute_dtype
  if dtype not in hardware.matmul_flops:
    known = ", ".join(hardware.matmul_flops)
    raise ValueError(
      f"precision.compute_dtype={dtype}: matmuls were measured in {known} only. Measure anew: "
      "`ats-jax check_env --measure`."
    )
  tokens = cfg.data.batch_size * cfg.data.seq_len / mesh.size
  busy = 1.0 - bubble(cfg.step.accum_steps, num_stages())
  parameters, micro = jax.tree.leaves(trainable(state.model)), cfg.step.accum_steps
  compute = jnp.dtype(dtype).itemsize
  batch_axes = set(mesh_axes("rows"))
  gathered = scattered = 0
  summed: dict[int, int] = {}  # bytes by how many devices sum them
  for leaf in parameters:
    axes, size = _axes(leaf), math.prod(leaf.sharding.shard_shape(leaf.shape))
    if "fsdp" in axes:
      whole = size * mesh.shape["fsdp"]
      gathered += whole * compute
      scattered += whole * leaf.dtype.itemsize
    ways = math.prod(mesh.shape[axis] for axis in batch_axes - axes)
    summed[ways] = summed.get(ways, 0) + size * leaf.dtype.itemsize
  fsdp = mesh.shape["fsdp"]
  weights = hardware.seconds("all_gather", gathered, fsdp)
  gradients = hardware.seconds("reduce_scatter", scattered, fsdp)
  sums = [hardware.seconds("all_reduce", size, ways) for ways, size in summed.items()]
  parts = {
    "matmuls": flops_per_token * tokens / hardware.matmul_flops[dtype] / busy,
    "update": 2 * device_bytes(state) / hardware.memory_bytes_per_sec,
    "weights gathered": weights if weights is None else 2 * micro * weights,
    "gradients scattered": gradients if gradients is None else micro * gradients,
    "gradients summed": None if None in sums else micro * sum(filter(None, sums)),
  }
  computing = parts["matmuls"] + parts["update"]
  talking = [parts[name] or 0.0 for name in parts if name not in ("matmuls", "update")]
  return {
    "device_kind": hardware.device_kind,
    "measured_devices": hardware.devices,
    "parts": parts,
    "least": max(computing, sum(talking)),
    "most": computing + sum(talking),
    "left_out": [axis for axis in ("stage", "expert", "tensor") if mesh.shape[axis] > 1],
  }


def _axes(leaf: jax.ShapeDtypeStruct) -> set[str]:
  """Mesh axes that shard an array."""
  entries = leaf.sharding.spec  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
  return {a for entry in entries if entry for a in ((entry,) if isinstance(entry, str) else entry)}


def render(seconds: dict[str, Any], tokens: int) -> list[str]:
  """The lines of `step_seconds`; `tokens` are those of a step."""
  show = lambda s: "not measured" if s is None else f"{s * 1e3:,.2f} ms"
  lines = [
    f"a step, from rates measured on {seconds['measured_devices']} x {seconds['device_kind']}"
  ]
  lines += [f"  {name:<24}{show(part):>16}" for name, part in seconds["parts"].items()]
  lines.append(f"  {'at least, all hidden':<24}{show(seconds['least']):>16}")
  lines.append(f"  {'of these, none hidden':<24}{show(seconds['most']):>16}")
  lines.append(f"  at most {tokens / seconds['least']:,.0f} tokens/s on all devices")
  if seconds["left_out"]:
    lines.append(f"  left out: what mesh axes {', '.join(seconds['left_out'])} exchange")
  return lines
