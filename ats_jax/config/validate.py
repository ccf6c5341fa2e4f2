"""The rules: ranges of single fields, then one function for each rule that joins several."""

import dataclasses
import math
from typing import Any

from ats_jax import paths
from ats_jax.config.schema import Config
from ats_jax.config.validate_sparse import check_mod, check_moe

EIGHT_BIT_MULTIPLE = 16  # of the sizes of a matmul in 8 bits: what cuBLASLt takes


def validate(cfg: Config) -> Config:
  """Return `cfg` unchanged if every rule holds.

  Raises:
    ValueError: naming the setting, its value, what was expected and what to change.
  """
  _ranges(cfg, "")
  rules = (_heads, _batch, _adam, _writers, _tokenizer, _local_folders, _eight_bits)
  # With num_epochs, num_steps is known when the data is: `count_epochs` checks these rules then.
  of_num_steps = () if cfg.num_epochs else (_warmup, _orchestrator)
  for rule in (*rules, *of_num_steps):
    rule(cfg)
  if cfg.moe.num_experts:
    check_moe(cfg)
  if cfg.mod.routing != "none":
    check_mod(cfg)
  return cfg


def _ranges(section: Any, path: str) -> None:
  for field in dataclasses.fields(section):
    value, name, meta = getattr(section, field.name), path + field.name, field.metadata
    if dataclasses.is_dataclass(value):
      _ranges(value, f"{name}.")
      continue
    if meta["choices"] and value not in meta["choices"]:
      raise ValueError(f"{name}={value!r} is unknown. Choose one of: {', '.join(meta['choices'])}.")
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(f"{name}={value} is not a finite number ({meta['doc']}).")
    if meta["low"] is not None and value < meta["low"]:
      least = format_bound(meta["low"])
      raise ValueError(f"{name}={value} is too small: at least {least} ({meta['doc']}).")
    if meta["high"] is not None and value > meta["high"]:
      most = format_bound(meta["high"])
      raise ValueError(f"{name}={value} is too large: at most {most} ({meta['doc']}).")


def format_bound(bound: float) -> str:
  """An end of a range in words: whole numbers with all their digits."""
  return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _heads(cfg: Config) -> None:
  m = cfg.model
  if m.num_heads % m.num_kv_heads:
    raise ValueError(
      f"model.num_kv_heads={m.num_kv_heads} does not divide model.num_heads={m.num_heads}. "
      "Each key/value head serves the same number of query heads; use a divisor."
    )
  if not m.head_dim and m.d_model % m.num_heads:
    raise ValueError(
      f"model.num_heads={m.num_heads} does not divide model.d_model={m.d_model}. "
      "Change one of them, or set model.head_dim."
    )
  if (head_dim := m.head_dim or m.d_model // m.num_heads) % 2:
    raise ValueError(
      f"the head dimension is {head_dim}: RoPE needs pairs. Make model.head_dim even."
    )
  for name in ("num_heads", "num_kv_heads"):
    if getattr(m, name) % cfg.mesh.tensor:
      raise ValueError(
        f"mesh.tensor={cfg.mesh.tensor} does not divide model.{name}={getattr(m, name)}. "
        "Heads are sharded over 'tensor'."
      )
  if cfg.mesh.data != -1 and cfg.mesh.data < 1:
    raise ValueError(
      f"mesh.data={cfg.mesh.data}: use a positive number, or -1 for all that is left."
    )


def _batch(cfg: Config) -> None:
  if cfg.data.batch_size % cfg.step.accum_steps:
    raise ValueError(
      f"step.accum_steps={cfg.step.accum_steps} does not divide data.batch_size="
      f"{cfg.data.batch_size} (rows per update). Change one of them."
    )


def _warmup(cfg: Config) -> None:
  o = cfg.optimizer
  if o.warmup_steps and o.warmup_fraction:
    raise ValueError(
      f"optimizer.warmup_steps={o.warmup_steps} and optimizer.warmup_fraction="
      f"{o.warmup_fraction} are both set. Set one of them to 0."
    )
  if o.warmup_steps > cfg.num_steps:
    raise ValueError(
      f"optimizer.warmup_steps={o.warmup_steps} exceeds num_steps={cfg.num_steps}. "
      "Shorten the warm-up or train longer."
    )


def _adam(cfg: Config) -> None:
  o = cfg.optimizer
  for name in ("b1", "b2"):
    if getattr(o, name) == 1.0:
      raise ValueError(f"optimizer.{name}=1 never takes a gradient in. Use less than 1.")
  if o.eps == 0.0:
    raise ValueError(
      "optimizer.eps=0 divides 0 by 0 where a gradient is 0, as for tokens not seen yet. "
      "Use a small positive number, e.g. 1e-8."
    )


def _writers(cfg: Config) -> None:
  known = {"console", "jsonl", "csv", "tensorboard", "clu"}
  for name in filter(None, (w.strip() for w in cfg.log.writers.split(","))):
    if name not in known:
      raise ValueError(
        f"log.writers: unknown writer {name!r}. Choose from {', '.join(sorted(known))}."
      )


def _tokenizer(cfg: Config) -> None:
  name = cfg.data.tokenizer
  if name not in ("bytes", "bpe") and not paths.parse(name).is_file():
    raise ValueError(
      f"data.tokenizer={name!r} is neither 'bytes', 'bpe' nor an existing tokenizer.json file."
    )


def _local_folders(cfg: Config) -> None:
  for name, value in (
    ("compilation_cache", cfg.compilation_cache),
    ("data.cache_dir", cfg.data.cache_dir),
    ("data.paths", cfg.data.paths),
  ):
    if paths.is_remote(value):
      raise ValueError(f"{name}={value!r} is on a store. It must be local; a workdir need not be.")


def _eight_bits(cfg: Config) -> None:
  precision, model, tensor = cfg.precision, cfg.model, cfg.mesh.tensor
  if not precision.fp8:
    return
  kept = precision.fp8_keep_first + precision.fp8_keep_last
  if kept >= model.num_layers:
    raise ValueError(
      f"precision.fp8_keep_first={precision.fp8_keep_first} and fp8_keep_last="
      f"{precision.fp8_keep_last} leave none of {model.num_layers} layers for 8 bits. "
      "Lower them, or set precision.fp8=false."
    )
  head_dim = model.head_dim or model.d_model // model.num_heads
  widths = {
    "model.d_model": model.d_model,
    "model.num_heads x head_dim": model.num_heads * head_dim // tensor,
    "model.num_kv_heads x head_dim": model.num_kv_heads * head_dim // tensor,
    "model.d_ff": model.d_ff // tensor,
    "data.seq_len": cfg.data.seq_len,
  }
  for name, width in widths.items():
    if width % EIGHT_BIT_MULTIPLE:
      raise ValueError(
        f"precision.fp8 needs multiples of {EIGHT_BIT_MULTIPLE}: {name} is {width} on a device. "
        "Change it, or set precision.fp8=false."
      )


def _orchestrator(cfg: Config) -> None:
  o = cfg.orchestrator
  if o.raise_learning_rate and o.mode != "act":
    raise ValueError(
      f"orchestrator.raise_learning_rate=true, but orchestrator.mode={o.mode} changes nothing. Use "
      "orchestrator.mode=act."
    )
  if o.mode == "off":
    return
  if o.check_interval > cfg.num_steps:
    raise ValueError(
      f"orchestrator.check_interval={o.check_interval} exceeds num_steps={cfg.num_steps}: nobody "
      "would ever look. Use a tenth of the run or less, or orchestrator.mode=off."
    )
  if o.branch_steps and o.mode != "act":
    raise ValueError(
      f"orchestrator.branch_steps={o.branch_steps} with orchestrator.mode={o.mode}: what is tried "
      "ahead is done if it wins. Use mode=act, or branch_steps=0."
    )
  if o.mode == "act" and o.snapshot_gb == 0.0 and cfg.checkpoint.every_steps >= cfg.num_steps:
    raise ValueError(
      f"orchestrator.snapshot_gb=0 and checkpoint.every_steps={cfg.checkpoint.every_steps} of "
      f"num_steps={cfg.num_steps} leave nothing to roll back to. Allow snapshots, save more often, "
      "or use orchestrator.mode=observe."
    )
