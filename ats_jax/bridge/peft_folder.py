"""Adapters from and to folders of the library peft: adapter_config.json beside a safetensors file.

The modules have the names and the orientation of the family in a Hugging Face folder, where each
expert is a module of its own.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.bridge.family import EXPERT, Family, Item, WeightRow, match_weights
from ats_jax.bridge.folder import read_json
from ats_jax.bridge.safetensors_file import Slot, Tensor, Writer, read_header
from ats_jax.bridge.transforms import Same, Transposed
from ats_jax.checkpoint import layout, stream, workdir
from ats_jax.config.schema import Config
from ats_jax.config.schema.finetune import LoRA
from ats_jax.model.adapters import merged
from ats_jax.model.layout import stacks
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
# Of an embedding that is the head too: the head's adapter is that of the embedding transposed.
TIED = {"a": HEAD + SUFFIXES["b"], "b": HEAD + SUFFIXES["a"]}
# What may stand in a folder and changes what its adapters compute, with the value that is ours.
FIXED: Mapping[str, Any] = {
  "peft_type": "LORA",
  "bias": "none",
  "lora_bias": False,
  "fan_in_fan_out": False,
  "modules_to_save": None,
  "rank_pattern": {},
  "alpha_pattern": {},
  "layers_to_transform": None,
  "trainable_token_indices": None,
  "target_parameters": None,
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
    return row.theirs.endswith(".gate.weight")  # as models of experts have it that peft knows
  return isinstance(row.transform, Same if item.ours in ("embed", "head") else Transposed)


def _tied(cfg: Config, factors: list[Factor]) -> dict[str, Factor]:
  """The tensors of a head that is the embedding, and of what each is the transpose."""
  if not cfg.model.tie_embeddings:
    return {}
  return {TIED[factor.kind]: factor for factor in factors if factor.item.ours == "embed"}


def write(folder: Path, cfg: Config, family: Family, model: Any, *, base: str) -> int:
  """Write the adapters of a model; the number of tensors.

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
  parts = layout.named_arrays(model, stacks=stacks(cfg))
  factors = list(_factors(family, cfg, model, parts, adapter.rank))
  unfinished = folder.with_name(folder.name + ".unfinished")
  unfinished.mkdir(parents=True, exist_ok=True)
  tied, wide = _tied(cfg, factors), np.dtype(np.float32)
  slots = [Slot(name, wide, f.their_shape) for f in factors for name in f.theirs]
  slots += [Slot(name, wide, f.their_shape[::-1]) for name, f in tied.items()]
  with Writer(unfinished / WEIGHTS, slots) as writer:
    for factor in factors:
      array = _host(leaves, parts[factor.name])
      for name, part in zip(factor.theirs, factor.to_theirs(array), strict=True):
        writer.write(name, part)
    for name, factor in tied.items():
      (part,) = factor.to_theirs(_host(leaves, parts[factor.name]))
      writer.write(name, np.ascontiguousarray(part.T))
  modules = {module for factor in factors for module in factor.modules}
  if not (cfg.finetune.layers or adapter.targets):  # then a last part means nothing else
    modules = {name.rpartition(".")[2] for name in modules}
  fields = _config(adapter, factors) | {"target_modules": sorted(modules)}
  fields |= {"base_model_name_or_path": base} | ({"ensure_weight_tying": True} if tied else {})
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
    "task_type": "CAUSAL_LM",
    "r": adapter.rank,
    "lora_alpha": adapter.alpha if rs else adapter.factor * adapter.rank,
    "use_rslora": rs,
    "use_dora": adapter.name == "dora",
    "lora_dropout": 0.0,
    "inference_mode": True,
  }


def read(folder: Path, cfg: Config, family: Family, model: Any) -> Any:
  """The model with the adapters of a folder in place of its own.

  Args:
    folder: as peft writes one.
    cfg: the resolved config of the run.
    family: of the base, fitted to the settings.
    model: the model, with adapters as the settings say.

  Raises:
    ValueError: if they are others than the settings say.
  """
  adapter = cfg.finetune.adapter
  if not isinstance(adapter, LoRA):
    raise ValueError(f"{folder} holds adapters, and finetune.adapter.name=none. Use lora or dora.")
  _check_config(folder, adapter)
  tensors = read_header(folder / WEIGHTS)
  bases = {name: tensors.pop(name) for name in [*tensors] if name.endswith(BASE)}
  leaves, structure = jax.tree.flatten(model)
  parts = layout.named_arrays(model, stacks=stacks(cfg))
  factors = list(_factors(family, cfg, model, parts, adapter.rank))
  wanted = {name: f.their_shape for f in factors for name in f.theirs}
  tied = _tied(cfg, factors)
  if tied and not read_json(folder / CONFIG).get("ensure_weight_tying"):
    raise ValueError(
      f"{folder / CONFIG}: its adapter of the embedding is not that of the head, and this model "
      "has one table for both (model.tie_embeddings). Train it with ensure_weight_tying=true."
    )
  wanted |= {name: f.their_shape[::-1] for name, f in tied.items()}
  there = {name: tensor.shape for name, tensor in tensors.items()}
  if different := sorted(n for n in wanted.keys() | there.keys() if wanted.get(n) != there.get(n)):
    name = different[0]
    of = lambda shapes: str(list(shapes[name])) if name in shapes else "not there"
    raise ValueError(
      f"{folder}: {len(different)} tensors are not those of this run's adapters: {name} is "
      f"{of(there)} in the folder, {of(wanted)} here. Set finetune.adapter.targets and "
      "finetune.layers as it was trained, and begin with the model that it belongs to."
    )
  for name, factor in tied.items():
    if not np.array_equal(tensors[name].read().T, tensors[factor.theirs[0]].read()):
      raise ValueError(
        f"{folder / WEIGHTS}: {name} is not the transpose of {factor.theirs[0]}, and this model "
        "has one table for embedding and head (model.tie_embeddings)."
      )
  _check_bases(folder, bases, factors, leaves, parts)
  filled: list[Any] = list(leaves)
  for number in {parts[factor.name].number for factor in factors}:
    filled[number] = None
  targets = layout.named_arrays(
    jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model),
    stacks=stacks(cfg),
  )
  for factor in factors:
    array = factor.to_ours([tensors[name].read() for name in factor.theirs])
    target = targets[factor.name].target(factor.name)
    array = array.astype(target.dtype)
    put = jax.make_array_from_callback(array.shape, target.sharding, lambda i, a=array: a[i])
    stream.put(filled, targets, {factor.name: put})
  return structure.unflatten(jax.tree.map(jnp.asarray, filled))


def _check_bases(
  folder: Path,
  bases: Mapping[str, Tensor],
  factors: list[Factor],
  leaves: list[Any],
  parts: Mapping[str, layout.StoredArray],
) -> None:
  """Refuse the adapters of tables that are others than those of the model."""
  for factor in factors:
    for name in (f"{PREFIX}{module}{BASE}" for module in factor.modules):
      if (tensor := bases.get(name)) is None:
        continue
      ours = leaves[parts[factor.name.rpartition("/adapter/")[0] + "/weight"].number]
      theirs = tensor.read().astype(ours.dtype)
      put = lambda i, of=theirs: of[i]
      if theirs.shape != ours.shape or not jnp.array_equal(
        ours, jax.make_array_from_callback(ours.shape, ours.sharding, put)
      ):
        raise ValueError(
          f"{folder / WEIGHTS}: {name} {list(tensor.shape)} is not the table of this model "
          f"{list(ours.shape)}. Begin with the model that the adapters belong to."
        )


def _check_config(folder: Path, adapter: LoRA) -> None:
  theirs = read_json(folder / CONFIG)
  for key, value in FIXED.items():
    if (theirs.get(key) or None) != (value or None):
      raise ValueError(
        f"{folder / CONFIG}: {key} is {theirs.get(key)!r}, and this program has only {value!r}."
      )
  rank, alpha = theirs["r"], float(theirs["lora_alpha"])
  factor = alpha / (math.sqrt(rank) if theirs.get("use_rslora") else rank)
  kind = "dora" if theirs.get("use_dora") else "lora"
  has = (adapter.name, adapter.rank, adapter.factor)
  if (kind, rank) != has[:2] or not math.isclose(factor, adapter.factor, rel_tol=1e-6):
    scale = "rslora" if theirs.get("use_rslora") else "lora"
    raise ValueError(
      f"{folder / CONFIG} and this run have adapters of another kind. Its settings are "
      f"--config.finetune.adapter={kind} --config.finetune.adapter.rank={rank} "
      f"--config.finetune.adapter.alpha={alpha:g} --config.finetune.adapter.scale={scale}."
    )
