"""What a step takes at least, from rates of devices and links."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ats_jax.config.schema import Config
from ats_jax.model.count import Counts
from ats_jax.model.layout import layer_kinds
from ats_jax.model.param import cut_as, shards_of_gradients, trainable
from ats_jax.planner.abstract import device_bytes
from ats_jax.planner.hardware import Hardware
from ats_jax.sharding.apply import mesh_axes, num_shards
from ats_jax.sharding.pipeline import bubble, num_stages
from ats_jax.step.state import TrainState

COUNTED = ("data", "fsdp", "expert", "context", "tensor")  # mesh axes whose exchange is known here


def step_seconds(
  cfg: Config, state: TrainState, counts: Counts, hardware: Hardware
) -> dict[str, Any]:
  """Seconds of the parts of a step that the rates tell, on each device.

  Weights that are sharded along fsdp are gathered in the compute dtype, for the forward and the
  backward pass of each micro-batch, and their gradients scattered; with `mesh.zero` below 3 new
  weights are gathered once an update. Other gradients are summed over the axes of the batch and of
  a row. `context` swaps positions for heads before attention and back, in both passes.
  `tensor` sums activations twice a layer in the forward and twice in the backward pass (Shoeybi et
  al. 2019, arXiv:1909.08053, section 3); with `mesh.shard_residuals` it scatters these sums, and
  gathers positions six times a layer. `expert` sends rows to experts and back in both passes.
  `step.remat=full` computes the layers' forward pass twice, with what it exchanges; what other
  policies compute twice is left out. Matmuls take as long as the stages of a pipeline need with its
  bubble, in which a layer is computed once more.

  Args:
    cfg: the resolved run.
    state: its (abstract) state on the current (abstract) mesh.
    counts: of its model.
    hardware: the rates.

  Returns:
    `parts`, seconds by name, None where nothing was measured; `least`, if all communication of
    weights and gradients were hidden (that of activations is not: the next op waits for it),
    `most`, if none were, and `likely`, between them; `left_out`, mesh axes whose exchange is not
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
  rate, recomputed = hardware.matmul_flops[dtype], 0.0
  busy = 1.0 - bubble(cfg.step.accum_steps, num_stages())
  if cfg.step.remat == "full" or num_stages() > 1:
    recomputed = _stack_flops(cfg, counts) / 3 * tokens / rate / busy
  parts = {
    "matmuls": counts.flops_causal * tokens / rate / busy,
    "recomputed": recomputed,
    "update": 2 * device_bytes(state) / hardware.memory_bytes_per_sec,
    **_weights_and_gradients(cfg, state, hardware),
    **_activations(cfg, hardware),
  }
  total = lambda names: sum(parts[name] or 0.0 for name in names)
  waiting = ("activations summed", "heads swapped", "tokens exchanged")
  own = ("matmuls", "recomputed", "update", *waiting)
  computing, talking = total(own), total(name for name in parts if name not in own)
  least, most = total(waiting) + max(computing - total(waiting), talking), computing + talking
  return {
    "device_kind": hardware.device_kind,
    "measured_devices": hardware.devices,
    "parts": parts,
    "least": least,
    "likely": (least + most) / 2,
    "most": most,
    "left_out": [axis for axis, n in mesh.shape.items() if n > 1 and axis not in COUNTED],
  }


def _stack_flops(cfg: Config, counts: Counts) -> float:
  """Training FLOPs of a token in the layers: all but those of the head."""
  return counts.flops_causal - 6.0 * cfg.model.vocab_size * cfg.model.d_model


def _weights_and_gradients(
  cfg: Config, state: TrainState, hardware: Hardware
) -> dict[str, float | None]:
  """Seconds of what parameters, and gradients of the shape of parameters, cost on the links."""
  mesh, micro = jax.sharding.get_abstract_mesh(), cfg.step.accum_steps
  compute = jnp.dtype(cfg.precision.compute_dtype).itemsize
  token_axes = {*mesh_axes("rows"), *mesh_axes("residual_seq")}
  params: Any = trainable(state.model)
  leaves = [
    jax.tree.leaves(tree)
    for tree in (
      params,
      jax.eval_shape(shards_of_gradients, params),
      jax.eval_shape(lambda p: cut_as("moments", p), params),
    )
  ]
  gathered = new = scattered = 0
  summed: dict[int, int] = {}  # bytes by how many devices sum them
  for weight, grad, moment in zip(*leaves, strict=True):
    size = math.prod(grad.sharding.shard_shape(grad.shape))
    whole = math.prod(weight.sharding.shard_shape(weight.shape))
    if "fsdp" in _axes(weight):
      whole *= mesh.shape["fsdp"]
      gathered += whole * compute
    elif "fsdp" in _axes(moment):
      new += whole * weight.dtype.itemsize
    if "fsdp" in _axes(grad):
      scattered += whole * grad.dtype.itemsize
    ways = math.prod(mesh.shape[axis] for axis in token_axes - _axes(grad))
    summed[ways] = summed.get(ways, 0) + size * grad.dtype.itemsize
  fsdp = mesh.shape["fsdp"]
  sums = [hardware.seconds("all_reduce", size, ways) for ways, size in summed.items()]
  return {
    "weights gathered": _times(2 * micro, hardware.seconds("all_gather", gathered, fsdp)),
    "new weights gathered": hardware.seconds("all_gather", new, fsdp),
    "gradients scattered": _times(micro, hardware.seconds("reduce_scatter", scattered, fsdp)),
    "gradients summed": None if None in sums else micro * sum(filter(None, sums)),
  }


def _activations(cfg: Config, hardware: Hardware) -> dict[str, float | None]:
  """Seconds of what tokens cost on the links."""
  micro, layers = cfg.step.accum_steps, cfg.model.num_layers
  tokens = cfg.data.batch_size // micro // num_shards("batch") * cfg.data.seq_len
  tokens //= num_shards("seq")
  stream = tokens * cfg.model.d_model  # numbers of a micro-batch on a device
  itemsize = jnp.dtype(cfg.precision.compute_dtype).itemsize
  tensor, again = num_shards("ff"), cfg.step.remat == "full"
  # Of the recomputed layer the first sum alone: nothing needs the second. At the head in float32.
  if num_shards("residual_seq") > num_shards("seq"):
    in_layer = {"all_gather": 6 + 2 * again, "reduce_scatter": 4 + again}
    at_head = {"all_gather": itemsize, "reduce_scatter": 4}
  else:
    in_layer, at_head = {"all_reduce": 4 + again}, {"all_reduce": 4}
  sums = [
    *(
      _times(layers * number, hardware.seconds(kind, stream * itemsize, tensor))
      for kind, number in in_layer.items()
    ),
    *(hardware.seconds(kind, stream * n, num_shards("vocab")) for kind, n in at_head.items()),
  ]
  summed = None if None in sums else micro * sum(filter(None, sums))
  ways = num_shards("experts") if cfg.moe.num_experts else 1
  sparse = sum(kind.moe for kind in layer_kinds(cfg))
  local = (cfg.moe.num_experts + cfg.moe.spare_experts) // ways
  room = stream * min(cfg.moe.top_k, local) * ways  # as `model.moe` reserves
  sent = hardware.seconds("all_to_all", room * itemsize, ways)
  swaps = [
    hardware.seconds("all_to_all", tokens * width * itemsize, num_shards("seq"))
    for width in swapped_widths(cfg)
  ]
  passes = 2 if cfg.step.remat == "none" else 3  # no policy keeps what was swapped
  swapped = None if None in swaps else micro * layers * passes * sum(filter(None, swaps))
  return {
    "activations summed": summed,
    "heads swapped": swapped,
    "tokens exchanged": _times(micro * sparse * (4 + 2 * again), sent),
  }


def swapped_widths(cfg: Config) -> tuple[int, ...]:
  """Numbers of a token that a device sends along a row: queries, keys, values, what comes of them.

  Keys and values as often as devices need them (`ops.context_attention`).
  """
  model, ways = cfg.model, num_shards("seq")
  heads, kv_heads = (n // num_shards("heads") for n in (model.num_heads, model.num_kv_heads))
  sent, value = math.lcm(kv_heads, ways), model.v_head_dim or model.head_dim
  return heads * model.head_dim, sent * model.head_dim, sent * value, heads * value


def _times(number: int, seconds: float | None) -> float | None:
  return None if seconds is None else number * seconds


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
  lines.append(f"  {'weights hidden':<24}{show(seconds['least']):>16}")
  lines.append(f"  {'nothing hidden':<24}{show(seconds['most']):>16}")
  lines.append(f"  at most {tokens / seconds['least']:,.0f} tokens/s on all devices")
  if seconds["left_out"]:
    lines.append(f"  left out: what mesh axes {', '.join(seconds['left_out'])} exchange")
  return lines
