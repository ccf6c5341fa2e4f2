"""Weights that a new run begins with: of another run, or of a Hugging Face folder."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from ats_jax.bridge import hub
from ats_jax.bridge.convert import (
  COMPANIONS,
  check_tokenizer,
  copy_kept,
  keep_companions,
  load_model,
)
from ats_jax.bridge.export import choose_family
from ats_jax.bridge.folder import (
  ModelFolder,
  imported_fields,
  is_model_folder,
  open_model_folder,
  tokenizer_in,
)
from ats_jax.checkpoint import abstract_like, restore_tree, workdir
from ats_jax.config.build import resolve
from ats_jax.config.names import flatten
from ats_jax.config.schema import Config
from ats_jax.data.tokens.file import has_same_ids, load_tokenizer
from ats_jax.data.tokens.tokenizer import Tokenizer, build_tokenizer
from ats_jax.model.decoder import Decoder
from ats_jax.model.layers import Weight
from ats_jax.model.layout import stacks
from ats_jax.model.numerics import stored_dtype
from ats_jax.model.param import is_variable
from ats_jax.step.program import Program
from ats_jax.step.state import TrainState
from ats_jax.store import paths
from ats_jax.store.paths import Path


@dataclasses.dataclass(frozen=True)
class InitialWeights:
  """Where they are.

  Attributes:
    folder: workdir of a run of this program, or a folder of Hugging Face's.
    step: checkpoint of the run: a step, "latest" or "best".
    ignored: unknown fields of the folder's config.json that change nothing, as the user says.
    adapter: a folder of peft's whose adapters are those at first; "" = new ones.
    router: workdir of a run whose routers replace those of the weights; "" = none does.
  """

  folder: Path
  step: str = "latest"
  ignored: tuple[str, ...] = ()
  adapter: str = ""
  router: str = ""

  @classmethod
  def of(
    cls,
    source: str,
    step: str = "latest",
    ignored: Sequence[str] = (),
    adapter: str = "",
    router: str = "",
  ) -> "InitialWeights":
    """From a path as a user writes it; hf://OWNER/NAME is fetched from the Hub.

    Raises:
      ValueError: for a name that the Hub does not have, or a path that cannot be read.
    """
    return cls(paths.parse(hub.local_folder(source)), step, tuple(ignored), adapter, router)

  @functools.cached_property
  def source(self) -> ModelFolder:
    """The Hugging Face folder, whose headers are read once.

    Raises:
      ValueError: for one that this program cannot follow.
    """
    return open_model_folder(self.folder, self.ignored)

  def check(self, cfg: Config) -> None:
    """Refuse weights that do not fit a run before its text is read.

    A tokenizer that is trained on that text is another one than any folder's.

    Args:
      cfg: the run; its vocabulary need not be known.

    Raises:
      ValueError: if the model or the tokenizer of a Hugging Face folder is not the run's.
    """
    if is_model_folder(self.folder):
      source = self.source
      source.check_settings(resolve(cfg, source.settings["model.vocab_size"]))
      if cfg.data.tokenizer == "bpe":
        path = tokenizer_in(self.folder)
        raise ValueError(
          f"{self.folder}: data.tokenizer=bpe would train another tokenizer than that of its "
          f"weights. Use its own, --config.data.tokenizer={path or 'FILE'}."
        )
      check_tokenizer(self.folder, cfg, build_tokenizer(cfg.data, lambda: []))

  def keep_companions(self, folder: Path) -> None:
    """Keep in a run's workdir what a Hugging Face folder holds beside the weights, for exports."""
    if is_model_folder(self.folder):
      keep_companions(self.source, folder)
    else:
      copy_kept(self.folder, folder)

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
    if not self.router:
      return model
    from ats_jax.train.routers import with_routers  # here: few runs take them

    return with_routers(program.cfg, model, self.router)

  def with_adapter(self, program: Program, state: TrainState) -> TrainState:
    """The first state of a run, with the adapters of the folder `adapter` if there is one.

    Args:
      program: program of the run.
      state: as `program.init` makes it.

    Raises:
      ValueError: if they do not fit the run's.
    """
    if not self.adapter:
      return state
    cfg = program.cfg
    if is_model_folder(self.folder):
      family = self.source.family
    else:
      theirs = imported_fields(self.folder / COMPANIONS)
      family = choose_family(cfg, imported=theirs.get("model_type", ""))
    from ats_jax.bridge import peft_folder  # here: few runs begin with adapters

    family = family.fitted(flatten(cfg))
    read = functools.partial(peft_folder.read, pathlib.Path(self.adapter), cfg, family)
    logging.info("the adapters are those of %s", self.adapter)
    ema = None if state.ema is None else read(state.ema)
    return dataclasses.replace(state, model=read(state.model), ema=ema)

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
    if source.finetune.base_format:
      raise ValueError(
        f"--init_from={self.folder}: its base is quantised already "
        f"(finetune.adapter.base={source.finetune.base_format}). Begin with the merged model that "
        "ats-jax bridge export writes, or with the base that it began with and --init_adapter."
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
