"""From a checkpoint into a Hugging Face folder: sharded files, written tensor by tensor."""

import collections
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from ats_jax.bridge.convert import ASIDE, COMPANIONS, DTYPE, ROOT, abstract_parts
from ats_jax.bridge.families import FAMILIES, KNOWN, common, own
from ats_jax.bridge.family import (
  Family,
  Item,
  WeightRow,
  architecture,
  match_weights,
  to_theirs,
  together,
)
from ats_jax.bridge.folder import (
  CONFIG,
  INDEX,
  SINGLE,
  architecture_of,
  copy_companions,
  imported_fields,
  tokenizer_in,
)
from ats_jax.bridge.safetensors_file import DTYPES, Slot, Writer
from ats_jax.bridge.transforms import Shape
from ats_jax.checkpoint import integrity, reader, workdir
from ats_jax.config.build import CHANGES, resolve, with_changes
from ats_jax.config.names import flatten
from ats_jax.config.schema import Config
from ats_jax.data.tokens.export import files_of
from ats_jax.data.tokens.file import load_tokenizer
from ats_jax.store import paths
from ats_jax.store.paths import Path

SHARD_BYTES = 5 * 10**9
PROGRESS = "export.json"
WORDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def choose_family(cfg: Config, name: str = "", imported: str = "") -> Family:
  """The family that says all that a resolved config's model computes.

  Args:
    cfg: the config.
    name: a `model_type`; "" = the first that fits.
    imported: the `model_type` of the model that the run began with, which is tried first.

  Raises:
    ValueError: naming the settings that it, or each of them, has not.
  """
  if name and name not in KNOWN:
    raise ValueError(f"--family={name} is unknown. Choose one of: {', '.join(KNOWN)}.")
  if name == own.MODEL_TYPE:
    return own.FAMILY
  in_order = sorted(FAMILIES.values(), key=lambda family: family.model_type != imported)
  ranked = _ranked(cfg, [FAMILIES[name]] if name else in_order)
  nearest, missing = ranked[0]
  if not missing:
    return nearest
  others = ", ".join(family.model_type for family, _ in ranked[1:])
  raise ValueError(
    f"no family says what this model computes. {nearest.model_type} lacks: {'; '.join(missing)}."
    + (f" Others lack as much or more: {others}." if others else "")
    + f" --family={own.MODEL_TYPE} writes it with its decoder in PyTorch, which transformers loads "
    "with trust_remote_code."
  )


def obstacle(cfg: Config) -> str:
  """What keeps a resolved config's model from a published family once it is trained; "" = nothing.

  Beyond what the settings say: experts that are chosen by a trained bias.
  """
  ranked = _ranked(cfg, FAMILIES.values())
  trains_bias = cfg.moe.num_experts > 0 and cfg.moe.bias_update != "none"
  if any(not missing and (not trains_bias or _has_bias(family)) for family, missing in ranked):
    return ""
  nearest, missing = ranked[0]
  if not trains_bias or _has_bias(nearest):
    return f"{nearest.model_type} is nearest, and lacks {'; '.join(missing)}"
  bias = f"a bias by which experts are chosen, as moe.bias_update={cfg.moe.bias_update} trains it"
  other, others = next(row for row in ranked if _has_bias(row[0]))
  return (
    f"{nearest.model_type} is nearest, and lacks {'; '.join([*missing, bias])} "
    f"(moe.bias_update=none does not). {other.model_type} has one, and lacks {'; '.join(others)}"
  )


def _has_bias(family: Family) -> bool:
  """Whether a family has a tensor of the bias by which experts are chosen."""
  return any(isinstance(r, WeightRow) and r.ours == common.BIAS.ours for r in family.rows)


def _ranked(cfg: Config, families: Iterable[Family]) -> list[tuple[Family, list[str]]]:
  """Families with what each lacks of a model, the nearest first.

  One whose layers are of another kind is further than any that differs by settings.
  """

  def lacks(family: Family) -> tuple[bool, list[str]]:
    try:
      return False, _not_in(family, cfg)
    except ValueError as e:
      return True, [str(e)]

  found = [(family, *lacks(family)) for family in families]
  found.sort(key=lambda row: (row[1], len(row[2])))
  return [(family, missing) for family, _, missing in found]


def _not_in(family: Family, cfg: Config) -> list[str]:
  """Settings that come back other than they were through a family's config.json.

  Raises:
    ValueError: if its layers are of another kind.
  """
  has_experts = any("/router/" in row.ours for row in family.rows)
  if cfg.mod.routing != "none":
    raise ValueError(f"layers that skip tokens (mod.routing={cfg.mod.routing})")
  if has_experts and not cfg.moe.num_experts:
    raise ValueError("layers without experts (moe.num_experts=0)")
  back = family.read(family.write(cfg))
  wanted = architecture(cfg)
  bare = dataclasses.replace(cfg, model=type(cfg.model)(), moe=type(cfg.moe)())
  imported = architecture_of(back, bare)
  return [
    f"{name}={value} (would be {imported.get(name)!r})"
    for name, value in wanted.items()
    if imported.get(name) != value
  ]


def export(
  source: Path,
  target: pathlib.Path,
  *,
  step: str = "latest",
  family: str = "",
  dtype: str = "",
  shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
  """Write a folder that `transformers` loads; after a kill the same call goes on.

  Args:
    source: a workdir.
    target: the folder; it appears when it is complete.
    step: a step, "latest" or "best".
    family: a `model_type`; "" = that of the import, or the first that fits.
    dtype: of the tensors: bfloat16, float16 or float32; "" = that of the import, or of the weights.
    shard_bytes: a file holds at most this, or one tensor.

  Returns:
    `family`, `step`, `parameters`, `files`, `resumed`: files that an earlier call had written, and
    `aside`: tensors that the import left aside, which the folder has not.

  Raises:
    ValueError: if there is no such checkpoint, no family fits, or the folder is there.
  """
  if target.exists():
    raise ValueError(f"{target} exists. Remove it or choose another folder.")
  checkpoints = source / workdir.CHECKPOINTS
  run = workdir.load_identity(source)
  chosen, _ = reader.choose_checkpoint(checkpoints, int(step) if step.isdecimal() else step, run)
  extra = reader.load_extra(checkpoints, chosen, run)
  tokenizer = load_tokenizer(source / workdir.TOKENIZER)
  cfg = resolve(
    with_changes(workdir.load_config(source), extra.get(CHANGES, {})), tokenizer.vocab_size
  )
  companions = source / COMPANIONS
  theirs = imported_fields(companions)
  table = choose_family(cfg, family, theirs.get("model_type", "")).fitted(flatten(cfg))
  if cfg.step.loss.RATES:
    table = table.rating()
  if cfg.mod.routing != "none" and chosen < cfg.mod.anneal_fraction * cfg.num_steps:
    raise ValueError(
      f"at step {chosen} mod.capacity still falls (mod.anneal_fraction). Export a later step."
    )
  stored = DTYPES[WORDS[dtype] if dtype else _own_dtype(companions, cfg)]
  part = "ema" if cfg.optimizer.has_average else ROOT
  planned = match_weights(table, {n: p.shape for n, p in abstract_parts(cfg).items()})
  shards = _shards(planned, stored, shard_bytes, table.empty(flatten(cfg)))
  unfinished = target.with_name(target.name + ".unfinished")
  manifest = integrity.read_manifest(checkpoints / str(chosen))
  begun = json.dumps([run.run, chosen, part, table.model_type, str(stored), shard_bytes])
  _begin(unfinished, begun + json.dumps(manifest["files"], sort_keys=True))
  arrays = _arrays(checkpoints / str(chosen), planned, part, unfinished, shards)
  resumed = _write(unfinished, shards, arrays)
  copy_companions(companions, unfinished)
  if tokenizer_in(companions) is None:
    for name, content in files_of(tokenizer).items():
      if not (unfinished / name).exists():
        (unfinished / name).write_bytes(content)
  for name, text in table.files().items():
    (unfinished / name).write_text(text, encoding="utf-8")
  fields = {
    "max_position_embeddings": cfg.data.seq_len,
    "bos_token_id": tokenizer.of_text.bos_id,
    "eos_token_id": tokenizer.eos_id,
    "pad_token_id": tokenizer.pad_id,
    **table.write_again(cfg, theirs),
    **({"id2label": {"0": "reward"}, "label2id": {"reward": 0}} if cfg.step.loss.RATES else {}),
    "torch_dtype": str(stored),
  }
  workdir.write_json(paths.parse(unfinished / CONFIG), fields)
  (unfinished / PROGRESS).unlink()
  os.rename(unfinished, target)
  return {
    "family": table.name,
    "step": chosen,
    "parameters": sum(math.prod(slot.shape) for s in shards.values() for slot in s),
    "files": len(shards),
    "resumed": resumed,
    "aside": _aside(companions),
  }


def _aside(companions: Path) -> tuple[str, ...]:
  path = companions / ASIDE
  return tuple(json.loads(path.read_text())["tensors"]) if path.is_file() else ()


def _own_dtype(companions: Path, cfg: Config) -> str:
  path = companions / DTYPE
  return json.loads(path.read_text()) if path.is_file() else WORDS[cfg.precision.param_dtype]


def _shards(
  planned: list[Item], dtype: np.dtype, most: int, empty: Mapping[str, Shape]
) -> dict[str, list[Slot]]:
  """Which tensors stand in which file, in the order in which they are written."""
  cut: list[list[Slot]] = [[]]
  size = 0
  for item, *_ in together(planned):
    for name in item.theirs:
      is_wide = isinstance(item.row, WeightRow) and item.row.wide
      slot = Slot(name, DTYPES["F32"] if is_wide else dtype, item.their_shape)
      if cut[-1] and size + slot.nbytes > most:
        cut.append([])
        size = 0
      cut[-1].append(slot)
      size += slot.nbytes
  cut[-1] += [Slot(name, dtype, shape) for name, shape in empty.items()]
  if len(cut) == 1:
    return {SINGLE: cut[0]}
  return {f"model-{i:05}-of-{len(cut):05}.safetensors": slots for i, slots in enumerate(cut, 1)}


def _begin(folder: pathlib.Path, source: str) -> None:
  """Keep what an unfinished export of the same weights wrote; begin again after another one."""
  progress = folder / PROGRESS
  if progress.is_file() and progress.read_text(encoding="utf-8") == source:
    return
  paths.delete_rest(paths.parse(folder))
  folder.mkdir(parents=True)
  paths.write(progress, source)


def _arrays(
  checkpoint: Path,
  planned: list[Item],
  part: str,
  folder: pathlib.Path,
  shards: dict[str, list[Slot]],
) -> Iterator[tuple[str, np.ndarray]]:
  """The tensors of all files that are not there yet, in order."""
  left = {
    slot.name for name, slots in shards.items() if not (folder / name).exists() for slot in slots
  }
  is_left = lambda group: not group[0].theirs or bool(left.intersection(group[0].theirs))
  groups = [group for group in together(planned) if is_left(group)]
  with (
    paths.fetched(checkpoint / reader.STATE) as local,
    ocp.Checkpointer(reader.handler()) as orbax,
  ):
    read = _Reader(orbax, local, part, [item for group in groups for item in group])
    for group in groups:
      yield from (pair for pair in to_theirs(group, read) if pair[0] in left)
  slots = (slot for in_file in shards.values() for slot in in_file)
  yield from (
    (s.name, np.empty(s.shape, s.dtype)) for s in slots if s.name in left and 0 in s.shape
  )


class _Reader:
  """Reads our arrays in the order of a plan.

  A restore goes through the names of all arrays of a checkpoint first, so small ones are read
  together, as many as have no more elements than the largest has alone.
  """

  def __init__(self, orbax: ocp.Checkpointer, folder: Path, part: str, planned: list[Item]):
    self._orbax, self._folder, self._part = orbax, folder, part
    self._ahead = collections.deque(planned)
    self._most = max((_size(item) for item in planned), default=0)
    self._held: dict[str, np.ndarray] = {}

  def __call__(self, item: Item) -> np.ndarray:
    """The next array of the plan."""
    name = f"{self._part}/{item.ours}"
    if not self._held:
      self._held = self._restore()
    return self._held.pop(name)

  def _restore(self) -> dict[str, np.ndarray]:
    names, size = [], 0
    while self._ahead and (not names or size + _size(self._ahead[0]) <= self._most):
      item = self._ahead.popleft()
      names.append(f"{self._part}/{item.ours}")
      size += _size(item)
    wanted = ocp.args.PyTreeRestore(
      item=dict.fromkeys(names, np.empty(0)),
      restore_args=dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray)),
      partial_restore=True,
    )
    return self._orbax.restore(self._folder, args=wanted)


def _size(item: Item) -> int:
  return math.prod(item.shape)


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
  with np.errstate(over="ignore"):
    cast = array.astype(dtype, copy=False)
  if dtype == np.float16 and not np.isfinite(cast).all():
    raise ValueError(f"{name} has values that float16 does not hold. Use --dtype=bfloat16.")
  return cast


def _write(
  folder: pathlib.Path,
  shards: dict[str, list[Slot]],
  arrays: Iterator[tuple[str, np.ndarray]],
) -> int:
  """Write the files that are not there yet, and the index; return how many were there."""
  resumed = 0
  for file, slots in shards.items():
    if (folder / file).exists():
      resumed += 1
      continue
    with Writer(folder / file, slots) as writer:
      for slot in slots:
        name, array = next(arrays)
        writer.write(slot.name, _cast(name, array, slot.dtype))
  assert next(arrays, None) is None
  if len(shards) > 1:
    total = sum(slot.nbytes for slots in shards.values() for slot in slots)
    by_name = {slot.name: file for file, slots in shards.items() for slot in slots}
    index = {"metadata": {"total_size": total}, "weight_map": by_name}
    workdir.write_json(paths.parse(folder / INDEX), index)
  return resumed
