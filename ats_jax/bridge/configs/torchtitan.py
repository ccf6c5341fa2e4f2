"""torchtitan: its TOML of before 2026, and its Python configs, whose names differ a little."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ats_jax.bridge.configs.foreign import Found, flat
from ats_jax.bridge.configs.registry import read_function

_TOML, _REGISTRY = "torchtitan TOML", "torchtitan config registry"
_SECTIONS = {"job", "model", "optimizer", "lr_scheduler", "training", "parallelism"}


@dataclasses.dataclass(frozen=True)
class Flavor:
  """Dimensions that torchtitan keeps in its code, under a name."""

  d_model: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  d_ff: int
  vocab_size: int
  rope_theta: float
  norm_eps: float
  head_dim: int = 0
  tie_embeddings: bool = False
  qk_norm: bool = False


def _llama(*dims: int, vocab_size: int = 128_256, tied: bool = False) -> Flavor:
  d_model, layers, heads, kv_heads, d_ff = dims
  return Flavor(d_model, layers, heads, kv_heads, d_ff, vocab_size, 5e5, 1e-5, tie_embeddings=tied)


def _qwen(*dims: int, vocab_size: int = 151_936, tied: bool = False) -> Flavor:
  d_model, layers, heads, kv_heads, d_ff = dims
  return Flavor(
    d_model, layers, heads, kv_heads, d_ff, vocab_size, 1e6, 1e-6, 128, tied, qk_norm=True
  )


FLAVORS = {
  ("llama3", "debugmodel"): _llama(256, 6, 16, 16, 768, vocab_size=2048),
  ("llama3", "1B"): _llama(2048, 16, 32, 8, 8192, tied=True),
  ("llama3", "3B"): _llama(3072, 28, 24, 8, 8192, tied=True),
  ("llama3", "8B"): _llama(4096, 32, 32, 8, 14_336),
  ("llama3", "70B"): _llama(8192, 80, 64, 8, 28_672),
  ("llama3", "405B"): _llama(16_384, 126, 128, 8, 53_248),
  ("qwen3", "debugmodel"): _qwen(256, 8, 16, 8, 3072, vocab_size=2048, tied=True),
  ("qwen3", "0.6B"): _qwen(1024, 28, 16, 8, 3072, tied=True),
  ("qwen3", "1.7B"): _qwen(2048, 28, 16, 8, 6144, tied=True),
  ("qwen3", "4B"): _qwen(2560, 36, 32, 8, 9728, tied=True),
  ("qwen3", "8B"): _qwen(4096, 36, 32, 8, 12_288),
  ("qwen3", "14B"): _qwen(5120, 40, 40, 8, 17_408),
  ("qwen3", "32B"): _qwen(5120, 64, 64, 8, 25_600),
}

# The frequencies of every llama3 there.
_LLAMA3_ROPE = {
  "model.rope_scaling": "llama3", "model.rope_factor": 8.0, "model.rope_original_len": 8192,
  "model.rope_slow_turns": 1.0, "model.rope_fast_turns": 4.0,
}  # fmt: skip

# Names that the Python configs gave a new place.
_RENAMED = {
  "model_spec.0": "model.flavor",
  "model_spec.flavor": "model.flavor",
  "hf_assets_path": "model.hf_assets_path",
  "training.max_context_length": "training.seq_len",
  "checkpointer": "checkpoint",
  "validator": "validation",
}
# Calls whose name says something beside their fields.
_MEANT = {"activation_checkpoint", "optimizer", "loss", "loss.loss_fn", "model_spec"}


def is_toml(values: Mapping[str, Any]) -> bool:
  """Whether a TOML file has torchtitan's sections."""
  return len(_SECTIONS & values.keys()) >= 2


def read_toml(values: Mapping[str, Any]) -> Found:
  """Read torchtitan's TOML.

  Raises:
    ValueError: for a value that is wrong.
  """
  found = Found(_TOML, flat(values))
  return _read(found)


def read_python(text: str, function: str, path: Path) -> Found:
  """Read a function of torchtitan's config_registry.py, which is not run.

  Args:
    text: the file.
    function: its name; may be empty if there is one only.
    path: where the file is; the folder is named after the model.

  Raises:
    ValueError: for a function that cannot be read without running it, or a value that is wrong.
  """
  values = {}
  for name, value in read_function(text, function).items():
    section, dot, rest = name.partition(".")
    name = f"{_RENAMED.get(section, section)}{dot}{rest}"
    values[_RENAMED.get(name, name)] = value
  family = path.resolve().parent.name
  if not any(family == known for known, _ in FLAVORS):
    family = function.partition("_")[0]
  values["model.name"] = family
  found = Found(_REGISTRY, values)
  for name, value in values.items():
    has_fields = any(other.startswith(f"{name}.") for other in values)
    if has_fields and str(value).endswith("()") and name not in _MEANT:
      found.ignore("its fields follow", name)
  found.ignore("its fields follow", "model_spec")
  found.expect("optimizer", "default_adamw()", what="the optimizer here is AdamW")
  losses = ("ChunkedLossWrapper.Config()", "CrossEntropyLoss.Config()")
  for name in ("loss", "loss.loss_fn"):
    found.expect(name, *losses, what="the loss here is cross-entropy of the next token")
  sizes = [name for name in values if ".global_vocab_size" in name and name.startswith("loss.")]
  found.ignore("model.vocab_size says it", *sizes)
  return _read(found)


def _read(found: Found) -> Found:
  """What both forms say."""
  _model(found)
  _optimizer(found)
  _training(found)
  _mesh(found)
  _remat(found)
  _logs(found)
  _checkpoints(found)
  _rest(found)
  return found.finish()


def _model(found: Found) -> None:
  name, flavor = found.get("model.name", "llama3"), found.get("model.flavor", "debugmodel")
  dims = FLAVORS.get((str(name), str(flavor)))
  found.ignore("names the tokenizer; here it is data.tokenizer", "model.hf_assets_path",
               "model.tokenizer_path")  # fmt: skip
  if dims is None:
    why = "dimensions that are not known here. Import the model's config.json for config.model"
    found.lack("model.name", why)
    found.lack("model.flavor", why)
    found.notes.append(f"config.model is the default one, not {name} {flavor}.")
    return
  shape = {f"model.{key}": value for key, value in vars(dims).items()}
  if name == "llama3":
    shape |= _LLAMA3_ROPE
  found.give("model.name", {}, "a decoder that this one can be")
  found.give("model.flavor", shape)
  found.settings["data.bpe_vocab_size"] = dims.vocab_size
  found.notes.append(
    "A BPE is trained on your text; --config.data.tokenizer=FILE names the model's tokenizer.json."
  )
  converters = found.get("model.converters", [])
  if converters == ["float8"]:
    found.give("model.converters", {"precision.fp8": True})
  else:
    found.lack_all("no such change of the model", "model.converters")
  for other in found.values:
    if other.startswith("quantize."):
      if converters:
        found.lack(other, "precision.fp8 has one scale a tensor, and leaves the head as it is")
      else:
        found.ignore("not used: model.converters is empty", other)


def _optimizer(found: Found) -> None:
  found.expect("optimizer.name", "AdamW", what="the optimizer here is AdamW")
  found.take("optimizer.lr", "optimizer.learning_rate", 8e-4, float)
  found.take("optimizer.beta1", "optimizer.b1", 0.9, float)
  found.take("optimizer.beta2", "optimizer.b2", 0.95, float)
  found.take("optimizer.eps", "optimizer.eps", 1e-8, float)
  found.take("optimizer.weight_decay", "optimizer.weight_decay", 0.1, float)
  found.ignore("which kernel computes it", "optimizer.implementation")
  found.lack_all("updates come after the whole backward pass", "optimizer.early_step_in_backward")
  found.notes.append(
    "torchtitan decays norms and embeddings too; here only matrices are decayed "
    "(optimizer.decay_embeddings=true adds the embedding)."
  )
  steps = found.whole("training.steps", 10_000)
  found.take("training.steps", "num_steps", steps)
  shorter = lambda warmup: min(warmup, steps)  # as torchtitan does
  found.take("lr_scheduler.warmup_steps", "optimizer.warmup_steps", 200, shorter)
  found.take("lr_scheduler.min_lr_factor", "optimizer.final_lr_fraction", 0.0, float)
  found.expect("lr_scheduler.total_steps", steps, what="a schedule here is as long as the run")
  decay, shape = (
    found.get("lr_scheduler.decay_ratio"),
    found.get("lr_scheduler.decay_type", "linear"),
  )
  if decay is not None:
    found.give("lr_scheduler.decay_ratio", {"optimizer.schedule": "wsd",
               "optimizer.decay_fraction": decay})  # fmt: skip
    found.expect("lr_scheduler.decay_type", "linear", what="after a stable phase decay is linear")
  elif shape in ("linear", "cosine"):
    found.take("lr_scheduler.decay_type", "optimizer.schedule", "linear")
  else:
    found.lack("lr_scheduler.decay_type", "linear is used")
    found.settings["optimizer.schedule"] = "linear"


def _training(found: Found) -> None:
  length = found.whole("training.seq_len", 2048)
  found.take("training.seq_len", "data.seq_len", length)
  if length < 1:
    raise ValueError(f"{found.kind}: training.seq_len={length} is below 1.")
  found.take("training.max_norm", "optimizer.grad_clip", 1.0, float)
  found.take("training.dtype", "precision.param_dtype", "float32")
  found.take("training.mixed_precision_param", "precision.compute_dtype", "bfloat16")
  found.expect("training.mixed_precision_reduce", "float32", what="sums are in float32")
  found.lack_all("nothing is kept in host memory during a step", "training.enable_cpu_offload")
  found.ignore("of Python's or CUDA's own", "training.gc_freq", "training.gc_debug",
               "training.disable_cuda_graphs")  # fmt: skip
  found.lack_all("no data set has a name here: data.paths names files", "training.dataset")
  if found.get("training.dataset_path"):
    found.take("training.dataset_path", "data.paths")
  if found.kind == _REGISTRY:
    for name in found.values:
      if name.startswith("dataloader."):
        found.lack_all("data.paths names files", name)
  _batch(found, length)


def _batch(found: Found, length: int) -> None:
  ranks, tokens = _ranks(found), "training.num_tokens_per_microbatch_per_dp_rank"
  step_tokens = "training.num_tokens_per_train_step"
  if found.kind == _REGISTRY:
    local = max(1, found.whole(tokens, 16_384) // length)
    total = found.whole(step_tokens, -1) // length
  else:
    local = found.whole("training.local_batch_size", 8)
    total = found.whole("training.global_batch_size", -1)
  if local < 1:
    raise ValueError(f"{found.kind}: training.local_batch_size={local} is below 1.")
  rows = total if total > 0 else local * (ranks or 1)
  batch = {"data.batch_size": rows}
  if ranks and total > 0 and total % (local * ranks) == 0:
    batch["step.accum_steps"] = total // (local * ranks)
  names = ("training.local_batch_size", "training.global_batch_size", tokens, step_tokens)
  for name in (name for name in names if name in found.values):
    found.give(name, batch)
  found.settings |= batch
  there = f"each of {ranks} devices" if ranks else "each device"
  found.notes.append(
    f"data.batch_size={rows} counts all devices. There {there} had {local} rows at a time."
  )


def _ranks(found: Found) -> int:
  """Devices that share a batch; 0 = as many as there are."""
  shards = found.whole("parallelism.data_parallel_shard_degree", -1)
  return max(0, shards) * found.whole("parallelism.data_parallel_replicate_degree", 1)


def _mesh(found: Found) -> None:
  prefix = "parallelism."
  shards = f"{prefix}data_parallel_shard_degree"
  ways, experts = found.whole(shards, -1), found.whole(f"{prefix}expert_parallel_degree", 1)
  if ways > 0:
    found.give(shards, {"mesh.fsdp": max(1, ways // max(1, experts))})
  elif shards in found.values:
    found.give(shards, {}, "all devices that are left: --config.mesh.fsdp=DEVICES")
  for theirs, ours in (
    ("data_parallel_replicate_degree", "mesh.data"),
    ("tensor_parallel_degree", "mesh.tensor"),
    ("expert_parallel_degree", "mesh.expert"),
    ("context_parallel_degree", "mesh.context"),
  ):
    if found.whole(prefix + theirs, 1) > 1:
      found.take(prefix + theirs, ours)
    else:
      found.ignore("off", prefix + theirs)
  found.expect(f"{prefix}pipeline_parallel_degree", 1, what="there is no pipeline")
  cuts = (f"{prefix}pipeline_parallel_", f"{prefix}context_parallel_")
  details = [n for n in found.values if n.startswith(cuts) and not n.endswith("_degree")]
  found.ignore("of a pipeline or a cut of rows, which the line of its degree is about", *details)
  found.ignore("XLA plans communication", f"{prefix}fsdp_reshard_after_forward",
               f"{prefix}disable_loss_parallel", f"{prefix}enable_async_tensor_parallel",
               f"{prefix}spmd_backend", f"{prefix}enable_sequence_parallel")  # fmt: skip


def _logs(found: Found) -> None:
  if "metrics.log_freq" in found.values:
    found.take("metrics.log_freq", "log.every_steps")
  found.lack_all("log.writers names what there is", "metrics.enable_wandb")
  found.ignore("written in any case", "metrics.enable_tensorboard", "metrics.save_tb_folder",
               "metrics.disable_color_printing", "metrics.save_for_all_ranks")  # fmt: skip


def _checkpoints(found: Found) -> None:
  """Checkpoints and validation, which are off unless they are switched on."""
  if found.get("checkpoint.enable"):
    found.ignore("checkpoints are always written", "checkpoint.enable")
    found.take("checkpoint.interval", "checkpoint.every_steps", 500)
    found.take("checkpoint.keep_latest_k", "checkpoint.keep", 10, lambda keep: max(1, keep))
    found.take("checkpoint.async_mode", "checkpoint.asynchronous", "disabled",
               lambda mode: mode != "disabled")  # fmt: skip
    found.lack_all("weights of another run: --init_from", "checkpoint.initial_load_path")
    found.lack_all("a checkpoint holds the whole state", "checkpoint.last_save_model_only")
  else:
    found.ignore("not used: checkpoint.enable is off. Here they are always written",
                 *(name for name in found.values if name.startswith("checkpoint.")))  # fmt: skip
  if found.get("validation.enable"):
    found.ignore("on", "validation.enable")
    found.take("validation.freq", "eval.every_steps", 10)
    found.take("validation.steps", "eval.num_batches", -1, lambda steps: max(0, steps))
    found.lack_all("no data set has a name here: data.validation_paths", "validation.dataset")
  else:
    found.ignore("not used: validation.enable is off. Here the end of a run is evaluated",
                 *(name for name in found.values if name.startswith("validation.")))  # fmt: skip


def _rest(found: Found) -> None:
  if found.get("debug.seed") is not None:
    found.take("debug.seed", "seed")
  if "debug.deterministic" in found.values:
    found.take("debug.deterministic", "precision.deterministic")
  for name in found.values:
    if name.startswith(("job.", "profiling.", "profiler.", "comm.", "compile.")):
      found.ignore("of torchtitan's own running", name)


def _remat(found: Found) -> None:
  name = "activation_checkpoint"
  modes = {"none": "none", "full": "full", "selective": "dots"}
  calls = {"FullAC.Config()": "full", "SelectiveAC.Config()": "dots"}
  key = name if name in found.values else f"{name}.mode"
  mode = found.get(key, "selective")
  remat = (modes | calls).get(str(mode))
  if remat is None:
    found.lack(key, "step.remat is none, full, dots or names")
    return
  found.take(key, "step.remat", mode, lambda _: remat)
  reason = "off" if remat == "none" else "'dots' keeps the outputs of matmuls, 'full' none"
  found.ignore(reason, f"{name}.selective_ac_option")
