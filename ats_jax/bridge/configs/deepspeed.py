"""A DeepSpeed JSON: batch, optimizer, schedule, precision and ZeRO. It knows no model."""

from collections.abc import Mapping
from typing import Any

from ats_jax.bridge.configs.foreign import Found, flat

_SIGNS = {
  "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
  "zero_optimization", "gradient_clipping",
}  # fmt: skip
_ADAMS = ("Adam", "AdamW", "FusedAdam")
_COMMUNICATION = (
  "contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size",
  "allgather_partitions", "allgather_bucket_size", "round_robin_gradients", "sub_group_size",
  "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
  "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
)  # fmt: skip


def is_deepspeed(values: Mapping[str, Any]) -> bool:
  """Whether a JSON object is a DeepSpeed config."""
  return bool(_SIGNS & values.keys())


def read(values: Mapping[str, Any]) -> Found:
  """Read a DeepSpeed JSON.

  Raises:
    ValueError: for a value that is wrong.
  """
  everything = flat(values)
  found = Found("DeepSpeed", {k: v for k, v in everything.items() if v != "auto"})
  _batch(found)
  _optimizer(found)
  _schedule(found)
  _precision(found)
  _zero(found)
  found.take("gradient_clipping", "optimizer.grad_clip", 0.0, float)
  if "steps_per_print" in found.values:
    found.take("steps_per_print", "log.every_steps")
  found.ignore("this program times its steps anyway", "wall_clock_breakdown")
  found.ignore("nothing for training", "zero_allow_untested_optimizer", "dump_state")
  for name in found.values:
    if name.startswith("activation_checkpointing."):
      found.lack(name, "what is computed again is step.remat")
  found.finish()
  for name, value in everything.items():
    if value == "auto":
      found.values[name] = value
      found.lack(name, "'auto' is filled in by the program that starts DeepSpeed")
  found.notes.append("DeepSpeed's file says nothing of the model: set config.model.")
  return found


def _batch(found: Found) -> None:
  """The batch: rows of a device at a time x accumulation x devices; not all need be said."""
  names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
  total, micro, accum = (found.whole(name, 0) for name in names)
  if wrong := [name for name in names if found.get(name, 1) < 1]:
    raise ValueError(f"DeepSpeed: {wrong[0]}={found.get(wrong[0])} is below 1.")
  if accum:
    found.take("gradient_accumulation_steps", "step.accum_steps")
  if total:
    found.take("train_batch_size", "data.batch_size")
    if micro and accum and total % (micro * accum) == 0:
      devices = total // (micro * accum)
      found.give(
        "train_micro_batch_size_per_gpu", {}, f"follows from the rest on {devices} devices"
      )
    elif micro:
      found.give(
        "train_micro_batch_size_per_gpu", {}, "step.accum_steps on so many devices as you have"
      )
      found.notes.append(
        f"A device had {micro} rows at a time: step.accum_steps = {total} / ({micro} x devices)."
      )
  elif micro:
    rows = micro * (accum or 1)
    found.give("train_micro_batch_size_per_gpu", {"data.batch_size": rows}, "of one device")
    found.notes.append(f"data.batch_size counts all devices: {rows} x their number.")


def _optimizer(found: Found) -> None:
  if not any(name.startswith("optimizer.") for name in found.values):
    return
  found.expect("optimizer.type", *_ADAMS, what="the optimizer here is AdamW")
  found.take("optimizer.params.lr", "optimizer.learning_rate", 1e-3, float)
  betas = found.get("optimizer.params.betas", [0.9, 0.999])
  if not isinstance(betas, list) or len(betas) != 2:
    raise ValueError(f"DeepSpeed: optimizer.params.betas={betas!r} is no pair of numbers.")
  both = {"optimizer.b1": betas[0], "optimizer.b2": betas[1]}
  if "optimizer.params.betas" in found.values:
    found.give("optimizer.params.betas", both)
  else:
    found.take("optimizer.params.betas", "optimizer.b1", 0.9)
    found.take("optimizer.params.betas", "optimizer.b2", 0.999)
  found.take("optimizer.params.eps", "optimizer.eps", 1e-8, float)
  found.take("optimizer.params.weight_decay", "optimizer.weight_decay", 0.0, float)
  found.expect("optimizer.params.adam_w_mode", True, what="decay is decoupled here")
  found.expect("optimizer.params.amsgrad", False, what="there is no AMSGrad")
  found.expect("optimizer.params.bias_correction", True, what="moments are corrected here")
  found.ignore("which kernel computes it", "optimizer.params.torch_adam")


def _schedule(found: Found) -> None:
  kind, params = str(found.get("scheduler.type", "")), "scheduler.params."
  if not kind:
    return
  shapes = {
    "WarmupLR": ("constant", 1.0),
    "WarmupDecayLR": ("linear", 0.0),
    "WarmupCosineLR": ("cosine", 1e-4),
    "OneCycle": ("one_cycle", 0.1),
  }
  if kind not in shapes:
    found.lack("scheduler.type", f"schedules here that are alike: {', '.join(shapes)}")
    return
  shape, final = shapes[kind]
  found.give("scheduler.type", {"optimizer.schedule": shape})
  if kind == "OneCycle":
    found.take(f"{params}cycle_max_lr", "optimizer.learning_rate", 1e-3, float)
    return
  if kind == "WarmupCosineLR":
    found.take(f"{params}cos_min_ratio", "optimizer.final_lr_fraction", final, float)
  else:
    found.settings["optimizer.final_lr_fraction"] = final
    if f"{params}warmup_max_lr" in found.values:
      found.take(f"{params}warmup_max_lr", "optimizer.learning_rate", convert=float)
  found.take(f"{params}warmup_num_steps", "optimizer.warmup_steps", 1000, int)
  if f"{params}total_num_steps" in found.values:
    found.take(f"{params}total_num_steps", "num_steps", convert=int)
  found.lack_all(
    "warm-up begins at lr / warmup_steps", f"{params}warmup_min_lr", f"{params}warmup_min_ratio"
  )
  if found.get(f"{params}warmup_type", "log") != "linear" and kind != "WarmupCosineLR":
    found.values.setdefault(f"{params}warmup_type", "log")
  found.expect(f"{params}warmup_type", "linear", what="warm-up is linear here")


def _precision(found: Found) -> None:
  bf16 = "bf16" if "bf16.enabled" in found.values else "bfloat16"
  if found.get(f"{bf16}.enabled"):
    found.give(f"{bf16}.enabled", {"precision.compute_dtype": "bfloat16"}, "weights are float32")
  elif found.get("fp16.enabled"):
    found.lack("fp16.enabled", "bfloat16 is used, which needs no loss scale")
    found.settings["precision.compute_dtype"] = "bfloat16"
  else:
    found.take(f"{bf16}.enabled", "precision.compute_dtype", False, lambda _: "float32")
  for name in found.values:
    if name.startswith("fp16.") and name != "fp16.enabled":
      found.ignore("of the loss scale, which bfloat16 does not need", name)
  if not found.get("fp16.enabled"):
    found.ignore("not used", "fp16.enabled")


def _zero(found: Found) -> None:
  stage = found.whole("zero_optimization.stage", 0)
  if "zero_optimization.stage" in found.values:
    shards = "weights, gradients and moments are cut over the axis fsdp: --config.mesh.fsdp=DEVICES"
    found.give("zero_optimization.stage", {}, shards if stage else "mesh.fsdp stays 1")
  if stage in (1, 2):
    found.notes.append(
      f"ZeRO stage {stage} keeps weights whole on each device; fsdp cuts them too."
    )
  found.ignore("XLA plans communication", *(f"zero_optimization.{name}" for name in _COMMUNICATION))
  for name in found.values:
    if name.startswith(("zero_optimization.offload", "aio.")):
      found.lack(name, "nothing is kept in host memory or on a disk during a step")
