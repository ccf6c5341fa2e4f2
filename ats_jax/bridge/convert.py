"""From a Hugging Face folder into a workdir, or into a state: an array at a time."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from ats_jax.bridge.family import Item, match_weights, to_ours
from ats_jax.bridge.folder import (
  TOKENIZERS,
  ModelFolder,
  copy_companions,
  open_model_folder,
  tokenizer_in,
)
from ats_jax.checkpoint import deferred, layout, stream, workdir
from ats_jax.config.build import resolve, with_settings
from ats_jax.config.schema import Config
from ats_jax.data.tokens.file import has_same_ids, save_tokenizer
from ats_jax.data.tokens.tokenizer import Tokenizer, build_tokenizer
from ats_jax.model.decoder import Decoder, with_head
from ats_jax.model.layout import stacks
from ats_jax.model.numerics import numerics
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.store import paths
from ats_jax.store.paths import Path

# Of an import in a workdir.
COMPANIONS = "huggingface"  # folder of the files that stand beside the weights
DTYPE = "dtype.json"  # dtype of the weights in the folder
ASIDE = "aside.json"  # names of tensors that were left out
ROOT = "model"
# In which of our dtypes a file's are kept: it holds all their values.
KEPT_IN = {"BF16": "bfloat16", "F32": "float32", "F16": "float32"}


def config_of(source: ModelFolder, *, param_dtype: str = "", tokenizer: str = "") -> Config:
  """The config of a folder's model; what does not concern the model is at its default.

  Args:
    source: the folder.
    param_dtype: dtype of the weights; "" = that of the folder, by `KEPT_IN`.
    tokenizer: "bytes" or the file of one; "" = that of the folder.

  Raises:
    ValueError: if there is no tokenizer, or a rule is broken.
  """
  own = tokenizer_in(source.folder)
  if not tokenizer and own is None:
    raise ValueError(
      f"{source.folder} holds no {' or '.join(TOKENIZERS)}. Say which one reads its tokens: "
      "--tokenizer=FILE, or --tokenizer=bytes."
    )
  stored_dtype = KEPT_IN.get(
    source.dtype, "float32"
  )  # `Source.check` refuses files of other dtypes
  changes = {
    "data.tokenizer": tokenizer or str(own),
    "precision.param_dtype": param_dtype or stored_dtype,
    "precision.compute_dtype": "float32" if source.dtype == "F32" else "bfloat16",
  }
  return with_settings(Config(), {**changes, **source.settings})


def tokenizer_of(cfg: Config, source: ModelFolder) -> Tokenizer:
  """The tokenizer of a folder's config.

  Raises:
    ValueError: if it is not lossless, or has more tokens than the model.
  """
  tokenizer = build_tokenizer(cfg.data, lambda: [])
  if tokenizer.vocab_size > cfg.model.vocab_size:
    raise ValueError(
      f"{cfg.data.tokenizer} has {tokenizer.vocab_size} tokens, with those for the ends of "
      f"documents and for padding; vocab_size is {cfg.model.vocab_size} in {source.folder}. They "
      "belong to different models, or --tokenizer must name another one."
    )
  return tokenizer


def check_tokenizer(folder: os.PathLike[str], cfg: Config, own: Tokenizer) -> None:
  """See that a run reads the tokens that a folder's weights were trained with.

  Raises:
    ValueError: if it does not.
  """
  path = tokenizer_in(folder)
  if path is None:
    logging.warning(
      "%s holds no tokenizer: nobody can say whether its tokens are this run's.", folder
    )
    return
  theirs = build_tokenizer(dataclasses.replace(cfg.data, tokenizer=str(path)), lambda: [])
  if not has_same_ids(own, theirs):
    raise ValueError(
      f"{folder}: its tokenizer is not the one of this run, so its weights would read other "
      f"tokens. Use its own, --config.data.tokenizer={path}."
    )


def abstract_parts(cfg: Config) -> dict[str, layout.StoredArray]:
  """The arrays of a resolved config's model by name, as shapes; no device is used."""
  with on_mesh(cfg, make_mesh(cfg)):
    num = numerics(cfg)
    build = lambda key: with_head(cfg, num, Decoder(cfg, num, nnx.Rngs(params=key)), key)
    model = jax.eval_shape(build, jax.eval_shape(lambda: jax.random.key(0)))
  return layout.named_arrays(model, stacks=stacks(cfg))


def plan(source: ModelFolder, cfg: Config, parts: Mapping[str, layout.StoredArray]) -> list[Item]:
  """What to read for each of our arrays.

  Raises:
    ValueError: naming the setting or tensor that does not fit.
  """
  planned = match_weights(source.family, {name: part.shape for name, part in parts.items()})
  source.check(cfg, planned)
  return planned


def import_folder(
  folder: os.PathLike[str],
  target: Path,
  *,
  param_dtype: str = "",
  tokenizer: str = "",
  ignored: Collection[str] = (),
) -> dict[str, Any]:
  """Make a workdir with checkpoint 0 of a folder's weights; after a kill the same call goes on.

  Args:
    folder: a Hugging Face folder.
    target: the workdir.
    param_dtype: dtype of the weights, as of `config_of`.
    tokenizer: path of the tokenizer, as of `config_of`.
    ignored: unknown fields of config.json, as of `open_model_folder`.

  Returns:
    `family`, `parameters`, `bytes`, `resumed`: arrays that an earlier call had written, and
    `aside`: tensors that are left where they are.

  Raises:
    ValueError: for a folder that this program cannot follow, or a workdir that is somebody's.
  """
  source = open_model_folder(folder, ignored)
  source.log_what_is_left()
  cfg = config_of(source, param_dtype=param_dtype, tokenizer=tokenizer)
  our_tokenizer = tokenizer_of(cfg, source)
  resolved = resolve(cfg, our_tokenizer.vocab_size)
  parts = abstract_parts(resolved)
  planned = plan(source, resolved, parts)
  read = lambda name: source.tensors[name].read()

  def array(item: Item) -> deferred.Deferred:
    dtype = np.dtype(parts[item.ours].leaf.dtype)
    return deferred.Deferred(item.shape, dtype, lambda: to_ours(item, read, dtype))

  arrays = {f"{ROOT}/{item.ours}": array(item) for item in planned}
  with workdir.claim(target, cfg) as run:
    checkpoints = target / workdir.CHECKPOINTS
    if any(checkpoints.glob("[0-9]*")):
      raise ValueError(f"{target} holds checkpoints already. Use another --workdir.")
    save_tokenizer(our_tokenizer, target / workdir.TOKENIZER)
    keep_companions(source, target)
    fingerprint = json.dumps([source.fingerprint, cfg.precision.param_dtype])
    resumed = deferred.write(checkpoints, 0, arrays, run=run, source=fingerprint, extra={})
  return {
    "family": source.family.name,
    "parameters": sum(int(np.prod(i.shape, dtype=np.int64)) for i in planned if i.theirs),
    "bytes": sum(tensor.nbytes for tensor in source.tensors.values()),
    "resumed": resumed,
    "aside": source.aside,
  }


def keep_companions(source: ModelFolder, target: Path) -> None:
  """Keep in a workdir what stands beside a folder's weights; an export gives it back."""
  copy_companions(source.folder, target / COMPANIONS)
  workdir.write_json(target / COMPANIONS / DTYPE, source.dtype)
  if source.aside:
    left = {"folder": str(pathlib.Path(source.folder).absolute()), "tensors": source.aside}
    workdir.write_json(target / COMPANIONS / ASIDE, left)


def copy_kept(source: Path, target: Path) -> None:
  """Keep in a workdir what another one keeps of an import."""
  if (source / COMPANIONS).is_dir():
    paths.make_folder(target / COMPANIONS)
    for name in paths.files(source / COMPANIONS):
      paths.write(target / COMPANIONS / name, paths.read(source / COMPANIONS / name))


def load_model(source: ModelFolder, cfg: Config, abstract: Any) -> Any:
  """A folder's weights straight into a (sharded) model, a layer at a time.

  Args:
    source: the folder.
    cfg: the resolved config that the model has.
    abstract: the model as shapes, dtypes and shardings.

  Raises:
    ValueError: naming the setting or tensor that does not fit.
  """
  source.log_what_is_left()
  parts = layout.named_arrays(abstract, stacks=stacks(cfg))
  leaves, structure = jax.tree.flatten(abstract)
  filled: list[Any] = [None] * len(leaves)
  for item in plan(source, cfg, parts):
    target = parts[item.ours].target(item.ours)
    stream.put(filled, parts, {item.ours: _on_devices(source, item, target)})
  assert all(leaf is not None for leaf in filled)
  return structure.unflatten(jax.tree.map(jnp.asarray, filled))


def _on_devices(source: ModelFolder, item: Item, target: jax.ShapeDtypeStruct) -> jax.Array:
  """One of our arrays; the one that was read is gone before the next one is."""
  array = to_ours(item, lambda name: source.tensors[name].read(), np.dtype(target.dtype))
  return jax.make_array_from_callback(target.shape, target.sharding, lambda index: array[index])
