"""All that the planner knows of a run, as plain numbers and as text."""

import dataclasses
from typing import Any

from ats_jax.config.schema import Config
from ats_jax.metrics.memory import GIB
from ats_jax.model.count import count
from ats_jax.model.param import weights_of
from ats_jax.planner.abstract import (
  abstract_mesh,
  abstract_state,
  device_bytes,
  resolve_without_data,
)
from ats_jax.planner.hardware import Hardware
from ats_jax.planner.memory import kv_cache_bytes, peak, state_memory
from ats_jax.planner.seconds import render_seconds as render_seconds
from ats_jax.planner.seconds import step_seconds
from ats_jax.sharding.mesh import on_mesh
from ats_jax.sharding.pipeline import describe_pipeline


def describe(cfg: Config, devices: int = 0, hardware: Hardware | None = None) -> dict[str, Any]:
  """Parameters, FLOPs and memory of a run; nothing is allocated, no device is used.

  Args:
    cfg: the run, resolved or not.
    devices: how many share it; 0 = as few as its mesh needs.
    hardware: measured rates; None = no times.

  Returns:
    Sections of numbers: `run`, `parameters`, `flops_per_token`, `kv_cache_bytes`,
    `device_bytes_exact`, `device_bytes_estimated`, `step_seconds` (None without rates). And
    `peak`, the moment of a step that the estimates are of, in words.

  Raises:
    ValueError: for settings or a mesh that cannot be used.
  """
  cfg = resolve_without_data(cfg)
  mesh = abstract_mesh(cfg, devices)
  with on_mesh(cfg, mesh):
    state = abstract_state(cfg)
    kv_row = kv_cache_bytes(cfg, state.model)
    exact, (moment, estimated) = state_memory(cfg, state), peak(cfg, state)
    flops = flops_per_token(cfg, state.model)
    counts = count(cfg, state.model, cfg.data.seq_len)
    seconds = hardware and step_seconds(cfg, state.model, device_bytes(state), counts, hardware)
  micro = cfg.data.batch_size // cfg.step.accum_steps
  stored = " and ".join(sorted({str(param.dtype) for param in weights_of(state.model)}))
  return {
    "run": {
      "devices": mesh.size,
      "mesh": dict(mesh.shape),
      "rows_per_step": cfg.data.batch_size,
      "rows_per_micro_batch": micro,
      "micro_batches": cfg.step.accum_steps,
      "layers": cfg.model.num_layers,
      "stage_rounds": cfg.mesh.stage_rounds,
      "seq_len": cfg.data.seq_len,
      "remat": cfg.step.remat,
      "compute_dtype": cfg.precision.compute_dtype,
      "formats": {
        "weights": stored,
        **cfg.optimizer.formats(),
        "ema": "float32",
        "unsent gradients": stored,
        "gradients": stored,
        "gradient sums": "float32",
      },
    },
    "parameters": {
      "total": counts.parameters,
      "active": counts.active,
      "parts": {name: part._asdict() for name, part in counts.parts.items()},
    },
    "flops_per_token": flops,
    "kv_cache_bytes": {"row": kv_row, "token": kv_row / cfg.data.seq_len},
    "device_bytes_exact": exact,
    "device_bytes_estimated": estimated,
    "peak": moment,
    "step_seconds": seconds,
  }


def planned_bytes(plan: dict[str, Any]) -> int:
  """All bytes of a device in what `describe` gives."""
  return sum(plan["device_bytes_exact"].values()) + sum(plan["device_bytes_estimated"].values())


def flops_per_token(cfg: Config, model: Any) -> dict[str, float]:
  """FLOPs per token of the resolved `cfg`, and what its sparse layers spare (`model.count`).

  `training_without_...` are in the causal convention: every token to every expert, or through
  every layer.
  """
  here = count(cfg, model, cfg.data.seq_len)
  moe, mod = cfg.moe, cfg.mod
  everyone = dataclasses.replace(moe, top_k=moe.num_experts + moe.null_experts)
  whole_rows = dataclasses.replace(mod, capacity=1.0)
  without = lambda **changes: (
    count(dataclasses.replace(cfg, **changes), model, cfg.data.seq_len).flops_causal
  )
  return {
    "training": here.flops_causal,
    "forward": here.flops_causal / 3,
    "training_6n": here.flops_full,
    "forward_6n": here.flops_full / 3,
    "training_without_top_k": without(moe=everyone),
    "training_without_mod": without(mod=whole_rows),
    "training_without_both": without(moe=everyone, mod=whole_rows),
  }


def render_plan(plan: dict[str, Any]) -> str:
  """The numbers of `describe` as text."""
  run, kv = plan["run"], plan["kv_cache_bytes"]
  stages, rounds = run["mesh"]["stage"], run["stage_rounds"]
  context = run["mesh"]["context"]
  shards = run["devices"] // (run["mesh"]["tensor"] * context * stages)
  rows, positions = run["rows_per_micro_batch"] // shards, run["seq_len"] // context
  lines = [
    f"devices: {run['devices']:,} ({', '.join(f'{a}={n}' for a, n in run['mesh'].items())})",
    f"at a time on each: {rows:,} x {positions:,} tokens",
    *(
      [f"pipeline: {describe_pipeline(run['layers'], run['micro_batches'], stages, rounds)}"]
      * (stages > 1)
    ),
    "",
    *_table("parameters", ("total", "active"), _parameter_rows(plan["parameters"])),
    "",
    *_table("GFLOPs per token", ("training", "forward"), _flop_rows(plan["flops_per_token"])),
    *_savings(plan["flops_per_token"]),
    "",
    f"keys and values of a token: {kv['token']:,.0f} bytes; of a row: {kv['row'] / GIB:,.3f} GiB "
    f"({run['compute_dtype']})",
    "",
    *_table("memory of a device", ("GiB",), _memory_rows(plan)),
    f"Largest moment of a step: {plan['peak']}",
    *_NOTES,
  ]
  if plan["step_seconds"] is not None:
    lines += ["", *render_seconds(plan["step_seconds"], run["rows_per_step"] * run["seq_len"])]
  return "\n".join(lines)


_NOTES = (
  "Estimates, which XLA's choices change, of what is there at that moment:",
  "  activations: what reverse mode keeps of a micro-batch for its backward pass, as traced",
  "  recomputed block: what the layers of one pattern keep without remat",
  "  block's gradients: of all that these layers keep; if frozen, around one matmul",
  "  recomputed stage: what those of one stage keep of a micro-batch, once; it keeps its inputs",
  "  handed on: what comes out of a pipeline, and its gradient",
  "  compute weights: of the head and the layers of one pattern (of all, if unrolled) in the",
  "    compute dtype, gathered",
  "  head's gradient: in float32, gathered, without what the gradients have of it",
  "  logits chunk: tokens of a chunk x vocabulary x (float32 + compute dtype)",
  "  scores chunk: what attention keeps of some queries for its backward pass, without a kernel",
  "  stacks of gradients: of all layers, beside the gradients of each",
  "  gradients to come: those above that are not there yet, so they are taken off",
)


def _table(title: str, columns: tuple[str, ...], rows: dict[str, tuple[str, ...]]) -> list[str]:
  width = max(map(len, [title, *rows])) + 4
  line = lambda name, cells: f"{name:<{width}}" + "".join(f"{cell:>20}" for cell in cells)
  return [line(title, columns), *(line(f"  {name}", cells) for name, cells in rows.items())]


def _parameter_rows(parameters: dict[str, Any]) -> dict[str, tuple[str, ...]]:
  cells = lambda part: (f"{part['total']:,}", f"{part['active']:,.0f}")
  parts = {name: cells(part) for name, part in parameters["parts"].items() if part["total"]}
  return {**parts, "all": cells(parameters)}


def _flop_rows(flops: dict[str, float]) -> dict[str, tuple[str, ...]]:
  cells = lambda *names: tuple(f"{flops[name] / 1e9:,.3f}" for name in names)
  return {
    "causal attention, no input embedding": cells("training", "forward"),
    "6N + 12LdS": cells("training_6n", "forward_6n"),
  }


def _savings(flops: dict[str, float]) -> list[str]:
  dense = {
    "every token to every expert": flops["training_without_top_k"],
    "every token through every layer": flops["training_without_mod"],
  }
  dense = {what: full for what, full in dense.items() if full > flops["training"]}
  if len(dense) == 2:
    dense["both"] = flops["training_without_both"]
  return [
    f"  with {what}, training: {full / 1e9:,.3f}; {1 - flops['training'] / full:.1%} are saved"
    for what, full in dense.items()
  ]


def _memory_rows(plan: dict[str, Any]) -> dict[str, tuple[str, ...]]:
  formats = plan["run"]["formats"]
  exact, estimated = plan["device_bytes_exact"], plan["device_bytes_estimated"]
  cell = lambda size: (f"{size / GIB:,.3f}",)
  rows = {f"{name}, {formats[name]}": cell(n) for name, n in exact.items() if n and name in formats}
  rows["exact"] = cell(sum(exact.values()))
  rows |= {f"{name}, estimate": cell(size) for name, size in estimated.items() if size}
  rows["all"] = cell(sum(exact.values()) + sum(estimated.values()))
  return rows
