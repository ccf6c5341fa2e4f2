"""Adapters from and to folders of the library peft: adapter_config.json beside a safetensors file.

The modules have the names and the orientation of the family in a Hugging Face folder, where each
expert is a module of its own.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.bridge.family import (
  EXPERT,
  Family,
  Item,
  WeightRow,
  match_weights,
  to_ours,
  to_theirs,
)
from ats_jax.bridge.folder import read_json
from ats_jax.bridge.safetensors_file import Slot, Tensor, Writer, read_header
from ats_jax.bridge.transforms import Same, Transposed
from ats_jax.checkpoint import layout, stream, workdir
from ats_jax.config.schema import Config
from ats_jax.config.schema.finetune import DoRA, FinetuneConfig, LoRA
from ats_jax.model.adapters import fine_tuned, merged
from ats_jax.model.layout import stacks
from ats_jax.model.param import Param, Role, is_variable
from ats_jax.store import paths

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
SUFFIXES = {
  "a": ".lora_A.weight",
  "b": ".lora_B.weight",
  "lengths": ".lora_magnitude_vector",
}
OF_EMBEDDING = SUFFIXES | {"a": ".lora_embedding_A", "b": ".lora_embedding_B"}
BASE = ".base_layer.weight"  # of a table beside whose adapter peft saves it too
HEAD = f"{PREFIX}lm_head"
ROUTER = ".mlp.router.weight"  # no module of a matrix: peft adapts the parameter
# Of an embedding that is the head too: the head's adapter is that of the embedding transposed.
TIED = {"a": HEAD + SUFFIXES["b"], "b": HEAD + SUFFIXES["a"]}
# What may stand in a folder and changes what its adapters compute, with the value that is ours.
FIXED: Mapping[str, Any] = {
  "peft_type": "LORA",
  "bias": "none",
  "lora_bias": False,
  "fan_in_fan_out": False,
  "rank_pattern": {},
  "alpha_pattern": {},
  "layers_to_transform": None,
  "trainable_token_indices": None,
}


class Factor(NamedTuple):
  """One of our arrays of an adapter, in one layer.

  Attributes:
    name: of our array, by layer.
    kind: a key of `SUFFIXES`.
    rank: of the adapter.
    shape: of our array.
    item: the weight that it stands beside.
  """

  name: str
  kind: str
  rank: int
  shape: tuple[int, ...]
  item: Item

  @property
  def is_of_experts(self) -> bool:
    """Whether theirs are one for each expert."""
    return isinstance(self.item.row, WeightRow) and EXPERT in self.item.row.theirs

  @property
  def modules(self) -> list[str]:
    """Names of their modules."""
    return [name.removesuffix(".weight") for name in self.item.theirs]

  @property
  def theirs(self) -> list[str]:
    """Names of their tensors."""
    suffix = (OF_EMBEDDING if self.item.ours == "embed" else SUFFIXES)[self.kind]
    return [f"{PREFIX}{module}{suffix}" for module in self.modules]

  def to_theirs(self, ours: np.ndarray) -> list[np.ndarray]:
    """Their tensors: of the matrices transposes, one for each expert."""
    parts = ours if self.is_of_experts else ours[None]
    if self.kind == "lengths":
      return [part.reshape(-1) for part in parts]
    rows = -1 if self.kind == "a" else self.rank
    return [np.ascontiguousarray(part.reshape(rows, self._columns).T) for part in parts]

  def to_ours(self, theirs: list[np.ndarray]) -> np.ndarray:
    """Our array of their tensors."""
    if self.kind == "lengths":
      return theirs[0].reshape(self.shape)
    return np.stack([part.T for part in theirs]).reshape(self.shape)

  @property
  def their_shape(self) -> tuple[int, ...]:
    """Shape of each of their tensors."""
    size = math.prod(self.shape[int(self.is_of_experts) :])
    if self.kind == "lengths":
      return (size,)
    other = size // self.rank
    return (self.rank, other) if self.kind == "a" else (other, self.rank)

  @property
  def _columns(self) -> int:
    return self.their_shape[0]


def _factors(
  family: Family, cfg: Config, model: Any, parts: Mapping[str, layout.StoredArray], rank: int
) -> Iterator[Factor]:
  """All arrays of adapters of a model's named arrays.

  Raises:
    ValueError: for a weight that is no module of its own in the family.
  """
  # Of weights, that may be stored in another shape.
  whole = layout.named_arrays(jax.eval_shape(merged, model), stacks=stacks(cfg))
  for name, part in parts.items():
    weight, found, kind = name.rpartition("/adapter/")
    if not found:
      continue
    weight = weight if weight in whole else f"{weight}/weight"
    (item,) = match_weights(family, {weight: whole[weight].shape})
    if item.theirs[0].endswith(ROUTER) and cfg.finetune.adapter.name == "dora":
      raise ValueError(
        f"{weight} is no module in a {family.name} model, and peft has no DoRA of a parameter. "
        "Export the merged model."
      )
    if not _is_module(item):
      raise ValueError(
        f"{weight} is no matrix of its own in a {family.name} model, so peft has no name for its "
        "adapter. Export the merged model."
      )
    yield Factor(name, kind, rank, part.shape, item)


def _is_module(item: Item) -> bool:
  """Whether peft adapts a weight as a module of its own."""
  row = item.row
  if not isinstance(row, WeightRow):
    return False
  if "router" in item.ours.split("/"):
    return row.theirs.endswith((".gate.weight", ROUTER))  # as models have it that peft knows
  return isinstance(row.transform, Same if item.ours in ("embed", "head") else Transposed)


def _saved(family: Family, model: Any, parts: Mapping[str, layout.StoredArray]) -> list[Item]:
  """The weights that train themselves, which peft saves whole (`modules_to_save`).

  Raises:
    ValueError: for one that is not the weight of a module in the family.
  """
  is_own = lambda v: isinstance(v, Param) and v.role not in (Role.ADAPTER, Role.ADAPTER_OUT)
  own = jax.tree.map(lambda v: jax.tree.map(lambda _: is_own(v), v), model, is_leaf=is_variable)
  trains = jax.tree.leaves(own)
  shapes = {
    name: part.shape
    for name, part in parts.items()
    if trains[part.number] and "/adapter/" not in name
  }
  items = match_weights(family, shapes)
  for item in items:
    row = item.row
    tensor = row.theirs if isinstance(row, WeightRow) else ""
    is_tied = item.ours == "embed" and model.head is None
    if not tensor.endswith(".weight") or EXPERT in tensor or is_tied:
      raise ValueError(
        f"{item.ours} trains itself (finetune.adapter.train), and is no module of its own in a "
        f"{family.name} model that peft could save. Export the merged model."
      )
  return items


def _of(family: Family, model: Any) -> Family:
  """The family with the head of the model."""
  return family if model.predicts else family.rating()


def _tied(model: Any, factors: list[Factor]) -> dict[str, Factor]:
  """The tensors of a head that is the embedding, and of what each is the transpose."""
  if model.head is not None:
    return {}
  return {TIED[factor.kind]: factor for factor in factors if factor.item.ours == "embed"}


def write(folder: Path, cfg: Config, family: Family, model: Any, *, base: str) -> int:
  """Write the adapters of a model, and what trains beside them; the number of tensors.

  Args:
    folder: it appears when it is complete.
    cfg: the resolved config of the run.
    family: of the base, fitted to the settings.
    model: the model, with its adapters.
    base: folder or name of the base, for who loads it.
  """
  adapter = cfg.finetune.adapter
  assert isinstance(adapter, LoRA)
  if folder.exists():
    raise ValueError(f"{folder} exists. Remove it or choose another folder.")
  leaves = jax.tree.leaves(model)
  parts, family = layout.named_arrays(model, stacks=stacks(cfg)), _of(family, model)
  factors = list(_factors(family, cfg, model, parts, adapter.rank))
  saved = _saved(family, model, parts)
  unfinished = folder.with_name(folder.name + ".unfinished")
  unfinished.mkdir(parents=True, exist_ok=True)
  tied, wide = _tied(model, factors), np.dtype(np.float32)
  slots = [Slot(name, wide, f.their_shape) for f in factors for name in f.theirs]
  slots += [Slot(name, wide, f.their_shape[::-1]) for name, f in tied.items()]
  slots += [Slot(PREFIX + item.theirs[0], wide, item.their_shape) for item in saved]
  with Writer(unfinished / WEIGHTS, slots) as writer:
    for factor in factors:
      array = _host(leaves, parts[factor.name])
      for name, part in zip(factor.theirs, factor.to_theirs(array), strict=True):
        writer.write(name, part)
    for name, factor in tied.items():
      (part,) = factor.to_theirs(_host(leaves, parts[factor.name]))
      writer.write(name, np.ascontiguousarray(part.T))
    for item in saved:
      for name, array in to_theirs([item], lambda item: _host(leaves, parts[item.ours])):
        writer.write(PREFIX + name, np.ascontiguousarray(array))
  modules = {module for factor in factors for module in factor.modules}
  parameters = sorted({n for f in factors for n in f.item.theirs if n.endswith(ROUTER)})
  modules -= {name.removesuffix(".weight") for name in parameters}
  if not (cfg.finetune.layers or adapter.targets):  # then a last part means nothing else
    modules = {name.rpartition(".")[2] for name in modules}
  fields = _config(adapter, factors) | {"target_modules": sorted(modules)}
  fields |= {"base_model_name_or_path": base} | ({"ensure_weight_tying": True} if tied else {})
  fields["target_parameters"] = parameters or None
  fields["task_type"] = "CAUSAL_LM" if model.predicts else "SEQ_CLS"
  fields["modules_to_save"] = [item.theirs[0].removesuffix(".weight") for item in saved] or None
  workdir.write_json(paths.parse(unfinished / CONFIG), fields)
  unfinished.rename(folder)
  return len(slots)


def _host(leaves: list[Any], part: layout.StoredArray) -> np.ndarray:
  leaf = leaves[part.number]
  return np.asarray(leaf if part.layer is None else leaf[part.layer], np.float32)


def _config(adapter: LoRA, factors: list[Factor]) -> dict[str, Any]:
  """The adapter_config.json.

  peft joins the adapters of an expert's two first matrices to one of twice the rank, and doubles
  alpha, which is wrong for `use_rslora`: there alpha says the same factor without it.
  """
  experts = any(factor.is_of_experts for factor in factors)
  rs = adapter.scale == "rslora" and not experts
  return {
    **FIXED,
    "r": adapter.rank,
    "lora_alpha": adapter.alpha if rs else adapter.factor * adapter.rank,
    "use_rslora": rs,
    "use_dora": adapter.name == "dora",
    "lora_dropout": 0.0,
    "inference_mode": True,
  }


def read(folder: Path, cfg: Config, family: Family, model: Any, *, partly: bool = False) -> Any:
  """The model with the adapters of a folder in place of its own.

  Args:
    folder: as peft writes one.
    cfg: the resolved config of the run.
    family: of the base, fitted to the settings.
    model: the model, with adapters as the settings say.
    partly: those that the folder has not stay as they are.

  Raises:
    ValueError: if they are others than the settings say.
  """
  adapter = cfg.finetune.adapter
  if not isinstance(adapter, LoRA):
    raise ValueError(f"{folder} holds adapters, and finetune.adapter.name=none. Use lora or dora.")
  _check_config(folder, adapter)
  found = _found(folder, cfg, family, model, partly=partly)
  leaves, structure = jax.tree.flatten(model)
  for name, factor in found.tied.items():
    if not np.array_equal(found.tensors[name].read().T, found.tensors[factor.theirs[0]].read()):
      raise ValueError(
        f"{folder / WEIGHTS}: {name} is not the transpose of {factor.theirs[0]}, and this model "
        "has one table for embedding and head (model.tie_embeddings)."
      )
  _check_bases(folder, found, leaves)
  filled: list[Any] = list(leaves)
  names = [*(factor.name for factor in found.factors), *(item.ours for item in found.saved)]
  for number in {found.parts[name].number for name in names}:
    filled[number] = None
  targets = layout.named_arrays(
    jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model),
    stacks=stacks(cfg),
  )
  for factor in found.factors:
    tensors, names = found.tensors, factor.theirs
    given = [tensors[name].read() for name in names if name in tensors]
    if len(given) < len(names):
      first = factor.to_theirs(_host(leaves, found.parts[factor.name]))
      given = [
        tensors[name].read() if name in tensors else old
        for name, old in zip(names, first, strict=True)
      ]
    array = factor.to_ours(given)
    target = targets[factor.name].target(factor.name)
    array = array.astype(target.dtype)
    put = jax.make_array_from_callback(array.shape, target.sharding, lambda i, a=array: a[i])
    stream.put(filled, targets, {factor.name: put})
  for item in found.saved:
    target = targets[item.ours].target(item.ours)
    of = lambda name: found.tensors[PREFIX + name].read()
    array = to_ours(item, of, np.dtype(target.dtype))
    put = jax.make_array_from_callback(array.shape, target.sharding, lambda i, a=array: a[i])
    stream.put(filled, targets, {item.ours: put})
  return structure.unflatten(jax.tree.map(jnp.asarray, filled))


def config_with(folder: Path, cfg: Config, family: Family, model: Any) -> Config:
  """The config of a base with the adapters of a folder on it; no tensor is read.

  Args:
    folder: as peft writes one.
    cfg: the resolved config of the base.
    family: of the base, fitted to the settings.
    model: the base, which may be abstract.

  Raises:
    ValueError: if they are not for this base.
  """
  arrays = layout.named_arrays(model, stacks=stacks(cfg))
  items = match_weights(family, {name: part.shape for name, part in arrays.items()})
  targets = {
    name.removesuffix(".weight"): _target(item)
    for item in items
    if _is_module(item)
    for name in item.theirs
  }
  if cfg.model.tie_embeddings:
    targets[HEAD.removeprefix(PREFIX)] = targets["model.embed_tokens"]
  adapter, found = _stated(folder), dict[str, int]()
  if whole := read_json(folder / CONFIG).get("modules_to_save"):
    raise ValueError(
      f"{folder / CONFIG}: modules_to_save is {whole!r}, whole weights in place of those of the "
      "base. Begin a run with them (--init_adapter), or merge them with peft and import the result."
    )
  for name in read_header(folder / WEIGHTS):
    ends = [end for end in (*SUFFIXES.values(), *OF_EMBEDDING.values()) if name.endswith(end)]
    module = name.removeprefix(PREFIX).removesuffix(ends[0] if ends else BASE)
    if module not in targets:
      raise ValueError(
        f"{folder / WEIGHTS}: {name} belongs to no matrix of this {family.name} model that can "
        "have an adapter. Name the base that the adapters were trained with."
      )
    found[module] = found.get(module, 0) + bool(ends)
  number = 3 if adapter.name == "dora" else 2
  if incomplete := sorted(module for module, count in found.items() if count != number):
    raise ValueError(
      f"{folder / WEIGHTS}: {incomplete[0]} has {found[incomplete[0]]} tensors of an adapter, "
      f"expected {number}."
    )
  if not found:
    raise ValueError(f"{folder / WEIGHTS} holds no adapters.")
  of_these = tuple(sorted({targets[module] for module in found}))
  adapter = dataclasses.replace(adapter, targets=of_these)
  cfg = dataclasses.replace(cfg, finetune=FinetuneConfig(adapter=adapter))
  _found(folder, cfg, family, jax.eval_shape(lambda m: _tuned(cfg, m), model), partly=True)
  return cfg


def merged_with(folder: Path, cfg: Config, family: Family, model: Any) -> Any:
  """A base with the adapters of a folder merged into it, for the programs of the base.

  It shares the arrays that have no adapter.

  Args:
    folder: as peft writes one.
    cfg: the result of `config_with`.
    family: of the base, fitted to the settings.
    model: the base.

  Raises:
    ValueError: as `read`.
  """
  whole = merged(read(folder, cfg, family, _tuned(cfg, model), partly=True))
  return jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(whole))


def _tuned(cfg: Config, model: Any) -> Any:
  return fine_tuned(cfg, model, jax.random.key(0))  # their first values are not used


def _target(item: Item) -> str:
  """What `finetune.adapter.targets` calls a weight."""
  if item.ours in ("embed", "head"):
    return {"embed": "embedding"}.get(item.ours, item.ours)
  is_of_experts = isinstance(item.row, WeightRow) and EXPERT in item.row.theirs
  return "experts" if is_of_experts else item.ours.removesuffix("/weight").rpartition("/")[2]


class _Found(NamedTuple):
  """What a folder has for a model.

  Attributes:
    tensors: of adapters, by name.
    bases: those of tables beside whose adapters they are.
    parts: arrays of the model, by name.
    factors: those of adapters.
    tied: as `_tied` tells.
    saved: as `_saved` tells.
  """

  tensors: dict[str, Tensor]
  bases: dict[str, Tensor]
  parts: Mapping[str, layout.StoredArray]
  factors: list[Factor]
  tied: dict[str, Factor]
  saved: list[Item]


def _found(folder: Path, cfg: Config, family: Family, model: Any, *, partly: bool) -> _Found:
  """What there is in a folder for a model with adapters, whose arrays may be abstract.

  Raises:
    ValueError: if it is not for this model.
  """
  adapter = cfg.finetune.adapter
  assert isinstance(adapter, LoRA)
  tensors = read_header(folder / WEIGHTS)
  bases = {name: tensors.pop(name) for name in [*tensors] if name.endswith(BASE)}
  parts, family = layout.named_arrays(model, stacks=stacks(cfg)), _of(family, model)
  factors = list(_factors(family, cfg, model, parts, adapter.rank))
  saved = _saved(family, model, parts)
  wanted = {name: f.their_shape for f in factors for name in f.theirs}
  tied = _tied(model, factors)
  if tied and not read_json(folder / CONFIG).get("ensure_weight_tying"):
    raise ValueError(
      f"{folder / CONFIG}: its adapter of the embedding is not that of the head, and this model "
      "has one table for both (model.tie_embeddings). Train it with ensure_weight_tying=true."
    )
  wanted |= {name: f.their_shape[::-1] for name, f in tied.items()}
  wanted |= {PREFIX + item.theirs[0]: item.their_shape for item in saved}
  there = {name: tensor.shape for name, tensor in tensors.items()}
  names = there.keys() if partly else wanted.keys() | there.keys()
  if different := sorted(n for n in names if wanted.get(n) != there.get(n)):
    name = different[0]
    of = lambda shapes: str(list(shapes[name])) if name in shapes else "not there"
    settings = "Set finetune.adapter.targets and finetune.layers as it was trained, and begin with"
    raise ValueError(
      f"{folder}: {len(different)} tensors are not those of this run's adapters: {name} is "
      f"{of(there)} in the folder, {of(wanted)} here. {'Name' if partly else settings} the model "
      "that it belongs to."
    )
  return _Found(tensors, bases, parts, factors, tied, saved)


def _check_bases(folder: Path, found: _Found, leaves: list[Any]) -> None:
  """Refuse the adapters of tables that are others than those of the model."""
  for factor in found.factors:
    for name in (f"{PREFIX}{module}{BASE}" for module in factor.modules):
      if (tensor := found.bases.get(name)) is None:
        continue
      ours = leaves[found.parts[factor.name.rpartition("/adapter/")[0] + "/weight"].number]
      theirs = tensor.read().astype(ours.dtype)
      put = lambda i, of=theirs: of[i]
      if theirs.shape != ours.shape or not jnp.array_equal(
        ours, jax.make_array_from_callback(ours.shape, ours.sharding, put)
      ):
        raise ValueError(
          f"{folder / WEIGHTS}: {name} {list(tensor.shape)} is not the table of this model "
          f"{list(ours.shape)}. Begin with the model that the adapters belong to."
        )


def _stated(folder: Path) -> LoRA:
  """What the adapters of a folder are, without what has them.

  Raises:
    ValueError: for some that this program has not.
  """
  if not (folder / CONFIG).exists():
    raise ValueError(
      f"{folder} holds no {CONFIG}. Name a folder as peft saves adapters, or as `ats-jax bridge "
      "export --format=peft` writes those of a run."
    )
  theirs = read_json(folder / CONFIG)
  for key, value in FIXED.items():
    if (theirs.get(key) or None) != (value or None):
      raise ValueError(
        f"{folder / CONFIG}: {key} is {theirs.get(key)!r}, and this program has only {value!r}."
      )
  parameters = theirs.get("target_parameters") or []
  if others := [name for name in parameters if not name.endswith(ROUTER)]:
    raise ValueError(
      f"{folder / CONFIG}: target_parameters has {others[0]!r}, and this program has only those of "
      f"routers ({ROUTER})."
    )
  rank, alpha = theirs.get("r"), theirs.get("lora_alpha")
  if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)):
    raise ValueError(
      f"{folder / CONFIG}: r is {rank!r} and lora_alpha {alpha!r}, and both must be numbers."
    )
  scale = "rslora" if theirs.get("use_rslora") else "lora"
  return (DoRA if theirs.get("use_dora") else LoRA)(rank=rank, alpha=float(alpha), scale=scale)


def _check_config(folder: Path, adapter: LoRA) -> None:
  theirs = _stated(folder)
  is_same = (theirs.name, theirs.rank) == (adapter.name, adapter.rank)
  if not is_same or not math.isclose(theirs.factor, adapter.factor, rel_tol=1e-6):
    raise ValueError(
      f"{folder / CONFIG} and this run have adapters of another kind. Its settings are "
      f"--config.finetune.adapter={theirs.name} --config.finetune.adapter.rank={theirs.rank} "
      f"--config.finetune.adapter.alpha={theirs.alpha:g} "
      f"--config.finetune.adapter.scale={theirs.scale}."
    )
