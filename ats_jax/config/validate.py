"""The rules: ranges of single fields, then one function for each rule that joins several."""

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from ats_jax import extensions
from ats_jax.config.context import context
from ats_jax.config.curriculum import curriculum
from ats_jax.config.names import default_of, flatten, settings, unmet
from ats_jax.config.replicas import replicas
from ats_jax.config.schema import Config
from ats_jax.config.schema.setting import Checked, Kinds, Table, elements
from ats_jax.config.streaming import streaming
from ats_jax.store import paths

EIGHT_BIT_MULTIPLE = 16  # of the sizes of a matmul in 8 bits: what cuBLASLt takes


def validate(cfg: Config) -> Config:
  """Return `cfg` unchanged if every rule holds.

  Raises:
    ValueError: naming the setting, its value, what was expected and what to change.
  """
  _ranges(cfg, "", extensible=_has_unloaded(cfg))
  of_model = (_heads, context, replicas, _gathered, _latents, _windows)
  of_data = (_batch, _tokenizer, streaming)
  rules = (*of_model, *of_data, curriculum, _local_folders, _length, _writers, _eight_bits)
  # Where num_steps follows from the data, `count_epochs` checks these rules once that is known.
  of_num_steps = () if cfg.counts_epochs else (_warmup, _orchestrator)
  _effects(cfg)
  for rule in (*rules, *of_num_steps):
    rule(cfg)
  for section in _sections(cfg):
    if isinstance(section, Checked):
      section.check(cfg)
  if cfg.moe.num_experts:
    _experts(cfg)
  if cfg.mod.routing != "none":
    _depth(cfg)
  return cfg


def _sections(section: Any) -> Iterator[Any]:
  for field in dataclasses.fields(section):
    for inner in elements(getattr(section, field.name)):
      if dataclasses.is_dataclass(inner):
        yield inner
        yield from _sections(inner)


def _effects(cfg: Config) -> None:
  """Refuse a setting that cannot have an effect: one whose condition does not hold."""
  flat, fields = flatten(cfg), settings(cfg)
  for name, field in fields.items():
    default = default_of(name, field)
    if flat[name] != default and (needs := unmet(name, fields, flat)):
      value = flat[needs.setting] or repr(flat[needs.setting])  # '' shows that it is empty
      raise ValueError(
        f"{name}={flat[name]} does nothing with {needs.setting}={value}: it needs {needs.words}. "
        f"Set that, or leave {name} at {default!r}."
      )


def _gathered(cfg: Config) -> None:
  mesh = cfg.mesh
  whole = mesh.fsdp * mesh.expert * mesh.context == 1
  idle = {"fsdp": whole, "stage": mesh.stage > 1}
  asked = [name for name in ("keep_gathered", "copy_engines") if getattr(mesh, name)]
  if asked and any(idle.values()):
    name = next(name for name, is_idle in idle.items() if is_idle)
    raise ValueError(
      f"mesh.{asked[0]}=true does nothing with mesh.{name}={getattr(mesh, name)}: it is for "
      f"weights that are sharded and that no pipeline gathers. Set mesh.{asked[0]}=false."
    )


def _has_unloaded(cfg: Config) -> bool:
  """Whether a name that nobody knows may be one of an extension that has not been loaded."""
  return not extensions.are_loaded(cfg.extensions)


def _ranges(section: Any, path: str, *, extensible: bool) -> None:
  for field in dataclasses.fields(section):
    value, name, meta = getattr(section, field.name), path + field.name, field.metadata
    for place, one in _places(value):
      if dataclasses.is_dataclass(one):
        kind = getattr(one, Kinds.TAG, "") if place else ""
        _ranges(one, f"{name}{place}{kind and f' ({kind})'}.", extensible=extensible)
      else:
        _range(one, name + place, meta, extensible=extensible)


def _places(value: Any) -> Iterator[tuple[str, Any]]:
  """The elements of a list or a table, each with its place in brackets; or the one value."""
  if isinstance(value, Table):
    yield from ((f"[{key!r}]", one) for key, one in value.items())
  elif isinstance(value, tuple):
    yield from ((f"[{number}]", one) for number, one in enumerate(value))
  else:
    yield "", value


def _range(value: Any, name: str, meta: Mapping[str, Any], *, extensible: bool) -> None:
  choices = meta["choices"]
  if isinstance(choices, extensions.Registry | Kinds):
    if value not in choices and not extensible:
      raise ValueError(choices.unknown(value))
  elif choices and value not in choices:
    raise ValueError(f"{name}={value!r} is unknown. Choose one of: {', '.join(choices)}.")
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


def _divides(cfg: Config, divisor: str, whole: str, advice: str) -> None:
  """Refuse two settings, by dotted name, of which the first does not divide the second."""
  ways, size = operator.attrgetter(divisor, whole)(cfg)
  if size % ways:
    raise ValueError(f"{divisor}={ways} does not divide {whole}={size}. {advice}")


def _at_most(cfg: Config, name: str, limit: str, advice: str) -> None:
  """Refuse a setting that is larger than another one."""
  value, most = operator.attrgetter(name, limit)(cfg)
  if value > most:
    raise ValueError(f"{name}={value} exceeds {limit}={most}{advice}")


def _heads(cfg: Config) -> None:
  m = cfg.model
  advice = "Each key/value head serves the same number of query heads; use a divisor."
  _divides(cfg, "model.num_kv_heads", "model.num_heads", advice)
  if not m.head_dim:
    advice = "Change one of them, or set model.head_dim."
    _divides(cfg, "model.num_heads", "model.d_model", advice)
  if not m.kv_latent_dim and (head_dim := m.head_dim or m.d_model // m.num_heads) % 2:
    raise ValueError(
      f"the head dimension is {head_dim}: RoPE needs pairs. Make model.head_dim even."
    )
  for name in ("model.num_heads", "model.num_kv_heads"):
    _divides(cfg, "mesh.tensor", name, "Heads are sharded over 'tensor'.")
  if cfg.mesh.data != -1 and cfg.mesh.data < 1:
    raise ValueError(
      f"mesh.data={cfg.mesh.data}: use a positive number, or -1 for all that is left."
    )


def _latents(cfg: Config) -> None:
  m = cfg.model
  if not m.kv_latent_dim:
    return
  head_dim = m.head_dim or m.d_model // m.num_heads
  if not 0 < m.latent_rope_dim < head_dim or m.latent_rope_dim % 2:
    raise ValueError(
      f"model.latent_rope_dim={m.latent_rope_dim} of a head dimension of {head_dim}: an even "
      "number is rotated, and not all."
    )
  if m.num_kv_heads != m.num_heads:
    raise ValueError(
      f"model.num_kv_heads={m.num_kv_heads} with model.kv_latent_dim={m.kv_latent_dim}: each of "
      f"model.num_heads={m.num_heads} has its own keys there. Set both alike."
    )
  for name in ("qkv_bias", "attn_out_bias", "attn_sinks", "qk_norm", "attn_soft_cap", "window"):
    if getattr(m, name):
      raise ValueError(
        f"model.{name}={getattr(m, name)} with model.kv_latent_dim={m.kv_latent_dim}: latent "
        "attention has none. Set one of them to nothing."
      )


def _windows(cfg: Config) -> None:
  m = cfg.model
  if m.full_every == 1:
    raise ValueError("model.full_every=1 leaves no layer with a window. Set model.window=0.")
  if m.window_rope_theta and m.window_rope_theta < 1.0:
    raise ValueError(f"model.window_rope_theta={m.window_rope_theta} is below 1. Use 0 or 1e4.")
  if m.window and cfg.mod.routing != "none":
    raise ValueError(
      f"model.window={m.window} with mod.routing={cfg.mod.routing}: in a layer that skips tokens a "
      "window would count others. Set one of them to none."
    )
  if m.qk_norm_scope == "all" and cfg.mesh.tensor > 1:
    raise ValueError(
      f"model.qk_norm_scope=all takes all heads together; mesh.tensor={cfg.mesh.tensor} splits "
      "them. Use mesh.tensor=1."
    )


def _batch(cfg: Config) -> None:
  advice = "A micro-batch is a whole number of rows; change one of them."
  _divides(cfg, "step.accum_steps", "data.batch_size", advice)


def _length(cfg: Config) -> None:
  if cfg.length != "given" and cfg.num_epochs:
    most = " and most_epochs" if cfg.length == "budget" else ""
    raise ValueError(
      f"num_epochs={cfg.num_epochs} and length={cfg.length} both say when to end. Use num_epochs=0"
      f"{most}, or length=given."
    )
  if cfg.length != "budget":
    return
  _at_most(cfg, "least_epochs", "most_epochs", ". Raise most_epochs or lower least_epochs.")
  if not cfg.most_epochs:
    raise ValueError("most_epochs=0 trains nothing: use a positive number of passes, e.g. 4.")


def _warmup(cfg: Config) -> None:
  advice = (
    ". Shorten the warm-up, train longer, or use optimizer.warmup_fraction, a share of the run, "
    "with warmup_steps=0."
  )
  _at_most(cfg, "optimizer.warmup_steps", "num_steps", advice)


def _writers(cfg: Config) -> None:
  for name in cfg.log.writers:
    if name not in extensions.writers and not _has_unloaded(cfg):
      raise ValueError(extensions.writers.unknown(name))


def _tokenizer(cfg: Config) -> None:
  name = cfg.data.tokenizer
  if name not in ("bytes", "bpe") and not paths.parse(name).is_file():
    raise ValueError(
      f"data.tokenizer={name!r} is neither 'bytes', 'bpe' nor an existing file: a "
      "tokenizer.json, a .model of SentencePiece or a .tiktoken file."
    )


def _local_folders(cfg: Config) -> None:
  for name, value in (
    ("compilation_cache", cfg.compilation_cache),
    ("data.cache_dir", cfg.data.cache_dir),
    ("checkpoint.local_dir", cfg.checkpoint.local_dir),
  ):
    if paths.is_remote(value):
      raise ValueError(f"{name}={value!r} is on a store. It must be local; a workdir need not be.")
  if cfg.checkpoint.local_every and not cfg.checkpoint.local_dir:
    raise ValueError(
      f"checkpoint.local_every={cfg.checkpoint.local_every} needs a folder for its snapshots. Set "
      "checkpoint.local_dir, or checkpoint.local_every=0."
    )


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
  ways = cfg.mesh.context * (tensor if cfg.mesh.shard_residuals else 1)
  widths = {
    "model.d_model": model.d_model,
    "model.num_heads x head_dim": model.num_heads * head_dim // tensor,
    "model.num_kv_heads x head_dim": model.num_kv_heads * head_dim // tensor,
    "model.kv_latent_dim": model.kv_latent_dim,
    "model.kv_latent_dim + latent_rope_dim": model.kv_latent_dim + model.latent_rope_dim,
    "model.q_latent_dim": model.q_latent_dim,
    "model.num_heads x v_head_dim": model.num_heads * model.v_head_dim // tensor,
    "model.num_heads x latent_rope_dim": model.num_heads * model.latent_rope_dim // tensor,
    "model.d_ff": model.d_ff // tensor,
    "data.seq_len": cfg.data.seq_len // ways,
  }
  for name, width in widths.items():
    if width % EIGHT_BIT_MULTIPLE:
      raise ValueError(
        f"precision.fp8 needs multiples of {EIGHT_BIT_MULTIPLE}: {name} is {width} on a device. "
        "Change it, or set precision.fp8=false."
      )


def _orchestrator(cfg: Config) -> None:
  o = cfg.orchestrator
  if o.mode == "off":
    return
  advice = ": nobody would ever look. Use a tenth of the run or less, or orchestrator.mode=off."
  _at_most(cfg, "orchestrator.check_interval", "num_steps", advice)
  if o.mode == "act" and o.snapshot_gb == 0.0 and cfg.checkpoint.every_steps >= cfg.num_steps:
    raise ValueError(
      f"orchestrator.snapshot_gb=0 and checkpoint.every_steps={cfg.checkpoint.every_steps} of "
      f"num_steps={cfg.num_steps} leave nothing to roll back to. Allow snapshots, save more often, "
      "or use orchestrator.mode=observe."
    )


def _experts(cfg: Config) -> None:
  moe, layers = cfg.moe, cfg.model.num_layers
  advice = ". A token goes to each expert at most once; lower top_k or add experts."
  _at_most(cfg, "moe.top_k", "moe.num_experts", advice)
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
  _groups(cfg)
  if moe.null_experts and moe.dispatch == "capacity":
    raise ValueError(
      f"moe.null_experts={moe.null_experts} needs moe.dispatch=dropless: in capacity mode every "
      "expert computes all its places, so that nothing is saved. Set moe.null_experts=0, or "
      "moe.dispatch=dropless."
    )


def _groups(cfg: Config) -> None:
  moe = cfg.moe
  if moe.num_groups == 1:
    return
  for name in ("moe.num_experts", "moe.spare_experts"):
    _divides(cfg, "moe.num_groups", name, "Groups are of one size; change one of them.")
  _at_most(cfg, "moe.top_groups", "moe.num_groups", ". Lower top_groups.")
  if moe.top_k > (reach := moe.top_groups * moe.num_experts // moe.num_groups):
    raise ValueError(
      f"moe.top_k={moe.top_k} exceeds the {reach} experts of moe.top_groups={moe.top_groups} "
      "groups. Raise top_groups or lower top_k."
    )
  if moe.null_experts:
    raise ValueError(
      f"moe.null_experts={moe.null_experts} belong to no group: use them with moe.num_groups=1."
    )


def _depth(cfg: Config) -> None:
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
