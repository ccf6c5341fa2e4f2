"""Weights of a run or of a Hugging Face folder, for the model of another run."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from ats_jax.bridge.convert import check_tokenizer, load_model
from ats_jax.bridge.folder import ModelFolder, is_model_folder, open_model_folder
from ats_jax.checkpoint import abstract_like, restore_tree, workdir
from ats_jax.checkpoint.integrity import digests, read_manifest
from ats_jax.checkpoint.reader import find, process_0_decides
from ats_jax.data.tokens.file import has_same_ids, load_tokenizer
from ats_jax.data.tokens.tokenizer import Tokenizer
from ats_jax.model.decoder import Decoder
from ats_jax.model.layers import Weight
from ats_jax.model.layout import stacks
from ats_jax.model.numerics import stored_dtype
from ats_jax.model.param import is_variable
from ats_jax.step.program import Program
from ats_jax.store.paths import Path


@dataclasses.dataclass(frozen=True)
class Weights:
  """Where they are.

  Attributes:
    folder: workdir of a run of this program, or a folder of Hugging Face's.
    step: checkpoint of the run: a step, "latest" or "best".
    ignored: unknown fields of the folder's config.json that change nothing, as the user says.
  """

  folder: Path
  step: str = "latest"
  ignored: tuple[str, ...] = ()

  @functools.cached_property
  def source(self) -> ModelFolder:
    """The Hugging Face folder, whose headers are read once.

    Raises:
      ValueError: for one that this program cannot follow.
    """
    return open_model_folder(self.folder, self.ignored)

  @property
  def found_step(self) -> str:
    """The step of the checkpoint; "" for a Hugging Face folder.

    Raises:
      ValueError: if there is no such checkpoint.
    """
    if is_model_folder(self.folder):
      return ""
    workdir.load_config(self.folder)  # says what else the folder holds, if it holds no run
    chosen = int(self.step) if self.step.isdecimal() else self.step
    checkpoints = self.folder / workdir.CHECKPOINTS
    return str(process_0_decides(lambda: find(checkpoints, chosen)))

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of the names and SHA-256 of the files that hold them.

    Of a Hugging Face folder these are read whole; of a checkpoint its manifest has them.

    Raises:
      ValueError: if there are no weights.
    """
    if is_model_folder(self.folder):
      names = sorted({tensor.path.name for tensor in self.source.tensors.values()})
      of_files = digests(self.folder, names)
    else:
      checkpoint = self.folder / workdir.CHECKPOINTS / self.found_step
      of_files = read_manifest(checkpoint)["files"]
    return hashlib.sha256(json.dumps(of_files, sort_keys=True).encode()).hexdigest()

  def load(self, program: Program, tokenizer: Tokenizer) -> Decoder:
    """A model of these weights, in the dtypes and shardings of a run's.

    The state is built beside it, not before: then there is room for what loading needs.

    Args:
      program: program of the run.
      tokenizer: tokenizer of the run; the weights must have been trained with the same one.

    Raises:
      ValueError: if there are none, or they do not fit the run's model or tokenizer.
    """
    mesh = jax.sharding.get_mesh()
    abstract = abstract_like(program.abstract_base(), mesh)
    after = lambda model: model
    as_read = after
    if program.cfg.finetune.base_format:
      from ats_jax.model import quantised  # here: few runs have such a base

      tuned, after = program.init(abstract=True).model, quantised.arrived
      as_read = functools.partial(quantised.arriving, tuned=tuned)
    if is_model_folder(self.folder):
      check_tokenizer(self.folder, program.cfg, tokenizer)
      source = self.source
      model = after(load_model(source, program.cfg, as_read(abstract)))
      logging.info("the weights are those of %s in %s", source.family.name, self.folder)
    else:
      model = self._of_run(abstract, program, tokenizer, as_read, after)
    return model

  def _of_run(
    self,
    like: Decoder,
    program: Program,
    tokenizer: Tokenizer,
    as_read: Callable[[Any], Any],
    after: Callable[[Any], Any],
  ) -> Decoder:
    """The model of a checkpoint: the average of its weights, if that run kept one.

    Args:
      like: the model as shapes, dtypes and shardings.
      program: program of the run.
      tokenizer: tokenizer of the run.
      as_read: gives the shapes with which it is read.
      after: makes the model of what was read so.
    """
    source = workdir.load_config(self.folder)
    if source.finetune.adapter.name != "none":
      raise ValueError(
        f"--init_from={self.folder}: that run has adapters (finetune.adapter.name="
        f"{source.finetune.adapter.name}) on a base of its own. Begin with the merged model that "
        "ats-jax bridge export writes, or with its base and --init_adapter."
      )
    file = self.folder / workdir.TOKENIZER
    if not has_same_ids(tokenizer, load_tokenizer(file)):
      raise ValueError(
        f"--init_from={self.folder}: its tokenizer is not the one of this run, so its weights "
        f"would read other tokens. Use its own, --config.data.tokenizer={file}."
      )
    part = "ema" if source.optimizer.has_average else "model"
    given = jnp.dtype("float32" if part == "ema" else source.precision.param_dtype)

    def as_stored(variable: Any) -> Any:
      dtype = stored_dtype(variable.role, given)
      return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), variable
      )

    chosen = int(self.step) if self.step.isdecimal() else self.step
    abstract = jax.tree.map(as_stored, like, is_leaf=is_variable)
    step, model, _ = restore_tree(
      self.folder / workdir.CHECKPOINTS, as_read(abstract), chosen, part, stacks=stacks(program.cfg)
    )
    logging.info("the weights are those of step %d of %s", step, self.folder)

    def cast(new: Any, old: Any) -> Any:
      if isinstance(new, Weight) and not is_variable(new.weight):
        return new
      return jax.tree.map(lambda new, old: new.astype(old.dtype), new, old)

    is_leaf = lambda x: isinstance(x, Weight) or is_variable(x)
    return jax.tree.map(cast, after(model), like, is_leaf=is_leaf)
